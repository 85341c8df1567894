//! Measures backups on device 0. Segments of pseudo-random contents are saved, overwritten, restored and compared,
//! five times for each case. The speed of one large page-locked copy is measured for comparison. Prints one line
//! per round. Exits with code 1 if a byte is wrong.
//!
//! ```text
//! cargo run --release --package lowtide-cuda --example backup_speed --
//!     [--segments 64] [--mib 128] [--directory DIRECTORY] [--library LIBRARY]
//! ```
#![allow(unsafe_code, reason = "see crates/cuda/src/lib.rs")]
#![expect(clippy::print_stdout, reason = "what it prints is what it is for")]

use std::error::Error;
use std::ffi::{OsString, c_uint, c_void};
use std::path::PathBuf;
use std::process::ExitCode;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use lowtide_core::{Bytes, DeviceAddress, Driver, Stream};
use lowtide_cuda::{CudaBackup, CudaBackups, CudaDriver, Device, Library};
use lowtide_region::{BackupKind, Backups, MemoryRange};

const ROUNDS: u64 = 5;

fn main() -> ExitCode {
    let measured = Options::from_arguments().and_then(|options| measure(&options));
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    segments: u64,
    segment_size: Bytes,
    directory: Option<PathBuf>,
    library: OsString,
}

impl Options {
    fn from_arguments() -> Result<Options, Box<dyn Error>> {
        let mut options = Options {
            segments: 64,
            segment_size: Bytes::mib(128),
            directory: None,
            library: "libcuda.so.1".into(),
        };
        let mut arguments = std::env::args_os().skip(1);
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or("a value is missing")?;
            let number = || value.to_string_lossy().parse::<u64>();
            match name.to_string_lossy().as_ref() {
                "--segments" => options.segments = number()?,
                "--mib" => options.segment_size = Bytes::mib(number()?),
                "--directory" => options.directory = Some(value.into()),
                "--library" => options.library = value,
                other => return Err(format!("{other} is not known").into()),
            }
        }
        Ok(options)
    }
}

/// The settings of one table.
struct Case {
    title: &'static str,
    kind: BackupKind,
    retain: bool,
    /// What the job does between two backups.
    pause: Pause,
}

enum Pause {
    None,
    Sleep(Duration),
    UntilLocked,
}

const CASES: [Case; 4] = [
    Case {
        title: "host, not retained, one round after the other",
        kind: BackupKind::Host,
        retain: false,
        pause: Pause::None,
    },
    Case {
        title: "host, not retained, a second of rest before each save and restore",
        kind: BackupKind::Host,
        retain: false,
        pause: Pause::Sleep(Duration::from_secs(1)),
    },
    Case {
        title: "host, retained, everything page-locked before each save and restore",
        kind: BackupKind::Host,
        retain: true,
        pause: Pause::UntilLocked,
    },
    Case {
        title: "disk",
        kind: BackupKind::Disk,
        retain: false,
        pause: Pause::None,
    },
];

fn measure(options: &Options) -> Result<(), Box<dyn Error>> {
    // SAFETY: the caller names a driver.
    let library = unsafe { Library::open(&options.library) }?;
    let device = library.device(0)?;
    let threads = thread::available_parallelism()?;
    let size = options.segment_size;
    println!(
        "{}, {threads} host threads, {} segments of {size}; large pages: {}",
        device.name()?,
        options.segments,
        large_pages()
    );
    // SAFETY: it is given only what came from it, on the default stream.
    let mut driver = unsafe { CudaDriver::new(device.clone()) }?;
    measure_link(&options.library, &mut driver)?;
    let mut ranges = Vec::new();
    for _ in 0..options.segments {
        let address = driver.allocate(size)?;
        ranges.push(MemoryRange { address, size });
    }
    for case in CASES {
        measure_case(&case, options, &device, &mut driver, &ranges)?;
    }
    Ok(())
}

fn measure_case(
    case: &Case,
    options: &Options,
    device: &Device,
    driver: &mut CudaDriver,
    ranges: &[MemoryRange],
) -> Result<(), Box<dyn Error>> {
    // SAFETY: the ranges are the driver's, and nothing else uses them.
    let mut backups = unsafe { CudaBackups::new(device.clone()) }?;
    backups.set_retain(case.retain);
    if let Some(directory) = &options.directory {
        backups.set_directory(directory.clone());
    }
    let bytes: Bytes = ranges.iter().map(|range| range.size).sum();
    println!("\n{}", case.title);
    println!("round  save ms   GB/s  locked   restore ms   GB/s  locked   contents");
    let mut locked = 0.0;
    for round in 1..=ROUNDS {
        for (number, range) in ranges.iter().enumerate() {
            driver.write(range.address, &content(round, number, range.size))?;
        }
        case.rest(&backups, driver, ranges[0].address)?;
        let start = Instant::now();
        let mut backup = backups.begin(ranges, case.kind)?;
        while backups.save_next(&mut backup)? < ranges.len() {}
        let saved = start.elapsed();
        for range in ranges {
            driver.fill(range.address, range.size, 0xee, Stream::DEFAULT)?;
        }
        driver.synchronize_stream(Stream::DEFAULT)?;
        case.rest(&backups, driver, ranges[0].address)?;
        let locked_at_save = std::mem::replace(&mut locked, share_locked(&backup, bytes));
        let start = Instant::now();
        backups.restore(&mut backup, ranges)?;
        let restored = start.elapsed();
        let locked_at_restore = locked;
        locked = share_locked(&backup, bytes);
        backups.discard(backup);
        compare(driver, ranges, round)?;
        println!(
            "{round:5} {:8.1} {:6.1} {:6.0}%  {:11.1} {:6.1} {:6.0}%   as saved",
            saved.as_secs_f64() * 1e3,
            gigabytes_per_second(bytes, saved),
            locked_at_save * 100.0,
            restored.as_secs_f64() * 1e3,
            gigabytes_per_second(bytes, restored),
            locked_at_restore * 100.0,
        );
    }
    let kept = backups.kept().bytes();
    let start = Instant::now();
    let slowest = thread::scope(|scope| {
        let releasing = scope.spawn(|| backups.release_retained());
        slowest_call(driver, ranges[0].address, || releasing.is_finished())
    })?;
    println!(
        "kept {kept}, given back in {:.1} ms; the slowest of the job's small calls took {:.2} ms",
        start.elapsed().as_secs_f64() * 1e3,
        slowest.as_secs_f64() * 1e3
    );
    Ok(())
}

impl Case {
    /// Waits as this case does between two backups. If it waits for page-locking, the job makes small calls
    /// meanwhile.
    fn rest(
        &self,
        backups: &CudaBackups,
        driver: &mut CudaDriver,
        address: DeviceAddress,
    ) -> Result<(), Box<dyn Error>> {
        match self.pause {
            Pause::None => {}
            Pause::Sleep(time) => thread::sleep(time),
            Pause::UntilLocked => {
                let start = Instant::now();
                let slowest = thread::scope(|scope| {
                    let waiting = scope.spawn(|| backups.finish_locking());
                    slowest_call(driver, address, || waiting.is_finished())
                })?;
                let waited = start.elapsed().as_secs_f64() * 1e3;
                if waited > 10.0 {
                    println!(
                        "      (waited {waited:.0} ms until all was page-locked; beside that the \
                         slowest of the job's small calls took {:.2} ms)",
                        slowest.as_secs_f64() * 1e3
                    );
                }
            }
        }
        Ok(())
    }
}

/// Makes small calls until `is_over` returns true. Returns the duration of the slowest.
fn slowest_call(
    driver: &mut CudaDriver,
    address: DeviceAddress,
    is_over: impl Fn() -> bool,
) -> Result<Duration, Box<dyn Error>> {
    let mut byte = [0];
    driver.read(address, &mut byte)?;
    let mut slowest = Duration::ZERO;
    while !is_over() {
        let start = Instant::now();
        // The byte that is there already, because the contents are compared later.
        driver.fill(address, Bytes(1), byte[0], Stream::DEFAULT)?;
        driver.synchronize_stream(Stream::DEFAULT)?;
        slowest = slowest.max(start.elapsed());
    }
    Ok(slowest)
}

#[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
fn share_locked(backup: &CudaBackup, bytes: Bytes) -> f64 {
    backup.locked().get() as f64 / bytes.get() as f64
}

#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
fn gigabytes_per_second(bytes: Bytes, time: Duration) -> f64 {
    bytes.get() as f64 / time.as_secs_f64() / 1e9
}

/// Returns the contents of a segment in a round. No two segments are equal, and no two words of a segment.
fn content(round: u64, number: usize, size: Bytes) -> Vec<u8> {
    let seed = (round << 56) ^ ((number as u64) << 40);
    let words = (0..size.get() / 8).map(|index| {
        let mixed = (seed ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).to_le_bytes()
    });
    words.flatten().collect()
}

fn compare(driver: &CudaDriver, ranges: &[MemoryRange], round: u64) -> Result<(), Box<dyn Error>> {
    for (number, range) in ranges.iter().enumerate() {
        let expected = content(round, number, range.size);
        let mut found = vec![0; expected.len()];
        driver.read(range.address, &mut found)?;
        if found != expected {
            return Err(format!("round {round}: segment {number} is not as it was saved").into());
        }
    }
    Ok(())
}

/// Returns the system's setting for huge pages: `always [madvise] never`.
fn large_pages() -> String {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = std::fs::read_to_string(path).unwrap_or_else(|error| error.to_string());
    setting.trim().to_owned()
}

/// Prints the speed of one large copy from and to page-locked memory, which no backup can exceed.
fn measure_link(library: &OsString, driver: &mut CudaDriver) -> Result<(), Box<dyn Error>> {
    type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_uint;
    type Free = unsafe extern "C" fn(*mut c_void) -> c_uint;
    let size = Bytes::gib(1);
    let on_device = driver.allocate(size)?;
    // SAFETY: the library is a driver and loaded already.
    let library = unsafe { libloading::Library::new(library) }?;
    // SAFETY: the type is cuda.h's.
    let allocate = unsafe { library.get::<Allocate>("cuMemHostAlloc") }?;
    // SAFETY: the type is cuda.h's.
    let free = unsafe { library.get::<Free>("cuMemFreeHost") }?;
    use_context(&library)?;
    let length = usize::try_from(size.get())?;
    let mut memory = ptr::null_mut();
    // SAFETY: the call writes `memory`, which outlives it.
    let result = unsafe { allocate(&raw mut memory, length, 0) };
    if result != 0 {
        return Err(format!("cuMemHostAlloc failed with error {result}").into());
    }
    // SAFETY: the driver allocated `length` bytes, and fresh pages are zero.
    let on_host = unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), length) };
    let mut best = [f64::INFINITY; 2];
    for _ in 0..5 {
        let times = copy_both_ways(driver, on_device, on_host)?;
        best = [best[0].min(times[0]), best[1].min(times[1])];
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let speed = best.map(|seconds| size.get() as f64 / seconds / 1e9);
    println!(
        "the link: {:.1} GB/s from the device, {:.1} GB/s to it",
        speed[0], speed[1]
    );
    // SAFETY: it came from cuMemHostAlloc, and its slice is not used any more.
    unsafe { free(memory) };
    driver.free(on_device, size)?;
    Ok(())
}

fn copy_both_ways(
    driver: &mut CudaDriver,
    on_device: DeviceAddress,
    on_host: &mut [u8],
) -> Result<[f64; 2], Box<dyn Error>> {
    let start = Instant::now();
    driver.read(on_device, on_host)?;
    let read = start.elapsed().as_secs_f64();
    let start = Instant::now();
    driver.write(on_device, on_host)?;
    driver.synchronize_stream(Stream::DEFAULT)?;
    Ok([read, start.elapsed().as_secs_f64()])
}

/// Makes device 0's primary context current in this thread, for the rest of the process.
fn use_context(library: &libloading::Library) -> Result<(), Box<dyn Error>> {
    type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> c_uint;
    type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_uint;
    // SAFETY: the type is cuda.h's.
    let retain = unsafe { library.get::<Retain>("cuDevicePrimaryCtxRetain") }?;
    // SAFETY: the type is cuda.h's.
    let set_current = unsafe { library.get::<SetCurrent>("cuCtxSetCurrent") }?;
    let mut context = ptr::null_mut();
    // SAFETY: the call writes `context`, which outlives it.
    let retained = unsafe { retain(&raw mut context, 0) };
    // SAFETY: the context is retained.
    let set = unsafe { set_current(context) };
    if retained != 0 || set != 0 {
        return Err(format!("no context: errors {retained} and {set}").into());
    }
    Ok(())
}
