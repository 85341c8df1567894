//! The program's own view: its allocated blocks, and until when work may access their memory.
//!
//! The model keeps its own stream clocks, so that mistakes about events in the allocator or in the simulated driver
//! are found.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use lowtide_core::{Action, Allocation, Bytes, Config, DeviceAddress, Event, Handle, Stream};

use super::capture_clocks::{CaptureClocks, CapturedWork};
use super::order::Order;
use super::places::{Piece, Places};
use super::pools::Pools;
use crate::{Step, StepKind};

/// The blocks and streams of one program.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    held: BTreeMap<DeviceAddress, Held>,
    /// The same blocks, in the order in which an operation's index names them.
    addresses: Vec<DeviceAddress>,
    /// Freed memory that work may still access, or that has no `free_completed` event yet.
    resting: Vec<Resting>,
    /// Which physical bytes each address shows, and which of them the allocated blocks have.
    places: Places,
    held_pieces: BTreeMap<Piece, DeviceAddress>,
    pub(super) pools: Pools,
    order: Order,
    /// The time when the queued work of each stream is done.
    done_ns: BTreeMap<Stream, u64>,
    pub(super) captures: u32,
    pub(super) captured: CaptureClocks,
    /// Whether memory that a capture freed may be reused in the same capture.
    reuses_in_capture: bool,
    /// The bytes of the allocated blocks and of the pending blocks.
    pub(super) held_bytes: Bytes,
    pub(super) pending_bytes: Bytes,
    pub(super) pending: usize,
    /// The requested bytes of both.
    pub(super) requested: Bytes,
}

#[derive(Debug)]
struct Held {
    allocation: Allocation,
    /// Its index in [`Shadow::addresses`].
    place: usize,
    uses: Vec<Use>,
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    stream: Stream,
    /// The capture that used the block in this stream, if nothing else used it there. During this capture, its
    /// order is enough.
    captured_in: Option<u64>,
}

#[derive(Debug)]
struct Resting {
    allocation: Allocation,
    pieces: Vec<Piece>,
    /// The time when the last work of each stream that used the block is done, that of its own stream first.
    ends_ns: Vec<(Stream, u64)>,
    /// Whether other streams used the block, including captured ones.
    has_uses: bool,
    /// The uses in captures that were in progress, if the block was freed during a capture.
    captured: Option<CapturedWork>,
    is_completed: bool,
}

impl Shadow {
    pub(super) fn new(config: &Config) -> Shadow {
        Shadow {
            reuses_in_capture: match config {
                Config::Caching(caching) => caching.graph_capture_record_stream_reuse,
                _ => false,
            },
            pools: Pools::new(config),
            ..Shadow::default()
        }
    }

    /// Returns the number of allocated blocks.
    pub(super) fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the allocated block that an operation names.
    pub(super) fn address(&self, index: u16) -> Option<DeviceAddress> {
        let position = usize::from(index).checked_rem(self.addresses.len())?;
        Some(self.addresses[position])
    }

    /// Returns every allocated block, by address.
    pub(super) fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.held.values().map(|held| &held.allocation)
    }

    pub(super) fn launch(&mut self, stream: Stream, now_ns: u64, ns: u64) {
        if self.captured.capture_of(stream).is_some() {
            self.captured.launch(stream);
            return;
        }
        let done_ns = self.done_ns.entry(stream).or_default();
        *done_ns = (*done_ns).max(now_ns) + ns;
    }

    /// Makes the next work of `stream` wait for the current work of `other`.
    pub(super) fn wait(&mut self, stream: Stream, other: Stream) {
        if self.captured.capture_of(other).is_some() {
            self.captured.wait(stream, other);
            return;
        }
        let other_done_ns = self.done_ns.get(&other).copied().unwrap_or(0);
        let done_ns = self.done_ns.entry(stream).or_default();
        *done_ns = other_done_ns.max(*done_ns);
    }

    /// Adds a block that was allocated.
    ///
    /// # Errors
    ///
    /// A sentence if the block overlaps an allocated block, by address or by physical memory, if it has memory that
    /// work may still access without being ordered before the new owner's work, or if a private pool's block shares a
    /// handle with a block of another pool.
    pub(super) fn hand_out(&mut self, allocation: Allocation, now_ns: u64) -> Result<(), String> {
        let Allocation {
            address,
            size,
            requested,
            stream,
            ..
        } = allocation;
        let below = self.held.range(..address + size).next_back();
        if let Some((at, held)) = below.filter(|(_, held)| end_of(&held.allocation) > address) {
            return Err(format!(
                "{allocation:?} overlaps {at} of {:?}",
                held.allocation.size
            ));
        }
        let pieces = self.places.pieces(address, size);
        for piece in &pieces {
            let below = self.held_pieces.range(..=end_of_handle(piece)).next_back();
            if let Some((other, at)) = below.filter(|(other, _)| other.overlaps(piece)) {
                return Err(format!(
                    "{allocation:?} has bytes of {at}: {piece:?} and {other:?}"
                ));
            }
        }
        let overlaps = |resting: &&Resting| {
            let pairs = resting.pieces.iter();
            pairs
                .flat_map(|one| pieces.iter().map(move |other| (one, other)))
                .any(|(one, other)| one.overlaps(other))
        };
        for resting in self.resting.iter().filter(overlaps) {
            if !resting.is_completed {
                return Err(format!(
                    "{allocation:?} overlaps {resting:?}, which is not free"
                ));
            }
            let busy = |&&(user, end_ns): &&(Stream, u64)| {
                let is_after = user == stream || self.order.is_after(stream, user, end_ns);
                end_ns > now_ns && !is_after
            };
            if let Some((user, end_ns)) = resting.ends_ns.iter().find(busy) {
                return Err(format!(
                    "{allocation:?} at {now_ns} ns overlaps memory used in {user:?} until {end_ns} ns"
                ));
            }
        }
        self.give_to_pool(&allocation, &pieces)?;
        self.held_pieces
            .extend(pieces.iter().map(|&piece| (piece, address)));
        self.held_bytes += size;
        self.requested += requested;
        let place = self.addresses.len();
        self.addresses.push(address);
        self.held.insert(
            address,
            Held {
                allocation,
                place,
                uses: Vec::new(),
                pieces,
            },
        );
        Ok(())
    }

    /// Gives the handles of a new block to its pool, if that is private and held.
    ///
    /// # Errors
    ///
    /// A sentence if a handle belongs to another pool, or if this pool gets one that has a block of another pool.
    fn give_to_pool(&mut self, block: &Allocation, pieces: &[Piece]) -> Result<(), String> {
        if self.captures > 0 {
            self.pools.capture(block);
        }
        for handle in pieces.iter().filter_map(|piece| piece.handle) {
            if !self.pools.give(handle, block)? {
                continue;
            }
            let beside = self.held_pieces.range(all_of(handle));
            let mut beside = beside.map(|(_, at)| &self.held[at].allocation);
            if let Some(other) = beside.find(|other| other.pool != block.pool) {
                return Err(format!("{block:?} shares {handle:?} with {other:?}"));
            }
        }
        Ok(())
    }

    /// Begins a capture, which may use every block that is allocated.
    pub(super) fn begin_capture(&mut self, stream: Stream) {
        self.captured.begin(stream);
        self.captures += 1;
        for held in self.held.values() {
            self.pools.capture(&held.allocation);
        }
    }

    /// Records that a stream uses an allocated block.
    pub(super) fn record_stream(&mut self, address: DeviceAddress, stream: Stream) {
        let captured_in = self.captured.capture_of(stream);
        let held = self
            .held
            .get_mut(&address)
            .expect("operations name held blocks");
        if stream == held.allocation.stream {
            return;
        }
        match held.uses.iter_mut().find(|known| known.stream == stream) {
            Some(known) if known.captured_in == captured_in => {}
            Some(known) => known.captured_in = None,
            None => held.uses.push(Use {
                stream,
                captured_in,
            }),
        }
    }

    /// Removes a block that the program freed. The events say whether it is free yet.
    pub(super) fn free(&mut self, address: DeviceAddress) {
        let held = self
            .held
            .remove(&address)
            .expect("operations name held blocks");
        let Held {
            allocation,
            place,
            uses,
            pieces,
        } = held;
        for piece in &pieces {
            self.held_pieces.remove(piece);
        }
        self.addresses.swap_remove(place);
        if let Some(moved) = self.addresses.get(place) {
            self.held
                .get_mut(moved)
                .expect("every address is of a held block")
                .place = place;
        }
        self.held_bytes -= allocation.size;
        self.pending_bytes += allocation.size;
        self.pending += 1;
        let done_ns = |stream: Stream| (stream, self.done_ns.get(&stream).copied().unwrap_or(0));
        let is_in_graph = |known: &&Use| {
            known.captured_in.is_some()
                && known.captured_in == self.captured.capture_of(known.stream)
        };
        let (in_graph, running): (Vec<&Use>, Vec<&Use>) = uses.iter().partition(is_in_graph);
        let others = running.iter().map(|known| known.stream);
        let ends_ns = std::iter::once(allocation.stream)
            .chain(others)
            .map(done_ns)
            .collect();
        let has_uses = !uses.is_empty();
        let users = in_graph.iter().map(|known| known.stream);
        let own = users.clone().next().map(|_| allocation.stream);
        let captured = (self.captures > 0).then(|| self.captured.work_of(users.chain(own)));
        self.resting.push(Resting {
            allocation,
            pieces,
            ends_ns,
            has_uses,
            captured,
            is_completed: false,
        });
    }

    /// Checks an event against the model.
    ///
    /// # Errors
    ///
    /// A sentence if memory that work or a graph may still access is free or unmapped.
    pub(super) fn witness(&mut self, event: &Event, now_ns: u64) -> Result<(), String> {
        match event.action {
            Action::FreeCompleted => self.complete(event.address, now_ns),
            // What is unmapped is checked where the driver does it: an event says only which address counts.
            Action::SegmentFree => self.check_unused(event, (event.address, event.size), now_ns),
            _ => Ok(()),
        }
    }

    /// Follows a call of the driver.
    ///
    /// # Errors
    ///
    /// A sentence if addresses are unmapped that a block, work or a graph may still access.
    pub(super) fn follow(&mut self, step: &Step) -> Result<(), String> {
        match step.kind {
            StepKind::Map {
                address,
                size,
                handle,
            } => self.places.map(address, size, handle),
            StepKind::Unmap { address, size } => {
                let below = self.held.range(..address + size).next_back();
                if let Some((at, _)) = below.filter(|(_, held)| end_of(&held.allocation) > address)
                {
                    return Err(format!("{step:?} takes the memory of {at}"));
                }
                self.check_unused(step, (address, size), step.now_ns)?;
                self.places.unmap(address, size);
            }
            StepKind::Record { event, stream } => {
                let done_ns = self.done_ns.get(&stream).copied().unwrap_or(0);
                self.order.record(event, stream, done_ns);
            }
            StepKind::Wait { stream, event } => {
                let passes_ns = self.order.wait(stream, event);
                let done_ns = self.done_ns.entry(stream).or_default();
                *done_ns = passes_ns.max(*done_ns);
            }
        }
        Ok(())
    }

    /// Checks that neither work nor a graph of a held pool uses freed memory at some addresses, which `what` takes away.
    fn check_unused(
        &self,
        what: &impl std::fmt::Debug,
        (start, size): (DeviceAddress, Bytes),
        now_ns: u64,
    ) -> Result<(), String> {
        if let Some((at, pool)) = self.pools.captured_in(start, start + size) {
            return Err(format!(
                "{what:?} takes {at}, which a graph of {pool:?} may use"
            ));
        }
        let touched = self.resting.iter().find(|resting| {
            let inside =
                resting.allocation.address < start + size && end_of(&resting.allocation) > start;
            inside && resting.ends_ns.iter().any(|&(_, end_ns)| end_ns > now_ns)
        });
        touched.map_or(Ok(()), |resting| {
            Err(format!(
                "{what:?} at {now_ns} ns takes memory under work: {resting:?}"
            ))
        })
    }

    /// Removes freed memory that no work accesses any more.
    pub(super) fn forget_idle(&mut self, now_ns: u64) {
        self.resting.retain(|resting| {
            !resting.is_completed || resting.ends_ns.iter().any(|&(_, end_ns)| end_ns > now_ns)
        });
    }

    fn complete(&mut self, address: DeviceAddress, now_ns: u64) -> Result<(), String> {
        let captures = self.captures;
        let waiting = self.resting.iter_mut().rev();
        let mut waiting = waiting.filter(|resting| !resting.is_completed);
        let found = waiting.find(|resting| resting.allocation.address == address);
        let resting = found.ok_or_else(|| format!("{address} is free, and was not let go of"))?;
        let others = &resting.ends_ns[1..];
        if let Some((user, end_ns)) = others.iter().find(|&&(_, end_ns)| end_ns > now_ns) {
            return Err(format!(
                "{address} is free at {now_ns} ns, used in {user:?} until {end_ns} ns"
            ));
        }
        let stream = resting.allocation.stream;
        let work = resting.captured.as_ref();
        let is_over = work.is_none_or(|work| self.captured.is_over(stream, work));
        if captures > 0 && resting.has_uses && !(self.reuses_in_capture && is_over) {
            return Err(format!(
                "{address} is free during a capture, which may not ask for events, and its order does \
                 not say so"
            ));
        }
        resting.is_completed = true;
        self.pending -= 1;
        self.pending_bytes -= resting.allocation.size;
        self.requested -= resting.allocation.requested;
        Ok(())
    }
}

fn end_of(allocation: &Allocation) -> DeviceAddress {
    allocation.address + allocation.size
}

/// Returns the last place in the handle, or the plain memory, of a piece before which an overlapping piece begins.
fn end_of_handle(piece: &Piece) -> Piece {
    Piece {
        handle: piece.handle,
        start: piece.end - 1,
        end: u64::MAX,
    }
}

/// Returns the range of all pieces of a handle.
fn all_of(handle: Handle) -> RangeInclusive<Piece> {
    let piece = |start| Piece {
        handle: Some(handle),
        start,
        end: start,
    };
    piece(0)..=piece(u64::MAX)
}

#[cfg(test)]
mod tests {
    use lowtide_core::{EventHandle, MempoolId};

    use super::*;

    const PAGE: Bytes = Bytes::mib(2);
    const POOL: MempoolId = MempoolId(0, 1);
    /// Two addresses that show the same handle.
    const VIEWS: [DeviceAddress; 2] = [DeviceAddress(1 << 30), DeviceAddress(1 << 31)];

    fn step(kind: StepKind) -> Step {
        Step { now_ns: 0, kind }
    }

    fn shadow() -> Shadow {
        let mut shadow = Shadow::default();
        for address in VIEWS {
            let (size, handle) = (PAGE, Handle(7));
            let map = StepKind::Map {
                address,
                size,
                handle,
            };
            shadow.follow(&step(map)).unwrap();
        }
        shadow
    }

    fn allocation(address: DeviceAddress, stream: Stream) -> Allocation {
        Allocation {
            address,
            size: Bytes(512),
            requested: Bytes(512),
            stream,
            pool: MempoolId::DEFAULT,
            is_expandable: true,
            is_watched: false,
        }
    }

    /// A block at the first view, freed while work of stream 1 uses it until 100 ns.
    fn freed() -> Shadow {
        let mut shadow = shadow();
        shadow.hand_out(allocation(VIEWS[0], Stream(1)), 0).unwrap();
        shadow.launch(Stream(1), 0, 100);
        shadow.free(VIEWS[0]);
        shadow.complete(VIEWS[0], 0).unwrap();
        shadow
    }

    #[test]
    fn two_blocks_with_a_byte_in_common_are_found() {
        let mut shadow = shadow();
        shadow.hand_out(allocation(VIEWS[0], Stream(1)), 0).unwrap();
        let beside = allocation(VIEWS[1] + Bytes(512), Stream(1));
        assert_eq!(shadow.hand_out(beside, 0), Ok(()));
        let error = shadow.hand_out(allocation(VIEWS[1], Stream(1)), 0);
        assert!(error.unwrap_err().contains("has bytes of"));
    }

    #[test]
    fn memory_under_work_needs_its_stream_or_a_wait_or_time() {
        let other = allocation(VIEWS[1], Stream(2));
        let error = freed().hand_out(other, 99).unwrap_err();
        assert!(error.contains("overlaps memory used in"), "{error}");
        assert_eq!(freed().hand_out(other, 100), Ok(()));
        let own = allocation(VIEWS[1], Stream(1));
        assert_eq!(freed().hand_out(own, 0), Ok(()));
        let (event, stream) = (EventHandle(1), Stream(1));
        let record = StepKind::Record { event, stream };
        let wait = |stream| StepKind::Wait { stream, event };
        let mut waited = freed();
        waited.follow(&step(record)).unwrap();
        waited.follow(&step(wait(Stream(3)))).unwrap();
        assert!(waited.hand_out(other, 0).is_err(), "another stream waited");
        waited.follow(&step(wait(Stream(2)))).unwrap();
        assert_eq!(waited.hand_out(other, 0), Ok(()));
    }

    #[test]
    fn what_a_block_or_work_uses_is_not_unmapped() {
        let mut held = shadow();
        held.hand_out(allocation(VIEWS[0], Stream(1)), 0).unwrap();
        let error = held.follow(&unmap(VIEWS[0])).unwrap_err();
        assert!(error.contains("takes the memory of"), "{error}");
        assert_eq!(held.follow(&unmap(VIEWS[1])), Ok(()));
        let error = freed().follow(&unmap(VIEWS[0])).unwrap_err();
        assert!(error.contains("under work"), "{error}");
        assert_eq!(freed().follow(&unmap(VIEWS[1])), Ok(()));
    }

    fn unmap(address: DeviceAddress) -> Step {
        let size = PAGE;
        step(StepKind::Unmap { address, size })
    }

    /// A block of a held private pool at the first view, allocated and freed during a capture, which has ended.
    fn captured() -> Shadow {
        let mut shadow = shadow();
        shadow.pools.use_counts.insert(POOL, 1);
        shadow.begin_capture(Stream(1));
        let block = private(VIEWS[0]);
        shadow.hand_out(block, 0).unwrap();
        shadow.free(VIEWS[0]);
        shadow.captured.end_first();
        shadow.captures = 0;
        shadow.complete(VIEWS[0], 0).unwrap();
        shadow.forget_idle(0);
        assert!(shadow.resting.is_empty());
        shadow
    }

    fn private(address: DeviceAddress) -> Allocation {
        let pool = POOL;
        Allocation {
            pool,
            ..allocation(address, Stream(1))
        }
    }

    #[test]
    fn no_other_pool_gets_a_handle_of_a_held_pool() {
        let other = allocation(VIEWS[1] + Bytes(512), Stream(1));
        let error = captured().hand_out(other, 0).unwrap_err();
        assert!(error.contains("which is"), "{error}");
        let own = private(VIEWS[1] + Bytes(512));
        assert_eq!(captured().hand_out(own, 0), Ok(()));
        let mut released = captured();
        released.pools.end_hold(POOL);
        assert_eq!(released.hand_out(other, 0), Ok(()));
        let error = released.hand_out(private(VIEWS[0]), 0).unwrap_err();
        assert!(error.contains("shares"), "{error}");
    }

    #[test]
    fn what_a_graph_may_use_is_not_unmapped() {
        let error = captured().follow(&unmap(VIEWS[0])).unwrap_err();
        assert!(error.contains("which a graph of"), "{error}");
        assert_eq!(captured().follow(&unmap(VIEWS[1])), Ok(()));
        let mut released = captured();
        released.pools.end_hold(POOL);
        assert_eq!(released.follow(&unmap(VIEWS[0])), Ok(()));
        let mut allocated = shadow();
        allocated.pools.use_counts.insert(POOL, 1);
        allocated.hand_out(private(VIEWS[0]), 0).unwrap();
        allocated.begin_capture(Stream(1));
        assert!(
            allocated
                .pools
                .captured_in(VIEWS[0], VIEWS[0] + PAGE)
                .is_some()
        );
    }
}
