//! A device: its memory, its primary context and its attributes.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::names::Thread;
use crate::sys::*;

/// The granularity of physical memory and of mappings, minimum and recommended: 2 MiB, as measured on an H200.
pub(crate) const GRANULARITY_BYTES: u64 = 2 << 20;

const DEFAULT_CAPACITY_BYTES: u64 = 8 << 30;

/// One device.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// The device's number on this machine, the same in every process.
    pub(crate) number: usize,
    pub(crate) capacity_bytes: u64,
    usage: Arc<Mutex<Usage>>,
    /// Attributes that a test set. The others have the values of [`default_attribute`].
    pub(crate) attributes: BTreeMap<c_uint, c_int>,
    /// The primary context, while it is retained.
    pub(crate) context: Option<Context>,
    /// The error after an illegal access by the device's work. Every later call that needs the context returns it.
    pub(crate) fault: Option<CUresult>,
}

/// A device's primary context. There are no other contexts: `cuCtxCreate` is not exported.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) name: CUcontext,
    pub(crate) retains: u64,
    /// The legacy default stream. It waits for blocking streams, and they wait for it.
    pub(crate) legacy_stream: CUstream,
    /// The per-thread default streams that have been used.
    pub(crate) thread_streams: BTreeMap<Thread, CUstream>,
}

/// A part of a device's memory that counts as used until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    usage: Arc<Mutex<Usage>>,
    bytes: u64,
    /// The index of the shared page that the bytes are part of. `None` if they have their own pages.
    shared_page: Option<usize>,
}

/// The used memory of a device.
#[derive(Debug, Default)]
struct Usage {
    bytes: u64,
    /// The number of used bytes of each page that small allocations share; 0 if the entry is unused. Offsets in a
    /// page are not tracked, so holes cost nothing.
    shared_pages: Vec<u64>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut usage = lock_usage(&self.usage);
        let Some(index) = self.shared_page else {
            usage.bytes -= self.bytes;
            return;
        };
        usage.shared_pages[index] -= self.bytes;
        if usage.shared_pages[index] == 0 {
            usage.bytes -= GRANULARITY_BYTES;
        }
    }
}

fn lock_usage(usage: &Mutex<Usage>) -> MutexGuard<'_, Usage> {
    usage.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Creates the devices that the environment describes: `FAKECUDA_DEVICES` of them (1 by default), with
    /// `FAKECUDA_CAPACITY` bytes each. If `FAKECUDA_VISIBLE` is set, returns only those that it lists, in its
    /// order.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if a variable is not a number, or lists a device that does not exist.
    pub(crate) fn all_from_environment() -> Result<Vec<Self>, CUresult> {
        let count = number_from_environment("FAKECUDA_DEVICES", 1)?;
        let capacity_bytes = number_from_environment("FAKECUDA_CAPACITY", DEFAULT_CAPACITY_BYTES)?;
        let visible: Vec<u64> = match std::env::var("FAKECUDA_VISIBLE") {
            Err(_) => (0..count).collect(),
            Ok(text) => {
                let numbers = text
                    .split(',')
                    .map(|number| parse("FAKECUDA_VISIBLE", number));
                numbers.collect::<Result<_, _>>()?
            }
        };
        if visible.iter().any(|&number| number >= count) {
            return Err(CUresult::INVALID_VALUE);
        }
        let devices = visible.into_iter().map(|number| Self {
            number: host_size(number),
            capacity_bytes,
            ..Self::default()
        });
        Ok(devices.collect())
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        lock_usage(&self.usage).bytes
    }

    /// Counts `bytes` of the device's memory as used.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY` if less is free.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Charge, CUresult> {
        self.take(&mut lock_usage(&self.usage), bytes)?;
        Ok(Charge {
            usage: Arc::clone(&self.usage),
            bytes,
            shared_page: None,
        })
    }

    /// Counts `bytes` of a shared page as used, at most a whole page. Uses a new page if no shared page has room. A
    /// page is released with the last charge that shares it.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY` if the device has no free page.
    pub(crate) fn charge_shared(&self, bytes: u64) -> Result<Charge, CUresult> {
        let mut usage = lock_usage(&self.usage);
        let has_room = |&taken: &u64| taken > 0 && taken + bytes <= GRANULARITY_BYTES;
        let index = if let Some(index) = usage.shared_pages.iter().position(has_room) {
            index
        } else {
            self.take(&mut usage, GRANULARITY_BYTES)?;
            let unused = usage.shared_pages.iter().position(|&taken| taken == 0);
            unused.unwrap_or_else(|| {
                usage.shared_pages.push(0);
                usage.shared_pages.len() - 1
            })
        };
        usage.shared_pages[index] += bytes;
        Ok(Charge {
            usage: Arc::clone(&self.usage),
            bytes,
            shared_page: Some(index),
        })
    }

    fn take(&self, usage: &mut Usage, bytes: u64) -> Result<(), CUresult> {
        if self.capacity_bytes.saturating_sub(usage.bytes) < bytes {
            return Err(CUresult::OUT_OF_MEMORY);
        }
        usage.bytes += bytes;
        Ok(())
    }

    pub(crate) fn attribute(&self, attribute: c_uint) -> c_int {
        let set = self.attributes.get(&attribute).copied();
        set.unwrap_or_else(|| default_attribute(attribute, self.number))
    }
}

/// Returns an H200's value of the attributes that an allocator queries; 0 for the others.
fn default_attribute(attribute: c_uint, number: usize) -> c_int {
    match attribute {
        CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => ordinal(number + 1),
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
        _ => 0,
    }
}

/// Returns a device's index as CUDA's `int`.
pub(crate) fn ordinal(index: usize) -> c_int {
    c_int::try_from(index).expect("the number of devices came from an environment variable")
}

/// Returns a size as C's `size_t`.
pub(crate) fn host_size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a usize has 64 bits")
}

fn number_from_environment(name: &str, default: u64) -> Result<u64, CUresult> {
    let Ok(text) = std::env::var(name) else {
        return Ok(default);
    };
    parse(name, &text)
}

fn parse(name: &str, text: &str) -> Result<u64, CUresult> {
    text.parse().map_err(|_| {
        eprintln!("fakecuda: {name}: `{text}` is no number");
        CUresult::INVALID_VALUE
    })
}
