//! Memory between backups: who page-locks it beside the job, keeps it for the next backup, and gives it
//! back when none comes.

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

/// Copies to or from memory of the host, which are under way as long as this is there.
///
/// Meanwhile nothing else is page-locked for their device, as they would wait for the driver, and what is left of that
/// memory at once, or once they have filled it, as copies go on directly where that is done. When they have ended the
/// driver is the program's: this waits for the block that is page-locked just then, some milliseconds at most, and begins
/// the quiet time.
#[derive(Debug)]
pub(super) struct Copying {
    shared: Arc<Shared>,
    memory: Arc<HostMemory>,
    times: Times,
    /// Whether what of the memory is not resident is to be page-locked after them, too.
    is_saved: bool,
}

impl Copying {
    pub(super) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// Copies `content` to the memory at `offset`, all of it into one block, which is page-locked once all of it is there
    /// if these copies [save](Keeper::begin_saving).
    ///
    /// # Safety
    ///
    /// No one else uses this part of the memory meanwhile.
    pub(super) unsafe fn write(&self, offset: usize, content: &[u8]) {
        // SAFETY: by the contract of this function.
        if unsafe { self.memory.write(offset, content) } {
            // With the lock the keeper has seen it, or is told.
            drop(self.shared.lock());
            self.shared.changed.notify_all();
        }
    }

    /// Ends copies that have saved all that was to be: what of the memory is not resident is page-locked, too.
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

/// One device's keeper, and its thread once there is something to do beside the job.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    times: Times,
}

/// The host's memory that one device's ended backups have left for the next ones, or that the driver refused to let go.
#[derive(Clone, Debug)]
pub struct KeptMemory {
    shared: Arc<Shared>,
    queue: Arc<ReleaseQueue>,
}

impl KeptMemory {
    /// Returns how much of the host's memory is kept, most of it page-locked. Slots that no copy has needed yet have
    /// addresses and no memory, and do not count. What is going back counts until it has gone.
    pub fn bytes(&self) -> Bytes {
        let state = self.shared.lock();
        let bytes = state.idle_bytes() + state.leaving_bytes + self.queue.bytes();
        Bytes(bytes as u64)
    }
}

/// How long a keeper waits with what it does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// How long memory that is not retained waits for the next backup.
    pub(super) idle: Duration,
    /// How long after copies nothing is page-locked: other threads may wait for the driver meanwhile, and whoever
    /// has just got memory free has the most to ask of it.
    pub(super) quiet: Duration,
    /// How long that lasts at most where it begins anew again and again, before it has ended.
    pub(super) patience: Duration,
}

#[derive(Default, Debug)]
struct Shared {
    state: Mutex<State>,
    /// There is something to do, or the thread has come out of the driver, or ended.
    changed: Condvar,
}

#[derive(Default, Debug)]
struct State {
    /// Whether what is idle stays until it is asked for.
    retains: bool,
    idle: Vec<Idle<Arc<HostMemory>>>,
    idle_link: Option<Idle<Link>>,
    /// How much of the host's memory was idle and is going back.
    leaving_bytes: usize,
    /// Memory with blocks that are to be page-locked.
    to_lock: VecDeque<ToLock>,
    /// What copies are under way to or from. Others are not page-locked, unless somebody waits for that.
    copied: Vec<Weak<HostMemory>>,
    /// Until when none is that is not copied, likewise.
    quiet_until: Option<Instant>,
    /// Until when that is waited for, where it begins anew before it has ended.
    patient_until: Option<Instant>,
    /// Until when none is, likewise.
    rests_until: Option<Instant>,
    /// How many wait until none is left.
    waiting: usize,
    /// Memory of which the thread page-locks a block, and which it holds for that.
    locking: Option<Weak<HostMemory>>,
    blocks_handled: u64,
    /// Whether there is a thread that does what is to be done.
    is_served: bool,
    is_ended: bool,
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
    /// Before which of them all are.
    end: usize,
}

/// Which blocks of some memory are to be page-locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Blocks {
    /// Those that are resident, which takes the driver a sixth of the time.
    Resident,
    All,
}

impl ToLock {
    /// Returns the next one.
    fn next(&self, memory: &HostMemory) -> Option<usize> {
        let mut open = self.open(memory);
        open.find(|&block| self.blocks == Blocks::All || memory.is_resident(block))
    }

    /// Returns whether there is one once more of the memory is resident, and not before.
    fn waits(&self, memory: &HostMemory) -> bool {
        self.open(memory).next().is_some() && self.next(memory).is_none()
    }

    /// Returns those that are not page-locked.
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

    /// Returns memory that waits for a backup of so many bytes, if there is some.
    ///
    /// It is the smallest that is large enough, and not more than twice what would be mapped anew, lest a
    /// small backup takes it from a large one; of equals the newest, which is the same backup's where that was
    /// discarded just now. If none is, the largest that is too small goes back: it is
    /// likely the same backup's, which has grown, and would wait in vain.
    pub(super) fn take(&self, needed_bytes: usize) -> Option<Arc<HostMemory>> {
        let bytes_max = 2 * HostMemory::bytes_for(needed_bytes);
        let mut state = self.shared.lock();
        let sizes = state.idle.iter().map(|idle| idle.kept.bytes()).enumerate();
        let fitting = sizes
            .clone()
            .filter(|&(_, bytes)| (needed_bytes..=bytes_max).contains(&bytes))
            .min_by_key(|&(index, bytes)| (bytes, Reverse(state.idle[index].since)));
        if let Some((index, _)) = fitting {
            return Some(state.idle.swap_remove(index).kept);
        }
        let too_small = sizes
            .filter(|&(_, bytes)| bytes < needed_bytes)
            .max_by_key(|&(_, bytes)| bytes)
            .map(|(index, _)| index);
        let too_small = too_small.map(|index| state.idle.swap_remove(index));
        drop(state);
        drop(too_small);
        None
    }

    /// Returns the link, if it waits for a backup.
    pub(super) fn take_link(&self) -> Option<Link> {
        self.shared.lock().idle_link.take().map(|idle| idle.kept)
    }

    /// Keeps memory for the next backup. No one else has it.
    pub(super) fn keep(&mut self, memory: Arc<HostMemory>) {
        // Without a thread nobody would give it back in time.
        if self.start() || self.retains() {
            self.shared.lock().idle.push(Idle::new(memory));
            self.shared.changed.notify_all();
        }
    }

    /// Says that copies to or from some memory are under way.
    pub(super) fn begin_copying(&self, memory: &Arc<HostMemory>) -> Copying {
        let mut state = self.shared.lock();
        state.copied.push(Arc::downgrade(memory));
        if state.quiet_until < Some(Instant::now()) {
            // It has ended, or there was none.
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

    /// Says that some memory is about to be written to, its first `bytes`, as [`begin_copying`](Keeper::begin_copying)
    /// does, and has each block page-locked once it is resident.
    pub(super) fn begin_saving(&mut self, memory: &Arc<HostMemory>, bytes: usize) -> Copying {
        memory.count_anew();
        let copying = self.begin_copying(memory);
        self.lock_beside(memory, bytes, Blocks::Resident);
        copying
    }

    /// Keeps the link for the next backup. Nothing is under way on it.
    pub(super) fn keep_link(&mut self, link: Link) {
        if self.start() || self.retains() {
            self.shared.lock().idle_link = Some(Idle::new(link));
            self.shared.changed.notify_all();
        }
    }

    /// Has blocks within the memory's first `bytes` page-locked beside the job.
    pub(super) fn lock_beside(&mut self, memory: &Arc<HostMemory>, bytes: usize, blocks: Blocks) {
        if !self.start() {
            // Backups through the ring of slots are slower and need no thread.
            return;
        }
        let end = bytes.div_ceil(memory.block_bytes());
        let mut state = self.shared.lock();
        if !state.is_served {
            // It has ended since: who waits would wait in vain.
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

    /// Gives everything back that waits for a backup, and returns when that is done.
    pub(super) fn release(&self) {
        let mut state = self.shared.lock();
        let idle = mem::take(&mut state.idle);
        let link = state.idle_link.take();
        let is_idle = |memory: &Weak<HostMemory>| {
            let mut all = idle.iter();
            all.any(|idle| memory.ptr_eq(&Arc::downgrade(&idle.kept)))
        };
        state.to_lock.retain(|other| !is_idle(&other.memory));
        let bytes = bytes_of(&idle, link.as_ref());
        state.leaving_bytes += bytes;
        // Between two blocks the thread does not give the lock away: who waited for any would wait for all.
        while state.locking.as_ref().is_some_and(is_idle) {
            state = self.shared.wait(state, None);
        }
        drop(state);
        drop((idle, link));
        self.shared.lock().leaving_bytes -= bytes;
    }

    /// Returns how much of the host's memory waits for a backup.
    pub(super) fn idle_bytes(&self) -> usize {
        self.shared.lock().idle_bytes()
    }

    /// Returns what tells how much memory is kept or in `queue`, whoever uses the keeper.
    pub(super) fn kept(&self, queue: Arc<ReleaseQueue>) -> KeptMemory {
        let shared = Arc::clone(&self.shared);
        KeptMemory { shared, queue }
    }

    /// Waits until nothing is left to be page-locked.
    pub(super) fn finish_locking(&self) {
        let mut state = self.shared.lock();
        state.waiting += 1;
        self.shared.changed.notify_all();
        while state.locking.is_some() || !state.to_lock.is_empty() {
            state = self.shared.wait(state, None);
        }
        state.waiting -= 1;
    }

    /// Starts the thread if it is not there, or not any more. Returns whether it is.
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
            // A thread that panicked is as good as ended.
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

/// Which part of the time that a block took is waited for before the next one. Enough for a thread to wake up and take
/// the driver's lock; more would leave too much to the next backup, which may come soon.
const REST_SHARE: u32 = 4;

impl Shared {
    /// What the thread does.
    fn serve(&self, idle_time: Duration) {
        // Before the lock is taken, so that a panic gives the lock back first.
        let _end = End(self);
        let mut state = self.lock();
        while !state.is_ended {
            let now = Instant::now();
            let expired = state.take_expired(now, idle_time);
            if !expired.is_empty() {
                let bytes = bytes_of(&expired.memory, expired.link.as_ref());
                state.leaving_bytes += bytes;
                drop(state);
                give_back(expired);
                state = self.lock();
                state.leaving_bytes -= bytes;
            } else if let Some((memory, block)) = state.next_to_lock(now) {
                state.locking = Some(Arc::downgrade(&memory));
                drop(state);
                let is_locked = lock_block(memory, block);
                state = self.lock();
                // The driver lets those in who wait for it when nobody else asks, and not in turn.
                state.rests_until = Some(Instant::now() + now.elapsed() / REST_SHARE);
                state.blocks_handled += 1;
                let handled = state.locking.take();
                if let Some(handled) = handled.filter(|_| !is_locked) {
                    // What was refused once is not asked for again before the next backup.
                    state.to_lock.retain(|other| !other.memory.ptr_eq(&handled));
                }
                self.changed.notify_all();
            } else {
                // What was listed last may have needed nothing, and who waits for that does not know.
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
        match wait {
            None => self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
            Some(time) => {
                let woken = self.changed.wait_timeout(state, time);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// The end of the keeper's thread, however it ends: nobody waits for it any more.
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
    /// Returns the next block that is to be page-locked now, and its memory; or memory of which none is left, so that
    /// it does not go back under the lock if it is nobody else's by now.
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

    /// Returns which in the list a block is to be page-locked of now.
    fn next_listed(&self, now: Instant) -> Option<usize> {
        let mut listed = self.to_lock.iter();
        listed.position(|listed| self.due(listed, now) == Some(now))
    }

    /// Returns when the next block is to be page-locked, if the end of copies does not tell.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        let due = self
            .to_lock
            .iter()
            .filter_map(|listed| self.due(listed, now));
        due.min()
    }

    /// Returns from when on blocks of some memory are to be page-locked, `now` at the earliest; nothing while others are
    /// copied, or while that itself is and none of it is that far.
    fn due(&self, listed: &ToLock, now: Instant) -> Option<Instant> {
        let mut copied = self.copied.iter();
        let is_copied = copied.any(|memory| memory.ptr_eq(&listed.memory));
        // Copies hold their memory for as long as they are listed: it does not go back here, under the lock.
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

    fn idle_bytes(&self) -> usize {
        bytes_of(&self.idle, self.idle_link.as_ref())
    }

    /// Returns whether what is idle stays. While copies are under way it does, as they would wait for the driver.
    fn keeps_idle(&self) -> bool {
        self.retains || !self.copied.is_empty()
    }

    /// Takes out what has waited long enough.
    fn take_expired(&mut self, now: Instant, idle_time: Duration) -> Expired {
        let mut expired = Expired::default();
        if self.keeps_idle() {
            return expired;
        }
        let is_over = |since: Instant| now.saturating_duration_since(since) >= idle_time;
        expired.memory = self
            .idle
            .extract_if(.., |idle| is_over(idle.since))
            .collect();
        expired.link = self.idle_link.take_if(|idle| is_over(idle.since));
        expired
    }

    fn next_expiry(&self, idle_time: Duration) -> Option<Instant> {
        if self.keeps_idle() {
            return None;
        }
        let memory = self.idle.iter().map(|idle| idle.since);
        let link = self.idle_link.iter().map(|idle| idle.since);
        memory.chain(link).min().map(|since| since + idle_time)
    }
}

fn bytes_of(memory: &[Idle<Arc<HostMemory>>], link: Option<&Idle<Link>>) -> usize {
    let memory = memory.iter().map(|idle| idle.kept.bytes());
    let link = link.map(|idle| idle.kept.locked_bytes());
    memory.chain(link).sum()
}

/// What has waited long enough.
#[derive(Default)]
struct Expired {
    memory: Vec<Idle<Arc<HostMemory>>>,
    link: Option<Idle<Link>>,
}

impl Expired {
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

/// Page-locks a block, if there is one, and returns whether that was done. If nobody else has the memory by then,
/// it goes back.
fn lock_block(memory: Arc<HostMemory>, block: Option<usize>) -> bool {
    let Some(_call) = DriverCall::begin() else {
        // The process ends, and all of it with it.
        mem::forget(memory);
        return false;
    };
    // Even after a panic it goes back before the call ends.
    let memory = memory;
    block.is_none_or(|block| memory.lock(block).is_ok())
}

fn give_back(expired: Expired) {
    match DriverCall::begin() {
        Some(_call) => drop(expired),
        // As above.
        None => mem::forget(expired),
    }
}
