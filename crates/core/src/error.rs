//! The errors of the allocator.

use std::fmt;
use std::sync::Arc;

use crate::driver::DriverError;
use crate::units::{Bytes, DeviceAddress, MempoolId, PytorchSize, Stream, TorchRelease};

/// Why a call failed. The allocator is then as it was before the call, except for cached memory that was released
/// to the driver.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum AllocError {
    /// No memory is left for the request, after all memory that could be released was released.
    OutOfMemory(Box<OutOfMemory>),
    /// The request is larger than [`Bytes::REQUEST_MAX`].
    TooLarge {
        /// The requested size.
        requested: Bytes,
    },
    /// The address is not that of an allocated block: it was never returned, or was freed before.
    NotAllocated {
        /// The address.
        address: DeviceAddress,
    },
    /// No free memory of that size begins at the address.
    NotFree {
        /// The address.
        address: DeviceAddress,
        /// The requested size.
        size: Bytes,
    },
    /// A thread panicked while it worked on the device, so the device's state cannot be trusted.
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
    /// No user holds that pool, which ends with its last segment.
    PoolNotHeld {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// Requests are being routed to the pool already.
    PoolInUse {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// The pool already has segments, or a source of its own for them.
    PoolHasSource {
        /// The pool that was named.
        pool: MempoolId,
    },
    /// The most streams, 65,536, already have memory that is not only cached. Each stream counts once for the
    /// default pool and once for each private pool. Held pools keep their cached memory.
    TooManyStreams,
    /// The pool is paused.
    Paused {
        /// The name of the region that the memory belongs to.
        region: Arc<str>,
    },
    /// The pool cannot be restored to a checkpoint.
    NotRestorable {
        /// The pool that was named.
        pool: MempoolId,
        /// The first block that prevents it.
        address: DeviceAddress,
        /// The reason.
        reason: &'static str,
    },
    /// The options belong to another strategy, or the strategy is not `caching`, the only one whose options can be
    /// changed.
    NotReconfigurable,
    /// A call to the device failed for another reason than lack of memory.
    Driver(DriverError),
}

/// The state of the device when memory ran out.
#[derive(Clone, PartialEq, Debug)]
pub struct OutOfMemory {
    /// The device's number.
    pub device: u32,
    /// The requested size.
    pub requested: Bytes,
    /// The stream it is for.
    pub stream: Stream,
    /// The pool it is routed to.
    pub pool: MempoolId,
    /// The size that the driver would have been asked for: PyTorch's messages name it.
    pub segment_size: Bytes,
    /// The largest block that is free in the request's pool and stream.
    pub largest_free: Bytes,
    /// Allocated bytes.
    pub allocated: Bytes,
    /// Reserved bytes.
    pub reserved: Bytes,
    /// The limit on reserved bytes, if one is set.
    pub limit: Option<Bytes>,
    /// Bytes that private pools have reserved and do not use.
    pub free_in_private_pools: Bytes,
    /// Bytes free on the device, as the driver reports.
    pub device_free: Bytes,
    /// Bytes of the device.
    pub device_total: Bytes,
    /// Paused regions, by name, and the bytes that their segments take when resumed. These bytes count as reserved,
    /// but not against the limit.
    pub paused: Vec<(Arc<str>, Bytes)>,
    /// The strategy's details: BFC's summary of its bins. Empty for the others.
    pub details: String,
    /// The holders of allocated memory, the largest first.
    pub holders: Vec<Holder>,
    /// Whether the request was rejected before an attempt to allocate (`throw_on_cudamalloc_oom`).
    pub is_rejected: bool,
    /// Whether PyTorch's setting `expandable_segments` is on. `None` if the strategy does not read it.
    pub expandable_segments: Option<bool>,
    /// The release of PyTorch whose wording the message uses: the newest, unless the caller sets another.
    pub torch: TorchRelease,
}

/// The allocated blocks of one size on one stream and in one region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The size of each.
    pub size: Bytes,
    /// Their stream.
    pub stream: Stream,
    /// The name of their region, if any.
    pub region: Option<Arc<str>>,
    /// How many there are.
    pub count: u64,
}

impl Holder {
    /// Returns their total bytes.
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

/// PyTorch's wording, so that searches and scripts that look for it find it.
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

/// Returns PyTorch's advice if segments are not expandable, with the variable and the document that it names.
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
    /// Returns PyTorch's advice, in the wording of its release. Releases up to 2.13 give it even if segments are
    /// expandable already. Empty if the strategy does not read PyTorch's settings.
    fn advice(&self) -> &'static str {
        let Some(is_expandable) = self.expandable_segments else {
            return "";
        };
        match self.torch {
            TorchRelease(..2, _) | TorchRelease(2, ..10) => advise_expandable_segments!(
                "PYTORCH_CUDA_ALLOC_CONF",
                "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
            ),
            TorchRelease(2, 10) => advise_expandable_segments!(
                "PYTORCH_ALLOC_CONF",
                "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
            ),
            TorchRelease(2, 14) if is_expandable => "",
            TorchRelease(major, minor) if is_expandable && (major, minor) > (2, 14) => {
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

/// Without a source: the message of [`AllocError::Driver`] is the driver's whole message.
impl std::error::Error for AllocError {}
