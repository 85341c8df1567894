//! The stand-in driver, and its functions beyond CUDA.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::process::Command;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use fakecuda::Live;

use cudarc::driver::sys::CUmemAllocationProp;
use lowtide_core::{DeviceAddress, Stream};
use lowtide_cuda::{CudaDriver, Device, Library, LoadError};

use super::common::program::Program;

/// The stand-in in its initial state. Only one test at a time has it.
pub(crate) struct Fake {
    control: libloading::Library,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    pub(crate) fn start() -> Fake {
        static TURN: Mutex<()> = Mutex::new(());
        // The reset clears whatever a failed test has left.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the stand-in does nothing when it is loaded.
        let control = unsafe { libloading::Library::new(fakecuda::library_path()) };
        let fake = Fake {
            control: control.unwrap(),
            _turn: turn,
        };
        // SAFETY: the type is that of the stand-in's header.
        let reset = unsafe { fake.function::<unsafe extern "C" fn()>("fakecuda_reset") };
        // SAFETY: no other test uses it.
        unsafe { reset() };
        fake
    }

    /// Runs a test in its own process with two devices. Returns whether this is that process.
    pub(crate) fn has_two_devices(test: &str) -> bool {
        const DEVICES: &str = "FAKECUDA_DEVICES";
        if std::env::var_os(DEVICES).is_some() {
            return true;
        }
        let mut again = Command::new(std::env::current_exe().unwrap());
        let status = again.args([test, "--exact"]).env(DEVICES, "2").status();
        assert!(status.unwrap().success(), "{test} failed with two devices");
        false
    }

    pub(crate) fn open(&self) -> Result<Arc<Library>, LoadError> {
        // SAFETY: the stand-in behaves as a driver.
        unsafe { Library::open(fakecuda::library_path()) }
    }

    pub(crate) fn device(&self) -> Device {
        self.open().unwrap().device(0).unwrap()
    }

    pub(crate) fn driver(&self) -> CudaDriver {
        self.driver_of(self.device())
    }

    pub(crate) fn driver_of(&self, device: Device) -> CudaDriver {
        // SAFETY: the tests give it only what came from it, and reset only after it is dropped.
        unsafe { CudaDriver::new(device) }.unwrap()
    }

    /// Returns a program that uses device 0, and two of its streams.
    pub(crate) fn program(&self) -> (Program, [Stream; 2]) {
        let program = Program::new(fakecuda::library_path().as_os_str()).unwrap();
        program.use_device(0).unwrap();
        let streams = [(); 2].map(|()| program.create_stream().unwrap());
        (program, streams)
    }

    /// Makes the `nth` call of a function from now fail with an error code.
    pub(crate) fn fail(&self, name: &str, nth: u64, code: c_int) {
        type Fail = unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int;
        // SAFETY: the type is that of its header.
        let fail = unsafe { self.function::<Fail>("fakecuda_fail") };
        let text = CString::new(name).unwrap();
        // SAFETY: the text outlives the call.
        let result = unsafe { fail(text.as_ptr(), nth, code) };
        assert_eq!(result, 0, "{name} is not exported");
    }

    /// Makes streams run their work as late as possible, or turns that off.
    #[allow(dead_code, reason = "the tests of backups alone need it")]
    pub(crate) fn set_lazy(&self, is_lazy: bool) {
        type Set = unsafe extern "C" fn(c_int) -> c_int;
        // SAFETY: the type is that of its header.
        let set = unsafe { self.function::<Set>("fakecuda_set_lazy") };
        // SAFETY: takes a number only.
        assert_eq!(unsafe { set(is_lazy.into()) }, 0);
    }

    /// Removes the failures that have not happened yet.
    pub(crate) fn fail_none(&self) {
        // SAFETY: the type is that of its header.
        let fail_none = unsafe { self.function::<unsafe extern "C" fn()>("fakecuda_fail_none") };
        // SAFETY: changes the stand-in's own state only.
        unsafe { fail_none() };
    }

    /// Returns how often a function was called.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        type Calls = unsafe extern "C" fn(*const c_char) -> u64;
        // SAFETY: the type is that of its header.
        let calls = unsafe { self.function::<Calls>("fakecuda_calls") };
        let text = CString::new(name).unwrap();
        // SAFETY: the text outlives the call.
        unsafe { calls(text.as_ptr()) }
    }

    pub(crate) fn set_capacity(&self, bytes: u64) {
        type Set = unsafe extern "C" fn(c_int, u64) -> c_int;
        // SAFETY: the type is that of its header.
        let set = unsafe { self.function::<Set>("fakecuda_set_capacity") };
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { set(0, bytes) }, 0);
    }

    pub(crate) fn set_attribute(&self, attribute: c_uint, value: c_int) {
        type Set = unsafe extern "C" fn(c_int, c_uint, c_int) -> c_int;
        // SAFETY: the type is that of its header.
        let set = unsafe { self.function::<Set>("fakecuda_set_attribute") };
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { set(0, attribute, value) }, 0);
    }

    /// Keeps a stream from starting its next task, or releases it.
    pub(crate) fn hold(&self, stream: Stream, is_held: bool) {
        let name = if is_held {
            "fakecuda_hold_stream"
        } else {
            "fakecuda_release_stream"
        };
        type Hold = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: the type is that of its header.
        let hold = unsafe { self.function::<Hold>(name) };
        let raw = ptr::with_exposed_provenance_mut(usize::try_from(stream.0).unwrap());
        // SAFETY: the stream exists.
        assert_eq!(unsafe { hold(raw) }, 0);
    }

    /// Calls `cuMemAlloc` like a program that does not care about captures. Returns the error code.
    pub(crate) fn allocate_unguarded(&self) -> c_uint {
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let allocate = unsafe { self.function::<Allocate>("cuMemAlloc_v2") };
        let mut address = 0;
        // SAFETY: the call writes `address`, which outlives it.
        unsafe { allocate(&raw mut address, 4096) }
    }

    /// Returns the properties with which the handle that is mapped at an address was created.
    pub(crate) fn properties_at(&self, address: DeviceAddress) -> CUmemAllocationProp {
        type Retain = unsafe extern "C" fn(*mut u64, u64) -> c_uint;
        type Get = unsafe extern "C" fn(*mut CUmemAllocationProp, u64) -> c_uint;
        type Release = unsafe extern "C" fn(u64) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let retain = unsafe { self.function::<Retain>("cuMemRetainAllocationHandle") };
        // SAFETY: the type is cuda.h's.
        let get = unsafe { self.function::<Get>("cuMemGetAllocationPropertiesFromHandle") };
        // SAFETY: the type is cuda.h's.
        let release = unsafe { self.function::<Release>("cuMemRelease") };
        let (mut handle, mut properties) = (0, MaybeUninit::uninit());
        // SAFETY: the call writes `handle`, which outlives it.
        assert_eq!(unsafe { retain(&raw mut handle, address.0) }, 0);
        // SAFETY: the call writes `properties`, which outlives it.
        assert_eq!(unsafe { get(properties.as_mut_ptr(), handle) }, 0);
        // SAFETY: the handle is retained.
        assert_eq!(unsafe { release(handle) }, 0);
        // SAFETY: they were written.
        unsafe { properties.assume_init() }
    }

    /// Returns how many bytes of device 0 are in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        type Used = unsafe extern "C" fn(c_int) -> u64;
        // SAFETY: the type is that of its header.
        let used = unsafe { self.function::<Used>("fakecuda_used_bytes") };
        // SAFETY: takes a number only.
        unsafe { used(0) }
    }

    pub(crate) fn live(&self) -> Live {
        type GetLive = unsafe extern "C" fn(*mut Live) -> c_int;
        // SAFETY: the type is that of its header.
        let get_live = unsafe { self.function::<GetLive>("fakecuda_get_live") };
        let mut live = Live::default();
        // SAFETY: the call writes `live`, which outlives it.
        assert_eq!(unsafe { get_live(&raw mut live) }, 0);
        live
    }

    /// Returns a function of the stand-in.
    ///
    /// # Safety
    ///
    /// `F` must be the function's type in its header.
    unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: by the contract of this function.
        *unsafe { self.control.get::<F>(name) }.unwrap()
    }
}
