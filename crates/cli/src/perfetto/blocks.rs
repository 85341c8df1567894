//! The slices of blocks: what the program held, and for how long.

use std::cmp::Reverse;

use anyhow::Result;
use lowtide_history::{Block, Categories, History, Site, stream_text};
use lowtide_trace::OneLine;
use serde::Serialize;

use super::call_sites::CallSites;
use super::event::Events;
use super::lanes::Lanes;
use super::times::Times;

/// The most rows of blocks that the program holds for more than half of the recording.
const LONG_LIVED_ROWS_MAX: usize = 16;

/// The most rows of other blocks.
const ROWS_MAX: usize = 32;

/// The parts of a recording, and the most slices of other blocks that begin in each. So the slices of a long recording
/// are spread over all of it.
const PARTS: usize = 500;
const SLICES_IN_PART_MAX: u32 = 20;

/// What is known about a block.
#[derive(Serialize)]
struct Details<'a> {
    /// Its bytes, rounded up as live bytes are.
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    category: Option<&'static str>,
    #[serde(skip_serializing_if = "String::is_empty")]
    user_metadata: String,
    stream: String,
    address: String,
    /// The number of the event that allocated it, from 1; 0 if it was there before.
    event: u32,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stack: &'a [String],
}

/// Writes the largest blocks: first those that are held for more than half of the recording, then the others. The
/// larger a block, the higher its row.
pub(super) fn write(
    events: &mut Events<'_>,
    history: &History,
    categories: Option<&Categories>,
    times: &Times,
    sites: &mut CallSites<'_>,
) -> Result<()> {
    let (long_lived, others) = largest(history, times);
    let rows = [("long-lived", long_lived), ("largest", others)];
    for (name, lanes) in rows {
        for (number, lane) in (1..).zip(lanes.into_rows()) {
            // Perfetto sorts rows by name.
            let row = events.add_row(&format!("{name} {number:02}"))?;
            for (_, index) in lane {
                let block = &history.blocks[index];
                let site = sites.get(Site::of(block, history));
                let details = Details {
                    bytes: block.live_bytes().get(),
                    category: categories.map(|categories| categories.of_block(index).name()),
                    user_metadata: OneLine(&history.tags[block.tag as usize]).to_string(),
                    stream: stream_text(history.streams[block.stream as usize]),
                    address: format!("{:#x}", block.address),
                    event: block.start,
                    stack: &site.stack,
                };
                events.slice(row, &site.line, held(block, times), Some(details))?;
            }
        }
    }
    Ok(())
}

/// Returns the indices of the largest blocks: of those that are held for more than half of the recording, and of the
/// others. A block for which the larger ones leave no room is not among them. O(n log n) for n blocks.
fn largest(history: &History, times: &Times) -> (Lanes<usize>, Lanes<usize>) {
    let (begin, end) = times.ends();
    let is_long_lived = |block: &Block| {
        let (start, freed) = held(block, times);
        freed.saturating_sub(start) > end.saturating_sub(begin) / 2
    };
    let is_held = |&index: &usize| history.blocks[index].start < history.blocks[index].freed;
    let mut largest: Vec<usize> = (0..history.blocks.len()).filter(is_held).collect();
    largest.sort_by_key(|&index| Reverse(history.blocks[index].live_bytes()));

    let mut long_lived = Lanes::new(LONG_LIVED_ROWS_MAX);
    let mut others = Lanes::new(ROWS_MAX);
    let mut in_part = [0; PARTS];
    for index in largest {
        let block = &history.blocks[index];
        // Instants, because several may have the same time.
        let instants = i64::from(block.start)..i64::from(block.freed);
        let part = block.start as usize * PARTS / (history.events as usize + 1);
        let in_part = &mut in_part[part];
        if is_long_lived(block) {
            long_lived.put(instants, index);
        } else if *in_part < SLICES_IN_PART_MAX {
            *in_part += u32::from(others.put(instants, index));
        }
    }
    (long_lived, others)
}

/// Returns the times at which the program begins to hold a block, and ends.
fn held(block: &Block, times: &Times) -> (i64, i64) {
    (times.at(block.start), times.at(block.freed))
}
