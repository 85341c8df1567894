//! The checks that run between any two operations, and after the last.

use lowtide_core::{AllocError, BlockStatus, Bytes, CheckLevel, SegmentSnapshot, Stream};

use super::Op;
use super::ensure::{ensure, ensure_equal};
use super::runner::{Effect, Runner};
use crate::FaultPlan;

impl Runner {
    /// Checks everything: the allocator's own invariants, the snapshot, that the events alone give the same blocks,
    /// and that the device may access every allocated block. O(n log n) for n blocks.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub fn check(&mut self) -> Result<(), String> {
        self.allocator
            .lane()
            .check_invariants(CheckLevel::Everything)?;
        self.check_snapshot()?;
        self.read_events()?;
        let held = self
            .shadow
            .allocations()
            .map(|held| (held.address, held.requested));
        ensure(held.eq(self.ledger.held()), || {
            "the events lead to other blocks".into()
        })?;
        for held in self.shadow.allocations() {
            let known = self.allocator.lane().allocation(held.address);
            ensure(known.as_ref() == Ok(held), || {
                format!("{held:?} became {known:?}")
            })?;
            let access = self.allocator.driver().access(held.address, held.size);
            access.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Frees every block, ends every pool and capture, and releases everything. Checks that the device has all its
    /// memory again, and that the allocator still serves a request.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub fn finish(mut self) -> Result<(), String> {
        self.allocator.driver().set_faults(FaultPlan::none());
        self.fault = None;
        self.apply(&Op::SetLimit { limit: None })?;
        while self.shadow.captures > 0 {
            self.apply(&Op::CaptureEnd)?;
        }
        while self.shadow.len() > 0 {
            self.apply(&Op::Free { index: 0 })?;
        }
        let pools: Vec<_> = self.shadow.pools.use_counts.keys().copied().collect();
        for &pool in &pools {
            self.apply(&Op::EndPool { pool })?;
            while self.shadow.pools.use_count(pool) > 0 {
                self.apply(&Op::ReleasePool { pool })?;
            }
        }
        self.give_everything_back()?;
        for pool in pools.into_iter().filter(|pool| !pool.is_default()) {
            let answer = self.allocator.lane().pool(pool);
            ensure(answer == Err(AllocError::NoSuchPool { pool }), || {
                format!("{pool:?} has ended, and the allocator says {answer:?}")
            })?;
        }
        let again = Op::Alloc {
            size: Bytes::mib(3),
            stream: Stream(7),
            pool: None,
        };
        let effect = self.apply(&again)?;
        ensure(effect == Effect::Done, || {
            "an empty allocator serves no more".into()
        })?;
        self.apply(&Op::Free { index: 0 })?;
        self.give_everything_back()
    }

    fn give_everything_back(&mut self) -> Result<(), String> {
        self.apply(&Op::EmptyCache)?;
        self.check()?;
        let stats = self.allocator.stats();
        for (what, figure) in [
            ("allocated", stats.allocated_bytes),
            ("active", stats.active_bytes),
            ("requested", stats.requested_bytes),
            ("reserved", stats.reserved_bytes),
        ] {
            let held = figure.all.current.unsigned_abs();
            ensure_equal(&format!("{what} bytes of an empty allocator"), held, 0)?;
        }
        let leaks = self.allocator.driver().leaks();
        ensure(leaks.is_empty(), || {
            format!("the device did not get back: {leaks:?}")
        })
    }

    pub(super) fn check_figures(&mut self) -> Result<(), String> {
        self.allocator
            .lane()
            .check_invariants(CheckLevel::Figures)?;
        let created = self.allocator.driver().created_bytes();
        let stats = self.allocator.stats();
        let (shadow, ledger) = (&self.shadow, &self.ledger);
        let held_bytes = shadow.held_bytes.get();
        let count = |blocks: usize| blocks as u64;
        for (what, figures, known) in [
            ("held blocks", stats.allocation, count(shadow.len())),
            (
                "active blocks",
                stats.active,
                count(shadow.len() + shadow.pending),
            ),
            ("allocated bytes", stats.allocated_bytes, held_bytes),
            (
                "active bytes",
                stats.active_bytes,
                held_bytes + shadow.pending_bytes.get(),
            ),
            (
                "requested bytes",
                stats.requested_bytes,
                shadow.requested.get(),
            ),
            (
                "requested bytes of the events",
                stats.requested_bytes,
                ledger.active_requested().get(),
            ),
        ] {
            ensure_equal(what, figures.all.current.unsigned_abs(), known)?;
        }
        ensure_equal("requests without memory", ledger.ooms, self.ooms)?;
        let reserved = (ledger.whole_bytes + ledger.mapped_bytes).get();
        let kept = stats.reserved().get().checked_sub(reserved);
        ensure(
            kept == Some(0) || (self.had_fault && kept.is_some()),
            || {
                format!(
                    "reserved bytes: {reserved} by the events, {:?} by the figures",
                    stats.reserved()
                )
            },
        )?;
        ensure_equal(
            "reserved bytes on the device",
            stats.reserved().get(),
            (created + ledger.whole_bytes).get(),
        )
    }

    /// Checks that reserved memory does not grow above the limit. `before` is what was reserved before the
    /// operation, possibly above the limit.
    pub(super) fn check_limit(&self, before: Bytes) -> Result<(), String> {
        let Some(limit) = self.allocator.limit() else {
            return Ok(());
        };
        let reserved = self.allocator.stats().reserved();
        ensure(reserved <= before.max(limit + self.limit_slack), || {
            format!("{reserved:?} are held where {limit:?} are allowed, and before {before:?}")
        })
    }

    pub(super) fn check_device(&mut self) -> Result<(), String> {
        let violations = self.allocator.driver().violations();
        ensure(violations.is_empty(), || {
            format!("rules of the driver were broken: {violations:?}")
        })
    }

    /// Checks that the segments of a snapshot are sorted and do not overlap, that their blocks cover them exactly,
    /// and that all of it agrees with the statistics.
    fn check_snapshot(&mut self) -> Result<(), String> {
        let segments = self.allocator.snapshot().segments;
        for pair in segments.windows(2) {
            ensure(pair[0].address + pair[0].size <= pair[1].address, || {
                format!(
                    "the segments at {} and {} overlap",
                    pair[0].address, pair[1].address
                )
            })?;
        }
        let mut held = Vec::new();
        for segment in &segments {
            let mut end = segment.address;
            for block in &segment.blocks {
                ensure(block.address == end && !block.size.is_zero(), || {
                    format!("{block:?} does not start at {end}, where the one before it ends")
                })?;
                end = end + block.size;
                if block.status == BlockStatus::Allocated {
                    held.push((
                        block.address,
                        block.size,
                        block.requested,
                        segment.stream,
                        segment.pool,
                    ));
                }
            }
            ensure(end == segment.address + segment.size, || {
                format!(
                    "the blocks of the segment at {} end at {end}",
                    segment.address
                )
            })?;
        }
        let known = self.shadow.allocations();
        let known = known.map(|held| {
            (
                held.address,
                held.size,
                held.requested,
                held.stream,
                held.pool,
            )
        });
        ensure(known.eq(held), || {
            "the snapshot shows other blocks than the program holds".into()
        })?;
        let sum = |of: fn(&SegmentSnapshot) -> Bytes| segments.iter().map(of).sum::<Bytes>().get();
        let active = self.shadow.held_bytes + self.shadow.pending_bytes;
        ensure_equal(
            "active bytes of the snapshot",
            sum(|segment| segment.active_bytes()),
            active.get(),
        )?;
        let requested = sum(|segment| segment.requested_bytes());
        ensure_equal(
            "requested bytes of the snapshot",
            requested,
            self.shadow.requested.get(),
        )?;
        let reserved = self.ledger.whole_bytes + self.ledger.mapped_bytes;
        ensure_equal(
            "bytes of the snapshot",
            sum(|segment| segment.size),
            reserved.get(),
        )?;
        self.check_sums()
    }

    /// Checks that each current value is the sum of what was allocated less the sum of what was freed.
    fn check_sums(&self) -> Result<(), String> {
        if self.had_reset {
            return Ok(());
        }
        let stats = self.allocator.stats();
        let pools = [
            stats.allocation,
            stats.segment,
            stats.active,
            stats.inactive_split,
            stats.allocated_bytes,
            stats.reserved_bytes,
            stats.active_bytes,
            stats.inactive_split_bytes,
            stats.requested_bytes,
        ];
        let pools = pools
            .iter()
            .flat_map(|pools| [pools.all, pools.large_pool, pools.small_pool]);
        for stat in pools.chain([stats.oversize_allocations, stats.oversize_segments]) {
            ensure(stat.current == stat.allocated - stat.freed, || {
                format!("a figure is not what came less what went: {stat:?}")
            })?;
        }
        Ok(())
    }
}
