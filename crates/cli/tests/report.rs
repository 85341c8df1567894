//! `lowtide report`: reads the page's data as the page does, and adds the sums up again.

#![expect(
    clippy::unwrap_used,
    reason = "a page that cannot be read fails its test"
)]

mod common;

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use common::{
    GPT2, Scratch, fail, lowtide, run, run_json, sample, small, stderr, without_beginning,
};
use lowtide_core::{Action, BlockStatus, Bytes};
use lowtide_trace::TraceEvent;
use serde_json::Value;

/// The contents of a page.
struct Page {
    summary: Value,
    columns: HashMap<String, Vec<u64>>,
}

impl Page {
    fn read(path: &Path) -> Page {
        let page = fs::read_to_string(path).unwrap();
        let script = |id: &str| {
            let (_, rest) = page.split_once(&format!("id=\"{id}\">")).unwrap();
            rest.split_once("</script>").unwrap().0
        };
        let mut container = Vec::new();
        let compressed = from_base64(script("lowtide-data"));
        flate2::read::GzDecoder::new(&*compressed)
            .read_to_end(&mut container)
            .unwrap();
        Page {
            summary: serde_json::from_str(script("lowtide-summary")).unwrap(),
            columns: columns(&container),
        }
    }

    fn column(&self, name: &str) -> &[u64] {
        &self.columns[name]
    }

    /// Returns the live bytes and the bytes of blocks and segments of trace `trace` at `instant`.
    fn count(&self, trace: usize, instant: u64) -> [u64; 3] {
        let column = |name: &str| self.column(&format!("{trace}/{name}"));
        let [start, held, pending] =
            ["start", "held", "pending"].map(|name| column(&format!("blocks/{name}")));
        let (requested, padding) = (column("blocks/requested"), column("blocks/padding"));
        let mut sums = [0; 3];
        for block in 0..start.len() {
            let freed = start[block] + held[block];
            let size = requested[block] + padding[block];
            if (start[block]..freed).contains(&instant) {
                sums[0] += requested[block].next_multiple_of(512).min(size);
            }
            if (start[block]..freed + pending[block]).contains(&instant) {
                sums[1] += size;
            }
        }
        let (start, end) = (column("segments/start"), column("segments/end"));
        for segment in 0..start.len() {
            if (start[segment]..end[segment]).contains(&instant) {
                sums[2] += column("segments/size")[segment];
            }
        }
        sums
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for four in text.as_bytes().as_chunks::<4>().0 {
        let bits = four
            .iter()
            .fold(0_u32, |bits, &byte| bits << 6 | u32::from(digit(byte)));
        let padding = four.iter().filter(|&&byte| byte == b'=').count();
        bytes.extend_from_slice(&bits.to_be_bytes()[1..4 - padding]);
    }
    bytes
}

fn columns(container: &[u8]) -> HashMap<String, Vec<u64>> {
    let (length, rest) = container.split_at(4);
    let length = u32::from_le_bytes(length.try_into().unwrap()) as usize;
    let (directory, bytes) = rest.split_at(length);
    let directory: Value = serde_json::from_slice(directory).unwrap();
    let entries = directory["columns"].as_array().unwrap().iter();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    entries
        .map(|entry| {
            let width = if entry["kind"] == "u64" { 8 } else { 4 };
            let (count, offset) = (number(&entry["count"]), number(&entry["offset"]));
            assert_eq!(number(&entry["length"]), width * count);
            let mut last = 0_u64;
            let numbers = (0..count).map(|index| {
                let byte = |plane: usize| u64::from(bytes[offset + plane * count + index]);
                let difference = (0..width)
                    .map(|plane| byte(plane) << (8 * plane))
                    .sum::<u64>();
                last = last.wrapping_add(difference);
                if width == 4 {
                    last &= u64::from(u32::MAX);
                }
                last
            });
            (
                entry["name"].as_str().unwrap().to_owned(),
                numbers.collect(),
            )
        })
        .collect()
}

#[test]
fn the_sums_on_the_page_are_those_of_the_trace() {
    let scratch = Scratch::new("report");
    let path = scratch.path("both.html");
    let printed = run(&[
        "report",
        GPT2,
        "llama_varlen.pickle.zst",
        "-o",
        path.to_str().unwrap(),
    ]);
    assert_eq!(printed, format!("{}\n", path.display()));
    let page = Page::read(&path);
    for (index, name) in [GPT2, "llama_varlen.pickle.zst"].into_iter().enumerate() {
        let trace = &page.summary["traces"][index];
        assert_eq!(trace["name"], name);
        assert_eq!(trace["sizes"], "verified");
        let replayed = run_json(&["replay", name, "--json"]);
        assert_eq!(
            trace["peak_live"]["bytes"],
            replayed["trace"]["peak_live_bytes"]
        );
        assert_eq!(trace["events"], replayed["trace"]["events"]);
        for (strategy, outcome) in trace["strategies"]
            .as_array()
            .unwrap()
            .iter()
            .zip(replayed["results"].as_array().unwrap())
        {
            let peak = &outcome["peak_reserved_bytes"];
            assert_eq!(&strategy["peak_reserved_bytes"], peak);
            let label = strategy["label"].as_str().unwrap();
            let curve = page.column(&format!("{index}/curves/{label}/reserved/max"));
            assert_eq!(curve.iter().max().copied(), peak.as_u64(), "{label}");
        }
        for instant in trace["instants"].as_array().unwrap() {
            let figure = |key: &str| instant[key].as_u64().unwrap();
            let [live, in_blocks, reserved] = page.count(index, figure("event"));
            assert_eq!(
                [live, reserved],
                [figure("live"), figure("reserved")],
                "{instant}"
            );
            let causes = instant["causes"].as_object().unwrap();
            let cause = |name: &str| causes[name].as_u64().unwrap();
            assert_eq!(causes.len(), 7);
            let all: u64 = causes.values().map(|bytes| bytes.as_u64().unwrap()).sum();
            assert_eq!(live + all, reserved, "{instant}");
            let outside = all - cause("rounding") - cause("waiting_for_events");
            assert_eq!(in_blocks + outside, reserved, "{instant}");
        }
    }
}

#[test]
fn the_categories_on_the_page_are_those_of_the_summary() {
    let scratch = Scratch::new("report-categories");
    let path = scratch.path("page.html");
    let recording = "../crates/history/tests/data/checkpoint.all.pickle.gz";
    run(&["report", recording, "-o", path.to_str().unwrap()]);
    let page = Page::read(&path);
    let trace = &page.summary["traces"][0];
    let names = trace["categories"].as_array().unwrap();
    let peak = trace["peak_live"]["event"].as_u64().unwrap();
    let column = |name: &str| page.column(&format!("0/blocks/{name}"));
    let mut held: HashMap<&str, u64> = HashMap::new();
    for (block, &category) in column("category").iter().enumerate() {
        let start = column("start")[block];
        if (start..start + column("held")[block]).contains(&peak) {
            let requested = column("requested")[block];
            let size = requested + column("padding")[block];
            let name = names[usize::try_from(category).unwrap()].as_str().unwrap();
            *held.entry(name).or_default() += requested.next_multiple_of(512).min(size);
        }
    }
    let summary = run_json(&["summary", "--json", recording]);
    let categories = summary[0]["categories"].as_object().unwrap();
    let bytes = |kept: &Value| kept["bytes"].as_u64().unwrap();
    assert_eq!(names.len(), categories.len());
    for (name, kept) in categories {
        let found = held.get(&**name).copied().unwrap_or(0);
        assert_eq!(found, bytes(kept), "{name}");
    }
    assert!(held.len() >= 4, "{held:?}");

    // Categories follow from stacks.
    run(&["report", GPT2, "-o", path.to_str().unwrap()]);
    let page = Page::read(&path);
    let none = serde_json::json!([]);
    assert_eq!(page.summary["traces"][0]["categories"], none);
    assert!(!page.columns.contains_key("0/blocks/category"));
}

#[test]
fn stacks_names_and_times_can_be_looked_up() {
    let scratch = Scratch::new("report-stacks");
    let mut snapshot = common::read_sample(GPT2);
    let trace = &mut snapshot.traces[0];
    let mut stacks = (*trace.stacks).clone();
    let hostile = "</script><img src=x onerror=alert(1)>&amp;";
    let frame = |name: &'static str, filename: &'static str, line| lowtide_trace::Frame {
        name: name.into(),
        filename: filename.into(),
        line,
    };
    let stack = stacks.intern([
        frame(hostile, "train.py", 7),
        frame("forward", "/usr/lib/python3/dist-packages/x.py", 5),
        frame("run", "/usr/lib/python3.12/threading.py", 3),
        frame("solve", "/srv/solver.cpp", 1),
    ]);
    for event in &mut trace.events {
        event.stack = stack;
    }
    trace.stacks = std::sync::Arc::new(stacks);
    let input = scratch.write_snapshot("hostile.lowtide", &snapshot);
    let path = scratch.path("page.html");
    run(&[
        "report".as_ref(),
        input.as_os_str(),
        "-o".as_ref(),
        path.as_os_str(),
    ]);
    assert!(!fs::read_to_string(&path).unwrap().contains("<img"));

    let page = Page::read(&path);
    let trace = &page.summary["traces"][0];
    assert_eq!(trace["has_stacks"], true);
    assert_eq!(page.column("0/stacks/ends"), [0, 4]);
    let innermost = usize::try_from(page.column("0/stacks/frames")[0]).unwrap();
    let function = usize::try_from(page.column("0/frames/function")[innermost]).unwrap();
    assert_eq!(page.summary["strings"][function], hostile);
    assert_eq!(page.column("0/frames/line")[innermost], 7);
    assert_eq!(page.column("0/frames/owner"), [0, 1, 4, 0]);
    assert!(
        page.column("0/blocks/stack")
            .iter()
            .all(|&stack| stack == 1)
    );
    let (made, of_segments) = (
        page.column("0/segments/made"),
        page.column("0/segments/stack"),
    );
    let mut segments = made.iter().zip(of_segments);
    // The segments from before the first event have no known stack.
    assert!(segments.all(|(&made, &stack)| stack == u64::from(made > 0)));
    assert!(of_segments.contains(&1));
    let times = page.column("0/events/time_us");
    assert!(times.is_sorted() && times.len() <= 65_536);
    assert_eq!(times.last().copied(), trace["duration_us"].as_u64());
    let instants = page.column("0/events/time_event");
    assert_eq!(instants.last().copied(), trace["events"].as_u64());
    assert!(!page.column("0/annotations/event").is_empty());
    let growth = &trace["growth"];
    assert_eq!(growth["found_by"], "annotation");
    assert_eq!(growth["leaks"], serde_json::json!([]));
    let steps = page.column("0/steps/boundaries").len() - 1;
    assert_eq!(growth["steps"], steps);
}

#[test]
fn the_page_is_named_after_the_recording_and_can_be_printed() {
    let scratch = Scratch::new("report-name");
    let output = lowtide()
        .current_dir(scratch.path(""))
        .args(["report".as_ref(), sample(GPT2).as_os_str()])
        .output()
        .unwrap();
    assert_eq!(stderr(&output), "");
    assert_eq!(output.stdout, b"gpt2_train.html\n");
    let printed = run(&[
        "report".as_ref(),
        sample(GPT2).as_os_str(),
        "-o".as_ref(),
        "-".as_ref(),
    ]);
    assert_eq!(
        printed,
        fs::read_to_string(scratch.path("gpt2_train.html")).unwrap()
    );
}

#[test]
fn a_snapshot_without_history_shows_what_is_held() {
    let scratch = Scratch::new("report-state");
    let mut snapshot = lowtide_trace::read(&sample(GPT2)).unwrap();
    let segments = snapshot.traces[0].segments.clone();
    let live: u64 = segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.status == BlockStatus::Allocated)
        .map(|block| block.requested.round_up(Bytes(512)).get())
        .sum();
    snapshot.traces = vec![lowtide_trace::Trace::recovered(0, [], segments).unwrap()];
    let input = scratch.write_snapshot("state.lowtide", &snapshot);
    let output = scratch.path("state.html");
    let paths = [input.as_os_str(), "-o".as_ref(), output.as_os_str()];
    run(&["report".as_ref(), paths[0], paths[1], paths[2]]);
    let page = Page::read(&output);
    assert!(live > 0);
    assert_eq!(page.count(0, 0)[0], live);
    let reserved = page.column("0/segments/size").iter().sum::<u64>();
    assert_eq!(page.count(0, 0)[2], reserved);

    // The same if all of it is cached.
    let mut segments = snapshot.traces[0].segments.clone();
    let blocks = segments.iter_mut().flat_map(|segment| &mut segment.blocks);
    blocks.for_each(|block| block.status = BlockStatus::Inactive);
    snapshot.traces = vec![lowtide_trace::Trace::recovered(0, [], segments).unwrap()];
    scratch.write_snapshot("state.lowtide", &snapshot);
    run(&["report".as_ref(), paths[0], paths[1], paths[2]]);
    let page = Page::read(&output);
    assert_eq!(page.count(0, 0), [0, 0, reserved]);
    let peak_live = &page.summary["traces"][0]["instants"][0];
    assert_eq!(peak_live["reserved"], reserved, "{peak_live}");
}

#[test]
fn what_replays_leave_out_is_in_the_page_and_said() {
    let scratch = Scratch::new("report-lost");
    let mut snapshot = without_beginning(GPT2, 60_000);
    let trace = &mut snapshot.traces[0];
    let mut refused = *trace.events.last().unwrap();
    refused.event.action = Action::OutOfMemory;
    trace.events.push(refused);
    let input = scratch.write_snapshot("cut.lowtide", &snapshot);
    let output = scratch.path("cut.html");
    let paths = [input.as_os_str(), "-o".as_ref(), output.as_os_str()];
    let done = lowtide().arg("report").args(paths).output().unwrap();
    assert_eq!(done.status.code(), Some(0));
    let page = Page::read(&output);
    let trace = &page.summary["traces"][0];
    let notes = trace["replay_notes"].as_array().unwrap();
    let [at_least, lost, refused] = [0, 1, 2].map(|number| notes[number].as_str().unwrap());
    assert_eq!(notes.len(), 3);
    assert!(
        at_least.starts_with("any allocator reserves at least "),
        "{at_least}"
    );
    assert!(
        lost.starts_with("the recording's beginning is missing: the job had "),
        "{lost}"
    );
    assert!(
        refused.starts_with("the job ran out of memory at 1 request; a replay "),
        "{refused}"
    );
    let name = input.display();
    let expected = format!("lowtide: {name}: {lost}\nlowtide: {name}: {refused}\n");
    assert_eq!(stderr(&done), expected);
    assert_eq!(trace["is_cut_off"], false);
    assert_ne!(trace["initial_blocks"], 0);
}

#[test]
fn events_that_a_snapshot_missed_are_in_the_page_and_said() {
    let scratch = Scratch::new("report-missed");
    let mut snapshot = common::read_sample("mnist_mlp.pickle.zst");
    let events = &mut snapshot.traces[0].events;
    // The segments are newer than the events, as if other threads had gone on while PyTorch copied one after the
    // other.
    let is_alloc = |event: &TraceEvent| event.event.action == Action::Alloc;
    let last = events.iter().rposition(is_alloc).unwrap();
    events.truncate(last);
    let input = scratch.path("missed.pickle");
    lowtide_trace::write_pickle(&snapshot, &mut fs::File::create(&input).unwrap()).unwrap();
    let output = scratch.path("missed.html");
    let paths = [input.as_os_str(), "-o".as_ref(), output.as_os_str()];
    let done = lowtide().arg("report").args(paths).output().unwrap();
    assert_eq!(done.status.code(), Some(0));
    let missed = &Page::read(&output).summary["traces"][0]["missed_events"];
    assert!(missed.as_u64() > Some(0), "{missed}");
    let said = format!("at least {missed} event");
    assert!(stderr(&done).contains(&said), "{}", stderr(&done));
}

/// The page contains the names of annotations in full.
#[test]
fn a_page_that_is_too_large_is_said_to_be() {
    let scratch = Scratch::new("report-large");
    let output = scratch.path("large.html");
    let mut snapshot = lowtide_trace::read(&sample(GPT2)).unwrap();
    for (number, annotation) in (0..).zip(&mut snapshot.traces[0].annotations) {
        annotation.name = format!("{number} ").repeat(300_000).into();
    }
    let input = scratch.write_snapshot("names.lowtide", &snapshot);
    let paths = [input.as_os_str(), "-o".as_ref(), output.as_os_str()];
    let done = lowtide().arg("report").args(paths).output().unwrap();
    assert_eq!(done.status.code(), Some(0));
    let length = fs::metadata(&output).unwrap().len();
    assert!(length > 30_000_000, "{length}");
    let expected = format!(
        "lowtide: {}: the page has {} MB, which browsers are slow to show: most is names, of annotations, functions \
         and files\n",
        output.display(),
        (length + 500_000) / 1_000_000
    );
    assert!(stderr(&done).ends_with(&expected), "{}", stderr(&done));
}

#[test]
fn what_cannot_be_shown_is_said_in_one_line() {
    let check = |arguments: &[&str], expected: &str| assert_eq!(fail(arguments), expected);
    check(
        &["report"],
        "the following required arguments were not provided: <TRACE>...",
    );
    check(
        &["report", GPT2, "-o", "-", "--open"],
        "-o - prints the page, which --open cannot open; name a file for it",
    );
    check(
        &["report", "-", "-"],
        "- is standard input, which can be read once",
    );
    check(
        &["report", "none.pickle"],
        "none.pickle: No such file or directory (os error 2)",
    );
    check(
        &["report", GPT2, "-o", "none/page.html"],
        "none/page.html: No such file or directory (os error 2)",
    );
}

#[test]
fn pinned_memory_of_the_host_has_a_part_of_its_own() {
    let scratch = Scratch::new("report-host");
    let output = scratch.path("host.html");
    let name = small("torch2.15.pickle");
    run(&["report", &name, "-o", output.to_str().unwrap()]);
    let page = Page::read(&output);
    let [device, host] = &page.summary["traces"].as_array().unwrap()[..] else {
        panic!("a device and the host: {}", page.summary);
    };
    assert_eq!(
        (&device["name"], &device["device"]),
        (&name.as_str().into(), &0.into())
    );
    assert_eq!(host["name"], format!("{name}, pinned host memory"));
    assert_eq!(host["device"], Value::Null);
    assert_eq!(host["strategies"].as_array().unwrap().len(), 0);
    assert_eq!(host["sizes"], "verified");
    assert_eq!(host["has_stacks"], true);

    let recorded = lowtide_trace::read(&sample("").join(&name)).unwrap();
    let recorded = &recorded.host[0];
    let [live, reserved] = ["peak_live", "peak_reserved"].map(|key| &host[key]["bytes"]);
    assert_eq!(*live, recorded.peak_live_bytes().get());
    assert_eq!(*reserved, recorded.peak_reserved_bytes().get());
    // The memory held at the end, by the columns of blocks and segments.
    let at_end: Bytes = recorded
        .segments
        .iter()
        .map(|segment| segment.active_bytes())
        .sum();
    let last = recorded.events.len() as u64 - 1;
    let [_, blocks, segments] = page.count(1, last);
    assert_eq!(
        (blocks, segments),
        (at_end.get(), reserved.as_u64().unwrap())
    );
}
