//! The report of an out-of-memory error: bins, chunks by size, the largest free chunk, and a picture of each
//! region.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

use crate::block::{Block, SegmentId};
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::Bytes;

/// The number of bins. Bin `b` holds chunks from 256 · 2^b bytes up to the next bin's; the last holds all larger
/// ones too.
const BINS: usize = 21;
const SMALLEST_BIN: Bytes = Bytes(256);

/// How many sizes and regions are listed, so that the text stays short.
const SIZES_MAX: usize = 16;
const REGIONS_MAX: usize = 16;
/// The number of characters of a region's picture.
const PICTURE_WIDTH: usize = 64;

/// Returns the number of the bin that holds chunks of a size.
fn bin_of(size: Bytes) -> usize {
    let units = size.get() / SMALLEST_BIN.get();
    (units.max(1).ilog2() as usize).min(BINS - 1)
}

/// The contents of a bin.
#[derive(Clone, Copy, Default)]
struct BinSummary {
    chunks: u64,
    bytes: Bytes,
    chunks_in_use: u64,
    bytes_in_use: Bytes,
    bytes_requested: Bytes,
}

/// Returns the report for a request that the heap could not serve.
pub(super) fn describe(heap: &Heap, request: &Request, largest_free: Bytes) -> String {
    let mut text = String::new();
    let written = write_description(&mut text, heap, request, largest_free);
    written.expect("writing to a string cannot fail");
    text
}

fn write_description(
    text: &mut String,
    heap: &Heap,
    request: &Request,
    largest_free: Bytes,
) -> fmt::Result {
    let chunks = heap.blocks.by_segment();
    write_bins(text, &chunks)?;
    write_sizes(text, &chunks)?;
    writeln!(
        text,
        "The largest free chunk that the request may use has {largest_free}; it needs {}, from bin {}.",
        request.size,
        bin_of(request.size)
    )?;
    write_regions(text, heap, &chunks)
}

/// Writes a line for each bin that is not empty.
fn write_bins(text: &mut String, chunks: &[(SegmentId, Block)]) -> fmt::Result {
    let mut bins = [BinSummary::default(); BINS];
    for (_, chunk) in chunks {
        let bin = &mut bins[bin_of(chunk.size)];
        bin.chunks += 1;
        bin.bytes += chunk.size;
        if chunk.is_active() {
            bin.chunks_in_use += 1;
            bin.bytes_in_use += chunk.size;
            bin.bytes_requested += chunk.requested;
        }
    }
    writeln!(text, "Bins, by the smallest chunk that each may hold:")?;
    for (number, bin) in bins.iter().enumerate().filter(|(_, bin)| bin.chunks > 0) {
        writeln!(
            text,
            "  {number} ({}): {} chunks of {}, {} of them in use with {}, {} requested",
            Bytes(SMALLEST_BIN.get() << number),
            bin.chunks,
            bin.bytes,
            bin.chunks_in_use,
            bin.bytes_in_use,
            bin.bytes_requested
        )?;
    }
    Ok(())
}

/// Writes a line for each size of active chunks. The size with the most memory comes first.
fn write_sizes(text: &mut String, chunks: &[(SegmentId, Block)]) -> fmt::Result {
    let mut counts: BTreeMap<Bytes, u64> = BTreeMap::new();
    for (_, chunk) in chunks.iter().filter(|(_, chunk)| chunk.is_active()) {
        *counts.entry(chunk.size).or_default() += 1;
    }
    let mut sizes: Vec<(Bytes, Bytes, u64)> = counts
        .into_iter()
        .map(|(size, count)| (Bytes(size.get() * count), size, count))
        .collect();
    sizes.sort_unstable_by_key(|&line| Reverse(line));
    writeln!(text, "Chunks in use, by size:")?;
    for (total, size, count) in sizes.iter().take(SIZES_MAX) {
        writeln!(text, "  {count} x {size} = {total}")?;
    }
    write_left_out(text, sizes.len(), SIZES_MAX, "sizes")
}

/// Writes a picture of each region, the largest first.
fn write_regions(text: &mut String, heap: &Heap, chunks: &[(SegmentId, Block)]) -> fmt::Result {
    let mut regions: Vec<_> = heap.segments.iter().collect();
    regions.sort_unstable_by_key(|(_, region)| (Reverse(region.size), region.address));
    writeln!(text, "Regions (# in use, + in part, . free):")?;
    for &(id, region) in regions.iter().take(REGIONS_MAX) {
        let first = chunks.partition_point(|&(segment, _)| segment < id);
        let count = chunks[first..].partition_point(|&(segment, _)| segment == id);
        let picture = picture_of(heap, id, &chunks[first..first + count]);
        let domain = heap.domains.domain(region.domain);
        let pool = heap.domains.pool(domain.pool).id;
        writeln!(
            text,
            "  [{picture}] {} at {}, stream {}, pool {pool}",
            region.size, region.address, domain.stream.0
        )?;
    }
    write_left_out(text, regions.len(), REGIONS_MAX, "regions")
}

/// Returns the picture of a region. Each character stands for an equal part of it.
fn picture_of(heap: &Heap, id: SegmentId, chunks: &[(SegmentId, Block)]) -> String {
    let region = heap.segments.get(id);
    let size = u128::from(region.size.get());
    // Counted in 1/64 bytes, so that a part of the region is a whole number.
    let mut used = [0_u128; PICTURE_WIDTH];
    for (_, chunk) in chunks.iter().filter(|(_, chunk)| chunk.is_active()) {
        let start = chunk.address.offset_from(region.address);
        let [start, end] = [start, start + chunk.size]
            .map(|bytes| u128::from(bytes.get()) * PICTURE_WIDTH as u128);
        for part in start / size..end.div_ceil(size) {
            let in_part = end.min((part + 1) * size) - start.max(part * size);
            used[usize::try_from(part).expect("a chunk lies in its region")] += in_part;
        }
    }
    used.iter()
        .map(|&used| match used {
            0 => '.',
            used if used == size => '#',
            _ => '+',
        })
        .collect()
}

fn write_left_out(text: &mut String, count: usize, shown: usize, what: &str) -> fmt::Result {
    match count.saturating_sub(shown) {
        0 => Ok(()),
        left_out => writeln!(text, "  and {left_out} more {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_double_from_256_bytes_to_256_mebibytes_and_above() {
        let sizes = [256, 511, 512, 1023, 1024].map(|size| bin_of(Bytes(size)));
        assert_eq!(sizes, [0, 0, 1, 1, 2]);
        assert_eq!(bin_of(Bytes(Bytes::mib(256).get() - 256)), 19);
        assert_eq!(bin_of(Bytes::mib(256)), 20);
        assert_eq!(bin_of(Bytes::REQUEST_MAX), 20);
    }
}
