//! The numbers and texts in a section's payload.

use crate::budget::Budget;
use crate::error::{Result, TraceError};

/// Appends numbers and texts to a payload.
pub(super) trait PutPayload {
    fn put_natural(&mut self, value: u64);
    fn put_naturals(&mut self, values: &[u64]);
    fn put_integer(&mut self, value: i64);
    fn put_text(&mut self, text: &str);
}

impl PutPayload for Vec<u8> {
    fn put_natural(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.push(value.to_le_bytes()[0]);
    }

    fn put_naturals(&mut self, values: &[u64]) {
        values.iter().for_each(|&value| self.put_natural(value));
    }

    fn put_integer(&mut self, value: i64) {
        self.put_natural(((value << 1) ^ (value >> 63)).cast_unsigned());
    }

    fn put_text(&mut self, text: &str) {
        self.put_natural(text.len() as u64);
        self.extend_from_slice(text.as_bytes());
    }
}

/// Takes numbers and texts from the start of a payload.
pub(super) struct Payload<'p, 'b> {
    pub(super) rest: &'p [u8],
    /// The memory that its contents may take.
    pub(super) budget: &'b mut Budget,
}

impl<'p> Payload<'p, '_> {
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        let (&first, rest) = self.rest.split_first().ok_or_else(ends_early)?;
        self.rest = rest;
        Ok(first)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'p [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(ends_early)?;
        self.rest = rest;
        Ok(taken)
    }

    #[inline]
    pub(super) fn natural(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            // The tenth byte has room for one bit.
            if shift == 63 && byte > 1 {
                break;
            }
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(TraceError::malformed("a number has more than 64 bits"))
    }

    #[inline]
    pub(super) fn integer(&mut self) -> Result<i64> {
        let value = self.natural()?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// Returns a number below `end`.
    pub(super) fn number(&mut self, end: usize, of: &str) -> Result<u32> {
        let value = self.natural()?;
        u32::try_from(value)
            .ok()
            .filter(|&value| (value as usize) < end)
            .ok_or_else(|| TraceError::malformed(format!("{of} {value} is not there")))
    }

    /// Returns the item with a number that counts from 1; `None` for the number 0.
    pub(super) fn item<T: Copy>(&mut self, items: &[T], of: &str) -> Result<Option<T>> {
        let number = self.number(items.len() + 1, of)? as usize;
        Ok(number.checked_sub(1).map(|index| items[index]))
    }

    pub(super) fn text(&mut self) -> Result<&'p str> {
        let count = usize::try_from(self.natural()?).map_err(|_| ends_early())?;
        std::str::from_utf8(self.bytes(count)?)
            .map_err(|_| TraceError::malformed("a text is not UTF-8"))
    }
}

fn ends_early() -> TraceError {
    TraceError::malformed("an item reaches beyond the end of its section")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_back() {
        let naturals = [
            0,
            1,
            127,
            128,
            16_383,
            16_384,
            u64::from(u32::MAX),
            u64::MAX - 1,
            u64::MAX,
        ];
        let integers = [0, -1, 1, 63, -64, 64, -65, i64::MAX, i64::MIN];
        let mut bytes = Vec::new();
        naturals.iter().for_each(|&value| bytes.put_natural(value));
        integers.iter().for_each(|&value| bytes.put_integer(value));
        let mut budget = Budget::new(0);
        let mut payload = Payload {
            rest: &bytes,
            budget: &mut budget,
        };
        for value in naturals {
            assert_eq!(payload.natural().unwrap(), value);
        }
        for value in integers {
            assert_eq!(payload.integer().unwrap(), value);
        }
        assert!(payload.is_empty());
    }

    #[test]
    fn numbers_beyond_64_bits_are_refused() {
        let two_to_the_64 = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 2];
        for rest in [&[0xff; 20][..], &two_to_the_64, &[0x80]] {
            let mut budget = Budget::new(0);
            let budget = &mut budget;
            let mut payload = Payload { rest, budget };
            assert!(payload.natural().unwrap_err().is_malformed(), "{rest:x?}");
        }
    }
}
