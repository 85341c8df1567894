//! Why a request was not served.

use std::fmt;
use std::sync::Arc;

use crate::driver::DriverError;
use crate::units::{Bytes, DeviceAddress, MempoolId, PytorchSize, Stream, TorchRelease};

/// Why the allocator did not do what it was asked. Except for cached memory that went back to the
/// driver, the allocator is then as it was before the call.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum AllocError {
    /// No memory is left for the request, after everything that could be given back was.
    OutOfMemory(Box<OutOfMemory>),
    /// The request is larger than [`Bytes::REQUEST_MAX`].
    TooLarge {
        /// What was asked for.
        requested: Bytes,
    },
    /// The address is not that of a block that the program holds: it was never handed out, or was
    /// freed before.
    NotAllocated {
        /// The address.
        address: DeviceAddress,
    },
    /// No free memory of that size begins at the address.
    NotFree {
        /// The address.
        address: DeviceAddress,
        /// What was asked for.
        size: Bytes,
    },
    /// What is to be a part of the device's memory is not from 0 to 1.
    NotAFraction,
    /// A thread panicked while it worked on the device, whose state cannot be trusted since.
    Poisoned,
    /// There is no such pool.
    NoSuchPool {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// No requests are being routed to that pool.
    PoolNotRouted {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// Nothing holds that pool, which ends with its last segment.
    PoolNotHeld {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// Requests are being routed to that pool already.
    PoolInUse {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// That pool has segments, or a source of its own for them, already.
    PoolHasSource {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// As many streams have memory that is not only cached as can be told apart, 65,536, each counted once
    /// for the default pool and for each private pool that there is. Held pools keep what they have cached.
    TooManyStreams,
    /// The pool's memory is away.
    Paused {
        /// The name of the region that the memory belongs to.
        region: Arc<str>,
    },
    /// The pool cannot be brought back to a checkpoint.
    NotRestorable {
        /// The pool that was named.
        pool: MempoolId,
        /// The first block that stands in the way.
        address: DeviceAddress,
        /// Why it does.
        reason: &'static str,
    },
    /// The options are not those of the strategy in use, or it is not `caching`, the only one that takes
    /// others over.
    NotReconfigurable,
    /// A call to the device failed for another reason than lack of memory.
    Driver(DriverError),
}

/// What there was when memory ran out.
#[derive(Clone, PartialEq, Debug)]
pub struct OutOfMemory {
    /// The device's number.
    pub device: u32,
    /// What the program asked for.
    pub requested: Bytes,
    /// The stream it is for.
    pub stream: Stream,
    /// The pool it is routed to.
    pub pool: MempoolId,
    /// What the driver would have been asked for: PyTorch's messages name this size.
    pub segment_size: Bytes,
    /// The largest block that is free in the request's pool and stream.
    pub largest_free: Bytes,
    /// Bytes held by the program.
    pub allocated: Bytes,
    /// Bytes held from the driver.
    pub reserved: Bytes,
    /// Bytes that may be held from the driver, where a limit is set.
    pub limit: Option<Bytes>,
    /// Bytes held from the driver by private pools and not in use.
    pub free_in_private_pools: Bytes,
    /// Bytes free on the device, as its driver says.
    pub device_free: Bytes,
    /// Bytes of the device.
    pub device_total: Bytes,
    /// Regions whose memory is away, by name, and what their segments take when it is back. It counts as
    /// reserved, and not against the limit.
    pub paused: Vec<(Arc<str>, Bytes)>,
    /// What the strategy has to say: BFC's picture of its bins. Empty for the others.
    pub details: String,
    /// What the program holds, those that take the most first.
    pub holders: Vec<Holder>,
    /// Whether the driver was not asked, because the device was not to hold that much
    /// (`throw_on_cudamalloc_oom`).
    pub is_rejected: bool,
    /// Whether new segments grow by mapping memory.
    pub expandable_segments: bool,
    /// The release of PyTorch whose words the message has: the newest, unless whoever knows better says so.
    pub torch: TorchRelease,
}

/// The blocks of one size that the program holds on one stream and in one region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The size of each.
    pub size: Bytes,
    /// Their stream.
    pub stream: Stream,
    /// The name of the region they are in, if they are in one.
    pub region: Option<Arc<str>>,
    /// How many there are.
    pub count: u64,
}

impl Holder {
    /// Returns what they take together.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.size.get() * self.count)
    }
}

impl AllocError {
    /// Returns whether memory ran out, so that the caller may free some and try again.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, AllocError::OutOfMemory(_))
    }
}

impl From<DriverError> for AllocError {
    fn from(error: DriverError) -> AllocError {
        AllocError::Driver(error)
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocError::OutOfMemory(out_of_memory) => out_of_memory.fmt(f),
            AllocError::TooLarge { requested } => {
                write!(
                    f,
                    "CUDA out of memory. Tried to allocate more than 1EB memory. {} bytes were asked for",
                    requested.get()
                )
            }
            AllocError::NotAllocated { address } => {
                write!(
                    f,
                    "{address} is not an allocated block: it was freed before or never handed out"
                )
            }
            AllocError::NotFree { address, size } => {
                let size = size.get();
                write!(f, "no free memory of {size} bytes begins at {address}")
            }
            AllocError::Poisoned => {
                f.write_str("the allocator stopped: a thread panicked while it was being changed")
            }
            AllocError::NotAFraction => {
                f.write_str("a part of the device's memory is a fraction from 0 to 1")
            }
            AllocError::NoSuchPool { pool } => {
                write!(f, "there is no memory pool {pool}")
            }
            AllocError::PoolNotRouted { pool } => {
                write!(f, "no requests are being routed to memory pool {pool}")
            }
            AllocError::PoolNotHeld { pool } => {
                write!(f, "nothing holds memory pool {pool}")
            }
            AllocError::PoolInUse { pool } => {
                write!(f, "requests are being routed to memory pool {pool} already")
            }
            AllocError::PoolHasSource { pool } => {
                write!(
                    f,
                    "memory pool {pool} has segments already, or others have said where they come from"
                )
            }
            AllocError::Paused { region } => {
                write!(
                    f,
                    "region {region:?} is paused: resume it before allocating in it"
                )
            }
            AllocError::NotRestorable {
                pool,
                address,
                reason,
            } => {
                write!(
                    f,
                    "memory pool {pool} cannot be restored: of the block at {address}, {reason}"
                )
            }
            AllocError::NotReconfigurable => {
                f.write_str("only the strategy caching takes other options over while it runs")
            }
            AllocError::TooManyStreams => write!(
                f,
                "65,536 streams have memory in use, each counted once for every memory pool that it has some of: \
                 let go of pools (graphs, torch.cuda.MemPool) that are done with, or use fewer streams"
            ),
            AllocError::Driver(error) => error.fmt(f),
        }
    }
}

/// PyTorch's wording, so that what users search for and scripts look for is found.
impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_rejected {
            "Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. \
             Requested size:"
        } else {
            "Tried to allocate"
        };
        write!(
            f,
            "CUDA out of memory. {what} {}. GPU {} has a total capacity of {} of which {} is free. ",
            PytorchSize(self.segment_size),
            self.device,
            PytorchSize(self.device_total),
            PytorchSize(self.device_free)
        )?;
        if let Some(limit) = self.limit.map(PytorchSize) {
            write!(f, "{limit} allowed; ")?;
        }
        let held = self.allocated.saturating_add(self.free_in_private_pools);
        write!(
            f,
            "Of the allocated memory {} is allocated by PyTorch, ",
            PytorchSize(held)
        )?;
        if !self.free_in_private_pools.is_zero() {
            let private = PytorchSize(self.free_in_private_pools);
            write!(
                f,
                "with {private} allocated in private pools (e.g., CUDA Graphs), "
            )?;
        }
        let unallocated = PytorchSize(self.reserved.saturating_sub(held));
        write!(
            f,
            "and {unallocated} is reserved by PyTorch but unallocated.{}",
            self.advice()
        )?;
        write!(f, " The largest free block has {}.", self.largest_free)?;
        for (index, (region, size)) in self.paused.iter().enumerate() {
            let start = if index == 0 {
                " Paused, and not on the device: "
            } else {
                ", "
            };
            write!(f, "{start}{size} of region {region:?}")?;
        }
        if !self.paused.is_empty() {
            write!(f, ".")?;
        }
        if !self.details.is_empty() {
            write!(f, "\n{}", self.details)?;
        }
        self.fmt_holders(f)
    }
}

/// Returns what PyTorch advises where segments do not grow, with the variable and the document that it names.
macro_rules! advise_expandable_segments {
    ($variable:literal, $document:literal) => {
        concat!(
            " If reserved but unallocated memory is large try setting ",
            $variable,
            "=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  (https://",
            $document,
            ")"
        )
    };
}

impl OutOfMemory {
    /// Returns what PyTorch advises, in the words of its release. Up to 2.13 it does so even where segments grow already.
    fn advice(&self) -> &'static str {
        match self.torch {
            TorchRelease(..2, _) | TorchRelease(2, ..10) => advise_expandable_segments!(
                "PYTORCH_CUDA_ALLOC_CONF",
                "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
            ),
            TorchRelease(2, 10) => advise_expandable_segments!(
                "PYTORCH_ALLOC_CONF",
                "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
            ),
            TorchRelease(2, 14) if self.expandable_segments => "",
            TorchRelease(major, minor) if self.expandable_segments && (major, minor) > (2, 14) => {
                " expandable_segments is enabled. If instead the process is running out of virtual address space \
                 (VSZ), expandable segments may be over-reserving VA (each segment reserves ~9/8 of device memory, \
                 times the number of streams); reduce it via PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / \
                 expandable_segments_reserve_by_class."
            }
            _ => advise_expandable_segments!(
                "PYTORCH_CUDA_ALLOC_CONF",
                "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
            ),
        }
    }

    /// Writes a line that names what holds the most memory. Streams are named where there are several.
    fn fmt_holders(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED_MAX: usize = 5;
        let (named, others) = self.holders.split_at(self.holders.len().min(NAMED_MAX));
        let Some(first) = named.first() else {
            return Ok(());
        };
        let names_streams = (self.holders.iter()).any(|holder| holder.stream != first.stream);
        write!(f, "\nBiggest holders: ")?;
        for (index, holder) in named.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} x {}", holder.count, holder.size)?;
            if names_streams {
                write!(f, " on stream {:#x}", holder.stream.0)?;
            }
            if let Some(region) = &holder.region {
                write!(f, " in region {region:?}")?;
            }
        }
        match others {
            [] => write!(f, "."),
            [other] => write!(f, "; one more size holds {}.", other.bytes()),
            _ => {
                let bytes: Bytes = others.iter().map(Holder::bytes).sum();
                write!(f, "; {} more sizes hold {bytes}.", others.len())
            }
        }
    }
}

/// Without a source: what the driver said is all that [`AllocError::Driver`] says.
impl std::error::Error for AllocError {}
