//! Writes lowtide's own format while the job runs.

use std::fmt;
use std::io::{self, Write};

use lowtide_core::{MempoolId, SegmentSnapshot};

use super::payload::PutPayload;
use super::write::{CompactWriter, put_event};
use super::{BEFORE_FIRST, section};
use crate::model::{AllocatorSettings, TraceEvent};
use crate::stacks::StackTable;

/// The most events in a section. A truncated section is lost.
const EVENTS_PER_SECTION: usize = 4096;

/// Writes a recording while the job runs. If the process is killed, the file has everything that was
/// [flushed](StreamWriter::flush).
///
/// A device starts with the segments that it had before its first event. [`read`](crate::read) computes the
/// segments at the end from those and the events, wherever the file ends.
pub struct StreamWriter<W: Write> {
    writer: CompactWriter<W>,
    /// The devices, in the order in which they began.
    devices: Vec<Device>,
    /// The device of the sections written last, as an index into `devices`.
    current: usize,
}

/// The events of a device that are not written yet.
struct Device {
    number: u32,
    /// The events of the next section.
    payload: Vec<u8>,
    count: usize,
    /// The last event in `payload`.
    before: TraceEvent,
}

impl<W: Write> fmt::Debug for StreamWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices.iter().map(|device| device.number);
        let mut writer = f.debug_struct("StreamWriter");
        writer.field("devices", &devices.collect::<Vec<_>>());
        writer.finish_non_exhaustive()
    }
}

impl<W: Write> StreamWriter<W> {
    /// Returns a writer of a file without devices.
    ///
    /// # Errors
    ///
    /// If `out` cannot be written.
    pub fn new(out: W) -> io::Result<StreamWriter<W>> {
        Ok(StreamWriter {
            writer: CompactWriter::new(out)?,
            devices: Vec::new(),
            current: 0,
        })
    }

    /// Starts the recording of a device. `held` are the segments before its first event. `paused` has the pause of
    /// each of them that was paused, with its note in `stacks`.
    ///
    /// # Errors
    ///
    /// If the output cannot be written.
    ///
    /// # Panics
    ///
    /// If the device has begun before.
    pub fn begin_device(
        &mut self,
        device: u32,
        settings: &AllocatorSettings,
        held: &[SegmentSnapshot],
        paused: &[TraceEvent],
        stacks: &StackTable,
    ) -> io::Result<()> {
        assert!(!self.has_device(device), "device {device} begins once");
        self.current = self.devices.len();
        self.devices.push(Device {
            number: device,
            payload: Vec::new(),
            count: 0,
            before: BEFORE_FIRST,
        });
        self.writer.device(device)?;
        self.writer.settings(settings)?;
        let held = self.writer.segments(held, |_, _| 0);
        self.writer.section(section::HELD_BEFORE, &held)?;
        self.writer.events(section::PAUSED_BEFORE, paused, stacks)
    }

    /// Returns whether the recording of a device has begun.
    pub fn has_device(&self, device: u32) -> bool {
        self.devices.iter().any(|known| known.number == device)
    }

    /// Adds the next event of a device. Its stack is in `stacks` and its note in `notes`, which must be the same tables
    /// for all events.
    ///
    /// # Errors
    ///
    /// If the output cannot be written.
    ///
    /// # Panics
    ///
    /// If the device has not begun.
    pub fn push(
        &mut self,
        device: u32,
        event: &TraceEvent,
        stacks: &StackTable,
        notes: &StackTable,
    ) -> io::Result<()> {
        let index = self.index_of(device);
        let tables = &mut self.writer.tables;
        let numbers = [
            tables.stack(stacks, event.stack),
            tables.note(notes, event.note),
        ];
        let device = &mut self.devices[index];
        put_event(&mut device.payload, event, &device.before, numbers);
        device.before = *event;
        device.count += 1;
        let count = device.count;
        self.writer.write_long_tables()?;
        match count {
            EVENTS_PER_SECTION => self.write_events(index),
            _ => Ok(()),
        }
    }

    /// Records that a pool of a device holds the memory of the region with this tag, now and before.
    ///
    /// # Errors
    ///
    /// If the output cannot be written.
    ///
    /// # Panics
    ///
    /// If the device has not begun.
    pub fn push_region(&mut self, device: u32, pool: MempoolId, tag: &str) -> io::Result<()> {
        let index = self.index_of(device);
        self.turn_to(index)?;
        self.writer.regions([(&pool, &tag.into())])
    }

    /// Writes all events so far, in complete sections.
    ///
    /// # Errors
    ///
    /// If the output cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        for index in 0..self.devices.len() {
            if self.devices[index].count > 0 {
                self.write_events(index)?;
            }
        }
        self.writer.flush()
    }

    /// Writes the remaining events, and marks the file as complete.
    ///
    /// # Errors
    ///
    /// If the output cannot be written.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        let mut end = Vec::new();
        // Zero skipped entries for each device: the recorder makes only events.
        self.devices.iter().for_each(|_| end.put_natural(0));
        self.writer.section(section::END, &end)?;
        self.writer.flush()
    }

    fn index_of(&self, device: u32) -> usize {
        let index = self.devices.iter().position(|known| known.number == device);
        index.expect("the device was begun")
    }

    /// Writes the device of the next section, if it is another device than the last section's.
    fn turn_to(&mut self, index: usize) -> io::Result<()> {
        if std::mem::replace(&mut self.current, index) == index {
            Ok(())
        } else {
            self.writer.device(self.devices[index].number)
        }
    }

    fn write_events(&mut self, index: usize) -> io::Result<()> {
        self.turn_to(index)?;
        let device = &mut self.devices[index];
        self.writer.tables(section::EVENTS, &device.payload)?;
        device.payload.clear();
        (device.count, device.before) = (0, BEFORE_FIRST);
        Ok(())
    }
}
