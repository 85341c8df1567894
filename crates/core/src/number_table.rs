//! A hash table of numbers whose keys are stored elsewhere.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::units::DeviceAddress;

/// The numbers that a bucket has room for.
const BUCKET_LEN: usize = 6;

/// The smallest number of buckets: 256 bytes.
const BUCKETS_MIN_LOG2: u32 = 3;

/// A set of numbers, each found by the hash of its key.
///
/// A bucket is half a cache line, with a byte of the hash for each number. Keys are likely not in the cache, and
/// thanks to that byte a wrong key is rarely read. A full bucket passes numbers on to the next one and counts
/// them, so nothing has to move when a number is removed. Compare Knuth, The Art of Computer Programming, volume
/// 3, 6.4, and Abseil's tables, which compare many such bytes at once. At most three in five places are in use,
/// on average less than half: 13 bytes per number.
#[derive(Debug)]
pub(crate) struct NumberTable {
    /// A power of two of them.
    buckets: Vec<Bucket>,
    /// A hash shifted right by this is its bucket's index.
    shift: u32,
    len: usize,
    /// Receives the address of the buckets, for prefetches.
    hint: Option<&'static SearchHint>,
}

/// Room for a few numbers.
#[derive(Clone, Copy, Default, Debug)]
#[repr(align(32))]
struct Bucket {
    /// A byte for each place, zero if it is vacant. The bits above count the numbers that were passed on to the
    /// next bucket.
    control: u64,
    numbers: [u32; BUCKET_LEN],
}

/// One in the byte of each place.
const EACH: u64 = 0x0101_0101_0101;
/// The uppermost bit in the byte of each place.
const EACH_TOP: u64 = EACH << 7;
/// One number that was passed on.
const PASSED_ON: u64 = 1 << (8 * BUCKET_LEN);
/// The largest count of numbers passed on.
const PASSED_ON_MAX: u64 = !(PASSED_ON - 1);

impl Bucket {
    /// Returns the places whose byte is `tag`, as the uppermost bits of their bytes. Rarely, it also returns a
    /// place above such a place whose byte differs.
    #[inline]
    fn places_of(&self, tag: u64) -> u64 {
        let difference = self.control ^ (tag * EACH);
        // A byte that is zero borrows from its uppermost bit (Mycroft, 1987).
        difference.wrapping_sub(EACH) & !difference & EACH_TOP
    }

    /// Returns the place of a number that has a tag.
    #[inline]
    fn place_of(&self, tag: u64, is_it: impl Fn(NonZeroU32) -> bool) -> Option<usize> {
        let mut places = self.places_of(tag);
        while places != 0 {
            let place = first_of(places);
            if NonZeroU32::new(self.numbers[place]).is_some_and(&is_it) {
                return Some(place);
            }
            places &= places - 1;
        }
        None
    }

    #[inline]
    fn has_passed_on(&self) -> bool {
        self.control >= PASSED_ON
    }

    /// Counts a number that was passed on. A count that reaches the maximum stays there.
    #[inline]
    fn pass_on(&mut self) {
        if self.control < PASSED_ON_MAX {
            self.control += PASSED_ON;
        }
    }

    /// Subtracts a number that was passed on.
    #[inline]
    fn subtract(&mut self) {
        if self.control < PASSED_ON_MAX {
            self.control -= PASSED_ON;
        }
    }
}

/// Returns the lowest place of several.
#[inline]
fn first_of(places: u64) -> usize {
    (places.trailing_zeros() / 8) as usize
}

/// Returns the byte that represents a hash in its bucket: never zero, and from other bits than the bucket's index.
#[inline]
fn tag_of(hash: u32) -> u64 {
    u64::from(hash & 0xff).max(1)
}

impl NumberTable {
    pub(crate) fn new() -> NumberTable {
        NumberTable {
            buckets: vec![Bucket::default(); 1 << BUCKETS_MIN_LOG2],
            shift: u32::BITS - BUCKETS_MIN_LOG2,
            len: 0,
            hint: None,
        }
    }

    /// Publishes in `hint` where searches begin, now and whenever that changes.
    pub(crate) fn keep_hint(&mut self, hint: &'static SearchHint) {
        self.hint = Some(hint);
        hint.set(&self.buckets, self.shift);
    }

    /// Returns the number whose hash is `hash` and that `is_it` accepts. Constant time.
    #[inline]
    pub(crate) fn find(&self, hash: u32, is_it: impl Fn(NonZeroU32) -> bool) -> Option<NonZeroU32> {
        let index = self.first_bucket(hash);
        let bucket = &self.buckets[index];
        // Nearly always the first number with the tag is the right one.
        let place = first_of(bucket.places_of(tag_of(hash)));
        let number = bucket.numbers.get(place).copied().and_then(NonZeroU32::new);
        match number {
            Some(number) if is_it(number) => Some(number),
            _ => self.find_from(index, hash, is_it),
        }
    }

    /// Checks every number with the tag, bucket by bucket. Each bucket is visited at most once, because all of them
    /// may have passed numbers on, even if few are left.
    #[inline(never)]
    fn find_from(
        &self,
        mut index: usize,
        hash: u32,
        is_it: impl Fn(NonZeroU32) -> bool,
    ) -> Option<NonZeroU32> {
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[index];
            if let Some(place) = bucket.place_of(tag_of(hash), &is_it) {
                return NonZeroU32::new(bucket.numbers[place]);
            }
            if !bucket.has_passed_on() {
                return None;
            }
            index = self.after(index);
        }
        None
    }

    /// Adds a number that is not in the table. The table never shrinks. `hash_of_number` returns the hash of any
    /// number in it. Constant time, except when the table doubles.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        hash: u32,
        number: NonZeroU32,
        hash_of_number: impl Fn(NonZeroU32) -> u32,
    ) {
        debug_assert!(self.find(hash, |other| other == number).is_none());
        if self.len >= self.buckets.len() * BUCKET_LEN * 3 / 5 {
            self.double(hash_of_number);
        }
        self.len += 1;
        self.put(hash, number);
        debug_assert_eq!(self.find(hash, |other| other == number), Some(number));
        debug_assert!(self.len < self.buckets.len() * BUCKET_LEN);
    }

    /// Removes a number. Constant time.
    ///
    /// # Panics
    ///
    /// If it is not in the table under that hash.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u32, number: NonZeroU32) {
        let mut index = self.first_bucket(hash);
        loop {
            let after = self.after(index);
            let bucket = &mut self.buckets[index];
            if let Some(place) = bucket.place_of(tag_of(hash), |found| found == number) {
                bucket.control &= !(0xff << (8 * place));
                bucket.numbers[place] = 0;
                debug_assert!(self.len > 0);
                self.len -= 1;
                return;
            }
            assert!(bucket.has_passed_on(), "what is removed is in the table");
            bucket.subtract();
            index = after;
        }
    }

    #[cold]
    fn double(&mut self, hash_of_number: impl Fn(NonZeroU32) -> u32) {
        let doubled = vec![Bucket::default(); 2 * self.buckets.len()];
        debug_assert!(self.shift > 0);
        self.shift -= 1;
        if let Some(hint) = self.hint {
            hint.set(&doubled, self.shift);
        }
        for bucket in std::mem::replace(&mut self.buckets, doubled) {
            for number in bucket.numbers.into_iter().filter_map(NonZeroU32::new) {
                self.put(hash_of_number(number), number);
            }
        }
    }

    #[inline]
    fn put(&mut self, hash: u32, number: NonZeroU32) {
        let mut index = self.first_bucket(hash);
        loop {
            let after = self.after(index);
            let bucket = &mut self.buckets[index];
            // A vacant place's byte is zero, and no place below it is mistaken for vacant.
            let vacant = bucket.places_of(0);
            if vacant != 0 {
                let place = first_of(vacant);
                bucket.control |= tag_of(hash) << (8 * place);
                bucket.numbers[place] = number.get();
                return;
            }
            bucket.pass_on();
            index = after;
        }
    }

    #[inline]
    fn first_bucket(&self, hash: u32) -> usize {
        (hash >> self.shift) as usize
    }

    #[inline]
    fn after(&self, index: usize) -> usize {
        (index + 1) & (self.buckets.len() - 1)
    }
}

/// Where the search for a block begins, for threads that have not yet locked its allocator: they can prefetch that
/// memory.
#[derive(Debug)]
pub struct SearchHint(
    /// Where the buckets are and, in the lowest bits, the shift.
    AtomicU64,
);

/// The bits of a hint below the address; no process uses more than the others.
const HINT_SHIFT_BITS: u32 = 8;

impl Default for SearchHint {
    fn default() -> SearchHint {
        SearchHint::new()
    }
}

impl SearchHint {
    /// Returns a hint that is not set.
    pub const fn new() -> SearchHint {
        SearchHint(AtomicU64::new(0))
    }

    fn set(&self, buckets: &[Bucket], shift: u32) {
        let address = buckets.as_ptr().addr() as u64;
        let hint = address << HINT_SHIFT_BITS | u64::from(shift);
        self.0.store(hint, Ordering::Relaxed);
    }

    /// Returns where in this process's memory the search for a block that starts at `address` begins. Good only for
    /// a prefetch: it may be out of date, and is not an address if the hint is not set. Constant time; one load.
    #[inline]
    pub fn place_of(&self, address: DeviceAddress) -> usize {
        let hint = self.0.load(Ordering::Relaxed);
        let shift = hint & ((1 << HINT_SHIFT_BITS) - 1);
        let bucket = (hash_of(address.get()) >> shift) as usize;
        (hint >> HINT_SHIFT_BITS) as usize + bucket * size_of::<Bucket>()
    }
}

/// Returns a hash of a number whose lowest bits are often zero. The differing bits decide the upper bits, which
/// choose the bucket (multiplication by the golden ratio; Knuth, 6.4).
#[inline]
pub(crate) fn hash_of(number: u64) -> u32 {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> u32::BITS) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn number(index: usize) -> NonZeroU32 {
        NonZeroU32::new(u32::try_from(index).unwrap() + 1).unwrap()
    }

    fn index(number: NonZeroU32) -> usize {
        number.get() as usize - 1
    }

    /// Hashes that fall into a few buckets, including the last ones, which pass on to the first.
    fn hash() -> impl Strategy<Value = u32> {
        let few_bits = (0..4_u32, 0..3_u32).prop_map(|(bucket, tag)| bucket << 30 | tag);
        prop_oneof![
            Just(u32::MAX),
            Just(0),
            u32::MAX - 3..=u32::MAX,
            few_bits,
            any::<u32>()
        ]
    }

    proptest! {
        /// Compares with a map: after each change, the table finds exactly the numbers in it.
        #[test]
        fn finds_what_a_map_finds(
            changes in prop::collection::vec((any::<bool>(), 0..90_usize), 1..400),
            hashes in prop::collection::vec(hash(), 90),
        ) {
            let mut table = NumberTable::new();
            let mut map = BTreeMap::new();
            for (add, place) in changes {
                if add && map.insert(place, hashes[place]).is_none() {
                    table.insert(hashes[place], number(place), |number| hashes[index(number)]);
                } else if !add && map.remove(&place).is_some() {
                    table.remove(hashes[place], number(place));
                }
                for (other, &hash) in hashes.iter().enumerate() {
                    let found = table.find(hash, |found| found == number(other));
                    prop_assert_eq!(found.is_some(), map.contains_key(&other));
                }
                prop_assert_eq!(table.len, map.len());
            }
            for (place, hash) in map {
                table.remove(hash, number(place));
            }
            prop_assert!(table.buckets.iter().all(|bucket| bucket.control == 0));
        }
    }

    /// Also while the table grows.
    #[test]
    fn a_hint_is_where_a_search_begins() {
        static HINT: SearchHint = SearchHint::new();
        let mut table = NumberTable::new();
        table.keep_hint(&HINT);
        let address = |index: usize| DeviceAddress(512 * index as u64);
        for index in 0..1_000 {
            let hash = hash_of(address(index).get());
            let bucket: *const Bucket = &table.buckets[table.first_bucket(hash)];
            assert_eq!(HINT.place_of(address(index)), bucket.addr());
            table.insert(hash, number(index), |number| {
                hash_of(address(self::index(number)).get())
            });
        }
        assert!(table.buckets.len() > 1 << BUCKETS_MIN_LOG2);
    }

    #[test]
    fn a_bucket_is_half_a_cache_line() {
        assert_eq!((size_of::<Bucket>(), align_of::<Bucket>()), (32, 32));
    }

    #[test]
    fn every_tag_is_found_in_every_place_beside_every_other() {
        for tag in 1..=0xff_u64 {
            for place in 0..BUCKET_LEN {
                for other in [0, tag ^ 1, tag ^ 0x80, (tag + 1) & 0xff].map(|other| other * EACH) {
                    let control = other & !(0xff << (8 * place)) | tag << (8 * place);
                    let bucket = Bucket {
                        control,
                        ..Bucket::default()
                    };
                    assert_eq!(
                        first_of(bucket.places_of(tag)),
                        place,
                        "{tag:#x} in {control:#x}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_hash_alone_finds_nothing() {
        let mut table = NumberTable::new();
        table.insert(7, number(0), |_| 7);
        table.insert(7, number(1), |_| 7);
        assert_eq!(table.find(7, |_| false), None);
        assert_eq!(table.find(8, |_| true), None);
        assert_eq!(table.find(7, |found| found == number(1)), Some(number(1)));
    }

    /// Numbers that were passed on stay in their buckets when there is room again.
    #[test]
    fn a_search_ends_where_every_bucket_has_passed_something_on() {
        let mut table = NumberTable::new();
        let hash = |index: usize| u32::try_from(index / (BUCKET_LEN + 1)).unwrap() << table_shift();
        for bucket in 0..1 << BUCKETS_MIN_LOG2 {
            let first = bucket * (BUCKET_LEN + 1);
            for index in first..=first + BUCKET_LEN {
                table.insert(hash(index), number(index), |number| {
                    hash(self::index(number))
                });
            }
            for index in first..first + BUCKET_LEN {
                table.remove(hash(index), number(index));
            }
        }
        assert_eq!((table.len, table.buckets.len()), (8, 8));
        assert!(table.buckets.iter().all(Bucket::has_passed_on));
        assert_eq!(table.find(5, |_| false), None);
        for bucket in 0..8 {
            let left = bucket * (BUCKET_LEN + 1) + BUCKET_LEN;
            let found = table.find(hash(left), |found| found == number(left));
            assert_eq!(found, Some(number(left)));
        }
    }

    fn table_shift() -> u32 {
        u32::BITS - BUCKETS_MIN_LOG2
    }

    /// The numbers passed on are still found, and searches for others take longer.
    #[test]
    fn a_count_that_is_full_stays_full() {
        let mut table = NumberTable::new();
        table.buckets[0].control = PASSED_ON_MAX - PASSED_ON;
        for place in 0..=BUCKET_LEN + 1 {
            table.insert(0, number(place), |_| 0);
        }
        for place in (0..=BUCKET_LEN).rev() {
            table.remove(0, number(place));
            let left = table.find(0, |found| found == number(BUCKET_LEN + 1));
            assert_eq!(left, Some(number(BUCKET_LEN + 1)));
        }
        assert_eq!(table.buckets[0].control, PASSED_ON_MAX);
    }

    #[test]
    #[should_panic(expected = "what is removed is in the table")]
    fn what_is_not_there_is_not_removed() {
        NumberTable::new().remove(1, number(0));
    }

    #[test]
    fn addresses_a_power_of_two_apart_spread() {
        for log2 in [9, 10, 21, 24, 30] {
            let slots = (0..1_000_u64).map(|place| hash_of(place << log2) >> (u32::BITS - 12));
            let distinct: std::collections::BTreeSet<u32> = slots.collect();
            assert!(
                distinct.len() > 700,
                "{} of 1000, 2^{log2} apart",
                distinct.len()
            );
        }
    }
}
