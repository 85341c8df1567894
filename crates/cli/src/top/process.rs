//! The metrics of a process, grouped by device, region and stream.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use lowtide_trace::RecordedText;
use serde::Serialize;

use super::sample::{Answer, Sample};

/// A process that runs on lowtide.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// The name of its socket. It differs for processes of two containers with the same number.
    #[serde(skip)]
    pub(super) name: OsString,
    pub(super) command: RecordedText,
    pub(super) config: RecordedText,
    pub(super) version: RecordedText,
    pub(super) devices: Vec<Device>,
}

/// A process's memory on one device. Rates cover the time between two readings; `None` after the first.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(super) struct Device {
    pub(super) device: u32,
    pub(super) live_bytes: u64,
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
    pub(super) reserved_peak_bytes: u64,
    /// Reserved over live bytes; `None` if no bytes are live.
    pub(super) ratio: Option<f64>,
    pub(super) allocations: u64,
    pub(super) allocations_per_second: Option<f64>,
    pub(super) driver_calls: u64,
    pub(super) driver_calls_per_second: Option<f64>,
    pub(super) out_of_memory: u64,
    /// The host memory that ended backups keep for the next ones.
    pub(super) kept_host_bytes: u64,
    pub(super) regions: Vec<Region>,
    pub(super) streams: Vec<Stream>,
}

/// A region's memory on one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(super) struct Region {
    pub(super) tag: RecordedText,
    pub(super) backup: RecordedText,
    pub(super) live_bytes: u64,
    pub(super) mapped_bytes: u64,
    pub(super) paused_bytes: u64,
    pub(super) host_bytes: u64,
    pub(super) disk_bytes: u64,
    pub(super) pauses: u64,
    pub(super) pause_seconds: f64,
    pub(super) resumes: u64,
    pub(super) resume_seconds: f64,
    pub(super) saved_bytes: u64,
    pub(super) save_seconds: f64,
    /// The speed at which contents were saved; `None` if none were saved.
    pub(super) saved_bytes_per_second: Option<f64>,
    pub(super) restored_bytes: u64,
    pub(super) restore_seconds: f64,
    /// The speed at which contents were restored; `None` if none were restored.
    pub(super) restored_bytes_per_second: Option<f64>,
}

/// A stream's memory.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(super) struct Stream {
    pub(super) stream: RecordedText,
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
}

impl Process {
    /// Returns the process that an answer describes.
    pub(super) fn of(answer: &Answer) -> Process {
        let mut process = Process {
            pid: answer.pid,
            name: answer.name.clone(),
            ..Process::default()
        };
        let mut devices: BTreeMap<u32, Device> = BTreeMap::new();
        for sample in &answer.samples {
            if sample.name == "lowtide_info" {
                let label = |name| sample.label(name).into();
                (process.command, process.config) = (label("command"), label("config"));
                process.version = label("version");
            } else if let Ok(number) = sample.label("device").parse() {
                let device = devices.entry(number).or_default();
                device.device = number;
                device.add(sample);
            }
        }
        process.devices = devices.into_values().collect();
        for device in &mut process.devices {
            #[expect(clippy::cast_precision_loss, reason = "a ratio is not exact")]
            let ratio = device.reserved_bytes as f64 / device.live_bytes as f64;
            device.ratio = (device.live_bytes > 0).then_some(ratio);
            device.regions.iter_mut().for_each(Region::count_speeds);
        }
        process
    }

    pub(super) fn reserved_bytes(&self) -> u64 {
        let devices = self.devices.iter();
        devices.map(|device| device.reserved_bytes).sum()
    }

    /// Sets the rates since `earlier`.
    pub(super) fn count_since(&mut self, earlier: &Process, elapsed: Duration) {
        for device in &mut self.devices {
            let mut earlier = earlier.devices.iter();
            let earlier = earlier.find(|earlier| earlier.device == device.device);
            let Some(earlier) = earlier else { continue };
            // The process may have reset its counters in between.
            #[expect(clippy::cast_precision_loss, reason = "a rate is not exact")]
            let rate = |now: u64, then| now.saturating_sub(then) as f64 / elapsed.as_secs_f64();
            device.allocations_per_second = Some(rate(device.allocations, earlier.allocations));
            device.driver_calls_per_second = Some(rate(device.driver_calls, earlier.driver_calls));
        }
    }
}

impl Device {
    fn add(&mut self, sample: &Sample) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "bytes and counts are exact up to 2^53, and a cast takes what is not for 0"
        )]
        let value = sample.value as u64;
        match sample.name.as_str() {
            "lowtide_requested_bytes" => self.live_bytes = value,
            "lowtide_allocated_bytes" => self.allocated_bytes = value,
            "lowtide_reserved_bytes" => self.reserved_bytes = value,
            "lowtide_reserved_peak_bytes" => self.reserved_peak_bytes = value,
            "lowtide_allocations_total" => self.allocations = value,
            "lowtide_driver_allocations_total" | "lowtide_driver_frees_total" => {
                self.driver_calls += value;
            }
            "lowtide_out_of_memory_total" => self.out_of_memory = value,
            "lowtide_kept_host_bytes" => self.kept_host_bytes = value,
            "lowtide_stream_allocated_bytes" => self.stream(sample).allocated_bytes = value,
            "lowtide_stream_reserved_bytes" => self.stream(sample).reserved_bytes = value,
            name if name.starts_with("lowtide_region_") => self.region(sample).add(sample, value),
            _ => {}
        }
    }

    fn region(&mut self, sample: &Sample) -> &mut Region {
        let (tag, backup) = (sample.label("region"), sample.label("backup"));
        let is_it = |region: &Region| region.tag.raw() == tag && region.backup.raw() == backup;
        let index = self.regions.iter().position(is_it).unwrap_or_else(|| {
            self.regions.push(Region {
                tag: tag.into(),
                backup: backup.into(),
                ..Region::default()
            });
            self.regions.len() - 1
        });
        &mut self.regions[index]
    }

    fn stream(&mut self, sample: &Sample) -> &mut Stream {
        let name = sample.label("stream");
        let is_it = |stream: &Stream| stream.stream.raw() == name;
        let index = self.streams.iter().position(is_it).unwrap_or_else(|| {
            self.streams.push(Stream {
                stream: name.into(),
                ..Stream::default()
            });
            self.streams.len() - 1
        });
        &mut self.streams[index]
    }
}

impl Region {
    fn add(&mut self, sample: &Sample, value: u64) {
        match sample.name.as_str() {
            "lowtide_region_live_bytes" => self.live_bytes = value,
            "lowtide_region_mapped_bytes" => self.mapped_bytes = value,
            "lowtide_region_paused_bytes" => self.paused_bytes = value,
            "lowtide_region_host_bytes" => self.host_bytes = value,
            "lowtide_region_disk_bytes" => self.disk_bytes = value,
            "lowtide_region_pauses_total" => self.pauses = value,
            "lowtide_region_pause_seconds_total" => self.pause_seconds = sample.value,
            "lowtide_region_resumes_total" => self.resumes = value,
            "lowtide_region_resume_seconds_total" => self.resume_seconds = sample.value,
            "lowtide_region_saved_bytes_total" => self.saved_bytes = value,
            "lowtide_region_save_seconds_total" => self.save_seconds = sample.value,
            "lowtide_region_restored_bytes_total" => self.restored_bytes = value,
            "lowtide_region_restore_seconds_total" => self.restore_seconds = sample.value,
            _ => {}
        }
    }

    fn count_speeds(&mut self) {
        #[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
        let speed = |bytes: u64, seconds: f64| {
            (bytes > 0 && seconds > 0.0).then_some(bytes as f64 / seconds)
        };
        self.saved_bytes_per_second = speed(self.saved_bytes, self.save_seconds);
        self.restored_bytes_per_second = speed(self.restored_bytes, self.restore_seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(name: &str, labels: &[(&str, &str)], value: f64) -> Sample {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Sample {
            name: name.to_owned(),
            labels: labels.iter().map(owned).collect(),
            value,
        }
    }

    #[test]
    fn figures_go_where_they_belong() {
        let device = [("device", "1")];
        let region = [("device", "1"), ("region", "kv"), ("backup", "host")];
        let stream = [("device", "1"), ("stream", "0x10")];
        let mut samples = vec![
            sample(
                "lowtide_info",
                &[("command", "a b"), ("config", "bfc")],
                1.0,
            ),
            sample("lowtide_requested_bytes", &device, 100.0),
            sample("lowtide_reserved_bytes", &device, 150.0),
            sample("lowtide_allocations_total", &device, 7.0),
            sample("lowtide_kept_host_bytes", &device, 96.0),
            sample("lowtide_driver_allocations_total", &device, 2.0),
            sample("lowtide_driver_frees_total", &device, 1.0),
            sample("lowtide_region_paused_bytes", &region, 40.0),
            sample("lowtide_region_pause_seconds_total", &region, 0.25),
            sample("lowtide_region_saved_bytes_total", &region, 40.0),
            sample("lowtide_region_save_seconds_total", &region, 0.125),
            sample("lowtide_region_host_bytes", &region, 48.0),
            sample("lowtide_stream_reserved_bytes", &stream, 150.0),
            sample("lowtide_of_a_later_version", &device, 1.0),
        ];
        let early = Process::of(&Answer {
            pid: 7,
            name: "top-7-1".into(),
            samples: samples.clone(),
        });
        assert_eq!((early.command.raw(), early.config.raw()), ("a b", "bfc"));
        let [only] = &early.devices[..] else {
            panic!("one device");
        };
        assert_eq!(
            (only.device, only.ratio, only.driver_calls),
            (1, Some(1.5), 3)
        );
        assert_eq!(only.regions[0].tag.raw(), "kv");
        assert_eq!(
            (only.regions[0].paused_bytes, only.regions[0].pause_seconds),
            (40, 0.25)
        );
        assert_eq!(only.regions[0].host_bytes, 48);
        assert_eq!(only.kept_host_bytes, 96);
        assert_eq!(
            only.regions[0].saved_bytes_per_second,
            Some(320.0),
            "of the time of copying"
        );
        assert_eq!(only.regions[0].restored_bytes_per_second, None);
        assert_eq!(only.streams[0].reserved_bytes, 150);
        assert_eq!(only.allocations_per_second, None);

        samples[3].value = 27.0;
        samples[4].value = 0.0;
        let mut late = Process::of(&Answer {
            pid: 7,
            name: "top-7-1".into(),
            samples,
        });
        late.count_since(&early, Duration::from_secs(2));
        assert_eq!(late.devices[0].allocations_per_second, Some(10.0));
        assert_eq!(
            late.devices[0].driver_calls_per_second,
            Some(0.0),
            "counted anew"
        );
    }
}
