//! Quantities with their units in the type: bytes, device addresses, streams.

use std::fmt;
use std::ops::{Add, AddAssign, Rem, Sub, SubAssign};

/// A number of bytes of device memory.
///
/// Arithmetic is exact: like the integer types, it panics on overflow in builds with overflow
/// checks. Every size that enters the allocator is bounded by [`Bytes::REQUEST_MAX`] first, so sums
/// of a few sizes stay in range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// The largest request that is looked at, 1 EiB: PyTorch refuses more with a message of its own.
    pub const REQUEST_MAX: Bytes = Bytes(1 << 60);

    /// The largest segment, 128 TiB: where a device has no limit, more is refused as if there were none left.
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

    /// Returns the smallest multiple of `unit` that is not below `self`.
    ///
    /// # Panics
    ///
    /// If `unit` is zero.
    pub const fn round_up(self, unit: Bytes) -> Bytes {
        Bytes(self.0.div_ceil(unit.0) * unit.0)
    }

    /// Returns the largest multiple of `unit` that is not above `self`.
    ///
    /// # Panics
    ///
    /// If `unit` is zero.
    pub const fn round_down(self, unit: Bytes) -> Bytes {
        Bytes(self.0 / unit.0 * unit.0)
    }

    /// Returns `self - other`, or zero bytes where `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Returns `factor` times as many bytes, cut to a whole number as PyTorch cuts its fractions; no
    /// bytes for a negative factor, the most there are where the product is out of range.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a device's size needs no more digits than f64 has; the cast saturates"
    )]
    pub fn scale(self, factor: f64) -> Bytes {
        Bytes((factor * self.0 as f64) as u64)
    }

    /// Returns `self + other`, or the largest number of bytes where the sum is out of range.
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

/// Formats as PyTorch does in its messages: `512 bytes`, `1.50 KiB`, `20.00 MiB`, `11.93 GiB`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
        let bytes = self.0 as f64;
        match self.0 {
            0..=1024 => write!(f, "{} bytes", self.0),
            1025..=1_048_576 => write!(f, "{:.2} KiB", bytes / 1024.0),
            1_048_577..=1_073_741_824 => write!(f, "{:.2} MiB", bytes / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes / 1_073_741_824.0),
        }
    }
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
    /// The address that no memory has. Requests of zero bytes are answered with it.
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

/// The identity of a memory pool, as PyTorch numbers them: what a CUDA graph capture asked for
/// (first number) or a `torch.cuda.MemPool` (second number). `(0, 0)` is the device's default pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct MempoolId(pub u64, pub u64);

impl MempoolId {
    /// The pool of everything that no private pool asked for.
    pub const DEFAULT: MempoolId = MempoolId(0, 0);

    /// Returns whether this is the device's default pool.
    pub fn is_default(self) -> bool {
        self == MempoolId::DEFAULT
    }
}

/// As Python writes the pair.
impl fmt::Display for MempoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}
