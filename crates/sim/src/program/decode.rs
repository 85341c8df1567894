//! Decodes operations from bytes. Every sequence of bytes is a program, and changing one byte changes one
//! operation, as fuzzers and shrinkers need.

use lowtide_core::{Bytes, MempoolId, Stream};

use super::Op;
use crate::fault::random;

/// The number of bytes of one operation.
pub const ENCODED_SIZE: usize = 6;

impl Op {
    /// Decodes an operation. The first byte selects its kind, with frequencies that free about as often as they
    /// allocate. Zeros are the plainest operation.
    pub fn decode(bytes: [u8; ENCODED_SIZE]) -> Op {
        let [kind, a, b, c, d, e] = bytes;
        let index = u16::from_le_bytes([a, b]);
        let stream = stream(a);
        let pool = MempoolId(0, u64::from(b % 4));
        match kind {
            0..88 => Op::Alloc {
                size: size(a, u16::from_le_bytes([b, c])),
                stream: self::stream(d),
                pool: named_pool(e),
            },
            88..176 => Op::Free { index },
            176..178 => Op::FreeStray { index },
            178..180 => Op::AllocBehind {
                index,
                gap: c % 4,
                size: size(d, 0),
                stream: self::stream(e),
            },
            180..200 => Op::RecordStream {
                index,
                stream: self::stream(c),
            },
            200..204 => Op::Wait {
                stream,
                other: self::stream(b),
            },
            204..212 => Op::Launch {
                stream,
                ns: u64::from(b) << 12,
            },
            212..218 => Op::Advance {
                ns: u64::from(b) << 14,
            },
            218..220 => Op::Checkpoint { pool },
            220..222 => Op::Restore { pool },
            222 => Op::ProcessEvents,
            223 => Op::ReleaseIdle {
                size: Bytes::mib(u64::from(b)),
            },
            224..226 => Op::EmptyCache,
            226..229 => Op::BeginPool { pool, stream },
            229..233 => Op::EndPool { pool },
            233..235 => Op::RetainPool { pool },
            235..239 => Op::ReleasePool { pool },
            239..241 => Op::UseOnOom {
                pool,
                allow: c % 2 == 0,
            },
            241..242 => Op::NoSplit { pool },
            242..243 => Op::CaptureBegin { stream },
            243..246 => Op::CaptureEnd,
            246..248 => Op::SetLimit {
                limit: (b >= 64).then(|| Bytes::mib(u64::from(b) / 2)),
            },
            248..251 => Op::Fault {
                nth: u64::from(a % 32) + 1,
                out_of_memory: b % 2 == 0,
            },
            251 => Op::ResetPeaks,
            252 => Op::ResetSums,
            253 => Op::Reconfigure {
                expandable_segments: a % 2 == 0,
                max_split_size: (b % 4 == 0).then_some(Bytes::mib(20 + u64::from(c % 32))),
            },
            254 => Op::ReleaseUnused {
                is_old: a % 2 == 0,
                most: Bytes::mib(u64::from(b % 64)),
            },
            255 => Op::Snapshot,
        }
    }

    /// Decodes a program. Bytes at the end that do not fill an operation are dropped.
    pub fn decode_all(bytes: &[u8]) -> Vec<Op> {
        bytes
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(Op::decode)
            .collect()
    }
}

/// Returns an endless program. The same `seed` gives the same program.
pub fn random_program(seed: u64) -> impl Iterator<Item = Op> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        let [bytes @ .., _, _] = random(&mut state).to_le_bytes();
        Op::decode(bytes)
    })
}

/// Sizes at which a strategy's behaviour changes.
const EDGES: [u64; 32] = [
    512,
    1,
    0,
    256,
    257,
    513,
    1 << 10,
    4 << 10,
    66 << 10,
    (1 << 20) - 512,
    1 << 20,
    (1 << 20) + 1,
    2 << 20,
    (2 << 20) + 1,
    5 << 20,
    8 << 20,
    (8 << 20) + 1,
    (10 << 20) - 1,
    10 << 20,
    11 << 20,
    12 << 20,
    (20 << 20) - 1,
    20 << 20,
    24 << 20,
    (32 << 20) + 1,
    50 << 20,
    64 << 20,
    100 << 20,
    128 << 20,
    1 << 42,
    1 << 60,
    u64::MAX,
];

fn size(class: u8, fraction: u16) -> Bytes {
    if let Some(&edge) = EDGES.get(usize::from(class)) {
        return Bytes(edge);
    }
    // Otherwise a power of two up to 8 MiB plus a part of it, so up to 16 MiB. Small sizes are more frequent.
    let octave =
        [9, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23][usize::from(class % 16)];
    let floor = 1 << octave;
    Bytes(floor + ((floor * u64::from(fraction)) >> 16))
}

fn stream(byte: u8) -> Stream {
    Stream(u64::from(byte % 4).saturating_sub(1))
}

fn named_pool(byte: u8) -> Option<MempoolId> {
    (byte >= 192).then(|| MempoolId(0, u64::from(byte % 4)))
}
