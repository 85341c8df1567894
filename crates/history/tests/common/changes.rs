//! Compares a history's changes with its curves.

use lowtide_core::Bytes;
use lowtide_history::{CURVES, History, Part};

/// Compares the sums of [`History::changes`] with the curves, which are counted in another way: in each part
/// of a curve, both have the same extremes.
pub(crate) fn check_changes(history: &History) {
    let changes = history.changes();
    let mut changes = changes.iter().peekable();
    // Reserved, live, paused.
    let mut sums = [0_u64; 3];
    let curves = [0, 1, CURVES - 1];
    let part_instants = history.levels.part_instants();
    let mut extremes = [(u64::MAX, 0); 3];
    for instant in 0..=history.events {
        while let Some(change) = changes.next_if(|change| change.instant == instant) {
            let mut add = |sum: usize, bytes: Bytes, is_there: bool| {
                let (sum, bytes) = (&mut sums[sum], bytes.get());
                *sum = if is_there { *sum + bytes } else { *sum - bytes };
            };
            match change.part {
                Part::Segment(index) => add(0, history.segments[index].size, change.is_there),
                Part::Block(index) => add(1, history.blocks[index].live_bytes(), change.is_there),
                Part::Pause(index) => {
                    add(0, history.pauses[index].size, !change.is_there);
                    add(2, history.pauses[index].size, change.is_there);
                }
            }
        }
        for (extremes, sum) in extremes.iter_mut().zip(sums) {
            *extremes = (extremes.0.min(sum), extremes.1.max(sum));
        }
        let next = u64::from(instant) + 1;
        if next % part_instants == 0 || instant == history.events {
            let part = usize::try_from(u64::from(instant) / part_instants).expect("a few parts");
            for (curve, (least, most)) in curves.into_iter().zip(extremes) {
                let levels = (
                    history.levels.least(curve)[part],
                    history.levels.most(curve)[part],
                );
                assert_eq!((least, most), levels, "curve {curve}, part {part}");
            }
            extremes = [(u64::MAX, 0); 3];
        }
    }
    assert_eq!(changes.next(), None, "no change is after the last event");
}
