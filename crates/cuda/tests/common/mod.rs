//! What the tests on the stand-in driver and the run on a card share: the rest of a program, which
//! makes streams and captures, and a load of requests whose contents are checked.

use std::error::Error;
use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::ptr;

use lowtide_core::{Bytes, CheckLevel, DeviceAddress, DeviceAllocator, Driver, Stream};
use lowtide_cuda::CudaDriver;

/// What a program that uses an allocator does itself, as PyTorch would: current device, streams,
/// captures.
#[derive(Debug)]
pub(crate) struct Program {
    library: libloading::Library,
}

type Answer = Result<(), Box<dyn Error>>;

impl Program {
    pub(crate) fn new(library: &OsStr) -> Result<Program, Box<dyn Error>> {
        // SAFETY: the library is a driver and loaded already.
        let library = unsafe { libloading::Library::new(library) }?;
        Ok(Program { library })
    }

    /// Returns a function of the driver.
    ///
    /// # Safety
    ///
    /// `F` is the function's type in cuda.h.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, Box<dyn Error>> {
        // SAFETY: by the contract of this function.
        Ok(*unsafe { self.library.get::<F>(name) }?)
    }

    /// Makes the device's primary context current in this thread.
    pub(crate) fn use_device(&self, device: c_int) -> Answer {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_uint;
        type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let retain: Retain = unsafe { self.function("cuDevicePrimaryCtxRetain") }?;
        // SAFETY: the type is cuda.h's.
        let set_current: SetCurrent = unsafe { self.function("cuCtxSetCurrent") }?;
        let mut context = ptr::null_mut();
        // SAFETY: the call writes `context`, which outlives it.
        check("cuDevicePrimaryCtxRetain", unsafe {
            retain(&raw mut context, device)
        })?;
        // SAFETY: the context is held.
        check("cuCtxSetCurrent", unsafe { set_current(context) })
    }

    /// Returns the context that is current in this thread; 0 for none.
    pub(crate) fn current_context(&self) -> Result<usize, Box<dyn Error>> {
        type GetCurrent = unsafe extern "C" fn(*mut *mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let get_current: GetCurrent = unsafe { self.function("cuCtxGetCurrent") }?;
        let mut context = ptr::null_mut();
        // SAFETY: the call writes `context`, which outlives it.
        check("cuCtxGetCurrent", unsafe { get_current(&raw mut context) })?;
        Ok(context.addr())
    }

    /// Returns a new stream of the current device, for the rest of the process.
    pub(crate) fn create_stream(&self) -> Result<Stream, Box<dyn Error>> {
        const NON_BLOCKING: c_uint = 1;
        type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let create: Create = unsafe { self.function("cuStreamCreate") }?;
        let mut stream = ptr::null_mut();
        // SAFETY: the call writes `stream`, which outlives it.
        check("cuStreamCreate", unsafe {
            create(&raw mut stream, NON_BLOCKING)
        })?;
        Ok(Stream(stream.expose_provenance() as u64))
    }

    /// Begins a capture that forbids every thread the calls that could spoil it.
    pub(crate) fn begin_capture(&self, stream: Stream) -> Answer {
        const GLOBAL: c_uint = 0;
        type Begin = unsafe extern "C" fn(*mut c_void, c_uint) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let begin: Begin = unsafe { self.function("cuStreamBeginCapture_v2") }?;
        // SAFETY: the stream exists.
        check("cuStreamBeginCapture_v2", unsafe {
            begin(raw(stream), GLOBAL)
        })
    }

    /// Ends a capture; fails if it was spoiled. The graph is left alone.
    pub(crate) fn end_capture(&self, stream: Stream) -> Answer {
        type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let end: End = unsafe { self.function("cuStreamEndCapture") }?;
        let mut graph = ptr::null_mut();
        // SAFETY: 1. the stream exists. 2. The call writes `graph`, which outlives it.
        check("cuStreamEndCapture", unsafe {
            end(raw(stream), &raw mut graph)
        })
    }
}

fn check(call: &str, result: c_uint) -> Answer {
    match result {
        0 => Ok(()),
        code => Err(format!("{call} failed with error {code}").into()),
    }
}

fn raw(stream: Stream) -> *mut c_void {
    ptr::with_exposed_provenance_mut(usize::try_from(stream.0).expect("64 bits"))
}

/// A block that is held, and the byte that fills it.
struct Held {
    address: DeviceAddress,
    size: Bytes,
    stream: Stream,
    byte: u8,
}

/// Takes an allocator through `count` random requests of 1 byte to `size_max`, at most 100 held at a
/// time. Each block is filled in stream order, some from another stream than their own, read back, and
/// filled once more as it is freed: two blocks that overlap, or one that is handed out while its last
/// owner's work still writes to it, do not have their bytes.
pub(crate) fn exercise(
    allocator: &mut DeviceAllocator<CudaDriver>,
    streams: [Stream; 2],
    count: usize,
    size_max: Bytes,
) -> Answer {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut held: Vec<Held> = Vec::new();
    let mut copy = Vec::new();
    for _ in 0..count {
        if held.len() == 100 || (!held.is_empty() && random.below(3) == 0) {
            let index = random.below(held.len() as u64);
            let block = held.swap_remove(usize::try_from(index)?);
            verify_and_free(allocator, &block, &mut copy)?;
            continue;
        }
        // Sizes spread over all magnitudes.
        let magnitude = 1 << random.below(u64::from(size_max.get().ilog2()) + 1);
        let size = Bytes(1 + random.below(magnitude));
        let [stream, other] = if random.below(2) == 0 {
            streams
        } else {
            [streams[1], streams[0]]
        };
        let address = allocator.allocate(size, stream)?;
        let mut filling = stream;
        if random.below(8) == 0 {
            // The other stream may use the block once its own is done with what was there before.
            let driver = allocator.driver_mut();
            let event = driver.record_event(stream)?;
            driver.wait_event(other, event)?;
            driver.release_event(event);
            allocator.record_stream(address, other)?;
            filling = other;
        }
        let byte = random.below(256).to_le_bytes()[0];
        allocator.driver_mut().fill(address, size, byte, filling)?;
        held.push(Held {
            address,
            size,
            stream: filling,
            byte,
        });
    }
    for block in held {
        verify_and_free(allocator, &block, &mut copy)?;
    }
    allocator.check_invariants(CheckLevel::Everything)?;
    allocator.empty_cache()?;
    Ok(())
}

fn verify_and_free(
    allocator: &mut DeviceAllocator<CudaDriver>,
    block: &Held,
    copy: &mut Vec<u8>,
) -> Answer {
    let driver = allocator.driver_mut();
    driver.synchronize_stream(block.stream)?;
    copy.clear();
    copy.resize(usize::try_from(block.size.get())?, !block.byte);
    driver.read(block.address, copy)?;
    if let Some(offset) = copy.iter().position(|&byte| byte != block.byte) {
        return Err(format!(
            "the block at {} of {} bytes was filled with {}, and has {} at offset {offset}",
            block.address,
            block.size.get(),
            block.byte,
            copy[offset]
        )
        .into());
    }
    // Whoever has the bytes next, in whatever stream, must come after this.
    driver.fill(block.address, block.size, !block.byte, block.stream)?;
    allocator.free(block.address)?;
    Ok(())
}

/// A small source of numbers, the same in every run.
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
