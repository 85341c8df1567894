//! The driver's functions that lowtide replaces, by name. Each has its type from `cuda.h`, and calls the driver's
//! own function for whatever lowtide does not serve.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::AtomicPtr;

use super::lookup::{StandIn, entry_point};
use super::mode::is_serving;
use super::serving::guarded;
use super::{code, memory, summary};

/// Defines the exported functions and their list.
///
/// After the name come the function's name for `cuGetProcAddress`, the first CUDA version that has it, and
/// whether its default stream is per thread (such names have `_ptsz` in `cuda.h`). The body runs if lowtide
/// serves the process. The closure named before it calls the driver.
macro_rules! stand_ins {
    ($(
        fn $name:ident [$symbol:literal, $since:literal, $is_per_thread:literal]
            ($($argument:ident: $type:ty),*) |$driver:ident| $body:block
    )*) => {
        $(
            /// Replaces the driver's function of this name.
            ///
            /// # Safety
            ///
            /// As for the driver's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                let $driver = || {
                    let real = table::$name.real();
                    if real.is_null() {
                        return code::NO_DEVICE;
                    }
                    // SAFETY: it is the driver's function of this name, which cuda.h gives this type.
                    let real = unsafe {
                        transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(real)
                    };
                    // SAFETY: the arguments are the program's.
                    unsafe { real($($argument),*) }
                };
                if is_serving() {
                    guarded(|| $body)
                } else {
                    $driver()
                }
            }
        )*

        #[expect(non_upper_case_globals, reason = "the names of the driver's functions")]
        mod table {
            use super::*;

            $(pub(super) static $name: StandIn = StandIn {
                name: c_str(concat!(stringify!($name), "\0")),
                symbol: $symbol,
                since: $since,
                is_per_thread: $is_per_thread,
                function: super::$name as *const c_void,
                real: AtomicPtr::new(ptr::null_mut()),
            };)*
        }

        /// Every function of this file.
        pub(super) static STAND_INS: &[&StandIn] = &[$(&table::$name),*];
    };
}

const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text ends with its only zero byte"),
    }
}

stand_ins! {
    // Functions that lowtide serves.
    fn cuMemAlloc_v2 ["cuMemAlloc", 3020, false](memory: *mut u64, size: usize)
        |driver| { or_driver(driver, memory::allocate(memory, size)) }
    fn cuMemFree_v2 ["cuMemFree", 3020, false](address: u64)
        |driver| { or_driver(driver, memory::free(address)) }
    fn cuMemAllocAsync ["cuMemAllocAsync", 11020, false](memory: *mut u64, size: usize, stream: *mut c_void)
        |driver| { or_driver(driver, memory::allocate_async(memory, size, stream, false)) }
    fn cuMemAllocAsync_ptsz ["cuMemAllocAsync", 11020, true](memory: *mut u64, size: usize, stream: *mut c_void)
        |driver| { or_driver(driver, memory::allocate_async(memory, size, stream, true)) }
    fn cuMemFreeAsync ["cuMemFreeAsync", 11020, false](address: u64, stream: *mut c_void)
        |driver| { or_driver(driver, memory::free_async(address, stream, false)) }
    fn cuMemFreeAsync_ptsz ["cuMemFreeAsync", 11020, true](address: u64, stream: *mut c_void)
        |driver| { or_driver(driver, memory::free_async(address, stream, true)) }
    fn cuMemGetInfo_v2 ["cuMemGetInfo", 3020, false](free: *mut usize, total: *mut usize)
        |driver| { memory::add_kept(driver(), free) }
    fn cuIpcGetMemHandle ["cuIpcGetMemHandle", 4010, false](handle: *mut c_void, address: u64)
        |driver| { memory::refuse_inner(address).unwrap_or_else(driver) }

    // Functions for other device memory, which may need lowtide's cached memory.
    fn cuMemAllocManaged ["cuMemAllocManaged", 6000, false](memory: *mut u64, size: usize, flags: c_uint)
        |driver| {
            summary::count_managed();
            left_to_driver(driver)
        }
    fn cuMemAllocPitch_v2 ["cuMemAllocPitch", 3020, false]
        (memory: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint)
        |driver| { left_to_driver(driver) }
    fn cuMemCreate ["cuMemCreate", 10020, false]
        (handle: *mut u64, size: usize, properties: *const c_void, flags: u64)
        |driver| { or_after_release(driver) }
    fn cuMemAllocFromPoolAsync ["cuMemAllocFromPoolAsync", 11020, false]
        (memory: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void)
        |driver| { left_to_driver(driver) }
    fn cuMemAllocFromPoolAsync_ptsz ["cuMemAllocFromPoolAsync", 11020, true]
        (memory: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void)
        |driver| { left_to_driver(driver) }
    fn cuArrayCreate_v2 ["cuArrayCreate", 3020, false](array: *mut c_void, descriptor: *const c_void)
        |driver| { or_after_release(driver) }
    fn cuArray3DCreate_v2 ["cuArray3DCreate", 3020, false](array: *mut c_void, descriptor: *const c_void)
        |driver| { or_after_release(driver) }

    fn cuMipmappedArrayCreate ["cuMipmappedArrayCreate", 5000, false]
        (array: *mut c_void, descriptor: *const c_void, levels: c_uint)
        |driver| { or_after_release(driver) }

    // Functions for code and graphs, which the driver keeps in device memory.
    fn cuModuleLoad ["cuModuleLoad", 2000, false](module: *mut c_void, path: *const c_char)
        |driver| { or_after_release(driver) }
    fn cuModuleLoadData ["cuModuleLoadData", 2000, false](module: *mut c_void, image: *const c_void)
        |driver| { or_after_release(driver) }
    fn cuModuleLoadDataEx ["cuModuleLoadDataEx", 2010, false]
        (module: *mut c_void, image: *const c_void, count: c_uint, options: *mut c_void, values: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuModuleLoadFatBinary ["cuModuleLoadFatBinary", 2000, false](module: *mut c_void, image: *const c_void)
        |driver| { or_after_release(driver) }
    fn cuModuleGetFunction ["cuModuleGetFunction", 2000, false]
        (function: *mut c_void, module: *mut c_void, name: *const c_char)
        |driver| { or_after_release(driver) }
    fn cuLibraryLoadData ["cuLibraryLoadData", 12000, false]
        (library: *mut c_void, code: *const c_void, jit_options: *mut c_void, jit_values: *mut c_void,
         jit_count: c_uint, options: *mut c_void, values: *mut c_void, count: c_uint)
        |driver| { or_after_release(driver) }
    fn cuLibraryLoadFromFile ["cuLibraryLoadFromFile", 12000, false]
        (library: *mut c_void, path: *const c_char, jit_options: *mut c_void, jit_values: *mut c_void,
         jit_count: c_uint, options: *mut c_void, values: *mut c_void, count: c_uint)
        |driver| { or_after_release(driver) }
    fn cuLibraryGetModule ["cuLibraryGetModule", 12000, false](module: *mut c_void, library: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuKernelGetFunction ["cuKernelGetFunction", 12000, false](function: *mut c_void, kernel: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuCtxSetLimit ["cuCtxSetLimit", 3010, false](limit: c_int, value: usize)
        |driver| { or_after_release(driver) }
    // The result of `cuGetProcAddress` for `cuGraphInstantiate` depends on the driver, so it is not replaced.
    fn cuGraphInstantiate_v2 ["cuGraphInstantiate_v2", 11000, false]
        (executable: *mut c_void, graph: *mut c_void, node: *mut c_void, log: *mut c_char, size: usize)
        |driver| { or_after_release(driver) }
    fn cuGraphInstantiateWithFlags ["cuGraphInstantiateWithFlags", 11040, false]
        (executable: *mut c_void, graph: *mut c_void, flags: u64)
        |driver| { or_after_release(driver) }
    fn cuGraphInstantiateWithParams ["cuGraphInstantiateWithParams", 12000, false]
        (executable: *mut c_void, graph: *mut c_void, parameters: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuGraphInstantiateWithParams_ptsz ["cuGraphInstantiateWithParams", 12000, true]
        (executable: *mut c_void, graph: *mut c_void, parameters: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuGraphUpload ["cuGraphUpload", 11010, false](executable: *mut c_void, stream: *mut c_void)
        |driver| { or_after_release(driver) }
    fn cuGraphUpload_ptsz ["cuGraphUpload", 11010, true](executable: *mut c_void, stream: *mut c_void)
        |driver| { or_after_release(driver) }

    // Functions that change state which lowtide has to follow.
    fn cuStreamDestroy_v2 ["cuStreamDestroy", 4000, false](stream: *mut c_void)
        |driver| { memory::wait_for_last_work(stream).unwrap_or_else(driver) }
    fn cuStreamBeginCapture_v2 ["cuStreamBeginCapture", 10010, false](stream: *mut c_void, mode: c_uint)
        |driver| { memory::note_capture_began(driver()) }
    fn cuStreamBeginCapture_v2_ptsz ["cuStreamBeginCapture", 10010, true](stream: *mut c_void, mode: c_uint)
        |driver| { memory::note_capture_began(driver()) }
    fn cuStreamBeginCaptureToGraph ["cuStreamBeginCaptureToGraph", 12030, false]
        (stream: *mut c_void, graph: *mut c_void, nodes: *const c_void, data: *const c_void, count: usize, mode: c_uint)
        |driver| { memory::note_capture_began(driver()) }
    fn cuStreamBeginCaptureToGraph_ptsz ["cuStreamBeginCaptureToGraph", 12030, true]
        (stream: *mut c_void, graph: *mut c_void, nodes: *const c_void, data: *const c_void, count: usize, mode: c_uint)
        |driver| { memory::note_capture_began(driver()) }
    fn cuStreamEndCapture ["cuStreamEndCapture", 10000, false](stream: *mut c_void, graph: *mut *mut c_void)
        |driver| { memory::note_capture_ended(driver()) }
    fn cuStreamEndCapture_ptsz ["cuStreamEndCapture", 10000, true](stream: *mut c_void, graph: *mut *mut c_void)
        |driver| { memory::note_capture_ended(driver()) }
    fn cuDevicePrimaryCtxReset ["cuDevicePrimaryCtxReset", 7000, false](device: c_int)
        |driver| {
            memory::lose(device);
            driver()
        }
    fn cuDevicePrimaryCtxReset_v2 ["cuDevicePrimaryCtxReset", 11000, false](device: c_int)
        |driver| {
            memory::lose(device);
            driver()
        }
    fn cuDeviceSetMemPool ["cuDeviceSetMemPool", 11020, false](device: c_int, pool: *mut c_void)
        |driver| {
            memory::leave_pools_to_program();
            driver()
        }
    fn cuMemPoolSetAccess ["cuMemPoolSetAccess", 11020, false]
        (pool: *mut c_void, access: *const c_void, count: usize)
        |driver| {
            memory::leave_pools_to_program();
            driver()
        }

    // Functions that look up functions.
    fn cuGetProcAddress ["cuGetProcAddress", 11030, false]
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64)
        |driver| { find(driver, symbol, function, version, (flags, false)) }
    fn cuGetProcAddress_ptsz ["cuGetProcAddress", 11030, true]
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64)
        |driver| { find(driver, symbol, function, version, (flags, true)) }
    fn cuGetProcAddress_v2 ["cuGetProcAddress", 12000, false]
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_uint)
        |driver| { find(driver, symbol, function, version, (flags, false)) }
    fn cuGetProcAddress_v2_ptsz ["cuGetProcAddress", 12000, true]
        (symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_uint)
        |driver| { find(driver, symbol, function, version, (flags, true)) }
}

/// Returns lowtide's result for a memory call, or else the driver's.
fn or_driver(driver: impl Fn() -> c_int, answer: Option<c_int>) -> c_int {
    answer.unwrap_or_else(|| {
        summary::count_left_to_driver();
        driver()
    })
}

/// Returns the driver's result for a request for other memory that the program frees by the same function as
/// lowtide's. It is counted, as the free will be.
fn left_to_driver(driver: impl Fn() -> c_int) -> c_int {
    summary::count_left_to_driver();
    or_after_release(driver)
}

/// Returns the driver's result for a request for other memory. If the driver is out of memory, releases lowtide's
/// cached memory and calls it again.
fn or_after_release(driver: impl Fn() -> c_int) -> c_int {
    match driver() {
        code::OUT_OF_MEMORY if memory::release_kept() => driver(),
        code => code,
    }
}

/// Lets the driver look up a function, and returns ours in its place.
fn find(
    driver: impl Fn() -> c_int,
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    (flags, is_per_thread_by_default): (u64, bool),
) -> c_int {
    const LEGACY_STREAM: u64 = 1;
    const PER_THREAD_STREAM: u64 = 2;
    let code = driver();
    if code != code::SUCCESS || symbol.is_null() || function.is_null() {
        return code;
    }
    // SAFETY: the driver has just written to it.
    let found = unsafe { function.read() };
    if found.is_null() {
        return code;
    }
    // SAFETY: it is not null, and the driver has read it as a text.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    let is_per_thread =
        flags & PER_THREAD_STREAM != 0 || is_per_thread_by_default && flags & LEGACY_STREAM == 0;
    let meant = entry_point(symbol, version, is_per_thread, found);
    // SAFETY: the driver has just written to it.
    unsafe { function.write(meant) };
    code
}
