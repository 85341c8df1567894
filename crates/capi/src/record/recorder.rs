//! A recording: the events that allocating threads pass on, and the thread that writes them to the file.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lowtide_core::{Action, Bytes, Count, Event, MempoolId, Observer, SegmentSnapshot};
use lowtide_cuda::SignalsBlocked;
use lowtide_trace::{
    AllocatorSettings, Note, NoteId, StackId, StackTable, StreamWriter, TraceEvent,
};

use super::metadata;
use super::native::Functions;
use super::ring::{Entry, Ring};
use super::stacks;
use crate::boundary;
use crate::environment::shown;
use crate::error::{Error, Status};
use crate::exit::at_exit;
use crate::regions::table;

/// The maximum time between flushes: what a killed process can lose of its recording.
const FLUSH_EVERY: Duration = Duration::from_millis(50);
/// The number of entries between two reads of the clock.
const ENTRIES_PER_LOOK: u32 = 1024;
/// How long allocating threads, and a process that ends, wait for a file that accepts no data.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the thread that ends a recording checks whether the writer makes progress.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The error if an entry was claimed but never filled.
const INTERRUPTED: &str = "the process ended while one of its threads recorded a request";
/// The number of attempts, a millisecond apart, to find out at a recording's end which pools are regions'.
const REGION_ATTEMPTS: u32 = 100;
/// Reading debugging information recurses as deep as functions were inlined. Unused stack takes no memory.
const WRITER_STACK_BYTES: usize = 64 << 20;

/// A recording in progress.
pub(crate) struct Recorder {
    ring: Ring,
    /// The announcements in the ring, by number.
    announced: Mutex<HashMap<u64, Announcement>>,
    announcements: AtomicU64,
    writer: OnceLock<Thread>,
    /// The process that has the writer's thread. A forked child does not have it.
    process: u32,
    /// How many recordings the process began before this one, and 1.
    number: u64,
    path: PathBuf,
    options: Options,
    outcome: Mutex<Option<Result<(), Error>>>,
    has_ended: Condvar,
}

/// The options of a recording.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) has_stacks: bool,
    /// Whether the user gets a report about the file at the end.
    pub(super) reports: bool,
}

/// An entry that is not an event, with its own position among the events.
enum Announcement {
    /// A device's events begin here.
    Begin {
        device: u8,
        settings: AllocatorSettings,
        held: Vec<SegmentSnapshot>,
        paused: Vec<(Arc<str>, Event)>,
    },
    /// The memory of a region's segments leaves, or is back.
    Pause {
        device: u8,
        tag: Arc<str>,
        segments: Vec<Event>,
        time_us: i64,
    },
    /// The last entry.
    End,
}

impl Recorder {
    /// Starts writing to a file that was created as `path`.
    ///
    /// # Errors
    ///
    /// If the file could not be created, or no thread can be started.
    pub(super) fn start(
        path: &Path,
        created: io::Result<(File, PathBuf)>,
        options: Options,
    ) -> Result<Arc<Recorder>, Error> {
        let failed = |error: io::Error| {
            let text = format_args!("nothing is recorded: {}: {error}", shown(path));
            Error::new(Status::File, text)
        };
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let (file, path) = created.map_err(failed)?;
        let recorder = Arc::new(Recorder {
            ring: Ring::new(PATIENCE),
            announced: Mutex::default(),
            announcements: AtomicU64::new(0),
            writer: OnceLock::new(),
            process: std::process::id(),
            number: STARTED.fetch_add(1, Ordering::Relaxed) + 1,
            path,
            options,
            outcome: Mutex::default(),
            has_ended: Condvar::new(),
        });
        let _signals = SignalsBlocked::begin();
        let thread = thread::Builder::new()
            .name("lowtide-record".to_owned())
            .stack_size(WRITER_STACK_BYTES);
        let here = Arc::clone(&recorder);
        let thread = thread.spawn(move || here.write(file)).map_err(|error| {
            // An empty file would be mistaken for a recording. If it cannot be removed, it stays empty.
            let _ = lowtide_files::remove(&recorder.path);
            failed(error)
        })?;
        let _ = recorder.writer.set(thread.thread().clone());
        stacks::want(options.has_stacks);
        // Weak, so that a recording that was stopped is freed.
        let weak = Arc::downgrade(&recorder);
        at_exit(move || {
            if let Some(recorder) = weak.upgrade() {
                // The failure was reported already, and no caller is left to return it to.
                let _ = recorder.end_with_process();
            }
        });
        Ok(recorder)
    }

    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Returns the recording's number: above 0, and greater than those of earlier recordings.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the observer that records a device's events.
    pub(crate) fn of_device(self: &Arc<Recorder>, device: u8) -> Observer {
        let recorder = Arc::clone(self);
        Arc::new(move |events| {
            let time_us = now_us();
            let entries = events.iter().map(|&event| Entry::Happened {
                device,
                event,
                time_us,
                stack: stacks::current(),
                metadata: metadata::current(),
            });
            recorder.put(entries);
        })
    }

    /// Records a device from here on, starting with the memory that it holds already. `paused` are the paused
    /// segments, by their regions' tags. Earlier events of the device are skipped.
    pub(crate) fn begin(
        &self,
        device: u8,
        settings: AllocatorSettings,
        held: Vec<SegmentSnapshot>,
        paused: Vec<(Arc<str>, Event)>,
    ) {
        self.announce(Announcement::Begin {
            device,
            settings,
            held,
            paused,
        });
    }

    /// Records that the memory of some segments of a device leaves or is back. Their region has this tag.
    pub(crate) fn record_pause(&self, device: u8, tag: &Arc<str>, segments: Vec<Event>) {
        self.announce(Announcement::Pause {
            device,
            tag: Arc::clone(tag),
            segments,
            time_us: now_us(),
        });
    }

    /// Records that the program attached a text to a block. `event` is the annotation.
    pub(crate) fn record_annotation(&self, device: u8, event: Event, text: &str) {
        self.put(
            [Entry::Happened {
                device,
                event,
                time_us: now_us(),
                stack: 0,
                metadata: metadata::number_of(text),
            }]
            .into_iter(),
        );
    }

    /// Completes the file with all events until now.
    ///
    /// # Errors
    ///
    /// If the file could not be written to, now or before.
    pub(crate) fn end(&self) -> Result<(), Error> {
        self.complete(|| false)
    }

    /// Like [`Recorder::end`], when the process ends. If a signal's handler ends the process, the interrupted
    /// thread does not continue, and it may have claimed a slot that it will never fill.
    fn end_with_process(&self) -> Result<(), Error> {
        let mut awaited = None;
        self.complete(|| {
            let before = mem::replace(&mut awaited, self.ring.awaited());
            awaited.is_some() && awaited == before
        })
    }

    /// Completes the file. Calls `never_comes` now and then to find out whether the awaited entry will never
    /// come.
    fn complete(&self, mut never_comes: impl FnMut() -> bool) -> Result<(), Error> {
        self.announce(Announcement::End);
        self.wake();
        let mut outcome = lock(&self.outcome);
        let mut waits_since = Instant::now();
        while waits_since.elapsed() < PATIENCE {
            let waited = self
                .has_ended
                .wait_timeout_while(outcome, LOOK_EVERY, |outcome| outcome.is_none());
            outcome = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            if never_comes() {
                drop(outcome);
                return self.finish(Err(self.failure(INTERRUPTED)));
            }
            if self.ring.is_delayed() {
                waits_since = Instant::now();
            }
        }
        drop(outcome);
        self.give_up()
    }

    /// Puts an announcement after all earlier entries.
    fn announce(&self, announcement: Announcement) {
        let number = self.announcements.fetch_add(1, Ordering::Relaxed);
        // Not locked while waiting for the ring, because the writer takes this lock.
        lock(&self.announced).insert(number, announcement);
        self.put([Entry::Announced(number)].into_iter());
    }

    #[inline]
    fn put(&self, entries: impl ExactSizeIterator<Item = Entry>) {
        if self.ring.put(entries, || self.wake()).is_err() {
            let _ = self.give_up();
        }
    }

    /// Ends the recording if the writer is still waiting for the file, and returns the outcome.
    #[cold]
    fn give_up(&self) -> Result<(), Error> {
        self.finish(Err(self.failure("it takes nothing more")))
    }

    /// Ends the recording, once, and returns its outcome. Reports the outcome to the user.
    fn finish(&self, outcome: Result<String, Error>) -> Result<(), Error> {
        // From here on, no thread waits for room.
        self.ring.close();
        let mut known = lock(&self.outcome);
        let settled = known.get_or_insert_with(|| {
            stacks::want(false);
            match &outcome {
                Ok(what) if self.options.reports => boundary::say(what),
                Ok(_) => {}
                Err(error) => boundary::say(&error.text),
            }
            outcome.map(drop)
        });
        self.has_ended.notify_all();
        settled.clone()
    }

    fn wake(&self) {
        if let Some(writer) = self.writer.get() {
            writer.unpark();
        }
    }

    fn failure(&self, why: impl fmt::Display) -> Error {
        let path = shown(&self.path);
        let text = format_args!("the recording to {path} ended: {why}; what came before is there");
        Error::new(Status::File, text)
    }

    /// Writes entries until the last one. Runs in the writer's thread.
    fn write(&self, file: File) {
        let written = catch_unwind(AssertUnwindSafe(|| self.write_all(file)));
        // A bug in lowtide ends the recording and not the job; otherwise threads that allocate would wait.
        let written = written.unwrap_or_else(|_| Err(io::Error::other("lowtide panicked")));
        let _ = self.finish(written.map_err(|error| self.failure(error)));
    }

    /// Returns the report about the complete file.
    fn write_all(&self, file: File) -> io::Result<String> {
        let mut session = Session::new(self, file)?;
        while !session.drain()? {
            session.flush()?;
            if self.ring.is_closed() {
                // A producer lost patience: the file accepted no data for that long.
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::park_timeout(FLUSH_EVERY);
        }
        session.finish()
    }
}

/// The writer's state.
struct Session<'a> {
    recorder: &'a Recorder,
    file: File,
    writer: StreamWriter<File>,
    /// Whether a device's events are recorded, by device number.
    begun: [bool; 256],
    /// The texts of events: the program's, and the tags of regions. This table has no stacks.
    notes: StackTable,
    /// The notes of the program's texts, by their numbers in [`metadata`].
    texts: HashMap<u32, NoteId>,
    /// The private pools that are in the file, by device.
    pools: BTreeSet<(u8, MempoolId)>,
    /// The pools that may be regions' pools; that is not known yet.
    new_pools: Vec<(u8, MempoolId)>,
    functions: Functions,
    events: u64,
}

impl Session<'_> {
    fn new(recorder: &Recorder, file: File) -> io::Result<Session<'_>> {
        Ok(Session {
            recorder,
            writer: StreamWriter::new(file.try_clone()?)?,
            file,
            begun: [false; 256],
            notes: StackTable::new(),
            texts: HashMap::new(),
            pools: BTreeSet::new(),
            new_pools: Vec::new(),
            functions: Functions::default(),
            events: 0,
        })
    }

    /// Writes the entries that are there. Returns whether the last one was among them.
    fn drain(&mut self) -> io::Result<bool> {
        let mut flushed = Instant::now();
        let mut left = ENTRIES_PER_LOOK;
        while let Some(entry) = self.recorder.ring.take() {
            left -= 1;
            if left == 0 {
                left = ENTRIES_PER_LOOK;
                // If entries come as fast as they are written, this loop does not end by itself.
                if flushed.elapsed() >= FLUSH_EVERY {
                    self.flush()?;
                    flushed = Instant::now();
                }
            }
            match entry {
                Entry::Happened {
                    device,
                    event,
                    time_us,
                    stack,
                    metadata,
                } => {
                    let event = TraceEvent {
                        event,
                        time_us,
                        stack: StackId::NONE,
                        pool_known: true,
                        note: self.note_of(metadata),
                    };
                    self.push(device, event, stack)?;
                }
                Entry::Announced(number) => match lock(&self.recorder.announced).remove(&number) {
                    Some(Announcement::Begin {
                        device,
                        settings,
                        held,
                        paused,
                    }) => self.begin(device, &settings, &held, &paused)?,
                    Some(Announcement::Pause {
                        device,
                        tag,
                        segments,
                        time_us,
                    }) => segments.iter().try_for_each(|&event| {
                        let event =
                            TraceEvent::with_metadata(event, time_us, &tag, &mut self.notes);
                        self.push(device, event, 0)
                    })?,
                    Some(Announcement::End) | None => return Ok(true),
                },
            }
        }
        Ok(false)
    }

    fn begin(
        &mut self,
        device: u8,
        settings: &AllocatorSettings,
        held: &[SegmentSnapshot],
        paused: &[(Arc<str>, Event)],
    ) -> io::Result<()> {
        // If a device is first used while a recording begins, both announce it. All events since the first
        // announcement are recorded.
        if mem::replace(&mut self.begun[usize::from(device)], true) {
            return Ok(());
        }
        let paused = paused.iter();
        let paused: Vec<_> = paused
            .map(|(tag, event)| TraceEvent::with_metadata(*event, 0, tag, &mut self.notes))
            .collect();
        for segment in held {
            self.note_pool(device, segment.pool);
        }
        self.writer
            .begin_device(device.into(), settings, held, &paused, &self.notes)
    }

    /// Schedules a check, once per pool, of whether the pool is a region's.
    fn note_pool(&mut self, device: u8, pool: MempoolId) {
        if !pool.is_default() && self.pools.insert((device, pool)) {
            self.new_pools.push((device, pool));
        }
    }

    /// Writes everything so far, and which regions the pools in it belong to. That is unknown while a region is
    /// entered or left, because the thread that does so may be waiting for this one.
    fn flush(&mut self) -> io::Result<()> {
        for (device, pool) in mem::take(&mut self.new_pools) {
            match table::pools_unless_busy(device.into()) {
                Ok(Some(regions)) => {
                    if let Some(region) = regions.get(&pool) {
                        self.writer.push_region(device.into(), pool, &region.tag)?;
                    }
                }
                Ok(None) => self.new_pools.push((device, pool)),
                // The recording is useful without it.
                Err(_) => {}
            }
        }
        self.writer.flush()
    }

    /// Returns the note with the program's text of this number.
    fn note_of(&mut self, metadata: u32) -> NoteId {
        if let Some(&note) = self.texts.get(&metadata) {
            return note;
        }
        let text = metadata::text_of(metadata);
        let note = self.notes.intern_note(Note {
            compile_context: None,
            user_metadata: text.as_deref().map(Into::into),
        });
        self.texts.insert(metadata, note);
        note
    }

    fn push(&mut self, device: u8, event: TraceEvent, stack: u32) -> io::Result<()> {
        if !self.begun[usize::from(device)] {
            return Ok(());
        }
        self.events += 1;
        let Event { action, pool, .. } = event.event;
        if matches!(action, Action::SegmentAlloc | Action::SegmentMap) {
            self.note_pool(device, pool);
        }
        let notes = &self.notes;
        if stack == 0 {
            return self.writer.push(device.into(), &event, notes, notes);
        }
        if let Some(calls) = stacks::calls_of(stack) {
            self.look_up(stack, &calls)?;
        }
        stacks::with(stack, |stack, table| {
            let event = TraceEvent { stack, ..event };
            self.writer.push(device.into(), &event, table, &self.notes)
        })
    }

    /// Looks up the functions of a stack's calls. All earlier entries are flushed to the file before.
    fn look_up(&mut self, stack: u32, calls: &[usize]) -> io::Result<()> {
        self.flush()?;
        self.recorder.ring.set_delayed(true);
        let frames = self.functions.of_calls(calls);
        self.recorder.ring.set_delayed(false);
        stacks::describe(stack, &frames);
        Ok(())
    }

    /// Completes the file, and returns the report about it.
    fn finish(mut self) -> io::Result<String> {
        self.flush()?;
        for _ in 0..REGION_ATTEMPTS {
            if self.new_pools.is_empty() {
                break;
            }
            thread::sleep(Duration::from_millis(1));
            self.flush()?;
        }
        self.writer.finish()?;
        let size = Bytes(self.file.metadata()?.len());
        let path = shown(&self.recorder.path);
        let events = Count(self.events);
        Ok(format!("recorded {events} events to {path}, {size}"))
    }
}

/// Returns the time in microseconds since 1970.
#[inline]
pub(crate) fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = since.map_or(0, |since| since.as_micros());
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each lock guards one value, which a panic does not leave inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use lowtide_core::{Action, DeviceAddress, MempoolId, Stream};

    use super::*;

    /// Returns a recorder with its own file, and the file's path.
    fn recorder(name: &str) -> (Arc<Recorder>, PathBuf) {
        let name = format!("lowtide-recorder-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let created = File::create(&path).map(|file| (file, path.clone()));
        let options = Options {
            has_stacks: false,
            reports: false,
        };
        (Recorder::start(&path, created, options).unwrap(), path)
    }

    #[test]
    fn a_device_that_is_announced_twice_begins_once() {
        let (recorder, path) = recorder("twice");
        recorder.begin(3, AllocatorSettings::default(), Vec::new(), Vec::new());
        recorder.begin(3, AllocatorSettings::default(), Vec::new(), Vec::new());
        assert_eq!(recorder.end(), Ok(()));
        assert_eq!(recorder.end(), Ok(()), "it has ended");
        let read = lowtide_trace::read(&path).unwrap();
        assert!(!read.is_cut_off);
        assert_eq!(read.traces.len(), 1);
        let _ = std::fs::remove_file(path);
    }

    /// As if a signal's handler ended the process in between. The earlier events are in the file.
    #[test]
    fn an_entry_that_never_comes_ends_the_recording() {
        let (recorder, path) = recorder("interrupted");
        recorder.begin(3, AllocatorSettings::default(), Vec::new(), Vec::new());
        let entries = (0..1_usize).map(|_| -> Entry { panic!("the process ends here") });
        let interrupted = catch_unwind(AssertUnwindSafe(|| recorder.put(entries)));
        assert!(interrupted.is_err());
        let error = recorder.end_with_process().unwrap_err();
        assert!(error.text.contains(INTERRUPTED), "{}", error.text);
        let read = lowtide_trace::read(&path).unwrap();
        assert!(read.is_cut_off);
        assert_eq!(read.traces.len(), 1);
        let _ = std::fs::remove_file(path);
    }

    /// A file that accepts no data, such as a pipe that nobody reads, ends the recording once that is noticed.
    #[test]
    fn a_file_that_is_stuck_ends_the_recording() {
        let (reader, writer) = io::pipe().unwrap();
        let path = PathBuf::from("a pipe");
        let created = Ok((File::from(OwnedFd::from(writer)), path.clone()));
        let options = Options {
            has_stacks: false,
            reports: false,
        };
        let recorder = Recorder::start(&path, created, options).unwrap();
        recorder.begin(0, AllocatorSettings::default(), Vec::new(), Vec::new());
        let observer = recorder.of_device(0);
        // More than a pipe holds, and less than the queue holds.
        for number in 0..40_000 {
            observer(&[Event {
                action: Action::Alloc,
                pool: MempoolId(0, 0),
                address: DeviceAddress(number << 9),
                size: Bytes(512),
                stream: Stream(0),
            }]);
        }
        let stuck = recorder.give_up();
        let text = &stuck.as_ref().unwrap_err().text;
        assert!(
            text.contains("a pipe ended: it takes nothing more"),
            "{text}"
        );
        assert!(recorder.ring.is_closed());
        assert_eq!(recorder.end(), stuck);
        drop(reader);
        assert_eq!(recorder.end(), stuck, "whatever the writer says then");
    }
}
