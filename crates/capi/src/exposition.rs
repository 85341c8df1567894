//! This process's statistics as text in Prometheus's format, for `lowtide top` and for Prometheus.
//!
//! The text is made on request from counters that exist anyway, without driver calls. Threads that allocate
//! meanwhile wait for a device's lock while some numbers are added up. If statistics of streams are requested,
//! they also wait for a lane's lock while its blocks are listed.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fmt::{Display, Write as _};
use std::path::Path;
use std::time::Duration;

use lowtide_core::{BlockStatus, Bytes, Stats};
use lowtide_region::BackupKind;

use crate::error::Error;
use crate::regions::backups;
use crate::regions::figures::{self, OnDeviceFigures};
use crate::{devices, settings};

/// Who can read a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reader {
    /// Everyone who can reach an address or read a file. The page has numbers, but not the program's command
    /// line.
    Anyone,
    /// This process's user. The page also has the command line and the streams.
    SameUser,
}

/// Returns the statistics of every device in use and of every region. Each line has `labels` added.
///
/// # Errors
///
/// If lowtide panicked in this process.
pub(crate) fn text(labels: &[(&str, String)], reader: Reader) -> Result<String, Error> {
    let mut page = Page {
        text: String::new(),
        labels: labels
            .iter()
            .map(|(name, value)| label(name, value))
            .collect(),
    };
    let mut devices = Vec::new();
    for (ordinal, allocator) in devices::all() {
        devices.push((ordinal, allocator.with_all(|device| device.stats())?));
    }
    page.info(reader)?;
    page.devices(devices);
    page.regions(figures::all()?);
    if reader == Reader::SameUser {
        page.streams()?;
    }
    Ok(page.text)
}

/// A page that is built up family by family.
struct Page {
    text: String,
    /// The labels of every line.
    labels: String,
}

/// A family of metrics.
#[derive(Clone, Copy)]
struct Family {
    name: &'static str,
    help: &'static str,
}

/// A family of metrics and the function that returns an object's value.
struct Figure<Of, Value> {
    family: Family,
    value: fn(&Of) -> Value,
}

/// Defines a list of figures: each family's name, its value of an object, and its help text.
macro_rules! figures {
    ($list:ident: |$object:ident: &$of:ty| -> $value:ty {
        $($name:ident = $figure:expr, $help:literal;)*
    }) => {
        const $list: &[Figure<$of, $value>] = &[$(Figure {
            family: Family { name: stringify!($name), help: $help },
            value: |$object| $figure,
        }),*];
    };
}

figures! { DEVICE_FIGURES: |stats: &Stats| -> i64 {
    lowtide_requested_bytes = stats.requested_bytes.all.current,
        "Bytes that the program asked for and holds.";
    lowtide_allocated_bytes = stats.allocated_bytes.all.current,
        "Bytes of the blocks that the program holds, rounding included.";
    lowtide_active_bytes = stats.active_bytes.all.current,
        "Bytes of the blocks that the program holds or that wait for a stream.";
    lowtide_reserved_bytes = stats.reserved_bytes.all.current,
        "Bytes held from the driver, those included whose region is paused.";
    lowtide_inactive_split_bytes = stats.inactive_split_bytes.all.current,
        "Bytes of free blocks whose segment cannot be released as a whole; 0 unless the strategy is caching.";
    lowtide_requested_peak_bytes = stats.requested_bytes.all.peak,
        "The most bytes that the program asked for and held at once.";
    lowtide_allocated_peak_bytes = stats.allocated_bytes.all.peak,
        "The most bytes of blocks that the program held at once.";
    lowtide_reserved_peak_bytes = stats.reserved_bytes.all.peak,
        "The most bytes held from the driver at once, those included whose region was paused.";
    lowtide_blocks = stats.allocation.all.current,
        "Blocks that the program holds.";
    lowtide_segments = stats.segment.all.current,
        "Segments held from the driver; expandable ones are not counted.";
    lowtide_allocations_total = stats.allocation.all.allocated,
        "Requests that were served.";
    lowtide_frees_total = stats.allocation.all.freed,
        "Blocks that the program gave back.";
    lowtide_driver_allocations_total = stats.num_device_alloc,
        "Calls by which memory came from the driver: allocations and maps.";
    lowtide_driver_frees_total = stats.num_device_free,
        "Calls by which memory went back to the driver: frees and unmaps.";
    lowtide_allocation_retries_total = stats.num_alloc_retries,
        "Requests for which cached memory had to go back first.";
    lowtide_out_of_memory_total = stats.num_ooms,
        "Requests that could not be served.";
    lowtide_stream_waits_total = stats.num_sync_all_streams,
        "Waits for every stream that blocks were waiting for.";
} }

figures! { BACKUP_FIGURES: |ordinal: &c_int| -> u64 {
    lowtide_kept_host_bytes = backups::kept(*ordinal).get(),
        "Bytes of the host's memory that ended backups have left for the next ones.";
} }

figures! { REGION_FIGURES: |region: &OnDeviceFigures| -> u64 {
    lowtide_region_live_bytes = region.live.get(),
        "Bytes of the blocks that the program holds in the region.";
    lowtide_region_mapped_bytes = region.memory.mapped.get(),
        "Bytes of the device that the region has.";
    lowtide_region_paused_bytes = region.needed_to_resume.get(),
        "Bytes of the device that a resume of the region takes.";
    lowtide_region_host_bytes = region.memory.host.get(),
        "Bytes of the region that are kept in the host's memory.";
    lowtide_region_disk_bytes = region.memory.disk.get(),
        "Bytes of the region that are kept on disk.";
    lowtide_region_pauses_total = region.memory.pauses,
        "How often the region was paused.";
    lowtide_region_resumes_total = region.memory.resumes,
        "How often the region was resumed.";
    lowtide_region_saved_bytes_total = region.memory.saved.get(),
        "Bytes that were copied away.";
    lowtide_region_restored_bytes_total = region.memory.restored.get(),
        "Bytes that were copied back.";
} }

figures! { REGION_TIMES: |region: &OnDeviceFigures| -> String {
    lowtide_region_pause_seconds_total = seconds(region.memory.pause_time),
        "How long pausing took, the wait for the device included.";
    lowtide_region_resume_seconds_total = seconds(region.memory.resume_time),
        "How long resuming took.";
    lowtide_region_save_seconds_total = seconds(region.memory.save_time),
        "How long copying away took, a part of the time of the pauses.";
    lowtide_region_restore_seconds_total = seconds(region.memory.restore_time),
        "How long copying back took, a part of the time of the resumes.";
} }

// The reserved and the allocated bytes of a stream.
figures! { STREAM_FIGURES: |sizes: &[Bytes; 2]| -> u64 {
    lowtide_stream_reserved_bytes = sizes[0].get(),
        "Bytes held from the driver for a stream.";
    lowtide_stream_allocated_bytes = sizes[1].get(),
        "Bytes of the blocks of a stream that the program holds.";
} }

impl Page {
    fn begin(&mut self, Family { name, help }: Family) {
        let kind = if name.ends_with("_total") {
            "counter"
        } else {
            "gauge"
        };
        // Writing to a `String` does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, family: Family, labels: &str, value: impl Display) {
        let all = format!("{}{labels}", self.labels);
        let all = all.trim_end_matches(',');
        let _ = writeln!(self.text, "{}{{{all}}} {value}", family.name);
    }

    /// Adds some figures of all objects, which come with their labels.
    fn add<Of, Value: Display>(&mut self, figures: &[Figure<Of, Value>], objects: &[(String, Of)]) {
        for Figure { family, value } in figures {
            self.begin(*family);
            for (labels, object) in objects {
                self.sample(*family, labels, value(object));
            }
        }
    }

    fn info(&mut self, reader: Reader) -> Result<(), Error> {
        let family = Family {
            name: "lowtide_info",
            help: "The version of lowtide and how it is configured.",
        };
        let config = settings::config()?;
        let mut labels = vec![
            label("version", env!("CARGO_PKG_VERSION")),
            label("strategy", config.name().as_str()),
            label("config", &config.to_string()),
        ];
        if reader == Reader::SameUser {
            labels.push(label("command", &command()));
        }
        self.begin(family);
        self.sample(family, &labels.concat(), 1);
        Ok(())
    }

    fn devices(&mut self, devices: Vec<(c_int, Stats)>) {
        let of_device = |ordinal: c_int| label("device", &ordinal.to_string());
        let ordinals = devices.iter().map(|&(ordinal, _)| ordinal);
        let kept: Vec<_> = ordinals
            .map(|ordinal| (of_device(ordinal), ordinal))
            .collect();
        let devices = devices.into_iter();
        let stats: Vec<_> = devices
            .map(|(ordinal, stats)| (of_device(ordinal), stats))
            .collect();
        self.add(DEVICE_FIGURES, &stats);
        self.add(BACKUP_FIGURES, &kept);
    }

    fn regions(&mut self, regions: Vec<OnDeviceFigures>) {
        let labelled = regions.into_iter().map(|region| {
            let labels = [
                label("device", &region.device.to_string()),
                label("region", &region.tag),
                label("backup", backup_name(region.kind)),
            ];
            (labels.concat(), region)
        });
        let regions: Vec<_> = labelled.collect();
        self.add(REGION_FIGURES, &regions);
        self.add(REGION_TIMES, &regions);
    }

    /// Adds the memory of each stream. Stream numbers mean nothing outside this process, so they do not belong in
    /// a database.
    fn streams(&mut self) -> Result<(), Error> {
        let mut streams: BTreeMap<(c_int, u64), [Bytes; 2]> = BTreeMap::new();
        for (ordinal, allocator) in devices::all() {
            // Lane by lane: no thread waits for the others' segments.
            allocator.for_each_lane(|lane| {
                for segment in lane.segments() {
                    let [reserved, allocated] =
                        streams.entry((ordinal, segment.stream.0)).or_default();
                    *reserved += segment.size;
                    let held = |status| status == BlockStatus::Allocated;
                    let blocks = segment.blocks.iter().filter(|block| held(block.status));
                    *allocated += blocks.map(|block| block.size).sum::<Bytes>();
                }
                Ok(())
            })?;
        }
        let labelled = streams.into_iter().map(|((ordinal, stream), sizes)| {
            let labels = [
                label("device", &ordinal.to_string()),
                label("stream", &format!("{stream:#x}")),
            ];
            (labels.concat(), sizes)
        });
        self.add(STREAM_FIGURES, &labelled.collect::<Vec<_>>());
        Ok(())
    }
}

/// Returns a time in seconds, to the nanosecond.
fn seconds(time: Duration) -> String {
    format!("{}.{:09}", time.as_secs(), time.subsec_nanos())
}

/// Returns the name of a backup kind in Python and Prometheus.
fn backup_name(kind: Option<BackupKind>) -> &'static str {
    match kind {
        None => "none",
        Some(BackupKind::Host) => "host",
        Some(BackupKind::Disk) => "disk",
    }
}

/// Returns `name="value",`.
fn label(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\",")
}

/// Returns the first words of this process's command line.
fn command() -> String {
    const LENGTH_MAX: usize = 120;
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let program = Path::new(&program)
        .file_name()
        .unwrap_or_default()
        .to_owned();
    let words = [program].into_iter().chain(words);
    let words = words.map(|word| word.to_string_lossy().into_owned());
    let text = words.collect::<Vec<_>>().join(" ");
    text.chars()
        .filter(|character| !character.is_control())
        .take(LENGTH_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_labels_are_quoted() {
        assert_eq!(label("a", "b\"c\\d\ne"), r#"a="b\"c\\d\ne","#);
    }

    #[test]
    fn names_follow_prometheuss_conventions() {
        let devices = DEVICE_FIGURES.iter().map(|figure| figure.family);
        let backups = BACKUP_FIGURES.iter().map(|figure| figure.family);
        let regions = REGION_FIGURES.iter().map(|figure| figure.family);
        let times = REGION_TIMES.iter().map(|figure| figure.family);
        let families = devices.chain(backups).chain(regions).chain(times);
        for Family { name, help } in families {
            assert!(
                name.starts_with("lowtide_") && help.ends_with('.'),
                "{name}"
            );
            let docs = include_str!("../../../docs/json.md");
            assert!(docs.contains(&format!("`{name}`")), "{name}");
        }
    }
}
