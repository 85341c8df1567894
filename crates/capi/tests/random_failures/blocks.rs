//! The work of threads with blocks of their own.

use std::ffi::c_void;
use std::ptr;

use lowtide::*;

use crate::common::allocate_on;
use crate::{CAPACITY, MIB, Phase, Random, THREADS, insist};

/// How many blocks a thread holds.
const HELD_MAX: usize = 40;

/// A block, with its stamp in the first and last words and in one of each 4 KiB.
struct Block {
    memory: *mut c_void,
    words: usize,
    stamp: u64,
}

impl Block {
    fn new(memory: *mut c_void, words: usize, stamp: u64) -> Block {
        let block = Block {
            memory,
            words,
            stamp,
        };
        for word in block.stamped() {
            // SAFETY: the word lies within the block, which only this thread uses.
            unsafe { word.write(stamp) };
        }
        block
    }

    fn check(&self) {
        for word in self.stamped() {
            // SAFETY: as in `new`, which wrote it.
            let found = unsafe { word.read() };
            assert_eq!(found, self.stamp, "{word:p} in {:p}", self.memory);
        }
    }

    fn stamped(&self) -> impl Iterator<Item = *mut u64> {
        let first = self.memory.cast::<u64>();
        let places = (0..self.words).step_by(512).chain([self.words - 1]);
        places.map(move |place| first.wrapping_add(place))
    }
}

/// The work of one thread.
pub(crate) fn work(phase: &Phase<'_>, thread: usize) {
    let mut random = Random::new(phase.seed ^ (thread as u64 + 1) << 32);
    let mut held: Vec<Block> = Vec::new();
    for operation in 0..phase.operations {
        let is_full = held.len() >= HELD_MAX;
        if !is_full && random.below(5) < 3 {
            let stamp = (thread as u64 + 1) << 48 | operation as u64;
            held.extend(allocate(phase, thread, &mut random, stamp));
        } else if !held.is_empty() {
            let place = random.below(held.len());
            free(phase, &mut random, held.swap_remove(place));
        }
        manage(phase, thread, &mut random);
    }
    for block in held {
        free(phase, &mut random, block);
    }
}

/// Allocates a block. A request that fails is not repeated.
fn allocate(phase: &Phase<'_>, thread: usize, random: &mut Random, stamp: u64) -> Option<Block> {
    let words = 1 + match random.below(64) {
        0 => random.below(MIB / 2),
        1..8 => random.below(1 << 16),
        _ => random.below(1 << 12),
    };
    let stream = phase.stream(thread);
    let memory = allocate_on(words * 8, 0, stream).ok()?;
    Some(Block::new(memory, words, stamp))
}

fn free(phase: &Phase<'_>, random: &mut Random, block: Block) {
    block.check();
    if random.one_in(16) {
        let stream = phase.stream(THREADS + random.below(THREADS));
        phase.use_elsewhere(block.memory, block.words * 8, stream);
    }
    insist("free", || lowtide_deallocate(block.memory));
}

/// Sometimes makes a call that is not a request or a free. Failures are ignored.
fn manage(phase: &Phase<'_>, thread: usize, random: &mut Random) {
    match random.below(2_000) {
        0..5 => drop(lowtide_empty_cache(0)),
        5 => take_snapshot(),
        6..16 => {
            let (mut free, mut total) = (0, 0);
            // SAFETY: both may be written to.
            let _ = unsafe { lowtide_memory_info(0, &raw mut free, &raw mut total) };
        }
        16..18 => {
            // More than the device has.
            let refused = allocate_on(2 * CAPACITY, 0, phase.stream(thread));
            assert!(refused.is_err());
        }
        18..22 => use_pool(phase, thread, random),
        22..24 => capture(phase, thread, random),
        _ => {}
    }
}

fn take_snapshot() {
    let (mut bytes, mut length) = (ptr::null_mut(), 0);
    // SAFETY: both may be written to.
    if unsafe { lowtide_snapshot(&raw mut bytes, &raw mut length) } == Status::Ok {
        // SAFETY: they come from `lowtide_snapshot`.
        unsafe { lowtide_release_bytes(bytes) };
    }
}

/// Allocates from a private pool, and releases the pool.
fn use_pool(phase: &Phase<'_>, thread: usize, random: &mut Random) {
    let user = random.next() >> 8 | 1;
    let pool = Mempool { capture: 0, user };
    let mine = phase.streams[thread];
    unsafe extern "C" fn accepts(context: *mut c_void, stream: *mut c_void) -> bool {
        context.addr() == stream.addr()
    }
    let context = ptr::without_provenance_mut(mine);
    insist("route requests to a pool", || {
        // SAFETY: the context is a number.
        unsafe { lowtide_begin_allocate_to_pool(0, pool, Some(accepts), context, None) }
    });
    let blocks = (0..6).filter_map(|number| allocate(phase, thread, random, user << 8 | number));
    let blocks: Vec<Block> = blocks.collect();
    insist("end the route", || lowtide_end_allocate_to_pool(0, pool));
    blocks
        .into_iter()
        .for_each(|block| free(phase, random, block));
    insist("release a pool", || lowtide_release_pool(0, pool));
    let _ = lowtide_empty_pool(0, pool);
}

/// Does the same while the thread's stream is captured. Blocks that other streams used wait for the capture's
/// end.
fn capture(phase: &Phase<'_>, thread: usize, random: &mut Random) {
    /// The driver's codes of calls that fail at random.
    const AT_RANDOM: [i32; 2] = [2, 999];
    let stream = phase.stream(thread);
    insist("begin a capture", || lowtide_capture_begin(0));
    let is_captured = phase.fake.begin_relaxed_capture(stream) == 0;
    use_pool(phase, thread, random);
    // Releasing memory invalidates the capture of a stream that used it. Ending that capture then returns an
    // error.
    while is_captured && AT_RANDOM.contains(&phase.fake.end_capture_of(stream)) {}
    insist("end a capture", || lowtide_capture_end(0));
}
