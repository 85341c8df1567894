//! Checkpoints and restores of pools.

use lowtide_core::{Action, AllocError, Allocation, MempoolId};

use super::checkpoints::{Note, Place, place};
use super::ensure::ensure;
use super::runner::{Effect, Runner};

impl Runner {
    pub(super) fn checkpoint(&mut self, pool: MempoolId) -> Result<Effect, String> {
        let exists = self.allocator.lane().pool(pool).is_ok();
        let checkpoint = match self.allocator.lane().checkpoint(pool) {
            Ok(checkpoint) if exists => checkpoint,
            Err(AllocError::NoSuchPool { .. }) if !exists => return Ok(Effect::Refused),
            other => return Err(format!("a pool that exists, {exists}: {other:?}")),
        };
        let note = Note {
            checkpoint,
            held: self.held_in(pool).map(place).collect(),
            is_doubtful: pool.is_default() || self.shadow.pools.use_count(pool) == 0,
        };
        self.checkpoints.notes.insert(pool, note);
        Ok(Effect::Done)
    }

    pub(super) fn restore(&mut self, pool: MempoolId) -> Result<Effect, String> {
        let Some(note) = self.checkpoints.notes.get(&pool) else {
            return Ok(Effect::Nothing);
        };
        let before: Vec<Allocation> = self.held_in(pool).copied().collect();
        let result = self.allocator.lane_mut().restore(&note.checkpoint);
        match result {
            Ok(restored) => {
                ensure(restored.freed == before, || {
                    format!("{:?} were freed, and held were {before:?}", restored.freed)
                })?;
                let back: Vec<Place> = restored.allocated.iter().map(place).collect();
                ensure(back == note.held, || {
                    format!("{back:?} came back, and held were {:?}", note.held)
                })?;
                self.exchange(&restored.freed, &restored.allocated)?;
                self.check_live(pool)?;
                Ok(Effect::Done)
            }
            Err(AllocError::NoSuchPool { .. }) if note.is_doubtful => Ok(Effect::Refused),
            Err(AllocError::NotRestorable { .. })
                if note.is_doubtful
                    || self.shadow.pools.may_lose_memory
                    || self.shadow.captures > 0 =>
            {
                Ok(Effect::Refused)
            }
            Err(error) => self.unless_fault(Err(error)),
        }
    }

    /// Updates the model with the blocks that a restore exchanged, and reads its events.
    fn exchange(&mut self, freed: &[Allocation], allocated: &[Allocation]) -> Result<(), String> {
        for block in freed {
            self.shadow.free(block.address);
        }
        self.follow_steps()?;
        let events: Vec<_> = self.allocator.lane_mut().event_log().take().collect();
        let now_ns = self.now_ns();
        let mut hands_out = false;
        for event in &events {
            self.ledger.apply(event)?;
            hands_out |= event.action == Action::Alloc;
            // From the first `alloc` event on, blocks are allocated and freed only for show, as PyTorch does it.
            if !hands_out {
                self.shadow.witness(event, now_ns)?;
            }
        }
        for &block in allocated {
            self.shadow.hand_out(block, now_ns)?;
        }
        Ok(())
    }

    fn check_live(&self, pool: MempoolId) -> Result<(), String> {
        let mut held: Vec<_> = self.held_in(pool).copied().collect();
        held.sort_unstable_by_key(|held| held.address);
        let answer = self.allocator.lane().held_blocks(pool);
        ensure(answer.as_ref() == Ok(&held), || {
            format!("{held:?} are held: {answer:?}")
        })
    }

    fn held_in(&self, pool: MempoolId) -> impl Iterator<Item = &Allocation> {
        let held = self.shadow.allocations();
        held.filter(move |held| held.pool == pool)
    }
}
