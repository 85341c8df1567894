//! Programs of valid and invalid calls, against a model that keeps lists and compares every page.
//!
//! Not covered: time and events (tests/time.rs), and the addresses, except that they must not overlap (tests of the
//! address source).

use std::collections::BTreeSet;

use lowtide_core::{Bytes, DeviceAddress, Driver, DriverError, Handle};
use lowtide_sim::{FaultPlan, SimConfig, SimDriver};
use proptest::prelude::*;

const PAGE: u64 = 2 << 20;
const CAPACITY_PAGES: u64 = 24;

/// One call. An index names one of the existing objects. Offsets and sizes are in pages, and `wrong` makes the call
/// invalid.
#[derive(Clone, Debug)]
enum Op {
    Allocate {
        size: u64,
    },
    Free {
        which: usize,
        wrong: u64,
    },
    Reserve {
        pages: u64,
    },
    Unreserve {
        which: usize,
        wrong: u64,
    },
    Create {
        pages: u64,
    },
    Release {
        which: usize,
    },
    Map {
        handle: usize,
        range: usize,
        offset: u64,
        wrong: u64,
    },
    SetAccess {
        range: usize,
        offset: u64,
        pages: u64,
    },
    Unmap {
        range: usize,
        offset: u64,
        pages: u64,
    },
    Access {
        range: usize,
        offset: u64,
        pages: u64,
    },
    Fail,
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0..6usize;
    let size = prop_oneof![
        Just(0),
        1..(2u64 << 20),
        (1..12u64).prop_map(|pages| pages * PAGE),
        Just(3 * PAGE + 1),
    ];
    // Mostly valid, so that programs make progress.
    let wrong = || prop_oneof![9 => Just(0u64), 1 => Just(1)];
    let range = || (0..4usize, 0..6u64, 1..5u64);
    prop_oneof![
        3 => size.prop_map(|size| Op::Allocate { size }),
        2 => (which.clone(), wrong()).prop_map(|(which, wrong)| Op::Free { which, wrong }),
        2 => (0..8u64).prop_map(|pages| Op::Reserve { pages }),
        1 => (which.clone(), wrong()).prop_map(|(which, wrong)| Op::Unreserve { which, wrong }),
        3 => (0..4u64).prop_map(|pages| Op::Create { pages }),
        1 => which.clone().prop_map(|which| Op::Release { which }),
        5 => (which, 0..4usize, 0..6u64, wrong()).prop_map(|(handle, range, offset, wrong)| {
            Op::Map { handle, range, offset, wrong }
        }),
        2 => range().prop_map(|(range, offset, pages)| Op::SetAccess { range, offset, pages }),
        2 => range().prop_map(|(range, offset, pages)| Op::Unmap { range, offset, pages }),
        2 => range().prop_map(|(range, offset, pages)| Op::Access { range, offset, pages }),
        1 => Just(Op::Fail),
    ]
}

/// The model's prediction for a call.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Verdict {
    Done,
    OutOfMemory,
    Broken,
}

fn verdict<T>(answer: &Result<T, DriverError>) -> Verdict {
    match answer {
        Ok(_) => Verdict::Done,
        Err(DriverError::OutOfMemory) => Verdict::OutOfMemory,
        Err(_) => Verdict::Broken,
    }
}

#[derive(Default)]
struct Model {
    allocations: Vec<(u64, u64)>,
    /// Start and number of pages.
    reservations: Vec<(u64, u64)>,
    /// Handle, number of pages, whether it is released.
    handles: Vec<(Handle, u64, bool)>,
    /// Start, number of pages, handle, whether the device has access.
    mappings: Vec<(u64, u64, Handle, bool)>,
}

impl Model {
    /// Returns the bytes of every page with an allocation, and of every handle that is unreleased or mapped.
    fn physical(&self) -> u64 {
        let pages = |&(start, size): &(u64, u64)| start / PAGE..=(start + size - 1) / PAGE;
        let allocated: BTreeSet<u64> = self.allocations.iter().flat_map(pages).collect();
        let held = |&&(handle, _, released): &&(Handle, u64, bool)| {
            !released || self.mappings.iter().any(|mapping| mapping.2 == handle)
        };
        let created: u64 = self
            .handles
            .iter()
            .filter(held)
            .map(|handle| handle.1)
            .sum();
        (allocated.len() as u64 + created) * PAGE
    }

    fn room_for(&self, bytes: u64) -> Verdict {
        let fits = self.physical() + bytes <= CAPACITY_PAGES * PAGE;
        if fits {
            Verdict::Done
        } else {
            Verdict::OutOfMemory
        }
    }

    fn is_reserved(&self, page: u64) -> bool {
        let holds = |&(start, pages): &(u64, u64)| (start..start + pages * PAGE).contains(&page);
        self.reservations.iter().any(holds)
    }

    fn mapping_at(&self, page: u64) -> Option<usize> {
        let holds = |&(start, pages, ..): &(u64, u64, Handle, bool)| {
            (start..start + pages * PAGE).contains(&page)
        };
        self.mappings.iter().position(holds)
    }

    /// Returns the mappings that fill a range exactly, if they do.
    fn whole(&self, start: u64, pages: u64) -> Option<BTreeSet<usize>> {
        let each = (0..pages).map(|page| self.mapping_at(start + page * PAGE));
        let found = each.collect::<Option<BTreeSet<usize>>>()?;
        let total: u64 = found.iter().map(|&index| self.mappings[index].1).sum();
        (total == pages).then_some(found)
    }
}

struct Run {
    driver: SimDriver,
    model: Model,
    broken: usize,
}

impl Run {
    /// Makes one call on both sides and compares the results.
    fn step(&mut self, op: &Op) {
        let (expected, answer) = self.apply(op);
        assert_eq!(answer, expected, "{op:?}");
        self.broken += usize::from(expected == Verdict::Broken);
        assert_eq!(self.driver.violations().len(), self.broken, "{op:?}");
        assert_eq!(
            self.driver.physical_bytes(),
            Bytes(self.model.physical()),
            "{op:?}"
        );
    }

    fn apply(&mut self, op: &Op) -> (Verdict, Verdict) {
        match *op {
            Op::Allocate { size } => self.allocate(size),
            Op::Free { which, wrong } => self.free(which, wrong),
            Op::Reserve { pages } => self.reserve(pages),
            Op::Unreserve { which, wrong } => self.unreserve(which, wrong),
            Op::Create { pages } => self.create(pages),
            Op::Release { which } => self.release(which),
            Op::Map {
                handle,
                range,
                offset,
                wrong,
            } => self.map(handle, range, offset, wrong),
            Op::SetAccess {
                range,
                offset,
                pages,
            } => self.set_access(range, offset, pages),
            Op::Unmap {
                range,
                offset,
                pages,
            } => self.unmap(range, offset, pages),
            Op::Access {
                range,
                offset,
                pages,
            } => self.access(range, offset, pages),
            Op::Fail => self.fail(),
        }
    }

    fn allocate(&mut self, size: u64) -> (Verdict, Verdict) {
        let answer = self.driver.allocate(Bytes(size));
        let expected = match size {
            0 => Verdict::Broken,
            _ if size <= 1 << 20 => {
                // Whether the allocation fits depends on the page that it gets, so the result is checked instead.
                let Ok(DeviceAddress(address)) = answer else {
                    return (self.model.room_for(PAGE), verdict(&answer));
                };
                self.model.allocations.push((address, size));
                assert!(self.model.physical() <= CAPACITY_PAGES * PAGE);
                Verdict::Done
            }
            _ => {
                let expected = self.model.room_for(size.div_ceil(PAGE) * PAGE);
                if let Ok(DeviceAddress(address)) = answer {
                    self.model.allocations.push((address, size));
                }
                expected
            }
        };
        self.check_disjoint();
        (expected, verdict(&answer))
    }

    fn check_disjoint(&self) {
        let mut allocations = self.model.allocations.clone();
        allocations.sort_unstable();
        for pair in allocations.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap");
        }
    }

    fn free(&mut self, which: usize, wrong: u64) -> (Verdict, Verdict) {
        let Some(&(address, size)) = self.model.allocations.get(which) else {
            return (Verdict::Done, Verdict::Done);
        };
        let answer = self
            .driver
            .free(DeviceAddress(address), Bytes(size + wrong));
        if wrong == 0 {
            self.model.allocations.remove(which);
        }
        (broken_if(wrong != 0), verdict(&answer))
    }

    fn reserve(&mut self, pages: u64) -> (Verdict, Verdict) {
        let answer = self.driver.reserve(Bytes(pages * PAGE));
        if let Ok(DeviceAddress(start)) = answer {
            let taken = (0..pages).any(|page| self.model.is_reserved(start + page * PAGE));
            assert!(!taken, "{start:#x} is reserved twice");
            self.model.reservations.push((start, pages));
        }
        (broken_if(pages == 0), verdict(&answer))
    }

    fn unreserve(&mut self, which: usize, wrong: u64) -> (Verdict, Verdict) {
        let Some(&(start, pages)) = self.model.reservations.get(which) else {
            return (Verdict::Done, Verdict::Done);
        };
        let size = Bytes((pages + wrong) * PAGE);
        let answer = self.driver.unreserve(DeviceAddress(start), size);
        let used = (0..pages).any(|page| self.model.mapping_at(start + page * PAGE).is_some());
        let expected = broken_if(wrong != 0 || used);
        if expected == Verdict::Done {
            self.model.reservations.remove(which);
        }
        (expected, verdict(&answer))
    }

    fn create(&mut self, pages: u64) -> (Verdict, Verdict) {
        let expected = match pages {
            0 => Verdict::Broken,
            _ => self.model.room_for(pages * PAGE),
        };
        let answer = self.driver.create(Bytes(pages * PAGE));
        if let Ok(handle) = answer {
            self.model.handles.push((handle, pages, false));
        }
        (expected, verdict(&answer))
    }

    fn release(&mut self, which: usize) -> (Verdict, Verdict) {
        let Some(handle) = self.model.handles.get_mut(which) else {
            return (Verdict::Done, Verdict::Done);
        };
        let expected = broken_if(std::mem::replace(&mut handle.2, true));
        (expected, verdict(&self.driver.release(handle.0)))
    }

    fn map(&mut self, handle: usize, range: usize, offset: u64, wrong: u64) -> (Verdict, Verdict) {
        let (Some(&(handle, pages, released)), Some(start)) =
            (self.model.handles.get(handle), self.place(range, offset))
        else {
            return (Verdict::Done, Verdict::Done);
        };
        let each = || (0..pages).map(|page| start + page * PAGE);
        // A range must lie in one reservation; two adjacent ones do not count as one.
        let within = self.model.reservations.iter().any(|&(from, reserved)| {
            from <= start && start + pages * PAGE <= from + reserved * PAGE
        });
        let vacant = each().all(|page| self.model.mapping_at(page).is_none());
        let expected = broken_if(wrong != 0 || released || !within || !vacant);
        let size = Bytes((pages + wrong) * PAGE);
        let answer = self.driver.map(DeviceAddress(start), size, handle);
        if expected == Verdict::Done {
            self.model.mappings.push((start, pages, handle, false));
        }
        (expected, verdict(&answer))
    }

    fn set_access(&mut self, range: usize, offset: u64, pages: u64) -> (Verdict, Verdict) {
        let Some(start) = self.place(range, offset) else {
            return (Verdict::Done, Verdict::Done);
        };
        let whole = self.model.whole(start, pages);
        let expected = broken_if(whole.is_none());
        for index in whole.into_iter().flatten() {
            self.model.mappings[index].3 = true;
        }
        let answer = self
            .driver
            .set_access(DeviceAddress(start), Bytes(pages * PAGE));
        (expected, verdict(&answer))
    }

    fn unmap(&mut self, range: usize, offset: u64, pages: u64) -> (Verdict, Verdict) {
        let Some(start) = self.place(range, offset) else {
            return (Verdict::Done, Verdict::Done);
        };
        let whole = self.model.whole(start, pages);
        let expected = broken_if(whole.is_none());
        for index in whole.into_iter().flatten().rev() {
            self.model.mappings.remove(index);
        }
        let answer = self.driver.unmap(DeviceAddress(start), Bytes(pages * PAGE));
        (expected, verdict(&answer))
    }

    fn access(&mut self, range: usize, offset: u64, pages: u64) -> (Verdict, Verdict) {
        let Some(start) = self.place(range, offset) else {
            return (Verdict::Done, Verdict::Done);
        };
        let open = (0..pages).all(|page| {
            let mapping = self.model.mapping_at(start + page * PAGE);
            mapping.is_some_and(|index| self.model.mappings[index].3)
        });
        let answer = self
            .driver
            .access(DeviceAddress(start), Bytes(pages * PAGE));
        (broken_if(!open), verdict(&answer))
    }

    /// Makes a call that would succeed, but is failed by the plan.
    fn fail(&mut self) -> (Verdict, Verdict) {
        self.driver
            .set_faults(FaultPlan::nth_of_any(1, DriverError::OutOfMemory));
        let answer = self.driver.reserve(Bytes(PAGE));
        (Verdict::OutOfMemory, verdict(&answer))
    }

    /// Returns an address some pages into the reservation with this number.
    fn place(&self, range: usize, offset: u64) -> Option<u64> {
        let &(start, _) = self.model.reservations.get(range)?;
        Some(start + offset * PAGE)
    }
}

fn broken_if(broken: bool) -> Verdict {
    if broken {
        Verdict::Broken
    } else {
        Verdict::Done
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_driver_agrees_with_the_model(program in proptest::collection::vec(op(), 1..60)) {
        let config = SimConfig {
            capacity: Some(Bytes(CAPACITY_PAGES * PAGE)),
            ..SimConfig::default()
        };
        let mut run = Run { driver: SimDriver::new(config), model: Model::default(), broken: 0 };
        for op in &program {
            run.step(op);
        }
    }
}
