//! Host memory between backups. A thread page-locks it while the job runs, keeps it for the next backup, and
//! releases it when none comes.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lowtide_core::Bytes;

use crate::backup::host_memory::HostMemory;
use crate::backup::link::Link;
use crate::backup::release::ReleaseQueue;
use crate::beside::{DriverCall, start_beside};

/// Copies to or from host memory. They are in progress as long as this exists.
///
/// Meanwhile, no other memory of their device is page-locked, because the copies would wait for the driver. The
/// copied memory itself is page-locked, since copies to and from page-locked blocks are direct: at once, or block
/// by block as the copies fill it.
///
/// On drop, this waits for the block that is being page-locked, some milliseconds at most, and starts the quiet
/// time. The program then has the driver to itself.
#[derive(Debug)]
pub(super) struct Copying {
    shared: Arc<Shared>,
    memory: Arc<HostMemory>,
    times: Times,
    /// Whether blocks that are not resident are to be page-locked as well, after the copies.
    is_saved: bool,
}

impl Copying {
    pub(super) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Copies `content` to the memory at `offset`, all of it into one block. If these copies
    /// [save](Keeper::begin_saving), the block is page-locked once it is full.
    ///
    /// # Safety
    ///
    /// No one else may use this part of the memory meanwhile.
    pub(super) unsafe fn write(&self, offset: usize, content: &[u8]) {
        // SAFETY: by the contract of this function.
        if unsafe { self.memory.write(offset, content) } {
            // After this lock, the keeper has either seen the full block or waits and is notified.
            drop(self.shared.lock());
            self.shared.changed.notify_all();
        }
    }

    /// Ends copies that have saved the whole backup. Blocks that are not resident are then page-locked as well.
    pub(super) fn end_saved(mut self) {
        self.is_saved = true;
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let is_it = |memory: &Weak<HostMemory>| memory.ptr_eq(&Arc::downgrade(&self.memory));
        let place = state.copied.iter().position(is_it);
        state
            .copied
            .swap_remove(place.expect("it was added and is removed here alone"));
        let mut listed = state.to_lock.iter_mut();
        let listed = listed.find(|listed| self.is_saved && is_it(&listed.memory));
        if let Some(listed) = listed {
            listed.blocks = Blocks::All;
        }
        let now = Instant::now();
        state.quiet_until = Some(now + self.times.quiet);
        state.patient_until.get_or_insert(now + self.times.patience);
        self.shared.changed.notify_all();
        let handled = state.blocks_handled;
        while state.locking.is_some() && state.blocks_handled == handled {
            state = self.shared.wait(state, None);
        }
    }
}

/// The keeper of one device. Its thread starts when there is something to do in the background.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    times: Times,
}

/// The host memory that one device's ended backups have left for later ones, or that the driver refused to release.
#[derive(Clone, Debug)]
pub struct KeptMemory {
    shared: Arc<Shared>,
    queue: Arc<ReleaseQueue>,
}

impl KeptMemory {
    /// Returns how many bytes of host memory are kept. Most of them are page-locked. Slots that no copy has used
    /// yet have addresses but no memory, and do not count. Memory that is being released counts until it is
    /// released.
    pub fn bytes(&self) -> Bytes {
        let state = self.shared.lock();
        let bytes = state.idle.bytes() + state.leaving_bytes + self.queue.bytes();
        Bytes(bytes as u64)
    }
}

/// How long a keeper delays its actions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// How long memory that is not retained waits for the next backup.
    pub(super) idle: Duration,
    /// How long after copies nothing is page-locked. Other threads would wait for the driver, and a thread that has
    /// just got free memory calls the driver most.
    pub(super) quiet: Duration,
    /// The longest quiet time if further copies restart it before it has ended.
    pub(super) patience: Duration,
}

#[derive(Default, Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when there is something to do, and when the thread has returned from the driver or has ended.
    changed: Condvar,
}

#[derive(Default, Debug)]
struct State {
    /// Whether idle memory stays until it is released explicitly.
    retains: bool,
    idle: AllIdle,
    /// The bytes of host memory that were idle and are being released.
    leaving_bytes: usize,
    /// Memory with blocks that are to be page-locked.
    to_lock: VecDeque<ToLock>,
    /// The memory that copies in progress use. Other memory is not page-locked, unless a caller waits for that.
    copied: Vec<Weak<HostMemory>>,
    /// The end of the quiet time. Before it, memory that is not being copied is not page-locked, unless a caller
    /// waits.
    quiet_until: Option<Instant>,
    /// The latest end of the quiet time if copies restart it.
    patient_until: Option<Instant>,
    /// The end of the pause after a block. Before it, nothing is page-locked, unless a caller waits.
    rests_until: Option<Instant>,
    /// The number of callers that wait until nothing is left to page-lock.
    waiting: usize,
    /// The memory of the block that the thread is page-locking. The thread keeps the memory alive meanwhile.
    locking: Option<Weak<HostMemory>>,
    blocks_handled: u64,
    /// Whether the thread is running.
    is_served: bool,
    is_ended: bool,
}

/// Memory and a link that no backup uses now.
#[derive(Default, Debug)]
struct AllIdle {
    memory: Vec<Idle<Arc<HostMemory>>>,
    link: Option<Idle<Link>>,
}

#[derive(Debug)]
struct Idle<T> {
    kept: T,
    since: Instant,
}

#[derive(Debug)]
struct ToLock {
    memory: Weak<HostMemory>,
    blocks: Blocks,
    /// The end of the range of blocks to page-lock; it begins at block 0.
    end: usize,
}

/// Which blocks of some memory are to be page-locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Blocks {
    /// Resident blocks only: page-locking one takes the driver a sixth of the time.
    Resident,
    All,
}

impl ToLock {
    /// Returns the next block to page-lock.
    fn next(&self, memory: &HostMemory) -> Option<usize> {
        let mut open = self.open(memory);
        open.find(|&block| self.blocks == Blocks::All || memory.is_resident(block))
    }

    /// Returns whether blocks are left, but none before more of the memory is resident.
    fn waits(&self, memory: &HostMemory) -> bool {
        self.open(memory).next().is_some() && self.next(memory).is_none()
    }

    /// Returns the blocks in the range that are not page-locked.
    fn open<'a>(&self, memory: &'a HostMemory) -> impl Iterator<Item = usize> + use<'a> {
        (0..self.end).filter(|&block| !memory.is_locked(block * memory.block_bytes()))
    }
}

impl Keeper {
    pub(super) fn new(times: Times) -> Keeper {
        Keeper {
            shared: Arc::default(),
            thread: None,
            times,
        }
    }

    /// Returns idle memory for a backup of `needed_bytes` bytes, if there is some that fits.
    ///
    /// It is the smallest that is large enough. It is at most twice as large as new memory would be, so that a
    /// small backup does not take a large one's memory. Among equal sizes, it is the newest, which is the same
    /// backup's memory if that was released just now.
    ///
    /// If none fits, the largest that is too small is released. It is likely the memory of the same backup, which
    /// has grown, and no backup would use it.
    pub(super) fn take(&self, needed_bytes: usize) -> Option<Arc<HostMemory>> {
        let bytes_max = 2 * HostMemory::bytes_for(needed_bytes);
        let mut state = self.shared.lock();
        let idle = &mut state.idle.memory;
        let sizes = idle.iter().map(|idle| idle.kept.bytes()).enumerate();
        let fitting = sizes
            .clone()
            .filter(|&(_, bytes)| (needed_bytes..=bytes_max).contains(&bytes))
            .min_by_key(|&(index, bytes)| (bytes, Reverse(idle[index].since)));
        if let Some((index, _)) = fitting {
            return Some(idle.swap_remove(index).kept);
        }
        let too_small = sizes
            .filter(|&(_, bytes)| bytes < needed_bytes)
            .max_by_key(|&(_, bytes)| bytes)
            .map(|(index, _)| index);
        let too_small = too_small.map(|index| idle.swap_remove(index));
        drop(state);
        drop(too_small);
        None
    }

    /// Returns the idle link, if there is one.
    pub(super) fn take_link(&self) -> Option<Link> {
        self.shared.lock().idle.link.take().map(|idle| idle.kept)
    }

    /// Keeps memory for the next backup. No one else holds it.
    pub(super) fn keep(&mut self, memory: Arc<HostMemory>) {
        // Without a thread, nothing would release it in time.
        if self.start() || self.retains() {
            self.shared.lock().idle.memory.push(Idle::new(memory));
            self.shared.changed.notify_all();
        }
    }

    /// Registers copies to or from some memory. They are in progress until the returned value is dropped.
    pub(super) fn begin_copying(&self, memory: &Arc<HostMemory>) -> Copying {
        let mut state = self.shared.lock();
        state.copied.push(Arc::downgrade(memory));
        if state.quiet_until < Some(Instant::now()) {
            // The quiet time has ended, or there was none.
            state.patient_until = None;
        }
        drop(state);
        self.shared.changed.notify_all();
        Copying {
            shared: Arc::clone(&self.shared),
            memory: Arc::clone(memory),
            times: self.times,
            is_saved: false,
        }
    }

    /// Like [`begin_copying`](Keeper::begin_copying), for copies that will write the memory's first `bytes`. Each
    /// block is page-locked once it is resident.
    pub(super) fn begin_saving(&mut self, memory: &Arc<HostMemory>, bytes: usize) -> Copying {
        memory.count_anew();
        let copying = self.begin_copying(memory);
        self.lock_beside(memory, bytes, Blocks::Resident);
        copying
    }

    /// Keeps the link for the next backup. No copy is in progress on it.
    pub(super) fn keep_link(&mut self, link: Link) {
        if self.start() || self.retains() {
            self.shared.lock().idle.link = Some(Idle::new(link));
            self.shared.changed.notify_all();
        }
    }

    /// Page-locks blocks within the memory's first `bytes` in the background.
    pub(super) fn lock_beside(&mut self, memory: &Arc<HostMemory>, bytes: usize, blocks: Blocks) {
        if !self.start() {
            // Without the thread, backups go through the ring of slots, which is slower.
            return;
        }
        let end = bytes.div_ceil(memory.block_bytes());
        let mut state = self.shared.lock();
        if !state.is_served {
            // The thread has ended since. A caller of `finish_locking` would wait forever.
            return;
        }
        let memory = Arc::downgrade(memory);
        state.to_lock.retain(|other| !other.memory.ptr_eq(&memory));
        state.to_lock.push_back(ToLock {
            memory,
            blocks,
            end,
        });
        drop(state);
        self.shared.changed.notify_all();
    }

    pub(super) fn set_retains(&self, retains: bool) {
        self.shared.lock().retains = retains;
        self.shared.changed.notify_all();
    }

    pub(super) fn retains(&self) -> bool {
        self.shared.lock().retains
    }

    /// Releases all idle memory and the idle link. Returns when they are released.
    pub(super) fn release(&self) {
        let mut state = self.shared.lock();
        let idle = mem::take(&mut state.idle);
        let is_idle = |memory: &Weak<HostMemory>| {
            let mut all = idle.memory.iter();
            all.any(|idle| memory.ptr_eq(&Arc::downgrade(&idle.kept)))
        };
        state.to_lock.retain(|other| !is_idle(&other.memory));
        let bytes = idle.bytes();
        state.leaving_bytes += bytes;
        // The thread keeps the lock between two blocks. Waiting for any block would mean waiting for all, so this
        // waits only for a block of idle memory.
        while state.locking.as_ref().is_some_and(is_idle) {
            state = self.shared.wait(state, None);
        }
        drop(state);
        drop(idle);
        self.shared.lock().leaving_bytes -= bytes;
    }

    /// Returns how many bytes of host memory are idle.
    pub(super) fn idle_bytes(&self) -> usize {
        self.shared.lock().idle.bytes()
    }

    /// Returns a handle that reports how much memory is kept or in `queue`. It works while another thread uses the
    /// keeper.
    pub(super) fn kept(&self, queue: Arc<ReleaseQueue>) -> KeptMemory {
        let shared = Arc::clone(&self.shared);
        KeptMemory { shared, queue }
    }

    /// Waits until nothing is left to page-lock.
    pub(super) fn finish_locking(&self) {
        let mut state = self.shared.lock();
        state.waiting += 1;
        self.shared.changed.notify_all();
        while state.locking.is_some() || !state.to_lock.is_empty() {
            state = self.shared.wait(state, None);
        }
        state.waiting -= 1;
    }

    /// Starts the thread unless it is running. Returns whether it is running.
    fn start(&mut self) -> bool {
        if !mem::replace(&mut self.shared.lock().is_served, true) {
            self.join();
            let (shared, idle_time) = (Arc::clone(&self.shared), self.times.idle);
            self.thread = start_beside("lowtide keeper", move || shared.serve(idle_time)).ok();
            if self.thread.is_none() {
                self.shared.lock().is_served = false;
            }
        }
        self.thread.is_some()
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic in the thread changes nothing here: it has ended.
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.lock().is_ended = true;
        self.shared.changed.notify_all();
        self.join();
        self.release();
    }
}

/// The pause after a block is the time that the block took, divided by this. It lets a thread wake up and take the
/// driver's lock. A longer pause would leave too much to the next backup, which may come soon.
const REST_SHARE: u32 = 4;

impl Shared {
    /// The main loop of the thread.
    fn serve(&self, idle_time: Duration) {
        // Created before the lock is taken, so that a panic releases the lock first.
        let _end = End(self);
        let mut state = self.lock();
        while !state.is_ended {
            let now = Instant::now();
            let expired = state.take_expired(now, idle_time);
            if !expired.is_empty() {
                let bytes = expired.bytes();
                state.leaving_bytes += bytes;
                drop(state);
                release(expired);
                state = self.lock();
                state.leaving_bytes -= bytes;
            } else if let Some((memory, block)) = state.next_to_lock(now) {
                state.locking = Some(Arc::downgrade(&memory));
                drop(state);
                let is_locked = lock_block(memory, block);
                state = self.lock();
                // The driver's lock is not fair: a waiting thread gets it only while no one else asks for it.
                state.rests_until = Some(Instant::now() + now.elapsed() / REST_SHARE);
                state.blocks_handled += 1;
                let handled = state.locking.take();
                if let Some(handled) = handled.filter(|_| !is_locked) {
                    // After a refusal, the memory is not tried again before the next backup.
                    state.to_lock.retain(|other| !other.memory.ptr_eq(&handled));
                }
                self.changed.notify_all();
            } else {
                // The last entry of the list may have needed nothing. Callers that wait for it must be notified.
                self.changed.notify_all();
                let next = state.next_expiry(idle_time).into_iter();
                let next = next.chain(state.next_due(now)).min();
                let wait = next.map(|next| next.saturating_duration_since(now));
                state = self.wait(state, wait);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under the lock is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        wait: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        let woken = self
            .changed
            .wait_timeout(state, wait.unwrap_or(Duration::MAX));
        woken.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Marks the end of the keeper's thread, also after a panic: no caller waits for it any more.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.locking, state.is_served) = (None, false);
        state.to_lock.clear();
        drop(state);
        self.0.changed.notify_all();
    }
}

impl State {
    /// Returns the next block to page-lock now, and its memory. The block is `None` if the memory has none left. The
    /// memory is returned nevertheless: this may be the last reference, and it must be dropped without the lock.
    fn next_to_lock(&mut self, now: Instant) -> Option<(Arc<HostMemory>, Option<usize>)> {
        while let Some(place) = self.next_listed(now) {
            let listed = &self.to_lock[place];
            let memory = listed.memory.upgrade();
            let block = memory.as_ref().and_then(|memory| listed.next(memory));
            if block.is_none() {
                self.to_lock.remove(place);
            }
            if let Some(memory) = memory {
                return Some((memory, block));
            }
        }
        None
    }

    /// Returns the index in the list of the first memory that is due now.
    fn next_listed(&self, now: Instant) -> Option<usize> {
        let mut listed = self.to_lock.iter();
        listed.position(|listed| self.due(listed, now) == Some(now))
    }

    /// Returns when the next block is due, unless that depends on the end of copies.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        let due = self
            .to_lock
            .iter()
            .filter_map(|listed| self.due(listed, now));
        due.min()
    }

    /// Returns when blocks of some memory are due for page-locking, `now` at the earliest. Returns `None` while the
    /// memory is being copied and has no block ready. Also returns `None` while other memory is being copied,
    /// unless a caller waits for page-locking.
    fn due(&self, listed: &ToLock, now: Instant) -> Option<Instant> {
        let mut copied = self.copied.iter();
        let is_copied = copied.any(|memory| memory.ptr_eq(&listed.memory));
        // Copies in the list hold their memory, so dropping this reference does not release it under the lock.
        let copied = is_copied.then(|| listed.memory.upgrade()).flatten();
        if copied.is_some_and(|memory| listed.waits(&memory)) {
            return None;
        }
        if self.waiting > 0 {
            return Some(now);
        }
        let quiet_until = if is_copied {
            None
        } else if self.copied.is_empty() {
            self.quiet_until.min(self.patient_until)
        } else {
            return None;
        };
        Some(now).max(quiet_until).max(self.rests_until)
    }

    /// Returns whether idle memory stays. It also stays during copies, which would wait for the driver.
    fn keeps_idle(&self) -> bool {
        self.retains || !self.copied.is_empty()
    }

    /// Removes and returns the idle memory and link whose time is over.
    fn take_expired(&mut self, now: Instant, idle_time: Duration) -> AllIdle {
        if self.keeps_idle() {
            return AllIdle::default();
        }
        let is_over = |since: Instant| now.saturating_duration_since(since) >= idle_time;
        let AllIdle { memory, link } = &mut self.idle;
        AllIdle {
            memory: memory.extract_if(.., |idle| is_over(idle.since)).collect(),
            link: link.take_if(|idle| is_over(idle.since)),
        }
    }

    fn next_expiry(&self, idle_time: Duration) -> Option<Instant> {
        if self.keeps_idle() {
            return None;
        }
        let memory = self.idle.memory.iter().map(|idle| idle.since);
        let link = self.idle.link.iter().map(|idle| idle.since);
        memory.chain(link).min().map(|since| since + idle_time)
    }
}

impl AllIdle {
    /// Returns how many bytes of host memory these are.
    fn bytes(&self) -> usize {
        let memory = self.memory.iter().map(|idle| idle.kept.bytes());
        let link = self.link.iter().map(|idle| idle.kept.locked_bytes());
        memory.chain(link).sum()
    }

    fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.link.is_none()
    }
}

impl<T> Idle<T> {
    fn new(kept: T) -> Idle<T> {
        Idle {
            kept,
            since: Instant::now(),
        }
    }
}

/// Page-locks a block, if there is one. Returns whether the driver accepted it. If no one else holds the memory any
/// more, this releases it.
fn lock_block(memory: Arc<HostMemory>, block: Option<usize>) -> bool {
    let Some(_call) = DriverCall::begin() else {
        // The process is exiting and takes the memory with it.
        mem::forget(memory);
        return false;
    };
    // Rebound so that it is dropped before `_call`, even after a panic.
    let memory = memory;
    block.is_none_or(|block| memory.lock(block).is_ok())
}

fn release(idle: AllIdle) {
    match DriverCall::begin() {
        Some(_call) => drop(idle),
        // As above: the process is exiting.
        None => mem::forget(idle),
    }
}
