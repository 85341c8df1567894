//! The work of the thread that pauses and resumes.

use std::ffi::{CStr, c_int, c_void};

use lowtide::*;

use crate::common::{allocate, check, fill};
use crate::{MIB, Phase, Random, THREADS, insist};

/// The regions, and their backups.
const REGIONS: [(&CStr, Backup); 4] = [
    (c"weights", Backup::Host),
    (c"optimizer", Backup::Host),
    (c"cold", Backup::Disk),
    (c"kv", Backup::None),
];

/// The largest number of blocks in all regions.
const HELD_MAX: usize = 12;

struct Block {
    memory: *mut c_void,
    size: usize,
    seed: usize,
    /// An index into [`REGIONS`].
    region: usize,
}

pub(crate) fn work(phase: &Phase<'_>) {
    let mut random = Random::new(phase.seed ^ 0xffff);
    let mut held: Vec<Block> = Vec::new();
    for round in 0..phase.operations / 40 {
        for _ in 0..3 {
            if held.len() < HELD_MAX {
                held.extend(allocate_in(&mut random, round));
            }
        }
        cycle(&mut random, &mut held);
        while random.below(3) > 0 && !held.is_empty() {
            let place = random.below(held.len());
            free(phase, &mut random, held.swap_remove(place));
        }
        settings(&mut random);
    }
    for block in held {
        free(phase, &mut random, block);
    }
}

/// Releases the memory of the regions that no block uses.
pub(crate) fn trim_all() {
    for (tag, backup) in REGIONS {
        // SAFETY: the text ends with a zero byte.
        insist("trim", || unsafe {
            lowtide_region_trim(0, tag.as_ptr(), backup as c_int)
        });
    }
}

/// Allocates a block in a region. A request that fails is not repeated.
fn allocate_in(random: &mut Random, seed: usize) -> Option<Block> {
    let region = random.below(REGIONS.len());
    let (tag, backup) = REGIONS[region];
    let words_max = if random.one_in(3) { MIB } else { MIB / 16 };
    let size = 8 * (1 + random.below(words_max));
    // SAFETY: the text ends with a zero byte.
    insist("enter a region", || unsafe {
        lowtide_region_enter(tag.as_ptr(), backup as c_int)
    });
    let memory = allocate(size, 0);
    insist("leave a region", || lowtide_region_leave());
    let memory = memory.ok()?;
    fill(memory, size, seed);
    Some(Block {
        memory,
        size,
        seed,
        region,
    })
}

/// Pauses a region and resumes it, with frees in between.
fn cycle(random: &mut Random, held: &mut Vec<Block>) {
    let region = random.below(REGIONS.len());
    let (tag, backup) = REGIONS[region];
    let drops = random.one_in(8);
    for _ in 0..1 + random.below(3) {
        // A call that fails is repeated or ignored.
        let _ = if drops {
            // SAFETY: the text ends with a zero byte.
            unsafe { lowtide_pause_and_drop(tag.as_ptr()) }
        } else {
            // SAFETY: as above.
            unsafe { lowtide_pause(tag.as_ptr()) }
        };
    }
    if random.one_in(2)
        && let Some(place) = held.iter().position(|block| block.region == region)
    {
        let block = held.swap_remove(place);
        insist("free what may be away", || lowtide_deallocate(block.memory));
    }
    // SAFETY: as above.
    insist("resume", || match unsafe { lowtide_resume(tag.as_ptr()) } {
        // No block was ever allocated in the region.
        Status::InvalidArgument => Status::Ok,
        status => status,
    });
    for block in held.iter().filter(|block| block.region == region) {
        if drops || backup == Backup::None {
            fill(block.memory, block.size, block.seed);
        }
        check(block.memory, block.size, block.seed);
    }
}

fn free(phase: &Phase<'_>, random: &mut Random, block: Block) {
    check(block.memory, block.size, block.seed);
    if random.one_in(4) {
        let stream = phase.stream(THREADS + random.below(THREADS));
        phase.use_elsewhere(block.memory, block.size, stream);
    }
    insist("free in a region", || lowtide_deallocate(block.memory));
}

/// Sometimes changes what happens to host memory between backups.
fn settings(random: &mut Random) {
    match random.below(24) {
        0 => insist("retain", || lowtide_retain_backups(true)),
        1 => insist("retain no more", || lowtide_retain_backups(false)),
        2 => insist("release", || lowtide_release_backups()),
        3 => insist("page-lock", || lowtide_page_lock_backups()),
        4 => trim_all(),
        _ => {}
    }
}
