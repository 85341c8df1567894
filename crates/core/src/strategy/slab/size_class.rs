//! Size classes: eight for each power of two, so that at most an eighth of a block is lost to rounding.

use crate::strategy::buddy::arenas::GRANULE;
use crate::strategy::buddy::forest::Run;
use crate::units::Bytes;

/// Each power of two from 4 KiB on is divided into this many classes.
const STEPS_LOG2: u32 = 3;

/// The step between sizes up to 4 KiB, and the smallest alignment: the driver's own addresses have it too.
const STEP_MIN_LOG2: u32 = 9;

/// Blocks up to this are objects of a slab; larger ones are runs of their own.
const OBJECT_MAX: Bytes = Bytes::kib(64);

/// No slab is larger. With [`OBJECT_MAX`], a slab has at least eight objects.
const SLAB_MAX: Bytes = Bytes::kib(512);

/// A slab has at most 64 objects: its free objects are the bits of a word.
const OBJECTS_MAX_LOG2: u32 = u64::BITS.ilog2();

/// How many classes have slabs.
pub(super) const OBJECT_CLASSES: usize = SizeClass::of(OBJECT_MAX).index() + 1;

/// The class of the sizes that are rounded up to `units << step_log2` bytes, with up to 16 units.
///
/// From 4 KiB on there are 9 to 16 units, so rounding adds less than an eighth of the request. A run can have any
/// number of units up to 16, so a block, and a slab of 2ⁿ objects, fills its run exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SizeClass {
    units: u64,
    step_log2: u32,
}

impl SizeClass {
    /// Returns the class of a size from 1 byte to [`Bytes::REQUEST_MAX`].
    #[inline]
    pub(super) const fn of(size: Bytes) -> SizeClass {
        let last = size.get() - 1;
        let step_log2 = (last | 1).ilog2().saturating_sub(STEPS_LOG2);
        let step_log2 = if step_log2 < STEP_MIN_LOG2 {
            STEP_MIN_LOG2
        } else {
            step_log2
        };
        SizeClass {
            units: (last >> step_log2) + 1,
            step_log2,
        }
    }

    /// Returns the size of the class's blocks.
    #[inline]
    pub(super) const fn size(self) -> Bytes {
        Bytes(self.units << self.step_log2)
    }

    /// Returns the number of the class. Classes of larger sizes have larger numbers.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "there are at most 16 units, and a usize has 64 bits or 32"
    )]
    pub(super) const fn index(self) -> usize {
        (((self.step_log2 - STEP_MIN_LOG2) << STEPS_LOG2) as usize) + self.units as usize - 1
    }

    /// Returns whether the class's blocks are objects of slabs.
    #[inline]
    pub(super) const fn has_slabs(self) -> bool {
        self.size().get() <= OBJECT_MAX.get()
    }

    /// Returns the binary logarithm of how many blocks a run of the class holds: one block, or as many objects as
    /// fit [`SLAB_MAX`].
    #[inline]
    pub(super) const fn objects_log2(self) -> u32 {
        if !self.has_slabs() {
            return 0;
        }
        let fitting = (SLAB_MAX.get() / self.size().get().next_power_of_two()).ilog2();
        if fitting < OBJECTS_MAX_LOG2 {
            fitting
        } else {
            OBJECTS_MAX_LOG2
        }
    }

    /// Returns the run of the class: one block, or a slab of them.
    #[inline]
    pub(super) const fn run(self) -> Run {
        Run {
            units: self.units,
            order: self.step_log2 + self.objects_log2() - GRANULE.get().ilog2(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Checks that a request's block is large enough. Above 4 KiB, the excess must be at most an eighth of the
    /// block and at most an eighth of the request.
    fn check(requested: u64) {
        let class = SizeClass::of(Bytes(requested));
        let size = class.size().get();
        assert!(size >= requested, "{requested}");
        let waste = size - requested;
        if requested > 4096 {
            assert!(waste * 8 <= size && waste * 8 <= requested, "{requested}");
        } else {
            assert!(waste < 512, "{requested}");
        }
        assert_eq!(
            SizeClass::of(class.size()),
            class,
            "a class holds its own size"
        );
        let run = class.run();
        assert!((1..=16).contains(&run.units), "{requested}");
        let run_size = size << class.objects_log2();
        assert_eq!(run.granules() * GRANULE.get(), run_size, "{requested}");
    }

    #[test]
    fn at_most_an_eighth_is_wasted() {
        (1..=1 << 21).for_each(check);
        // Sizes on both sides of each class's size, beyond 32 bits.
        for bit in 9..60 {
            for units in 8..16_u64 {
                let size = (units << bit) >> 3;
                [size - 1, size, size + 1].into_iter().for_each(check);
            }
        }
        check(Bytes::REQUEST_MAX.get());
    }

    #[test]
    fn numbers_rise_by_one_with_the_classes() {
        let mut class = SizeClass::of(Bytes(1));
        assert_eq!(class.index(), 0);
        while class.size() < Bytes::REQUEST_MAX {
            let next = SizeClass::of(Bytes(class.size().get() + 1));
            assert_eq!(next.index(), class.index() + 1);
            class = next;
        }
    }

    #[test]
    fn a_class_has_as_many_objects_as_its_slab_holds() {
        let objects = |kib| 1 << SizeClass::of(Bytes::kib(kib)).objects_log2();
        assert_eq!([1, 8, 9, 16, 60, 64].map(objects), [64, 64, 32, 32, 8, 8]);
        assert_eq!(SizeClass::of(Bytes::kib(66)).size(), Bytes::kib(72));
    }

    proptest! {
        #[test]
        fn any_size_wastes_at_most_an_eighth(requested in 1..=Bytes::gib(16).get()) {
            check(requested);
        }
    }
}
