//! Finds which initial segments and blocks are older, if the replay depends on it.

use std::collections::BTreeMap;

use lowtide_core::{Action, Bytes, Config, DeviceAddress, Event, FreeBlockOrder};

use crate::job::{Job, Options};
use crate::progress::Progress;
use crate::run::{Ages, Miss, Run};

/// The most trial replays. Some jobs have thousands of segments and blocks; those that this many replays do not
/// order keep their guessed order.
const REPLAYS_MAX: usize = 200;

/// Returns the ages, of those tried, with which a replay with `config` takes the recorded blocks for the most events.
///
/// A recording that lost its beginning does not have the ages. If a replay takes one free block and PyTorch took
/// another, PyTorch's block is older or lies in the older segment. It is moved before the first one, and the replay
/// starts again.
pub(crate) fn search(
    job: &Job<'_>,
    config: &Config,
    options: &Options,
    progress: &dyn Progress,
) -> Ages {
    let mut ages = Ages::guess(job);
    let order = free_block_order(job, config);
    if order == FreeBlockOrder::Address || ages.segments.is_empty() || !options.verify {
        return ages;
    }
    ages.blocks = Run::new(job, config, options, &ages).blocks_by_age();
    let (mut best, mut latest) = (ages.clone(), None);
    for _ in 0..REPLAYS_MAX {
        progress.expect(job.trace.events.len() as u64);
        let run = Run::new(job, config, options, &ages);
        let Ok(miss) = run.first_miss(progress) else {
            break;
        };
        let Some(miss) = miss else {
            return ages;
        };
        let event = miss.difference.event;
        if latest < Some(event) {
            (best, latest) = (ages.clone(), Some(event));
        }
        let has_moved = match order {
            FreeBlockOrder::BlockAge => move_before(&mut ages.blocks, block_places(&miss)),
            _ => {
                let places = segment_places(job, &ages.segments, &miss);
                move_before(&mut ages.segments, places)
            }
        };
        if !has_moved {
            break;
        }
    }
    best
}

/// Returns how a replay chooses among free blocks of one size.
fn free_block_order(job: &Job<'_>, config: &Config) -> FreeBlockOrder {
    let recorded = job.trace.settings.free_block_order;
    match config.clone().in_order(recorded) {
        Config::Caching(options) => options.free_block_order.unwrap_or_default(),
        _ => FreeBlockOrder::Address,
    }
}

/// Moves `older` right before `younger` and returns true if it came behind it; else returns false.
fn move_before<T>(order: &mut [T], [older, younger]: [Option<usize>; 2]) -> bool {
    match (older, younger) {
        (Some(older), Some(younger)) if younger < older && older < order.len() => {
            order[younger..=older].rotate_right(1);
            true
        }
        _ => false,
    }
}

/// Returns the positions in the order of the segments in which PyTorch and the replay took a block.
fn segment_places(job: &Job<'_>, order: &[usize], miss: &Miss) -> [Option<usize>; 2] {
    [miss.difference.recorded, miss.difference.replayed].map(|event| {
        let address = allocated_at(event)?;
        order.iter().position(|&place| {
            let segment = &job.program.initial_segments[place];
            segment.address <= address && address < segment.address + segment.size
        })
    })
}

/// Returns the positions in the order of the free blocks that PyTorch and the replay took. Blocks that began later
/// than the initial ones have positions behind the order's end.
fn block_places(miss: &Miss) -> [Option<usize>; 2] {
    let (difference, lane) = (&miss.difference, miss.allocator.lane());
    let numbers: BTreeMap<DeviceAddress, u64> = lane.block_numbers().collect();
    let place_at = |address| usize::try_from(numbers.get(&address)? - 1).ok();
    let taken = allocated_at(difference.replayed).and_then(|address| {
        let block = lane.allocation(address).ok()?;
        // A block that was split off began just now; the remainder is the block that was there before.
        let is_part = numbers.values().max() == numbers.get(&address);
        let part = if is_part { block.size } else { Bytes::ZERO };
        place_at(address + part)
    });
    [allocated_at(difference.recorded).and_then(place_at), taken]
}

fn allocated_at(event: Option<Event>) -> Option<DeviceAddress> {
    let event = event.filter(|event| event.action == Action::Alloc)?;
    Some(event.address)
}
