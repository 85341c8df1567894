//! Fragmentation: the causes of the bytes that are reserved and not live.

use crate::snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot};
use crate::units::{Bytes, MempoolId, Stream};

/// Live bytes are requests rounded up to this.
const LIVE_ROUNDING: Bytes = Bytes(512);

/// The cause of reserved bytes that are not live.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Cause {
    /// A block is larger than its request.
    Rounding,
    /// A block was freed, but a stream that used it has not passed its event yet.
    WaitingForEvents,
    /// Free, in a private pool: a CUDA graph's, or one of the program's own.
    PrivatePools,
    /// Free, but in another stream.
    OtherStreams,
    /// Free, and could be released to the driver: a segment without a block, or whole pages of an expandable one.
    CachedSegments,
    /// Free, in an expandable segment, on pages that blocks lie on too.
    PartlyUsedPages,
    /// Free, beside blocks in a segment that can only be released whole.
    SplitRemainders,
}

impl Cause {
    /// Every cause, in the order in which they are checked.
    pub const ALL: [Cause; 7] = [
        Cause::Rounding,
        Cause::WaitingForEvents,
        Cause::PrivatePools,
        Cause::OtherStreams,
        Cause::CachedSegments,
        Cause::PartlyUsedPages,
        Cause::SplitRemainders,
    ];

    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Rounding => "rounding",
            Cause::WaitingForEvents => "waiting_for_events",
            Cause::PrivatePools => "private_pools",
            Cause::OtherStreams => "other_streams",
            Cause::CachedSegments => "cached_segments",
            Cause::PartlyUsedPages => "partly_used_pages",
            Cause::SplitRemainders => "split_remainders",
        }
    }
}

/// The reserved bytes at one moment, the live part, and the causes of the rest. Each byte counts once, so `live`
/// and all causes add up to `reserved`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fragmentation {
    /// The reserved bytes.
    pub reserved: Bytes,
    /// The sum of [`Fragmentation::live_bytes_of`] over the allocated blocks.
    pub live: Bytes,
    /// The rest by cause, in the order of [`Cause::ALL`].
    pub causes: [Bytes; Cause::ALL.len()],
}

impl Fragmentation {
    /// Returns the fragmentation of an allocator with these `segments`, from the view of a request in `stream`. `large_page`
    /// is the page size of large expandable segments
    /// ([`CachingConfig::large_segment_size`](crate::CachingConfig::large_segment_size)). Linear time.
    pub fn of(segments: &[SegmentSnapshot], stream: Stream, large_page: Bytes) -> Fragmentation {
        let mut fragmentation = Fragmentation::default();
        for segment in segments {
            fragmentation.reserved += segment.size;
            for block in &segment.blocks {
                fragmentation.add_block(block);
            }
            for (cause, bytes) in FreeBytes::of(segment, large_page).causes(stream) {
                *fragmentation.of_cause_mut(cause) += bytes;
            }
        }
        fragmentation
    }

    /// Returns the live bytes of an allocated block: its request rounded up to 512 bytes, and at most the block's
    /// size. TensorFlow's blocks can be smaller than that.
    pub fn live_bytes_of(requested: Bytes, size: Bytes) -> Bytes {
        requested.round_up(LIVE_ROUNDING).min(size)
    }

    /// Returns the bytes of one cause.
    pub fn of_cause(&self, cause: Cause) -> Bytes {
        self.causes[cause as usize]
    }

    /// Returns the bytes of one cause, to be changed.
    pub fn of_cause_mut(&mut self, cause: Cause) -> &mut Bytes {
        &mut self.causes[cause as usize]
    }

    fn add_block(&mut self, block: &BlockSnapshot) {
        match block.status {
            BlockStatus::Allocated => {
                let live = Fragmentation::live_bytes_of(block.requested, block.size);
                self.live += live;
                *self.of_cause_mut(Cause::Rounding) += block.size - live;
            }
            BlockStatus::PendingFree => *self.of_cause_mut(Cause::WaitingForEvents) += block.size,
            BlockStatus::Inactive => {}
        }
    }
}

/// The free bytes of one segment, or of one mapped range of an expandable segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FreeBytes {
    /// The stream that its blocks belong to.
    pub stream: Stream,
    /// Which pool it belongs to.
    pub pool: MempoolId,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// The bytes in no block.
    pub free: Bytes,
    /// The free bytes that could be released to the driver. Without a block that is all of them; with a block,
    /// none. For an expandable segment: the whole pages that no block touches.
    pub releasable: Bytes,
}

impl FreeBytes {
    /// The page size of expandable segments for small requests.
    pub const SMALL_PAGE: Bytes = Bytes::mib(2);

    /// Returns the causes that the bytes count for, from the view of a request in `stream`.
    pub fn causes(&self, stream: Stream) -> [(Cause, Bytes); 2] {
        let (whole, part) = if !self.pool.is_default() {
            (Cause::PrivatePools, Cause::PrivatePools)
        } else if self.stream != stream {
            (Cause::OtherStreams, Cause::OtherStreams)
        } else if self.is_expandable {
            (Cause::CachedSegments, Cause::PartlyUsedPages)
        } else {
            (Cause::CachedSegments, Cause::SplitRemainders)
        };
        [
            (whole, self.releasable),
            (part, self.free - self.releasable),
        ]
    }

    fn of(segment: &SegmentSnapshot, large_page: Bytes) -> FreeBytes {
        let free = segment.size - segment.active_bytes();
        let page = if segment.is_large {
            large_page
        } else {
            FreeBytes::SMALL_PAGE
        };
        let releasable = if segment.is_expandable {
            free_page_bytes(segment, page)
        } else if free == segment.size {
            free
        } else {
            Bytes::ZERO
        };
        FreeBytes {
            stream: segment.stream,
            pool: segment.pool,
            is_expandable: segment.is_expandable,
            free,
            releasable,
        }
    }
}

/// Returns the bytes of a segment's pages that no block touches. Pages are counted from its address.
fn free_page_bytes(segment: &SegmentSnapshot, page: Bytes) -> Bytes {
    let whole_pages =
        |from: Bytes, to: Bytes| to.round_down(page).saturating_sub(from.round_up(page));
    let mut bytes = Bytes::ZERO;
    let mut free_from = Bytes::ZERO;
    for block in &segment.blocks {
        if block.status != BlockStatus::Inactive {
            let start = block.address.offset_from(segment.address);
            bytes += whole_pages(free_from, start);
            free_from = start + block.size;
        }
    }
    bytes + whole_pages(free_from, segment.size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::DeviceAddress;

    use BlockStatus::{Allocated, Inactive, PendingFree};

    /// Returns a segment of `blocks`, each its size, its request and its state.
    fn segment(blocks: &[(u64, u64, BlockStatus)]) -> SegmentSnapshot {
        let mut address = DeviceAddress(1 << 40);
        let mut tiles = Vec::new();
        for &(size, requested, status) in blocks {
            let (size, requested) = (Bytes(size), Bytes(requested));
            tiles.push(BlockSnapshot {
                address,
                size,
                requested,
                status,
            });
            address = address + size;
        }
        SegmentSnapshot {
            address: DeviceAddress(1 << 40),
            size: tiles.iter().map(|block| block.size).sum(),
            stream: Stream::DEFAULT,
            pool: MempoolId::DEFAULT,
            is_large: true,
            is_expandable: false,
            blocks: tiles,
        }
    }

    /// Returns the causes that have bytes, after having checked that all add up.
    fn causes(segments: &[SegmentSnapshot]) -> Vec<(&'static str, u64)> {
        let fragmentation = Fragmentation::of(segments, Stream::DEFAULT, Bytes::mib(20));
        let sum: Bytes = fragmentation.causes.into_iter().sum();
        assert_eq!(fragmentation.live + sum, fragmentation.reserved);
        let named = Cause::ALL.map(|cause| (cause.name(), fragmentation.of_cause(cause).get()));
        named.into_iter().filter(|&(_, bytes)| bytes > 0).collect()
    }

    #[test]
    fn each_byte_counts_once() {
        let mixed = segment(&[
            (1024, 1000, Allocated),
            (2048, 100, Allocated),
            (4096, 1, PendingFree),
            (8192, 7, Inactive),
        ]);
        let expected = [
            ("rounding", 2048 - 512),
            ("waiting_for_events", 4096),
            ("split_remainders", 8192),
        ];
        assert_eq!(causes(&[mixed]), expected);
    }

    #[test]
    fn free_segments_are_cached_or_belong_to_others() {
        let free = segment(&[(4096, 0, Inactive)]);
        assert_eq!(
            causes(std::slice::from_ref(&free)),
            [("cached_segments", 4096)]
        );
        let foreign = SegmentSnapshot {
            stream: Stream(7),
            ..free.clone()
        };
        assert_eq!(
            causes(std::slice::from_ref(&foreign)),
            [("other_streams", 4096)]
        );
        let private = SegmentSnapshot {
            pool: MempoolId(1, 0),
            ..foreign
        };
        assert_eq!(causes(&[private]), [("private_pools", 4096)]);
    }

    #[test]
    fn whole_free_pages_of_an_expandable_segment_could_go_back() {
        const MIB: u64 = 1 << 20;
        let mut expandable = segment(&[
            (25 * MIB, 25 * MIB, Allocated),
            (10 * MIB, 0, Inactive),
            // Neighbours, though listed separately.
            (25 * MIB, 0, Inactive),
        ]);
        expandable.is_expandable = true;
        let expected = [
            ("cached_segments", 20 * MIB),
            ("partly_used_pages", 15 * MIB),
        ];
        assert_eq!(causes(std::slice::from_ref(&expandable)), expected);
        expandable.is_large = false;
        let expected = [("cached_segments", 34 * MIB), ("partly_used_pages", MIB)];
        assert_eq!(causes(&[expandable]), expected);
    }

    #[test]
    fn a_block_smaller_than_512_bytes_is_live_as_far_as_it_goes() {
        let small = segment(&[(256, 200, Allocated), (256, 0, Inactive)]);
        assert_eq!(causes(&[small]), [("split_remainders", 256)]);
    }
}
