//! All functions except requests: versions, configuration, statistics, snapshots.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use lowtide_core::{Bytes, CachingConfig, Config, Stats, StatsReset, TorchRelease};

use crate::boundary::{run, text_from_c, write_to_c};
use crate::devices::Allocator;
use crate::error::{Error, Status};
use crate::settings::Choice;
use crate::{cuda, devices, pauses, settings, start};

/// The version of this interface. It changes when a program that was built against an older header would no
/// longer work. A program compares it with the result of `lowtide_abi_version`.
pub const LOWTIDE_ABI_VERSION: u32 = 3;

/// Returns the version of the loaded library's interface.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_abi_version() -> u32 {
    LOWTIDE_ABI_VERSION
}

/// Returns lowtide's version, like "0.1.0". The text belongs to lowtide and stays valid until the process ends.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Returns the number of this thread's current device: the one whose primary context is current. CUDA's runtime
/// uses that context too. Returns -1 in these cases:
/// - the thread has no context yet;
/// - the current context is one that the program created itself;
/// - the current context was created after the device was reset;
/// - the call failed; `lowtide_last_error` returns the reason.
///
/// Use it in place of `cudaGetDevice` for each request. With CUDA 12 and newer the result is the same wherever
/// this function returns a device. In a context that it has seen before, it costs one call of `cuCtxGetCurrent`,
/// a fifth of the time; in a new context it costs a few more calls. Starts the driver and creates no context.
/// lowtide retains each context that it has identified until the process ends, so no other context gets its
/// handle unless the program resets the device.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_current_device() -> c_int {
    let mut device = -1;
    let _ = run(|| {
        let current = cuda::contexts()?.current()?;
        device = current.map_or(-1, u32::cast_signed);
        Ok(())
    });
    device
}

/// Sets the strategy and its options for every device of the process; either may be null.
///
/// If `strategy` is null, the strategy is the first of these that applies:
/// - `LOWTIDE_STRATEGY`;
/// - `caching`, if `config` or `LOWTIDE_CONF` has options, or if lowtide is preloaded in front of the driver;
/// - `tide`.
///
/// If `config` is null, the options are:
/// - `LOWTIDE_CONF`, if `strategy` is null too;
/// - else, for `caching`, the first variable that is set of PyTorch's `PYTORCH_CUDA_ALLOC_CONF`,
///   `PYTORCH_HIP_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`.
///
/// Options have the syntax of these variables. A later call replaces an earlier one.
///
/// Returns `LOWTIDE_STATUS_STARTED` if a device is in use already, and `LOWTIDE_STATUS_CONFIG` if the strategy or
/// an option is refused. Nothing has changed then.
///
/// # Safety
///
/// Both are null or end with a zero byte. They are read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_configure(
    strategy: *const c_char,
    config: *const c_char,
) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let strategy = unsafe { text_from_c("strategy", strategy) }?;
        // SAFETY: as above.
        let conf = unsafe { text_from_c("config", config) }?;
        settings::configure(Choice::of_program(strategy, conf))
    })
}

/// Sets the PyTorch release that the memory is for, like 2 and 13 for 2.13.0.
///
/// If several free blocks have the same size, `caching` takes the one that this release takes:
/// - up to 2.11, the block with the lowest address;
/// - in 2.12, the block that has been a separate block for the longest time;
/// - from 2.13 on, the block in the oldest segment.
///
/// Without this call `caching` does as 2.11. The option `free_block_order` (`address`, `block_age`,
/// `segment_age`) takes precedence.
///
/// Out-of-memory errors have this release's text, and without this call the newest release's.
///
/// Returns `LOWTIDE_STATUS_STARTED` if a device is in use already. Nothing has changed then.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_torch_version(major: u32, minor: u32) -> Status {
    run(|| settings::set_torch(TorchRelease(major, minor)))
}

/// Changes the options of the strategy `caching` at run time for every device, as PyTorch's
/// `torch.cuda.memory._set_allocator_settings` does.
///
/// `settings` has PyTorch's syntax. If it is refused, the status is `LOWTIDE_STATUS_CONFIG`, the text is
/// PyTorch's, and nothing has changed. `max_split_size_mb`, `roundup_power2_divisions` and
/// `garbage_collection_threshold` are first reset to their defaults; the other options keep their values.
/// `per_process_memory_fraction` limits only devices that are not in use yet. The options of other strategies do
/// not change.
///
/// # Safety
///
/// `settings` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_reconfigure(settings: *const c_char) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let settings = unsafe { text_from_c("settings", settings) }?;
        settings::reconfigure(settings.ok_or_else(|| Error::null("settings"))?)
    })
}

/// Returns the strategy and the options, like "caching:expandable_segments:True"; null on failure. Does not fix them.
/// The text belongs to lowtide and stays valid until the process ends.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_config() -> *const c_char {
    let mut text = ptr::null();
    let _ = run(|| {
        text = lasting(settings::chosen()?.to_string())?.as_ptr();
        Ok(())
    });
    text
}

/// The options of `caching` in force that PyTorch's snapshots list. For another strategy, PyTorch's defaults.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub struct CachingSettings {
    /// Blocks of this many bytes or more are never split. The maximum of the type means that all blocks may be
    /// split.
    pub max_split_size: u64,
    /// The share of the limit above which cached memory is released; 0 means never.
    pub garbage_collection_threshold: f64,
    /// The number of steps between two powers of two that sizes are rounded up to, by power of two from 1 MiB on;
    /// 0 means no rounding.
    pub roundup_power2_divisions: [u64; 16],
    /// Whether segments grow by mapping memory.
    pub expandable_segments: bool,
    /// Whether a block that several streams used may be reused during a graph capture.
    pub graph_capture_record_stream_reuse: bool,
    /// Whether the text `given` asks for all options in force, and for `caching`.
    pub are_given: bool,
}

/// Writes the options in force, which are fixed after this call, and whether the text `given` asks for them, in
/// PyTorch's syntax. PyTorch may have read different options than lowtide: not every release reads every
/// variable.
///
/// # Safety
///
/// `given` is null or ends with a zero byte, and is read before this returns. `settings` is null or may be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_settings_in_force(
    given: *const c_char,
    settings: *mut CachingSettings,
) -> Status {
    run(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let given = unsafe { text_from_c("given", given) }?;
        let in_force = settings_in_force(&settings::config()?, given.unwrap_or_default());
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("settings", settings, in_force) }
    })
}

fn settings_in_force(config: &Config, given: &str) -> CachingSettings {
    let default = CachingConfig::default();
    let (options, are_given) = match config {
        Config::Caching(options) => {
            let asked = Config::parse("caching", given);
            (options, asked.is_ok_and(|asked| asked == *config))
        }
        _ => (&default, false),
    };
    CachingSettings {
        max_split_size: options.max_split_size.map_or(u64::MAX, Bytes::get),
        garbage_collection_threshold: options.garbage_collection_threshold,
        roundup_power2_divisions: options.roundup_power2_divisions,
        expandable_segments: options.expandable_segments,
        graph_capture_record_stream_reuse: options.graph_capture_record_stream_reuse,
        are_given,
    }
}

/// Means every device in use, for functions that take a device's number.
pub(crate) const EVERY_DEVICE: c_int = -1;

/// Releases all unused memory of a device to the driver; for -1, of every device in use. Waits for the streams
/// that still use freed blocks, unless a stream is being captured.
///
/// Memory that was released before a failure stays released. If one device fails, the others are still emptied,
/// and the first error is returned. A device that is not in use is not started.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_empty_cache(device: c_int) -> Status {
    let empty = |_, allocator: &Allocator| -> Result<(), Error> {
        Ok(allocator.with_all(|device| device.empty_cache(None))??)
    };
    run(|| match device {
        EVERY_DEVICE => devices::for_each(empty),
        _ => devices::get_checked(device)?.map_or(Ok(()), |allocator| empty(device, allocator)),
    })
}

/// Writes the driver's free memory and the device's total memory, in bytes.
///
/// # Safety
///
/// Both are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_memory_info(
    device: c_int,
    free: *mut u64,
    total: *mut u64,
) -> Status {
    use lowtide_core::Driver;
    run(|| {
        if free.is_null() {
            return Err(Error::null("free"));
        }
        let allocator = start::device(device)?;
        let info = allocator.physical().driver_mut().memory_info()?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("total", total, info.total.get()) }?;
        // SAFETY: as above.
        unsafe { write_to_c("free", free, info.free.get()) }
    })
}

/// Writes the fraction of the device's memory that may be reserved: 1 if there is no limit. For a device that is
/// not in use, the fraction comes from the options, and the device is not started.
///
/// # Safety
///
/// `fraction` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_get_memory_fraction(device: c_int, fraction: *mut f64) -> Status {
    run(|| {
        let held_at_most = match devices::get_checked(device)? {
            Some(allocator) => allocator.with_all(|device| device.memory_fraction())??,
            None => settings::config()?.memory_fraction().unwrap_or(1.0),
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("fraction", fraction, held_at_most) }
    })
}

/// One statistic of `torch.cuda.memory_stats`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct MemoryStat {
    /// PyTorch's key, like "allocated_bytes.all.peak", ended by a zero byte.
    pub key: [c_char; 96],
    /// The statistic's value.
    pub value: i64,
}

/// Writes every statistic of `torch.cuda.memory_stats` to `stats`, in the order of the keys, and their number to
/// `count`.
///
/// `stats` belongs to the caller and has room for `capacity` statistics. If that is too small, the status is
/// `LOWTIDE_STATUS_TOO_SMALL` and only `count` is written. To get the size, call with a capacity of 0; `stats`
/// may be null then. There are about 130 statistics, and 12 more for each private pool. A device that is not in
/// use has statistics too, and is not started. Until the driver is started, every number below 128 is accepted.
///
/// # Safety
///
/// `stats` may be written to for `capacity` statistics, or `capacity` is 0; `count` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_memory_stats(
    device: c_int,
    stats: *mut MemoryStat,
    capacity: usize,
    count: *mut usize,
) -> Status {
    run(|| {
        if stats.is_null() && capacity > 0 {
            return Err(Error::null("stats"));
        }
        let entries = match devices::get_checked(device)? {
            Some(allocator) => allocator.with_all(|device| device.stats())?.entries(),
            None => stats_of_nothing(&settings::config()?),
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("count", count, entries.len()) }?;
        if capacity < entries.len() {
            let text = format_args!(
                "there are {} figures, room is for {capacity}",
                entries.len()
            );
            return Err(Error::new(Status::TooSmall, text));
        }
        for (index, (key, value)) in entries.iter().enumerate() {
            let stat = MemoryStat::new(key, *value);
            // SAFETY: there is room for `capacity` figures, of which this is one.
            let target = unsafe { stats.add(index) };
            // SAFETY: as above.
            unsafe { write_to_c("stats", target, stat) }?;
        }
        Ok(())
    })
}

/// Writes the allocated bytes and the reserved bytes of a device: "allocated_bytes.all.current" and
/// "reserved_bytes.all.current" of `lowtide_memory_stats`, cheap enough to call at every request. Both are 0 for
/// a device that is not in use.
///
/// # Safety
///
/// Both are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_memory_usage(
    device: c_int,
    allocated: *mut u64,
    reserved: *mut u64,
) -> Status {
    run(|| {
        if allocated.is_null() {
            return Err(Error::null("allocated"));
        }
        let (held, from_driver) = match devices::get(device) {
            Some(allocator) => {
                let stats = allocator.with_all(|device| device.stats())?;
                (stats.allocated(), stats.reserved())
            }
            None => (Bytes::ZERO, Bytes::ZERO),
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("reserved", reserved, from_driver.get()) }?;
        // SAFETY: as above.
        unsafe { write_to_c("allocated", allocated, held.get()) }
    })
}

/// Sets every peak of a device's statistics to its current value.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_reset_peak_stats(device: c_int) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => Ok(allocator.with_all(|device| device.reset_stats(StatsReset::Peaks))?),
        None => Ok(()),
    })
}

/// Sets every sum and count of a device's statistics to zero.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_reset_accumulated_stats(device: c_int) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => {
            Ok(allocator.with_all(|device| device.reset_stats(StatsReset::Accumulated))?)
        }
        None => Ok(()),
    })
}

/// Writes a snapshot of every segment and block of the devices in use, in the format of
/// `torch.cuda.memory._dump_snapshot`. PyTorch's viewer and `lowtide` read it. It has no history. If memory is
/// paused, the snapshot has a key `pauses`, which the viewer ignores. Its value is a list of dicts with the
/// `device` and an `event`, whose `user_metadata` is the region's tag.
///
/// The caller owns the bytes and frees them with `lowtide_release_bytes`. On failure nothing is written.
///
/// # Safety
///
/// `bytes` and `length` are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_snapshot(bytes: *mut *mut c_void, length: *mut usize) -> Status {
    run(|| {
        if bytes.is_null() || length.is_null() {
            return Err(Error::null("bytes` and `length"));
        }
        let (pickle, _) =
            pauses::snapshot_of(|allocator| allocator.with_all(|device| device.snapshot()))?;
        let copy = copy_for_c(&pickle)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("bytes", bytes, copy) }?;
        // SAFETY: as above.
        unsafe { write_to_c("length", length, pickle.len()) }
    })
}

/// Frees bytes from `lowtide_snapshot` or `lowtide_share`. Null is ignored.
///
/// # Safety
///
/// `bytes` is null, or from one of these functions and not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_release_bytes(bytes: *mut c_void) {
    // SAFETY: it is null, or came from `malloc` in `copy_for_c`, by the contract of this function.
    unsafe { libc::free(bytes) }
}

/// Returns the statistics of a device that is not in use.
fn stats_of_nothing(config: &Config) -> Vec<(String, i64)> {
    let max_split_size = match config {
        Config::Caching(options) => options.max_split_size,
        _ => None,
    };
    let stats = Stats {
        max_split_size: max_split_size.map_or(-1, |size| size.get().cast_signed()),
        ..Stats::default()
    };
    stats.entries()
}

impl MemoryStat {
    fn new(key: &str, value: i64) -> MemoryStat {
        let mut stat = MemoryStat {
            key: [0; 96],
            value,
        };
        // The longest key, of a private pool with two numbers of 20 digits, leaves one byte.
        let last = stat.key.len() - 1;
        for (target, byte) in stat.key[..last].iter_mut().zip(key.bytes()) {
            *target = byte as c_char;
        }
        stat
    }
}

/// Returns a text that is never freed; the same pointer for equal texts.
fn lasting(text: String) -> Result<&'static CStr, Error> {
    static TEXTS: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let text = CString::new(text).map_err(|error| Error::new(Status::Internal, error))?;
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.iter().find(|known| ***known == *text) {
        return Ok(known);
    }
    let text = Box::leak(text.into_boxed_c_str());
    texts.push(text);
    Ok(text)
}

/// Returns a copy in memory that C can free.
pub(crate) fn copy_for_c(bytes: &[u8]) -> Result<*mut c_void, Error> {
    // SAFETY: any size may be asked for.
    let copy = unsafe { libc::malloc(bytes.len()) };
    if copy.is_null() {
        let text = format_args!("the host has no {} bytes for the answer", bytes.len());
        return Err(Error::new(Status::Internal, text));
    }
    // SAFETY: 1. both have so many bytes. 2. The copy is new, so they do not overlap.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len()) };
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_key_fits() {
        let most = u64::MAX;
        let key = format!("reserved_bytes_by_private_pools.{most}_{most}.small_pool.allocated");
        let stat = MemoryStat::new(&key, -1);
        // SAFETY: the key ends with a zero byte, which `new` leaves at its end.
        let written = unsafe { std::ffi::CStr::from_ptr(stat.key.as_ptr()) };
        assert_eq!(written.to_str(), Ok(&*key));
        assert_eq!(stat.value, -1);
    }
}
