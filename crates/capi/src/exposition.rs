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
use crate::regions::figures::{self, OnDeviceFigures};
use crate::regions::keeper;
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
    page.devices(&devices);
    page.regions(&figures::all()?);
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

/// The metadata of one family of metrics.
#[derive(Clone, Copy)]
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
}

/// A family of metrics and the function that returns its values.
struct Figure<Of, Value> {
    family: Family,
    value: fn(&Of) -> Value,
}

const fn figure<Of, Value>(
    kind: &'static str,
    name: &'static str,
    help: &'static str,
    value: fn(&Of) -> Value,
) -> Figure<Of, Value> {
    let family = Family { name, kind, help };
    Figure { family, value }
}

const DEVICE_FIGURES: [Figure<Stats, i64>; 17] = [
    figure(
        "gauge",
        "lowtide_requested_bytes",
        "Bytes that the program asked for and holds.",
        |stats| stats.requested_bytes.all.current,
    ),
    figure(
        "gauge",
        "lowtide_allocated_bytes",
        "Bytes of the blocks that the program holds, rounding included.",
        |stats| stats.allocated_bytes.all.current,
    ),
    figure(
        "gauge",
        "lowtide_active_bytes",
        "Bytes of the blocks that the program holds or that wait for a stream.",
        |stats| stats.active_bytes.all.current,
    ),
    figure(
        "gauge",
        "lowtide_reserved_bytes",
        "Bytes held from the driver, those included whose region is paused.",
        |stats| stats.reserved_bytes.all.current,
    ),
    figure(
        "gauge",
        "lowtide_inactive_split_bytes",
        "Bytes of free blocks whose segment cannot be released as a whole; 0 unless the strategy is caching.",
        |stats| stats.inactive_split_bytes.all.current,
    ),
    figure(
        "gauge",
        "lowtide_requested_peak_bytes",
        "The most bytes that the program asked for and held at once.",
        |stats| stats.requested_bytes.all.peak,
    ),
    figure(
        "gauge",
        "lowtide_allocated_peak_bytes",
        "The most bytes of blocks that the program held at once.",
        |stats| stats.allocated_bytes.all.peak,
    ),
    figure(
        "gauge",
        "lowtide_reserved_peak_bytes",
        "The most bytes held from the driver at once, those included whose region was paused.",
        |stats| stats.reserved_bytes.all.peak,
    ),
    figure(
        "gauge",
        "lowtide_blocks",
        "Blocks that the program holds.",
        |stats| stats.allocation.all.current,
    ),
    figure(
        "gauge",
        "lowtide_segments",
        "Segments held from the driver; expandable ones are not counted.",
        |stats| stats.segment.all.current,
    ),
    figure(
        "counter",
        "lowtide_allocations_total",
        "Requests that were served.",
        |stats| stats.allocation.all.allocated,
    ),
    figure(
        "counter",
        "lowtide_frees_total",
        "Blocks that the program gave back.",
        |stats| stats.allocation.all.freed,
    ),
    figure(
        "counter",
        "lowtide_driver_allocations_total",
        "Calls by which memory came from the driver: allocations and maps.",
        |stats| stats.num_device_alloc,
    ),
    figure(
        "counter",
        "lowtide_driver_frees_total",
        "Calls by which memory went back to the driver: frees and unmaps.",
        |stats| stats.num_device_free,
    ),
    figure(
        "counter",
        "lowtide_allocation_retries_total",
        "Requests for which cached memory had to go back first.",
        |stats| stats.num_alloc_retries,
    ),
    figure(
        "counter",
        "lowtide_out_of_memory_total",
        "Requests that could not be served.",
        |stats| stats.num_ooms,
    ),
    figure(
        "counter",
        "lowtide_stream_waits_total",
        "Waits for every stream that blocks were waiting for.",
        |stats| stats.num_sync_all_streams,
    ),
];

const KEPT_HOST_BYTES: Family = Family {
    name: "lowtide_kept_host_bytes",
    kind: "gauge",
    help: "Bytes of the host's memory that ended backups have left for the next ones.",
};

const REGION_FIGURES: [Figure<OnDeviceFigures, u64>; 9] = [
    figure(
        "gauge",
        "lowtide_region_live_bytes",
        "Bytes of the blocks that the program holds in the region.",
        |region| region.live.get(),
    ),
    figure(
        "gauge",
        "lowtide_region_mapped_bytes",
        "Bytes of the device that the region has.",
        |region| region.memory.mapped.get(),
    ),
    figure(
        "gauge",
        "lowtide_region_paused_bytes",
        "Bytes of the device that a resume of the region takes.",
        |region| region.needed_to_resume.get(),
    ),
    figure(
        "gauge",
        "lowtide_region_host_bytes",
        "Bytes of the region that are kept in the host's memory.",
        |region| region.memory.host.get(),
    ),
    figure(
        "gauge",
        "lowtide_region_disk_bytes",
        "Bytes of the region that are kept on disk.",
        |region| region.memory.disk.get(),
    ),
    figure(
        "counter",
        "lowtide_region_pauses_total",
        "How often the region was paused.",
        |region| region.memory.pauses,
    ),
    figure(
        "counter",
        "lowtide_region_resumes_total",
        "How often the region was resumed.",
        |region| region.memory.resumes,
    ),
    figure(
        "counter",
        "lowtide_region_saved_bytes_total",
        "Bytes that were copied away.",
        |region| region.memory.saved.get(),
    ),
    figure(
        "counter",
        "lowtide_region_restored_bytes_total",
        "Bytes that were copied back.",
        |region| region.memory.restored.get(),
    ),
];

const REGION_TIMES: [Figure<OnDeviceFigures, Duration>; 4] = [
    figure(
        "counter",
        "lowtide_region_pause_seconds_total",
        "How long pausing took, the wait for the device included.",
        |region| region.memory.pause_time,
    ),
    figure(
        "counter",
        "lowtide_region_resume_seconds_total",
        "How long resuming took.",
        |region| region.memory.resume_time,
    ),
    figure(
        "counter",
        "lowtide_region_save_seconds_total",
        "How long copying away took, a part of the time of the pauses.",
        |region| region.memory.save_time,
    ),
    figure(
        "counter",
        "lowtide_region_restore_seconds_total",
        "How long copying back took, a part of the time of the resumes.",
        |region| region.memory.restore_time,
    ),
];

impl Page {
    fn begin(&mut self, Family { name, kind, help }: Family) {
        // Writing to a `String` does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, family: Family, labels: &str, value: impl Display) {
        let all = format!("{}{labels}", self.labels);
        let all = all.trim_end_matches(',');
        let _ = writeln!(self.text, "{}{{{all}}} {value}", family.name);
    }

    fn info(&mut self, reader: Reader) -> Result<(), Error> {
        let family = Family {
            name: "lowtide_info",
            kind: "gauge",
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

    fn devices(&mut self, devices: &[(c_int, Stats)]) {
        for Figure { family, value } in DEVICE_FIGURES {
            self.begin(family);
            for (ordinal, stats) in devices {
                self.sample(family, &label("device", &ordinal.to_string()), value(stats));
            }
        }
        self.begin(KEPT_HOST_BYTES);
        for (ordinal, _) in devices {
            let kept = keeper::kept(*ordinal).get();
            self.sample(
                KEPT_HOST_BYTES,
                &label("device", &ordinal.to_string()),
                kept,
            );
        }
    }

    fn regions(&mut self, regions: &[OnDeviceFigures]) {
        let labels = |region: &OnDeviceFigures| {
            let labels = [
                label("device", &region.device.to_string()),
                label("region", &region.name.tag),
                label("backup", backup_name(region.name.kind)),
            ];
            labels.concat()
        };
        for Figure { family, value } in REGION_FIGURES {
            self.begin(family);
            for region in regions {
                self.sample(family, &labels(region), value(region));
            }
        }
        for Figure { family, value } in REGION_TIMES {
            self.begin(family);
            for region in regions {
                let time = value(region);
                let seconds = format!("{}.{:09}", time.as_secs(), time.subsec_nanos());
                self.sample(family, &labels(region), seconds);
            }
        }
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
        let figures: [Figure<[Bytes; 2], u64>; 2] = [
            figure(
                "gauge",
                "lowtide_stream_reserved_bytes",
                "Bytes held from the driver for a stream.",
                |sizes| sizes[0].get(),
            ),
            figure(
                "gauge",
                "lowtide_stream_allocated_bytes",
                "Bytes of the blocks of a stream that the program holds.",
                |sizes| sizes[1].get(),
            ),
        ];
        for Figure { family, value } in figures {
            self.begin(family);
            for ((ordinal, stream), sizes) in &streams {
                let labels = [
                    label("device", &ordinal.to_string()),
                    label("stream", &format!("{stream:#x}")),
                ];
                self.sample(family, &labels.concat(), value(sizes));
            }
        }
        Ok(())
    }
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
        let devices = DEVICE_FIGURES.map(|figure| figure.family);
        let regions = REGION_FIGURES.map(|figure| figure.family);
        let times = REGION_TIMES.map(|figure| figure.family);
        let families = devices.into_iter().chain([KEPT_HOST_BYTES]);
        let families = families.chain(regions).chain(times);
        for Family { name, kind, help } in families {
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
            assert!(
                name.starts_with("lowtide_") && help.ends_with('.'),
                "{name}"
            );
            let docs = include_str!("../../../docs/json.md");
            assert!(docs.contains(&format!("`{name}`")), "{name}");
        }
    }
}
