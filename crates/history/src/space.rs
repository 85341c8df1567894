//! The reserved memory at an instant and its free bytes, updated event by event.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, Fragmentation, FreeBytes, MempoolId, Stream};

/// The stream and pool of a segment, and its kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Domain {
    pub(crate) stream: Stream,
    pub(crate) pool: MempoolId,
    pub(crate) is_large: bool,
    pub(crate) is_expandable: bool,
}

/// Memory that is released to the driver as a whole: a segment, or a page of an expandable segment. Adjacent pages
/// that are all unused, or all fully used, are one unit, because a range may have any number of pages.
#[derive(Clone, Copy, Debug)]
struct Unit {
    end: u64,
    /// The bytes in blocks.
    used: u64,
    /// The number of its domain.
    domain: usize,
    /// Whether it is paused. It then counts nowhere.
    is_away: bool,
}

/// The reserved memory, by address and by domain.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    /// The units by their start. No two overlap.
    units: BTreeMap<u64, Unit>,
    /// The free bytes of each domain. There are few domains.
    domains: Vec<(Domain, FreeBytes)>,
    /// The stream whose fragmentation is kept.
    stream: Stream,
    /// The size of the pages of large expandable segments.
    large_page: Bytes,
    fragmentation: Fragmentation,
}

impl Space {
    pub(crate) fn new(stream: Stream, large_page: Bytes) -> Space {
        Space {
            units: BTreeMap::new(),
            domains: Vec::new(),
            stream,
            large_page,
            fragmentation: Fragmentation::default(),
        }
    }

    /// Returns the current fragmentation. The caller updates `live`, `rounding` and `waiting_for_events` for blocks.
    pub(crate) fn fragmentation_mut(&mut self) -> &mut Fragmentation {
        &mut self.fragmentation
    }

    /// Returns the fragmentation that a request in `stream` sees.
    pub(crate) fn fragmentation_for(&self, stream: Stream) -> Fragmentation {
        let mut fragmentation = self.fragmentation;
        for (_, free) in &self.domains {
            count(&mut fragmentation, free, self.stream, |cause, bytes| {
                *cause -= bytes
            });
            count(&mut fragmentation, free, stream, |cause, bytes| {
                *cause += bytes
            });
        }
        fragmentation
    }

    /// Returns the domain of the memory at `address`.
    pub(crate) fn domain_at(&self, address: u64) -> Option<Domain> {
        let (_, unit) = self.units.range(..=address).next_back()?;
        (address < unit.end).then(|| self.domains[unit.domain].0)
    }

    /// Adds the `size` bytes at `start`. Returns `false`, and changes nothing, if some of them exist already or
    /// `size` is zero.
    pub(crate) fn insert(&mut self, start: u64, size: Bytes, domain: Domain) -> bool {
        let end = start.saturating_add(size.get());
        let before = self.units.range(..end).next_back();
        if start == end || before.is_some_and(|(_, unit)| unit.end > start) {
            return false;
        }
        let number = self.domain_number(domain);
        let unit = Unit {
            end,
            used: 0,
            domain: number,
            is_away: false,
        };
        self.units.insert(start, unit);
        self.fragmentation.reserved += Bytes(end - start);
        self.change_free(number, |free| {
            free.free += Bytes(end - start);
            free.releasable += Bytes(end - start);
        });
        true
    }

    /// Removes the `size` bytes at `start`. Returns `false`, and changes nothing, unless they are whole units
    /// without blocks.
    pub(crate) fn remove(&mut self, start: u64, size: Bytes) -> bool {
        let end = start.saturating_add(size.get());
        let Some((domain, false)) = self.whole_units(start, end) else {
            return false;
        };
        if self.units.range(start..end).any(|(_, unit)| unit.used > 0) {
            return false;
        }
        while let Some((&from, _)) = self.units.range(start..end).next() {
            self.units.remove(&from);
        }
        self.fragmentation.reserved -= size;
        self.change_free(domain, |free| {
            free.free -= size;
            free.releasable -= size;
        });
        true
    }

    /// Pauses or resumes the `size` bytes at `start`, with their blocks. Returns `false`, and changes nothing,
    /// unless they are whole units in the opposite state.
    pub(crate) fn set_away(&mut self, start: u64, size: Bytes, is_away: bool) -> bool {
        let end = start.saturating_add(size.get());
        let units = self.whole_units(start, end);
        let Some((domain, _)) = units.filter(|(_, was_away)| is_away != *was_away) else {
            return false;
        };
        let (free, releasable) = self.free_in(start, end);
        for (_, unit) in self.units.range_mut(start..end) {
            unit.is_away = is_away;
        }
        let change =
            |bytes: &mut Bytes, by: Bytes| if is_away { *bytes -= by } else { *bytes += by };
        change(&mut self.fragmentation.reserved, size);
        self.change_free(domain, |of_domain| {
            change(&mut of_domain.free, free);
            change(&mut of_domain.releasable, releasable);
        });
        true
    }

    /// Splits the unit around an address there, if a page begins at the address.
    fn cut(&mut self, address: u64) {
        let Some((&start, &unit)) = self.units.range(..address).next_back() else {
            return;
        };
        let begins_page = |page: u64| (address - start).is_multiple_of(page);
        if address < unit.end && self.page(unit.domain).is_some_and(begins_page) {
            let part = |start: u64, end: u64| Unit {
                end,
                used: if unit.used == 0 { 0 } else { end - start },
                ..unit
            };
            self.units.insert(start, part(start, address));
            self.units.insert(address, part(address, unit.end));
        }
    }

    /// Makes the page around an address a unit of its own.
    fn cut_out(&mut self, address: u64) {
        if let Some((&start, unit)) = self.units.range(..=address).next_back()
            && address < unit.end
            && let Some(page) = self.page(unit.domain)
        {
            let page_start = address - (address - start) % page;
            self.cut(page_start);
            self.cut(page_start.saturating_add(page));
        }
    }

    /// Returns the page size of a domain of expandable segments; `None` for other domains.
    fn page(&self, domain: usize) -> Option<u64> {
        let (domain, _) = self.domains[domain];
        let page = if domain.is_large {
            self.large_page
        } else {
            FreeBytes::SMALL_PAGE
        };
        domain.is_expandable.then_some(page.get())
    }

    /// Returns the domain of a range and whether it is paused, if the range consists of whole units of one domain
    /// that are all paused or all not. Splits the units around its ends, if pages begin there.
    fn whole_units(&mut self, start: u64, end: u64) -> Option<(usize, bool)> {
        self.cut(start);
        self.cut(end);
        let mut reached = start;
        let mut found = None;
        for (&from, unit) in self.units.range(start..end) {
            let kind = (unit.domain, unit.is_away);
            if from != reached || found.is_some_and(|other| other != kind) {
                return None;
            }
            reached = unit.end;
            found = Some(kind);
        }
        found.filter(|_| reached == end)
    }

    /// Returns how many of the `size` bytes at `address` lie in one segment, without a hole.
    pub(crate) fn covered(&self, address: u64, size: Bytes) -> Bytes {
        let Some((_, first)) = self.units.range(..=address).next_back() else {
            return Bytes::ZERO;
        };
        let end = address.saturating_add(size.get());
        let mut reached = first.end;
        while reached < end
            && let Some(next) = self.units.get(&reached)
            && next.domain == first.domain
            && self.domains[next.domain].0.is_expandable
        {
            reached = next.end;
        }
        Bytes(reached.min(end).saturating_sub(address))
    }

    /// Calls `act` with the start and end of each range of a stream and a pool in which adjacent free memory
    /// merges, by address. Paused memory is left out.
    pub(crate) fn each_run(&self, stream: Stream, pool: MempoolId, mut act: impl FnMut(u64, u64)) {
        let mut run: Option<(u64, u64, usize)> = None;
        for (&start, unit) in &self.units {
            let (domain, _) = self.domains[unit.domain];
            if unit.is_away || domain.stream != stream || domain.pool != pool {
                continue;
            }
            match &mut run {
                Some((_, end, number))
                    if *end == start && *number == unit.domain && domain.is_expandable =>
                {
                    *end = unit.end;
                }
                _ => {
                    if let Some((start, end, _)) = run.replace((start, unit.end, unit.domain)) {
                        act(start, end);
                    }
                }
            }
        }
        if let Some((start, end, _)) = run {
            act(start, end);
        }
    }

    /// Returns the distance from `address`, which is not reserved, to the next reserved address.
    pub(crate) fn room_at(&self, address: u64) -> Bytes {
        let next = self.units.range(address..).next();
        Bytes(next.map_or(u64::MAX, |(&next, _)| next) - address)
    }

    /// Adds a block in reserved memory. Returns `false`, and changes nothing, if it does not fit beside the others.
    pub(crate) fn occupy(&mut self, address: u64, size: Bytes) -> bool {
        self.cut_out(address);
        self.cut_out(address.saturating_add(size.get()).saturating_sub(1));
        self.each_unit(address, size, |length, used, inside| {
            (used + inside <= length).then(|| used + inside)
        })
    }

    /// Removes a block that was added.
    pub(crate) fn vacate(&mut self, address: u64, size: Bytes) {
        let was_there = self.each_unit(address, size, |_, used, inside| used.checked_sub(inside));
        debug_assert!(was_there, "a block of {size} at {address:#x}");
    }

    /// Changes the used bytes of each unit that a block overlaps. `change` receives a unit's length and used bytes,
    /// and the bytes of the block in it. If it returns `None` for one unit, none is changed, and this returns `false`.
    fn each_unit(
        &mut self,
        address: u64,
        size: Bytes,
        change: impl Fn(u64, u64, u64) -> Option<u64>,
    ) -> bool {
        let end = address + size.get();
        let Some((&first, _)) = self.units.range(..=address).next_back() else {
            return false;
        };
        let inside = |start: u64, unit: &Unit| end.min(unit.end) - address.max(start);
        let changes = |(&start, unit): (&u64, &Unit)| {
            change(unit.end - start, unit.used, inside(start, unit)).is_some()
        };
        if !self.units.range(first..end).all(changes) {
            return false;
        }
        let (free_before, whole_before) = self.free_in(first, end);
        for (&start, unit) in self.units.range_mut(first..end) {
            let inside = inside(start, unit);
            unit.used = change(unit.end - start, unit.used, inside).unwrap_or(unit.used);
        }
        let Unit {
            domain, is_away, ..
        } = self.units[&first];
        if is_away {
            return true;
        }
        let (free_after, whole_after) = self.free_in(first, end);
        self.change_free(domain, |free| {
            free.free = free.free + free_after - free_before;
            free.releasable = free.releasable + whole_after - whole_before;
        });
        true
    }

    /// Returns the free bytes in the units from `start` to `end`, and those in units without blocks.
    fn free_in(&self, start: u64, end: u64) -> (Bytes, Bytes) {
        let (mut free, mut whole) = (Bytes::ZERO, Bytes::ZERO);
        for (&start, unit) in self.units.range(start..end) {
            let length = unit.end - start;
            free += Bytes(length - unit.used);
            whole += Bytes(if unit.used == 0 { length } else { 0 });
        }
        (free, whole)
    }

    /// Changes a domain's free bytes, and updates the fragmentation.
    fn change_free(&mut self, domain: usize, change: impl FnOnce(&mut FreeBytes)) {
        let (_, free) = &mut self.domains[domain];
        let stream = self.stream;
        count(&mut self.fragmentation, free, stream, |cause, bytes| {
            *cause -= bytes
        });
        change(free);
        count(&mut self.fragmentation, free, stream, |cause, bytes| {
            *cause += bytes
        });
    }

    fn domain_number(&mut self, domain: Domain) -> usize {
        let known = self.domains.iter().position(|(known, _)| *known == domain);
        known.unwrap_or_else(|| {
            let free = FreeBytes {
                stream: domain.stream,
                pool: domain.pool,
                is_expandable: domain.is_expandable,
                free: Bytes::ZERO,
                releasable: Bytes::ZERO,
            };
            self.domains.push((domain, free));
            self.domains.len() - 1
        })
    }
}

/// Changes the causes to which free bytes belong.
fn count(
    fragmentation: &mut Fragmentation,
    free: &FreeBytes,
    stream: Stream,
    change: impl Fn(&mut Bytes, Bytes),
) {
    for (cause, bytes) in free.causes(stream) {
        change(fragmentation.of_cause_mut(cause), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file of some bytes may contain a mapping of 16 TiB.
    #[test]
    fn pages_are_apart_only_where_blocks_are() {
        let mut space = Space::new(Stream::DEFAULT, Bytes::mib(20));
        let domain = Domain {
            stream: Stream::DEFAULT,
            pool: MempoolId::DEFAULT,
            is_large: true,
            is_expandable: true,
        };
        let all = Bytes::gib(16 << 10);
        assert!(space.insert(0, all, domain));
        assert_eq!(space.units.len(), 1);
        // A part of one page, and parts of two pages with whole pages between them.
        let blocks = [(50 * MIB, Bytes::mib(5)), (70 * MIB, Bytes::gib(8 << 10))];
        for (address, size) in blocks {
            assert!(space.occupy(address, size));
        }
        assert!(space.units.len() <= 8, "{:?}", space.units);
        let cached = |space: &mut Space| space.fragmentation_mut().causes[4];
        let (start, end) = (40 * MIB, (8 << 40) + 70 * MIB);
        let whole = start + (16 << 40) - end.next_multiple_of(20 * MIB);
        assert_eq!(cached(&mut space).get(), whole);
        assert!(!space.remove(60 * MIB, Bytes::mib(20)), "a block is there");
        for (address, size) in blocks {
            space.vacate(address, size);
        }
        assert_eq!(cached(&mut space), all);
        assert!(
            !space.remove(30 * MIB, Bytes::mib(20)),
            "no page begins there"
        );
        assert!(space.remove(60 * MIB, Bytes::mib(20)));
        assert_eq!(space.fragmentation_mut().reserved, all - Bytes::mib(20));
    }
}
