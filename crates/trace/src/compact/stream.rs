//! Writes lowtide's own format while the events happen.

use std::fmt;
use std::io::{self, Write};

use lowtide_core::{MempoolId, SegmentSnapshot};

use super::payload::PutPayload;
use super::write::{CompactWriter, put_event};
use super::{BEFORE_FIRST, section};
use crate::model::{AllocatorSettings, TraceEvent};
use crate::stacks::StackTable;

/// How many events go into a section at most. One that is cut off is lost.
const EVENTS_PER_SECTION: usize = 4096;

/// Writes a recording while it is made, so that a process that is killed leaves all of it that was
/// [flushed](StreamWriter::flush).
///
/// A device is begun with what it held already, and [`read`](crate::read) makes the segments at the end out of
/// that and the events, wherever the file ends.
pub struct StreamWriter<W: Write> {
    writer: CompactWriter<W>,
    /// In the order in which they were begun.
    devices: Vec<Device>,
    /// The device, by its place in `devices`, that the sections written last are about.
    current: usize,
}

/// What is to be written about a device.
struct Device {
    number: u32,
    /// Events, of the next section.
    payload: Vec<u8>,
    count: usize,
    /// The last of them.
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
    /// Returns a writer of a file that has no device yet.
    ///
    /// # Errors
    ///
    /// If `out` cannot be written to.
    pub fn new(out: W) -> io::Result<StreamWriter<W>> {
        Ok(StreamWriter {
            writer: CompactWriter::new(out)?,
            devices: Vec::new(),
            current: 0,
        })
    }

    /// Begins the recording of a device, which had `held` before its first event, and of that `paused` was away: the
    /// pause of each segment, whose note is in `stacks`.
    ///
    /// # Errors
    ///
    /// If what is written to fails.
    ///
    /// # Panics
    ///
    /// If the device was begun before.
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

    /// Returns whether a device was begun.
    pub fn has_device(&self, device: u32) -> bool {
        self.devices.iter().any(|known| known.number == device)
    }

    /// Adds the next event of a device, whose stack and note are in `stacks`: the same table for all events.
    ///
    /// # Errors
    ///
    /// If what is written to fails.
    ///
    /// # Panics
    ///
    /// If the device was not begun.
    pub fn push(&mut self, device: u32, event: &TraceEvent, stacks: &StackTable) -> io::Result<()> {
        let index = self.index_of(device);
        let tables = &mut self.writer.tables;
        let numbers = [
            tables.stack(stacks, event.stack),
            tables.note(stacks, event.note),
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

    /// Says that a pool of a device has the memory of a region with this tag, now and before.
    ///
    /// # Errors
    ///
    /// If what is written to fails.
    ///
    /// # Panics
    ///
    /// If the device was not begun.
    pub fn push_region(&mut self, device: u32, pool: MempoolId, tag: &str) -> io::Result<()> {
        let index = self.index_of(device);
        self.turn_to(index)?;
        self.writer.regions([(&pool, &tag.into())])
    }

    /// Writes all events so far, in sections that are complete.
    ///
    /// # Errors
    ///
    /// If what is written to fails.
    pub fn flush(&mut self) -> io::Result<()> {
        for index in 0..self.devices.len() {
            if self.devices[index].count > 0 {
                self.write_events(index)?;
            }
        }
        self.writer.flush()
    }

    /// Writes what is left, and that nothing is missing.
    ///
    /// # Errors
    ///
    /// If what is written to fails.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        let mut end = Vec::new();
        // Of nothing that happened there is no event.
        self.devices.iter().for_each(|_| end.put_natural(0));
        self.writer.section(section::END, &end)?;
        self.writer.flush()
    }

    fn index_of(&self, device: u32) -> usize {
        let index = self.devices.iter().position(|known| known.number == device);
        index.expect("the device was begun")
    }

    /// Says which device the next section is about, where it is another than the last was.
    fn turn_to(&mut self, index: usize) -> io::Result<()> {
        match std::mem::replace(&mut self.current, index) == index {
            true => Ok(()),
            false => self.writer.device(self.devices[index].number),
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
