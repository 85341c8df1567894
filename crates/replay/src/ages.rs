//! In which order the segments came that were there before the first event, where that decides.

use lowtide_core::{Action, Config, Event, FreeBlockOrder};

use crate::run::Run;
use crate::{Job, Options, Progress};

/// Some jobs have thousands of segments. What is not told by so many replays stays as it was guessed.
const REPLAYS_MAX: usize = 200;

/// Returns the places of the program's initial segments, the oldest first, such that a replay with `config` takes
/// blocks from them as it was recorded, or for longest.
///
/// A recording that lost its beginning does not say it. The guess is the order of their addresses, as a driver hands
/// them out to a job that has given none back. Where a replay takes a block in one of two segments, and PyTorch took
/// one in the other, that other is the older one: it is put right before the first, and the replay begins again.
pub(crate) fn search(
    job: &Job<'_>,
    config: &Config,
    options: &Options,
    progress: &dyn Progress,
) -> Vec<usize> {
    let mut order = guess(job);
    if !is_decided_by_age(job, config) || !options.verify {
        return order;
    }
    let (mut best, mut latest) = (order.clone(), None);
    for _ in 0..REPLAYS_MAX {
        let events = job.trace.events.len() as u64;
        progress.expect(events);
        let run = Run::new(job, config, options, &order);
        let Ok(miss) = run.first_miss(progress) else {
            break;
        };
        let Some(miss) = miss else {
            return order;
        };
        let difference = miss.difference;
        if latest < Some(difference.event) {
            (best, latest) = (order.clone(), Some(difference.event));
        }
        let answers = [difference.recorded, difference.replayed];
        let places = answers.map(|answer| place_of(job, &order, answer));
        match places {
            [Some(older), Some(younger)] if younger < older => {
                order[younger..=older].rotate_right(1);
            }
            _ => break,
        }
    }
    best
}

/// Returns the places of the program's initial segments, the lowest address first.
pub(crate) fn guess(job: &Job<'_>) -> Vec<usize> {
    (0..job.program.initial_segments.len()).collect()
}

/// Returns whether blocks are taken from the oldest segment, and there are several whose age nobody knows.
fn is_decided_by_age(job: &Job<'_>, config: &Config) -> bool {
    let recorded = job.trace.settings.free_block_order;
    let Config::Caching(options) = config.clone().in_order(recorded) else {
        return false;
    };
    options.free_block_order == Some(FreeBlockOrder::SegmentAge)
        && job.program.initial_segments.len() > 1
}

/// Returns where in the order the segment is in which an allocation was answered.
fn place_of(job: &Job<'_>, order: &[usize], event: Option<Event>) -> Option<usize> {
    let address = event.filter(|event| event.action == Action::Alloc)?.address;
    let holds = |place: &usize| {
        let segment = &job.program.initial_segments[*place];
        segment.address <= address && address < segment.address + segment.size
    };
    order.iter().position(holds)
}
