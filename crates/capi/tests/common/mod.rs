//! Runs each test in a process of its own, with the stand-in driver: the allocators of a process exist until it
//! ends.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "only for tests, each of which uses a part of it"
)]

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::{Command, exit};
use std::ptr;

#[path = "../../../fakecuda/src/located.rs"]
mod located;

pub(crate) use located::{Live, library_path};

use lowtide::*;

/// The variable that is set in the process that a test starts for itself.
const CHILD: &str = "LOWTIDE_TEST_CHILD";

/// The strategies in which a test runs that names none: the default, and the one that reads PyTorch's settings.
const STRATEGIES: [&str; 2] = ["tide", "caching"];
/// For a test of what `caching` does alone, or of its settings.
pub(crate) const CACHING: (&str, &str) = ("LOWTIDE_STRATEGY", "caching");
/// Chooses `tide`.
pub(crate) const TIDE: (&str, &str) = ("LOWTIDE_STRATEGY", "tide");

/// Runs `body` in a new process with these environment variables. Fails if the process fails. Without a strategy or
/// PyTorch's settings in them, runs it once with each of [`STRATEGIES`].
pub(crate) fn isolated(test: &str, variables: &[(&str, &str)], body: fn(&Fake)) {
    let mut names = variables.iter().map(|&(name, _)| name);
    let strategy = variables.iter().find(|(name, _)| *name == CACHING.0);
    let strategies = match strategy {
        Some(&(_, strategy)) => vec![strategy],
        None if names.any(|name| name.ends_with("_CONF")) => vec![CACHING.1],
        None => STRATEGIES.to_vec(),
    };
    for strategy in strategies {
        let mut variables = variables.to_vec();
        variables.push((CACHING.0, strategy));
        output_of(test, &variables, body);
    }
}

/// Runs `body` in a new process with these environment variables. Fails if the process fails. Returns its output.
pub(crate) fn output_of(test: &str, variables: &[(&str, &str)], body: fn(&Fake)) -> String {
    if env::var_os(CHILD).is_some() {
        body(&Fake::load());
        exit(0);
    }
    let output = command(test)
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // If no test has the name, the process succeeds too, so its output is checked.
    assert!(
        output.status.success() && text.contains("running 1 test"),
        "{test} with {variables:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Returns whether the test's process uses `tide`.
pub(crate) fn is_tide() -> bool {
    env::var(CACHING.0).is_ok_and(|strategy| strategy == "tide")
}

/// Returns a command that runs one test in a process of its own, with `caching` and none of our environment variables.
pub(crate) fn command(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["LOWTIDE_", "PYTORCH_", "FAKECUDA_"]
            .iter()
            .any(|ours| name.starts_with(ours))
        {
            command.env_remove(name);
        }
    }
    // Most tests expect the calls of one segment for many blocks, and PyTorch's settings to be read.
    command.env("LOWTIDE_STRATEGY", "caching");
    command
}

/// The stand-in driver.
pub(crate) struct Fake(libloading::Library);

impl Fake {
    pub(crate) fn load() -> Fake {
        // SAFETY: loading it runs nothing.
        Fake(unsafe { libloading::Library::new(library_path()) }.unwrap())
    }

    /// Returns a function by its name; `F` must be its type.
    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: every caller below gives the type that fakecuda.h or cuda.h gives it.
        *unsafe { self.0.get::<F>(name) }.unwrap()
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        let calls = self.function::<unsafe extern "C" fn(*const c_char) -> u64>("fakecuda_calls");
        // SAFETY: the name ends with a zero byte.
        unsafe { calls(name.as_ptr()) }
    }

    /// Returns how often the driver was asked for memory, of segments or of pages.
    pub(crate) fn memory_calls(&self) -> u64 {
        self.calls("cuMemAlloc_v2") + self.calls("cuMemCreate")
    }

    pub(crate) fn live(&self) -> Live {
        let mut live = Live::default();
        let get = self.function::<unsafe extern "C" fn(*mut Live) -> c_int>("fakecuda_get_live");
        // SAFETY: `live` may be written to.
        assert_eq!(unsafe { get(&raw mut live) }, 0);
        live
    }

    pub(crate) fn used_bytes(&self, device: c_int) -> u64 {
        let used = self.function::<unsafe extern "C" fn(c_int) -> u64>("fakecuda_used_bytes");
        // SAFETY: any number may be passed.
        unsafe { used(device) }
    }

    /// Returns a new stream of device 0, and makes the device's context current.
    pub(crate) fn stream(&self) -> *mut c_void {
        self.stream_of(0)
    }

    /// Returns a new stream of a device, and makes the device's context current.
    pub(crate) fn stream_of(&self, device: c_int) -> *mut c_void {
        self.use_device(device);
        let mut stream = ptr::null_mut();
        let create =
            self.function::<unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int>("cuStreamCreate");
        // SAFETY: `stream` may be written to.
        assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
        stream
    }

    /// Resets a device's primary context, even if it is retained.
    pub(crate) fn reset(&self, device: c_int) {
        let reset =
            self.function::<unsafe extern "C" fn(c_int) -> c_int>("cuDevicePrimaryCtxReset_v2");
        // SAFETY: the callers no longer use its resources.
        assert_eq!(unsafe { reset(device) }, 0);
    }

    /// Makes a device's context current in this thread.
    pub(crate) fn use_device(&self, device: c_int) {
        let mut context = ptr::null_mut();
        let retain = self.function::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(
            "cuDevicePrimaryCtxRetain",
        );
        // SAFETY: `context` may be written to.
        assert_eq!(unsafe { retain(&raw mut context, device) }, 0);
        let set = self.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuCtxSetCurrent");
        // SAFETY: the context is retained.
        assert_eq!(unsafe { set(context) }, 0);
    }

    /// Returns the device of this thread's current context; `None` if there is none.
    pub(crate) fn current_device(&self) -> Option<c_int> {
        let mut context = ptr::null_mut();
        let get =
            self.function::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>("cuCtxGetCurrent");
        // SAFETY: `context` may be written to.
        assert_eq!(unsafe { get(&raw mut context) }, 0);
        if context.is_null() {
            return None;
        }
        let mut device = 0;
        let get = self.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuCtxGetDevice");
        // SAFETY: `device` may be written to.
        assert_eq!(unsafe { get(&raw mut device) }, 0);
        Some(device)
    }

    /// Allocates memory directly from the driver. Returns its address, or the error code.
    pub(crate) fn allocate(&self, size: usize) -> Result<*mut c_void, c_int> {
        let mut address = 0;
        let allocate =
            self.function::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2");
        // SAFETY: `address` may be written to.
        match unsafe { allocate(&raw mut address, size) } {
            0 => Ok(ptr::with_exposed_provenance_mut(
                usize::try_from(address).unwrap(),
            )),
            code => Err(code),
        }
    }

    /// Sets bytes in stream order.
    pub(crate) fn set_bytes(&self, memory: *mut c_void, size: usize, stream: *mut c_void) {
        assert!(self.sets_bytes(memory, size, stream));
    }

    /// Sets bytes in stream order. Returns whether the driver queued the work.
    pub(crate) fn sets_bytes(&self, memory: *mut c_void, size: usize, stream: *mut c_void) -> bool {
        type SetBytes = unsafe extern "C" fn(*mut c_void, u8, usize, *mut c_void) -> c_int;
        let set = self.function::<SetBytes>("cuMemsetD8Async");
        // SAFETY: memory and stream exist until the work is done.
        unsafe { set(memory, 1, size, stream) == 0 }
    }

    /// Waits for the work of a stream. Returns whether all of it was allowed.
    pub(crate) fn synchronize(&self, stream: *mut c_void) -> bool {
        type Synchronize = unsafe extern "C" fn(*mut c_void) -> c_int;
        let synchronize = self.function::<Synchronize>("cuStreamSynchronize");
        // SAFETY: the stream exists.
        unsafe { synchronize(stream) == 0 }
    }

    /// Makes device 0 current and waits for all its work. Returns whether all of it was allowed.
    pub(crate) fn synchronize_device(&self) -> bool {
        self.use_device(0);
        let synchronize = self.function::<unsafe extern "C" fn() -> c_int>("cuCtxSynchronize");
        // SAFETY: takes nothing.
        unsafe { synchronize() == 0 }
    }

    /// Destroys a stream whose work is done.
    pub(crate) fn destroy_stream(&self, stream: *mut c_void) {
        type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
        let destroy = self.function::<Destroy>("cuStreamDestroy_v2");
        // SAFETY: the stream exists.
        assert_eq!(unsafe { destroy(stream) }, 0);
    }

    /// Begins to capture a stream in the mode that PyTorch uses by default.
    pub(crate) fn begin_capture(&self, stream: *mut c_void) {
        let begin = self
            .function::<unsafe extern "C" fn(*mut c_void, u32) -> c_int>("cuStreamBeginCapture_v2");
        // SAFETY: the stream exists.
        assert_eq!(unsafe { begin(stream, 0) }, 0);
    }

    /// Ends the capture of a stream, and checks that no call invalidated it.
    pub(crate) fn end_capture(&self, stream: *mut c_void) {
        assert!(self.ends_capture(stream));
    }

    /// Ends the capture of a stream. Returns whether it was still valid.
    pub(crate) fn ends_capture(&self, stream: *mut c_void) -> bool {
        self.end_capture_of(stream) == 0
    }

    /// Begins to capture a stream in relaxed mode, in which all calls are allowed. Returns the driver's code.
    pub(crate) fn begin_relaxed_capture(&self, stream: *mut c_void) -> c_int {
        let begin = self
            .function::<unsafe extern "C" fn(*mut c_void, u32) -> c_int>("cuStreamBeginCapture_v2");
        // SAFETY: the stream exists.
        unsafe { begin(stream, 2) }
    }

    /// Ends the capture of a stream and destroys its graph. Returns the driver's code.
    pub(crate) fn end_capture_of(&self, stream: *mut c_void) -> c_int {
        type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
        let end = self.function::<End>("cuStreamEndCapture");
        let mut graph = ptr::null_mut();
        // SAFETY: 1. the stream exists. 2. `graph` may be written to.
        let code = unsafe { end(stream, &raw mut graph) };
        let destroy = self.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuGraphDestroy");
        if code == 0 {
            // SAFETY: nothing else uses the graph. Without this it would stay in the driver's table.
            unsafe { destroy(graph) };
        }
        code
    }

    /// Makes later work of a stream wait for the work now in `other`, like `wait_stream`.
    pub(crate) fn wait(&self, stream: *mut c_void, other: *mut c_void) {
        let mut event = ptr::null_mut();
        let create =
            self.function::<unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int>("cuEventCreate");
        // SAFETY: `event` may be written to.
        assert_eq!(unsafe { create(&raw mut event, 0) }, 0);
        let record = self
            .function::<unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int>("cuEventRecord");
        // SAFETY: both exist.
        assert_eq!(unsafe { record(event, other) }, 0);
        type Wait = unsafe extern "C" fn(*mut c_void, *mut c_void, u32) -> c_int;
        let wait = self.function::<Wait>("cuStreamWaitEvent");
        // SAFETY: as above.
        assert_eq!(unsafe { wait(stream, event, 0) }, 0);
        let destroy =
            self.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuEventDestroy_v2");
        // SAFETY: the event is no longer used.
        assert_eq!(unsafe { destroy(event) }, 0);
    }

    pub(crate) fn hold(&self, stream: *mut c_void, is_held: bool) {
        let name = if is_held {
            "fakecuda_hold_stream"
        } else {
            "fakecuda_release_stream"
        };
        let hold = self.function::<unsafe extern "C" fn(*mut c_void) -> c_int>(name);
        // SAFETY: the stream exists.
        assert_eq!(unsafe { hold(stream) }, 0);
    }

    /// Makes the `nth` call of a function from now on fail with a code.
    pub(crate) fn fail(&self, name: &str, nth: u64, code: c_int) {
        type Fail = unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int;
        let fail = self.function::<Fail>("fakecuda_fail");
        let name = CString::new(name).unwrap();
        // SAFETY: the name ends with a zero byte.
        assert_eq!(unsafe { fail(name.as_ptr(), nth, code) }, 0);
    }

    /// Makes `per_million` of a million calls fail from now on, chosen at random by a seed.
    pub(crate) fn fail_at_random(&self, seed: u64, per_million: u64) {
        let fail = self.function::<unsafe extern "C" fn(u64, u64)>("fakecuda_fail_at_random");
        // SAFETY: takes numbers only.
        unsafe { fail(seed, per_million) };
    }

    /// Sets whether streams do their work as late as possible.
    pub(crate) fn set_lazy(&self, is_lazy: bool) {
        let set = self.function::<unsafe extern "C" fn(c_int) -> c_int>("fakecuda_set_lazy");
        // SAFETY: takes a number only.
        assert_eq!(unsafe { set(is_lazy.into()) }, 0);
    }

    pub(crate) fn fail_none(&self) {
        // SAFETY: takes nothing.
        unsafe { self.function::<unsafe extern "C" fn()>("fakecuda_fail_none")() }
    }
}

pub(crate) fn last_error() -> String {
    // SAFETY: the text belongs to this thread, and no call is running in it.
    let text = unsafe { CStr::from_ptr(lowtide_last_error()) };
    text.to_str().unwrap().to_owned()
}

/// Allocates memory of a device on its default stream.
pub(crate) fn allocate(size: usize, device: c_int) -> Result<*mut c_void, Status> {
    allocate_on(size, device, ptr::null_mut())
}

pub(crate) fn allocate_on(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> Result<*mut c_void, Status> {
    let untouched = ptr::dangling_mut::<c_void>();
    let mut memory = untouched;
    // SAFETY: `memory` may be written to.
    match unsafe { lowtide_allocate(size, device, stream, &raw mut memory) } {
        Status::Ok => Ok(memory),
        status => {
            assert_eq!(memory, untouched, "a failure leaves it as it was");
            Err(status)
        }
    }
}

/// Returns the allocated block at an address.
pub(crate) fn find(memory: *mut c_void) -> Result<Allocation, Status> {
    let mut found = std::mem::MaybeUninit::uninit();
    // SAFETY: `found` may be written to.
    match unsafe { lowtide_find_allocation(memory, found.as_mut_ptr()) } {
        // SAFETY: it was written.
        Status::Ok => Ok(unsafe { found.assume_init() }),
        status => Err(status),
    }
}

/// Returns one statistic of a device.
pub(crate) fn stat(device: c_int, key: &str) -> i64 {
    let mut count = 0;
    // SAFETY: with a capacity of 0, only the count is written.
    let status = unsafe { lowtide_memory_stats(device, ptr::null_mut(), 0, &raw mut count) };
    assert_eq!(status, Status::TooSmall);
    let mut stats = vec![
        MemoryStat {
            key: [0; 96],
            value: 0
        };
        count
    ];
    // SAFETY: there is room for `count`.
    let status = unsafe { lowtide_memory_stats(device, stats.as_mut_ptr(), count, &raw mut count) };
    assert_eq!(status, Status::Ok);
    assert_eq!(stats.len(), count);
    let found = stats.iter().find(|stat| {
        // SAFETY: the key ends with a zero byte.
        unsafe { CStr::from_ptr(stat.key.as_ptr()) }.to_str() == Ok(key)
    });
    found.unwrap().value
}

/// Writes a pattern to device memory. Here it is host memory.
pub(crate) fn fill(memory: *mut c_void, size: usize, seed: usize) {
    for index in 0..size / 8 {
        // SAFETY: the word lies within the block.
        let word = unsafe { memory.cast::<usize>().add(index) };
        // SAFETY: only the test uses the block.
        unsafe { word.write(seed.wrapping_mul(0x9e37_79b9) ^ index) };
    }
}

/// Checks the pattern.
pub(crate) fn check(memory: *mut c_void, size: usize, seed: usize) {
    for index in 0..size / 8 {
        // SAFETY: the word lies within the block.
        let word = unsafe { memory.cast::<usize>().add(index) };
        // SAFETY: only the test uses the block, and it was written.
        let found = unsafe { word.read() };
        assert_eq!(
            found,
            seed.wrapping_mul(0x9e37_79b9) ^ index,
            "word {index}"
        );
    }
}
