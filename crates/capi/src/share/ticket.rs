//! The bytes that name shared memory.

use std::sync::OnceLock;

use lowtide_core::MappedRange;
use lowtide_cuda::{IpcHandle, Uuid};
use lowtide_files::unguessable_number;

use super::wire::{Fields, encode_range};
use crate::error::{Error, Status};

/// The first bytes: what they are, and the version of what follows.
const MAGIC: [u8; 8] = *b"lowtide\x01";
const ALLOCATION: u8 = 1;
const MAPPED: u8 = 2;

/// The information that one process gives another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    /// The identity of the process that has the memory. Its socket has the same name.
    pub(crate) exporter: [u8; 16],
    /// The UUID of the device.
    pub(crate) device: Uuid,
    pub(crate) shared: Shared,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Shared {
    Allocation(IpcHandle),
    Mapped(Mapped),
}

/// Memory that the exporter's thread sends handles of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    /// The exporter's process id, for messages.
    pub(crate) process: u32,
    /// Proves that the importer was given these bytes.
    pub(crate) token: [u8; 16],
    pub(crate) range: MappedRange,
}

impl Ticket {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(match self.shared {
            Shared::Allocation(_) => ALLOCATION,
            Shared::Mapped(_) => MAPPED,
        });
        bytes.extend(self.exporter);
        bytes.extend(self.device.0);
        match &self.shared {
            Shared::Allocation(handle) => bytes.extend(handle.0),
            Shared::Mapped(mapped) => {
                bytes.extend(mapped.process.to_le_bytes());
                bytes.extend(mapped.token);
                encode_range(&mapped.range, &mut bytes);
            }
        }
        bytes
    }

    /// Decodes what [`Ticket::encode`] returned.
    ///
    /// # Errors
    ///
    /// If the bytes are anything else, or too many, or too few.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Ticket, Error> {
        let mut fields = Fields(bytes);
        let ticket = Ticket::read(&mut fields).filter(|_| fields.is_empty());
        ticket.ok_or_else(|| {
            let text = "these bytes are not from lowtide_share, or from another version of lowtide";
            Error::new(Status::InvalidArgument, text)
        })
    }

    fn read(fields: &mut Fields<'_>) -> Option<Ticket> {
        if fields.array()? != MAGIC {
            return None;
        }
        let [kind] = fields.array()?;
        let exporter = fields.array()?;
        let device = Uuid(fields.array()?);
        let shared = match kind {
            ALLOCATION => Shared::Allocation(IpcHandle(fields.array()?)),
            MAPPED => Shared::Mapped(Mapped {
                process: u32::from_le_bytes(fields.array()?),
                token: fields.array()?,
                range: fields.range()?,
            }),
            _ => return None,
        };
        Some(Ticket {
            exporter,
            device,
            shared,
        })
    }
}

/// The identity of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    /// Public: every process of the machine may know it.
    pub(crate) name: [u8; 16],
    /// Secret: known to processes that were given the bytes.
    pub(crate) token: [u8; 16],
}

impl Identity {
    /// Returns this process's identity, which is created at the first call.
    ///
    /// # Errors
    ///
    /// If the system has no random bytes.
    pub(crate) fn of_this_process() -> Result<&'static Identity, Error> {
        static IDENTITY: OnceLock<Identity> = OnceLock::new();
        if let Some(identity) = IDENTITY.get() {
            return Ok(identity);
        }
        let (name, token) = (random()?, random()?);
        // Another thread may have been faster.
        Ok(IDENTITY.get_or_init(|| Identity { name, token }))
    }
}

fn random() -> Result<[u8; 16], Error> {
    let number = unguessable_number().map_err(|error| {
        let text = format_args!("the system has no random bytes: {error}");
        Error::new(Status::Driver, text)
    })?;
    Ok(number.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use lowtide_core::{Bytes, DeviceAddress};

    use super::*;

    fn tickets() -> [Ticket; 2] {
        let range = MappedRange {
            address: DeviceAddress(0x7f00_0020_0000),
            size: Bytes::mib(40),
            newest: 7,
        };
        let mapped = Mapped {
            process: 4711,
            token: [3; 16],
            range,
        };
        [
            Shared::Allocation(IpcHandle([9; 64])),
            Shared::Mapped(mapped),
        ]
        .map(|shared| Ticket {
            exporter: [1; 16],
            device: Uuid([2; 16]),
            shared,
        })
    }

    #[test]
    fn what_is_written_is_read() {
        for ticket in tickets() {
            assert_eq!(Ticket::decode(&ticket.encode()), Ok(ticket));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for ticket in tickets() {
            let bytes = ticket.encode();
            for length in 0..bytes.len() {
                assert!(Ticket::decode(&bytes[..length]).is_err(), "{length} bytes");
            }
            assert!(Ticket::decode(&[&bytes[..], &[0]].concat()).is_err());
            for index in 0..=MAGIC.len() {
                let mut other = bytes.clone();
                other[index] ^= 0x40;
                assert!(Ticket::decode(&other).is_err(), "byte {index}");
            }
        }
    }

    #[test]
    fn an_identity_is_random_and_stays() {
        let first = Identity::of_this_process().unwrap();
        let again = Identity::of_this_process().unwrap();
        assert_eq!(first.name, again.name);
        assert_ne!(first.name, first.token);
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
