//! Quantities with their units in the type: bytes, device addresses, streams.

use std::fmt;
use std::ops::{Add, AddAssign, Rem, Sub, SubAssign};

/// A number of bytes of device memory.
///
/// Arithmetic panics on overflow in builds with overflow checks, as the integer types do. The allocator checks
/// every size against [`Bytes::REQUEST_MAX`] first, so sums of a few sizes stay in range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// The largest request that is not rejected at once, 1 EiB. PyTorch rejects larger ones with a message of its
    /// own.
    pub const REQUEST_MAX: Bytes = Bytes(1 << 60);

    /// The largest segment, 128 TiB. A larger one is refused as out of memory, even on a device without a limit.
    pub const SEGMENT_MAX: Bytes = Bytes(1 << 47);

    /// Returns `count` KiB.
    pub const fn kib(count: u64) -> Bytes {
        Bytes(count << 10)
    }

    /// Returns `count` MiB.
    pub const fn mib(count: u64) -> Bytes {
        Bytes(count << 20)
    }

    /// Returns `count` GiB.
    pub const fn gib(count: u64) -> Bytes {
        Bytes(count << 30)
    }

    /// Returns the number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whether there are no bytes.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns `self` rounded up to a multiple of `unit`. Nearly every unit is a power of two: then this takes no
    /// division, even if the unit is not a constant.
    ///
    /// # Panics
    ///
    /// If `unit` is zero.
    #[inline]
    pub const fn round_up(self, unit: Bytes) -> Bytes {
        if unit.0.is_power_of_two() {
            Bytes((self.0 + (unit.0 - 1)) & !(unit.0 - 1))
        } else {
            Bytes(self.0.div_ceil(unit.0) * unit.0)
        }
    }

    /// Returns `self` rounded down to a multiple of `unit`, as [`Bytes::round_up`].
    ///
    /// # Panics
    ///
    /// If `unit` is zero.
    #[inline]
    pub const fn round_down(self, unit: Bytes) -> Bytes {
        if unit.0.is_power_of_two() {
            Bytes(self.0 & !(unit.0 - 1))
        } else {
            Bytes(self.0 / unit.0 * unit.0)
        }
    }

    /// Returns how many whole units `self` has, as [`Bytes::round_up`].
    ///
    /// # Panics
    ///
    /// If `unit` is zero.
    #[inline]
    pub(crate) const fn whole(self, unit: Bytes) -> u64 {
        if unit.0.is_power_of_two() {
            self.0 >> unit.0.trailing_zeros()
        } else {
            self.0 / unit.0
        }
    }

    /// Returns `self - other`, or zero bytes if `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Returns `factor` times as many bytes, truncated to a whole number as PyTorch does. Returns zero for a
    /// negative factor and `u64::MAX` bytes if the product is out of range.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a device's size needs no more digits than f64 has; the cast saturates"
    )]
    pub fn scale(self, factor: f64) -> Bytes {
        Bytes((factor * self.0 as f64) as u64)
    }

    /// Returns `self + other`, or `u64::MAX` bytes if the sum is out of range.
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        self.0 -= other.0;
    }
}

impl Rem for Bytes {
    type Output = Bytes;
    fn rem(self, other: Bytes) -> Bytes {
        Bytes(self.0 % other.0)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes::ZERO, Add::add)
    }
}

/// Formats in the largest fitting unit: `512 bytes`, `1.50 KiB`, `20.00 MiB`, `11.93 GiB`, up to EiB.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (1 << 60, "EiB"),
            (1 << 50, "PiB"),
            (1 << 40, "TiB"),
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
        ];
        // A size that would round up to 1024.00 of a unit is written as 1.00 of the next.
        let is_reached = |unit: u64| self.0 >= unit - unit / 1024 / 200;
        match UNITS.iter().find(|&&(unit, _)| is_reached(unit)) {
            Some(&(unit, name)) => write!(f, "{:.2} {name}", in_units(*self, unit)),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// A size as PyTorch writes it in its messages: up to `1024.00 MiB`, and never above GiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PytorchSize(pub(crate) Bytes);

impl fmt::Display for PytorchSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PytorchSize(size) = *self;
        match size.0 {
            0..=0x400 => write!(f, "{} bytes", size.0),
            0x401..=0x10_0000 => write!(f, "{:.2} KiB", in_units(size, 1 << 10)),
            0x10_0001..=0x4000_0000 => write!(f, "{:.2} MiB", in_units(size, 1 << 20)),
            _ => write!(f, "{:.2} GiB", in_units(size, 1 << 30)),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
fn in_units(size: Bytes, unit: u64) -> f64 {
    size.0 as f64 / unit as f64
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}B", self.0)
    }
}

/// An address in a device's address space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The null address, which no memory has. A request of zero bytes returns it.
    pub const NULL: DeviceAddress = DeviceAddress(0);

    /// Returns the address as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the distance from `start` to `self`.
    ///
    /// # Panics
    ///
    /// If `self` is below `start`, in builds with overflow checks.
    pub const fn offset_from(self, start: DeviceAddress) -> Bytes {
        Bytes(self.0 - start.0)
    }
}

impl Add<Bytes> for DeviceAddress {
    type Output = DeviceAddress;
    fn add(self, offset: Bytes) -> DeviceAddress {
        DeviceAddress(self.0 + offset.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A stream of a device, by its raw handle (`cudaStream_t`); the default stream is 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Stream(pub u64);

impl Stream {
    /// The device's default stream.
    pub const DEFAULT: Stream = Stream(0);
}

/// The id of a memory pool, as PyTorch numbers them. The first number is set for pools of CUDA graph captures,
/// the second for a `torch.cuda.MemPool`. `(0, 0)` is the device's default pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct MempoolId(pub u64, pub u64);

impl MempoolId {
    /// The default pool, for all requests that no private pool serves.
    pub const DEFAULT: MempoolId = MempoolId(0, 0);

    /// Returns whether this is the device's default pool.
    pub fn is_default(self) -> bool {
        self == MempoolId::DEFAULT
    }
}

/// Formats the pair as Python does.
impl fmt::Display for MempoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// A release of PyTorch, by its first two numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TorchRelease(pub u32, pub u32);

impl TorchRelease {
    /// The newest release whose behavior is known.
    pub const NEWEST: TorchRelease = TorchRelease(2, 15);
}

/// A count. Formats with commas between the thousands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Count(pub u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        Ok(())
    }
}

/// Returns a size as a signed number, the type of the statistics. Sizes are below 2^60.
pub(crate) fn signed(size: Bytes) -> i64 {
    size.get().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_the_largest_unit_for_people_and_in_pytorchs_own_way_in_its_message() {
        let check = |bytes, expected: [&str; 2]| {
            let texts = [
                Bytes(bytes).to_string(),
                PytorchSize(Bytes(bytes)).to_string(),
            ];
            assert_eq!(texts, expected);
        };
        check(0, ["0 bytes"; 2]);
        check(1023, ["1023 bytes"; 2]);
        check(1024, ["1.00 KiB", "1024 bytes"]);
        check(1536, ["1.50 KiB"; 2]);
        check((1 << 20) - 6, ["1023.99 KiB"; 2]);
        check((1 << 20) - 1, ["1.00 MiB", "1024.00 KiB"]);
        check(1 << 20, ["1.00 MiB", "1024.00 KiB"]);
        check(1 << 30, ["1.00 GiB", "1024.00 MiB"]);
        check((1 << 30) + 1, ["1.00 GiB"; 2]);
        check(1 << 40, ["1.00 TiB", "1024.00 GiB"]);
        check(1 << 63, ["8.00 EiB", "8589934592.00 GiB"]);
    }

    #[test]
    fn thousands_are_set_apart() {
        let check = |count, expected| assert_eq!(Count(count).to_string(), expected);
        check(0, "0");
        check(999, "999");
        check(1000, "1,000");
        check(1_234_567, "1,234,567");
    }
}
