//! The importer's request and the exporter's reply. A connection carries one request. Both have a fixed length,
//! so neither side has to trust a length from the other.

use std::os::fd::OwnedFd;

use lowtide_core::{Bytes, DeviceAddress, MappedRange};
use lowtide_sockets::DESCRIPTORS_MAX;

/// The maximum number of handles in a reply.
pub(crate) const PARTS_MAX: usize = DESCRIPTORS_MAX;

/// The prefix of the names of exporters' sockets.
pub(crate) const PREFIX: &str = "share-";

/// Returns the name of an exporter's socket.
pub(crate) fn socket_name(exporter: [u8; 16]) -> String {
    format!("{PREFIX}{:032x}", u128::from_be_bytes(exporter))
}

pub(crate) const REQUEST_BYTES: usize = 16 + 4 * 8;
/// A status, a count, and either sizes or a text.
pub(crate) const REPLY_BYTES: usize = 2 + PARTS_MAX * 8;

const PARTS: u8 = 0;
const REFUSED: u8 = 1;
const GONE: u8 = 2;
const FAILED: u8 = 3;

/// Requests the handles of a range from an offset on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) token: [u8; 16],
    pub(crate) range: MappedRange,
    pub(crate) offset: Bytes,
}

#[derive(Debug)]
pub(crate) enum Reply {
    /// The next handles and their sizes: at least one and at most [`PARTS_MAX`].
    Parts(Vec<(OwnedFd, Bytes)>),
    /// The token belongs to another process.
    Refused,
    /// The range is not mapped any more.
    Gone,
    /// The driver's error.
    Failed(String),
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.token.to_vec();
        encode_range(&self.range, &mut bytes);
        bytes.extend(self.offset.get().to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Request> {
        let mut fields = Fields(bytes);
        Some(Request {
            token: fields.array()?,
            range: fields.range()?,
            offset: Bytes(fields.number()?),
        })
    }
}

impl Reply {
    /// Returns the reply's bytes, and the descriptors to send with them.
    pub(crate) fn encode(self) -> (Vec<u8>, Vec<OwnedFd>) {
        let (status, content, descriptors) = match self {
            Reply::Parts(parts) => {
                let (descriptors, sizes): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
                let sizes = sizes
                    .iter()
                    .flat_map(|size: &Bytes| size.get().to_le_bytes());
                (PARTS, sizes.collect(), descriptors)
            }
            Reply::Refused => (REFUSED, Vec::new(), Vec::new()),
            Reply::Gone => (GONE, Vec::new(), Vec::new()),
            Reply::Failed(text) => (FAILED, text.into_bytes(), Vec::new()),
        };
        let count = u8::try_from(descriptors.len()).expect("PARTS_MAX at most");
        let mut bytes = vec![status, count];
        bytes.extend(content);
        bytes.resize(REPLY_BYTES, 0);
        (bytes, descriptors)
    }

    /// Decodes a reply; `None` if it is invalid, such as more than `size_max` bytes of memory.
    pub(crate) fn decode(
        bytes: &[u8; REPLY_BYTES],
        descriptors: Vec<OwnedFd>,
        size_max: Bytes,
    ) -> Option<Reply> {
        let mut fields = Fields(bytes);
        let [status, count] = fields.array()?;
        if descriptors.len() != usize::from(count) {
            return None;
        }
        match status {
            PARTS if count > 0 => {
                let mut left = size_max;
                let mut parts = Vec::new();
                for descriptor in descriptors {
                    let size = Bytes(fields.number()?);
                    if size.is_zero() || size > left {
                        return None;
                    }
                    left -= size;
                    parts.push((descriptor, size));
                }
                Some(Reply::Parts(parts))
            }
            REFUSED => Some(Reply::Refused),
            GONE => Some(Reply::Gone),
            FAILED => {
                let text = String::from_utf8_lossy(fields.0);
                let text = text.trim_end_matches('\0');
                Some(Reply::Failed(text.replace(char::is_control, " ")))
            }
            _ => None,
        }
    }
}

/// Writes what [`Fields::range`] reads.
pub(crate) fn encode_range(range: &MappedRange, bytes: &mut Vec<u8>) {
    for number in [range.address.get(), range.size.get(), range.newest] {
        bytes.extend(number.to_le_bytes());
    }
}

/// The bytes that have not been read yet.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn range(&mut self) -> Option<MappedRange> {
        Some(MappedRange {
            address: DeviceAddress(self.number()?),
            size: Bytes(self.number()?),
            newest: self.number()?,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        let open = |_| OwnedFd::from(File::open("/dev/null").unwrap());
        (0..count).map(open).collect()
    }

    fn decoded(bytes: &[u8], count: usize, size_max: u64) -> Option<Reply> {
        let bytes = bytes.try_into().unwrap();
        Reply::decode(bytes, descriptors(count), Bytes(size_max))
    }

    #[test]
    fn a_request_is_read_as_written() {
        let range = MappedRange {
            address: DeviceAddress(1 << 40),
            size: Bytes(40),
            newest: 9,
        };
        let request = Request {
            token: [7; 16],
            range,
            offset: Bytes(20),
        };
        let bytes = request.encode();
        assert_eq!(
            Request::decode(bytes.as_slice().try_into().unwrap()),
            Some(request)
        );
    }

    #[test]
    fn a_reply_is_read_as_written() {
        let sizes = [Bytes(2), Bytes(20)];
        let parts = descriptors(2).into_iter().zip(sizes).collect();
        let (bytes, sent) = Reply::Parts(parts).encode();
        assert_eq!(sent.len(), 2);
        let Some(Reply::Parts(parts)) = decoded(&bytes, 2, 22) else {
            panic!("not read");
        };
        assert!(parts.iter().map(|(_, size)| *size).eq(sizes));
        let (bytes, _) = Reply::Failed("two\nlines".to_owned()).encode();
        assert!(matches!(decoded(&bytes, 0, 1), Some(Reply::Failed(text)) if text == "two lines"));
        let (bytes, _) = Reply::Failed("x".repeat(5000)).encode();
        assert!(matches!(decoded(&bytes, 0, 1), Some(Reply::Failed(_))));
        let (bytes, _) = Reply::Refused.encode();
        assert!(matches!(decoded(&bytes, 0, 1), Some(Reply::Refused)));
        let (bytes, _) = Reply::Gone.encode();
        assert!(matches!(decoded(&bytes, 0, 1), Some(Reply::Gone)));
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_none() {
        let parts = descriptors(2).into_iter().zip([Bytes(2), Bytes(20)]);
        let (bytes, _) = Reply::Parts(parts.collect()).encode();
        assert!(decoded(&bytes, 1, 22).is_none(), "a descriptor is missing");
        assert!(decoded(&bytes, 3, 22).is_none(), "one too many");
        assert!(decoded(&bytes, 2, 21).is_none(), "more than was asked for");
        let mut other = bytes.clone();
        other[2] = 0;
        assert!(decoded(&other, 2, 22).is_none(), "a part without bytes");
        other[0] = 9;
        assert!(decoded(&other, 2, 22).is_none(), "no such status");
        let empty = [0; REPLY_BYTES];
        assert!(
            decoded(&empty, 0, 22).is_none(),
            "nothing would come of asking again"
        );
    }
}
