//! A load of random requests whose contents are checked.

use std::error::Error;

use lowtide_core::{Bytes, CheckLevel, DeviceAddress, DeviceAllocator, Driver, Stream};
use lowtide_cuda::CudaDriver;

/// Runs random requests on an allocator, with at most 100 blocks allocated at a time.
///
/// Each block is filled in stream order, some from a stream other than their own, then read back, and filled again
/// when it is freed. The check fails if two blocks overlap, or if a block is reused while work of its last owner
/// still writes to it.
pub(crate) struct Load<'a> {
    pub(crate) allocator: &'a mut DeviceAllocator<CudaDriver>,
    pub(crate) streams: [Stream; 2],
    /// The number of steps, each an allocation or a free.
    pub(crate) steps: usize,
    /// The largest request, rounded down to a power of two.
    pub(crate) size_max: Bytes,
    /// The number of calls that may fail. Each is repeated once.
    pub(crate) failures_allowed: u32,
}

type Answer<T = ()> = Result<T, Box<dyn Error>>;

/// An allocated block and the byte that fills it.
#[derive(Clone, Copy)]
struct Held {
    address: DeviceAddress,
    size: Bytes,
    /// The stream that filled it last.
    stream: Stream,
    byte: u8,
}

impl Load<'_> {
    /// Runs the steps. At the end, nothing is allocated and nothing is reserved.
    pub(crate) fn run(&mut self) -> Answer {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..self.steps {
            if held.len() == 100 || (!held.is_empty() && random.below(3) == 0) {
                let index = random.below(held.len() as u64);
                self.free(held.swap_remove(usize::try_from(index)?))?;
            } else {
                held.push(self.allocate(&mut random)?);
            }
        }
        for block in held {
            self.free(block)?;
        }
        self.attempt(|allocator| Ok(allocator.empty_cache(None)?))?;
        self.check()
    }

    fn allocate(&mut self, random: &mut Random) -> Answer<Held> {
        // The sizes spread over all magnitudes.
        let magnitude = 1 << random.below(u64::from(self.size_max.get().ilog2()) + 1);
        let size = Bytes(1 + random.below(magnitude));
        let [first, second] = self.streams;
        let (stream, other) = if random.below(2) == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let byte = random.below(256).to_le_bytes()[0];
        let address = self.attempt(|allocator| Ok(allocator.allocate(size, stream)?))?;
        let is_shared = random.below(4) == 0;
        if is_shared {
            // The block may still be used in the first stream, so the other stream must wait for that.
            self.attempt(|allocator| {
                let driver = allocator.driver();
                let event = driver.record_event(stream)?;
                let waits = driver.wait_event(other, event);
                driver.release_event(event);
                Ok(waits?)
            })?;
            self.attempt(|allocator| Ok(allocator.lane_mut().record_stream(address, other)?))?;
        }
        let stream = if is_shared { other } else { stream };
        self.attempt(|allocator| Ok(allocator.driver().fill(address, size, byte, stream)?))?;
        Ok(Held {
            address,
            size,
            stream,
            byte,
        })
    }

    fn free(&mut self, block: Held) -> Answer {
        let Held {
            address,
            size,
            stream,
            byte,
        } = block;
        let mut copy = vec![!byte; usize::try_from(size.get())?];
        self.attempt(|allocator| Ok(allocator.driver().synchronize_stream(stream)?))?;
        self.attempt(|allocator| Ok(allocator.driver().read(address, &mut copy)?))?;
        if let Some(offset) = copy.iter().position(|&found| found != byte) {
            let found = copy[offset];
            return Err(format!("{block:?} has {found} at offset {offset}").into());
        }
        // The next owner of these bytes, in whichever stream, must write after this.
        self.attempt(|allocator| Ok(allocator.driver().fill(address, size, !byte, stream)?))?;
        self.attempt(|allocator| Ok(allocator.free(address)?))
    }

    /// Runs `step`, and repeats it if it fails and failures are allowed. A failed step must have changed nothing.
    fn attempt<T>(
        &mut self,
        mut step: impl FnMut(&mut DeviceAllocator<CudaDriver>) -> Answer<T>,
    ) -> Answer<T> {
        match step(self.allocator) {
            Err(_) if self.failures_allowed > 0 => {
                self.failures_allowed -= 1;
                self.check()?;
                step(self.allocator)
            }
            result => result,
        }
    }

    fn check(&self) -> Answer {
        Ok(self
            .allocator
            .lane()
            .check_invariants(CheckLevel::Everything)?)
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (address, size, byte) = (self.address, self.size.get(), self.byte);
        write!(f, "the block at {address} of {size} bytes, all {byte},")
    }
}

/// A small pseudo-random sequence, the same in every run.
struct Random(u64);

impl Random {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
