//! What the program itself knows: which blocks it holds, and until when work may touch them.
//!
//! The model keeps its own clocks for the streams, so that a mistake about events in the allocator or
//! in the simulated driver shows.

use std::collections::BTreeMap;

use lowtide_core::{Action, Allocation, Bytes, Config, DeviceAddress, Event, MempoolId, Stream};

use super::capture_clocks::{CaptureClocks, CapturedWork};

/// The blocks and streams of one program.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    held: BTreeMap<DeviceAddress, Held>,
    /// The same blocks in an order in which an operation can name them.
    addresses: Vec<DeviceAddress>,
    /// Freed memory that work may still touch, or that the allocator has not said is free.
    resting: Vec<Resting>,
    /// When the work queued on a stream is done.
    done_ns: BTreeMap<Stream, u64>,
    pub(super) captures: u32,
    pub(super) captured: CaptureClocks,
    /// Whether memory that a capture freed may serve it again.
    reuses_in_capture: bool,
    /// Bytes of the held blocks, and of the blocks that wait for an event.
    pub(super) held_bytes: Bytes,
    pub(super) pending_bytes: Bytes,
    pub(super) pending: usize,
    /// Bytes asked for, over both.
    pub(super) requested: Bytes,
}

#[derive(Debug)]
struct Held {
    allocation: Allocation,
    /// Its place in [`Shadow::addresses`].
    place: usize,
    uses: Vec<Use>,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    stream: Stream,
    /// The capture that used it there, if that was one and nothing else did: while it goes on, its order is
    /// enough.
    captured_in: Option<u64>,
}

#[derive(Debug)]
struct Resting {
    allocation: Allocation,
    /// When the last work of each stream that used it is done, that of its own stream first.
    ends_ns: Vec<(Stream, u64)>,
    /// Whether other streams, captured ones included, used it.
    has_uses: bool,
    /// What of that was captured, and in no capture that had ended, if it was let go of during one.
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
            ..Shadow::default()
        }
    }

    /// Returns how many blocks the program holds.
    pub(super) fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the held block that an operation names.
    pub(super) fn address(&self, index: u16) -> Option<DeviceAddress> {
        let position = usize::from(index).checked_rem(self.addresses.len())?;
        Some(self.addresses[position])
    }

    /// Returns every held block, by address.
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

    /// Has the next work of `stream` wait for what is now in `other`.
    pub(super) fn wait(&mut self, stream: Stream, other: Stream) {
        if self.captured.capture_of(other).is_some() {
            self.captured.wait(stream, other);
            return;
        }
        let other_done_ns = self.done_ns.get(&other).copied().unwrap_or(0);
        let done_ns = self.done_ns.entry(stream).or_default();
        *done_ns = other_done_ns.max(*done_ns);
    }

    /// Takes note of a block that was handed out.
    ///
    /// # Errors
    ///
    /// A sentence, where it overlaps a block that is held, or memory that work may still touch and
    /// that is not ordered before the new owner's work.
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
        for resting in self
            .resting
            .iter()
            .filter(|resting| overlap(&resting.allocation, &allocation))
        {
            if !resting.is_completed {
                return Err(format!(
                    "{allocation:?} overlaps {resting:?}, which is not free"
                ));
            }
            let busy = |&&(user, end_ns): &&(Stream, u64)| user != stream && end_ns > now_ns;
            if let Some((user, end_ns)) = resting.ends_ns.iter().find(busy) {
                return Err(format!(
                    "{allocation:?} at {now_ns} ns overlaps memory used in {user:?} until {end_ns} ns"
                ));
            }
        }
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
            },
        );
        Ok(())
    }

    /// Takes note that a stream uses a held block.
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

    /// Takes note that the program let go of a block; the events say whether it is free yet.
    pub(super) fn let_go(&mut self, address: DeviceAddress) {
        let held = self
            .held
            .remove(&address)
            .expect("operations name held blocks");
        let Held {
            allocation,
            place,
            uses,
        } = held;
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
            ends_ns,
            has_uses,
            captured,
            is_completed: false,
        });
    }

    /// Checks an event against what the program knows.
    ///
    /// # Errors
    ///
    /// A sentence, where memory is free, or gone, that work may still touch.
    pub(super) fn witness(&mut self, event: &Event, now_ns: u64) -> Result<(), String> {
        match event.action {
            Action::FreeCompleted => self.complete(event.address, now_ns),
            Action::SegmentFree | Action::SegmentUnmap => {
                let (start, end) = (event.address, event.address + event.size);
                let touched = self.resting.iter().find(|resting| {
                    let inside =
                        resting.allocation.address < end && end_of(&resting.allocation) > start;
                    inside && resting.ends_ns.iter().any(|&(_, end_ns)| end_ns > now_ns)
                });
                touched.map_or(Ok(()), |resting| {
                    Err(format!(
                        "{event:?} at {now_ns} ns takes memory under work: {resting:?}"
                    ))
                })
            }
            _ => Ok(()),
        }
    }

    /// Forgets freed memory that no work touches any more.
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

/// Which pools there are, and which requests go to them.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// How often each pool is held; one that is not held may have ended.
    pub(super) use_counts: BTreeMap<MempoolId, u32>,
    /// In the order in which they began; the first that matches decides.
    pub(super) routes: Vec<(MempoolId, Stream)>,
    /// Those that ever served others' requests.
    pub(super) open: Vec<MempoolId>,
}

impl Pools {
    pub(super) fn route(&self, stream: Stream) -> MempoolId {
        let route = self
            .routes
            .iter()
            .rev()
            .find(|&&(_, routed)| routed == stream);
        route.map_or(MempoolId::DEFAULT, |&(pool, _)| pool)
    }

    pub(super) fn use_count(&self, pool: MempoolId) -> u32 {
        let unheld = u32::from(pool.is_default());
        self.use_counts.get(&pool).copied().unwrap_or(unheld)
    }

    pub(super) fn is_routed(&self, pool: MempoolId) -> bool {
        self.routes.iter().any(|&(routed, _)| routed == pool)
    }
}

fn end_of(allocation: &Allocation) -> DeviceAddress {
    allocation.address + allocation.size
}

fn overlap(one: &Allocation, other: &Allocation) -> bool {
    one.address < end_of(other) && other.address < end_of(one)
}
