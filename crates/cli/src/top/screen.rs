//! Formats processes as a table for people, with the live bytes of the last readings.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, TableStyle};
use console::{Term, truncate_str};
use lowtide_core::Bytes;

use super::process::{Device, Process, Region};
use crate::format;

/// The number of readings that are shown.
const LOOKS_MAX: usize = 24;
/// The width of the command's column.
const COMMAND_COLUMNS: usize = 32;
/// Stands for a missing figure.
const NONE: &str = "–";
/// The last column shows live bytes over time.
const COLUMNS: [&str; 11] = [
    "pid", "command", "device", "live", "reserved", "ratio", "peak", "allocs/s", "driver/s",
    "OOMs", "",
];
/// The columns aligned to the left: the command, and live bytes over time.
const LEFT_COLUMNS: [usize; 2] = [1, 10];

/// The live bytes of the last readings, by process and device.
pub(super) type History = BTreeMap<(OsString, u32), VecDeque<u64>>;

/// Adds a reading, and removes the processes that ended.
pub(super) fn add(history: &mut History, processes: &[Process]) {
    let mut now = History::new();
    for process in processes {
        for device in &process.devices {
            let key = (process.name.clone(), device.device);
            let mut looks = history.remove(&key).unwrap_or_default();
            looks.push_back(device.live_bytes);
            while looks.len() > LOOKS_MAX {
                looks.pop_front();
            }
            now.insert(key, looks);
        }
    }
    *history = now;
}

/// Returns the text about the processes.
pub(super) fn table(processes: &[Process], history: &History) -> String {
    if processes.is_empty() {
        return "no process of yours runs on lowtide here\n".to_owned();
    }
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_header(COLUMNS);
    let mut details_of_rows = Vec::new();
    for process in processes {
        for (index, device) in process.devices.iter().enumerate() {
            let looks = history.get(&(process.name.clone(), device.device));
            let spark = looks.map_or_else(String::new, |looks| sparkline(looks, device));
            let cells = cells(process, device, index == 0);
            table.add_row(cells.into_iter().chain([spark]));
            details_of_rows.push(details(device));
        }
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        // Text is aligned to the left, figures to the right.
        if !LEFT_COLUMNS.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    // Each row is one line, because no text contains a line feed.
    let mut lines = table.lines();
    let mut text = String::new();
    let _ = writeln!(text, "{}", lines.next().unwrap_or_default().trim_end());
    for (line, details) in lines.zip(details_of_rows) {
        let _ = writeln!(text, "{}", line.trim_end());
        for detail in details {
            let _ = writeln!(text, "{detail}");
        }
    }
    text
}

/// Replaces the text on the terminal. If standard output is no terminal, appends to it.
pub(super) fn show(text: &str) -> std::io::Result<()> {
    let term = Term::stdout();
    if !term.is_term() {
        return term.write_line(text);
    }
    let (rows, columns) = term.size();
    let mut screen = "\x1b[H".to_owned();
    // The last row stays empty, because a line feed there would scroll the screen.
    for line in text.lines().take(usize::from(rows).saturating_sub(1)) {
        let line = truncate_str(line, columns.into(), "…");
        let _ = writeln!(screen, "{line}\x1b[K");
    }
    term.write_str(&(screen + "\x1b[J"))
}

fn cells(process: &Process, device: &Device, is_first: bool) -> [String; COLUMNS.len() - 1] {
    let command = process.command.to_string();
    let command = truncate_str(&command, COMMAND_COLUMNS, "…").into_owned();
    let [pid, command] = if is_first {
        [process.pid.to_string(), command]
    } else {
        [String::new(), String::new()]
    };
    let rate =
        |rate: Option<f64>| rate.map_or_else(|| NONE.to_owned(), |rate| format!("{rate:.0}"));
    [
        pid,
        command,
        device.device.to_string(),
        Bytes(device.live_bytes).to_string(),
        Bytes(device.reserved_bytes).to_string(),
        { device.ratio }.map_or_else(|| NONE.to_owned(), |ratio| format!("{ratio:.3}")),
        Bytes(device.reserved_peak_bytes).to_string(),
        rate(device.allocations_per_second),
        rate(device.driver_calls_per_second),
        format::count(device.out_of_memory),
    ]
}

/// Returns a line for each region, one for host memory kept from backups, and one for each stream if there are
/// several.
fn details(device: &Device) -> impl Iterator<Item = String> {
    let regions = device.regions.iter().map(region_text);
    let streams = device.streams.iter().filter(|_| device.streams.len() > 1);
    let streams = streams.map(|stream| {
        format!(
            "    stream {}: {} live, {} reserved",
            stream.stream,
            Bytes(stream.allocated_bytes),
            Bytes(stream.reserved_bytes)
        )
    });
    let kept = (device.kept_host_bytes > 0).then(|| {
        let bytes = Bytes(device.kept_host_bytes);
        format!("    {bytes} of the host's memory kept for the next pauses")
    });
    regions.chain(kept).chain(streams)
}

fn region_text(region: &Region) -> String {
    let mut text = format!(
        "    region {} ({}): {} live, {} mapped, {} away",
        region.tag,
        region.backup,
        Bytes(region.live_bytes),
        Bytes(region.mapped_bytes),
        Bytes(region.paused_bytes),
    );
    let kept = [
        (region.host_bytes, "in the host's memory"),
        (region.disk_bytes, "on disk"),
    ];
    for (bytes, place) in kept.into_iter().filter(|(bytes, _)| *bytes > 0) {
        let _ = write!(text, ", {} {place}", Bytes(bytes));
    }
    let (paused, saved) = (region.pause_seconds, region.saved_bytes_per_second);
    let (resumed, restored) = (region.resume_seconds, region.restored_bytes_per_second);
    text += &changes_text(region.pauses, "pause", paused, saved);
    text + &changes_text(region.resumes, "resume", resumed, restored)
}

/// Returns how often a region was paused or resumed and how long that took; the empty text if it never was.
fn changes_text(count: u64, noun: &str, seconds: f64, bytes_per_second: Option<f64>) -> String {
    if count == 0 {
        return String::new();
    }
    let counted = format::counted(count, noun);
    let took = format::duration(seconds * 1e6);
    let copied = bytes_per_second.map_or_else(String::new, |speed| {
        format!(" (copied at {:.1} GB/s)", speed / 1e9)
    });
    format!(", {counted} in {took}{copied}")
}

/// Returns live bytes over time as a sparkline. Its full height is the peak of reserved bytes.
fn sparkline(looks: &VecDeque<u64>, device: &Device) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = u128::from(device.reserved_peak_bytes.max(1));
    let bar = |&live: &u64| {
        let height = u128::from(live) * (BARS.len() as u128 - 1) / most;
        BARS[usize::try_from(height).map_or(BARS.len() - 1, |height| height.min(BARS.len() - 1))]
    };
    looks.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::super::process::Stream;
    use super::*;

    fn process(pid: u32, live_bytes: u64) -> Process {
        let device = Device {
            device: 0,
            live_bytes,
            reserved_bytes: 2 << 30,
            reserved_peak_bytes: 4 << 30,
            ratio: Some(2.0),
            allocations_per_second: Some(1234.4),
            ..Device::default()
        };
        Process {
            pid,
            name: pid.to_string().into(),
            command: "python train.py --with many words that are cut".into(),
            devices: vec![device],
            ..Process::default()
        }
    }

    #[test]
    fn columns_are_below_each_other() {
        let mut first = process(7, 1 << 30);
        let device = &mut first.devices[0];
        device.regions.push(Region {
            tag: "kv\ncache".into(),
            backup: "host".into(),
            paused_bytes: 3 << 20,
            host_bytes: 4 << 20,
            pauses: 2,
            pause_seconds: 0.002,
            saved_bytes_per_second: Some(45.67e9),
            resumes: 1,
            resume_seconds: 0.001,
            ..Region::default()
        });
        device.kept_host_bytes = 5 << 20;
        device.streams = vec![Stream {
            stream: "0x0".into(),
            ..Stream::default()
        }];
        let mut history = History::new();
        add(&mut history, &[first.clone(), process(8, 0)]);
        first.devices[0].live_bytes = 4 << 30;
        let all = [first, process(12345, 5)];
        add(&mut history, &all);
        assert_eq!(history.len(), 2, "a process that ended is forgotten");
        let text = table(&all, &history);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "one stream says nothing more: {text}");
        assert!(lines[0].starts_with("  pid  command "));
        assert!(
            lines[1].starts_with("    7  python train.py --with many wor…"),
            "{text}"
        );
        assert!(lines[1].ends_with("  ▂█"), "{text}");
        let expected = "    region kv\\ncache (host): 0 bytes live, 0 bytes mapped, 3.00 MiB away, 4.00 MiB in the \
                        host's memory, 2 pauses in 2.0 ms (copied at 45.7 GB/s), 1 resume in 1.0 ms";
        assert_eq!(lines[2], expected);
        assert_eq!(
            lines[3],
            "    5.00 MiB of the host's memory kept for the next pauses"
        );
        assert!(lines[4].starts_with("12345  python"), "{text}");
        let place = |line: &str, what: &str| line.find(what).map(|at| at + what.len());
        assert_eq!(place(lines[1], "1234"), place(lines[4], "  1234"));
    }

    #[test]
    fn nobody_there_is_said() {
        assert_eq!(
            table(&[], &History::new()),
            "no process of yours runs on lowtide here\n"
        );
    }
}
