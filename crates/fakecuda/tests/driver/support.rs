//! The driver for one test at a time, and short forms of the most common calls.

use std::ffi::{CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub(crate) use fakecuda::Live;

pub(crate) use cudarc::driver::sys::*;
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW};

pub(crate) const MIB: usize = 1 << 20;
/// A page of a card: 2 MiB.
pub(crate) const PAGE: usize = 2 * MIB;

pub(crate) const OK: CUresult = CUresult::CUDA_SUCCESS;

/// The driver, reset and initialized, with the context of device 0 current. No other test uses it meanwhile.
#[must_use = "the next test may begin once this is dropped"]
pub(crate) struct Driver {
    library: &'static Library,
    _turn: MutexGuard<'static, ()>,
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = fakecuda::library_path();
        // From here on, a dlopen of libcuda.so.1 gets this library, also from cudarc.
        unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
            .expect("the shared object loads")
            .into()
    })
}

impl Driver {
    /// Starts the driver with two devices of 1 GiB each.
    pub(crate) fn start() -> Self {
        let driver = Self::before_init();
        assert_eq!(unsafe { cuInit(0) }, OK);
        make_current(0);
        for device in 0..2 {
            assert_eq!(driver.set_capacity(device, 1 << 30), OK);
        }
        driver
    }

    pub(crate) fn before_init() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // The variable is only ever set to this value, under the lock.
        unsafe { std::env::set_var("FAKECUDA_DEVICES", "2") };
        let driver = Self {
            library: library(),
            _turn: turn,
        };
        driver.reset();
        let mut version = 0;
        unsafe { cuDriverGetVersion(&mut version) };
        assert_eq!(
            driver.calls("cuDriverGetVersion"),
            1,
            "another driver came first"
        );
        driver.reset();
        driver
    }

    /// Returns a function of `include/fakecuda.h`.
    fn function<F: Copy>(&self, name: &str) -> F {
        *unsafe { self.library.get::<F>(name) }.expect("the header's functions are exported")
    }

    /// Returns the address of an exported function of the shared object.
    pub(crate) fn address_of(&self, name: &str) -> *const c_void {
        self.function::<*const c_void>(name)
    }

    pub(crate) fn reset(&self) {
        unsafe { self.function::<unsafe extern "C" fn()>("fakecuda_reset")() }
    }

    pub(crate) fn set_capacity(&self, device: c_int, bytes: u64) -> CUresult {
        let set: unsafe extern "C" fn(c_int, u64) -> CUresult =
            self.function("fakecuda_set_capacity");
        unsafe { set(device, bytes) }
    }

    pub(crate) fn used_bytes(&self, device: c_int) -> usize {
        let used: unsafe extern "C" fn(c_int) -> u64 = self.function("fakecuda_used_bytes");
        usize::try_from(unsafe { used(device) }).unwrap()
    }

    pub(crate) fn set_attribute(&self, attribute: CUdevice_attribute, value: c_int) {
        let set: unsafe extern "C" fn(c_int, CUdevice_attribute, c_int) -> CUresult =
            self.function("fakecuda_set_attribute");
        assert_eq!(unsafe { set(0, attribute, value) }, OK);
    }

    pub(crate) fn fail(&self, name: &str, nth: u64, code: CUresult) -> CUresult {
        let fail: unsafe extern "C" fn(*const i8, u64, CUresult) -> CUresult =
            self.function("fakecuda_fail");
        let name = CString::new(name).unwrap();
        unsafe { fail(name.as_ptr(), nth, code) }
    }

    pub(crate) fn fail_at_random(&self, seed: u64, per_million: u64) {
        let fail: unsafe extern "C" fn(u64, u64) = self.function("fakecuda_fail_at_random");
        unsafe { fail(seed, per_million) };
    }

    pub(crate) fn set_lazy(&self, is_lazy: bool) {
        let set: unsafe extern "C" fn(c_int) -> CUresult = self.function("fakecuda_set_lazy");
        assert_eq!(unsafe { set(is_lazy.into()) }, OK);
    }

    pub(crate) fn fail_none(&self) {
        unsafe { self.function::<unsafe extern "C" fn()>("fakecuda_fail_none")() }
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        let calls: unsafe extern "C" fn(*const i8) -> u64 = self.function("fakecuda_calls");
        let name = CString::new(name).unwrap();
        unsafe { calls(name.as_ptr()) }
    }

    pub(crate) fn hold(&self, stream: CUstream) {
        let hold: unsafe extern "C" fn(CUstream) -> CUresult =
            self.function("fakecuda_hold_stream");
        assert_eq!(unsafe { hold(stream) }, OK);
    }

    pub(crate) fn release(&self, stream: CUstream) {
        let release: unsafe extern "C" fn(CUstream) -> CUresult =
            self.function("fakecuda_release_stream");
        assert_eq!(unsafe { release(stream) }, OK);
    }

    pub(crate) fn live(&self) -> Live {
        let get: unsafe extern "C" fn(*mut Live) -> CUresult = self.function("fakecuda_get_live");
        let mut live = Live::default();
        assert_eq!(unsafe { get(&mut live) }, OK);
        live
    }
}

/// Returns the value that a call writes through its pointer.
pub(crate) fn get<T>(call: impl FnOnce(*mut T) -> CUresult) -> Result<T, CUresult> {
    let mut value = MaybeUninit::uninit();
    match call(value.as_mut_ptr()) {
        OK => Ok(unsafe { value.assume_init() }),
        code => Err(code),
    }
}

/// Retains a device's primary context and makes it current.
pub(crate) fn make_current(device: c_int) -> CUcontext {
    let context = get(|out| unsafe { cuDevicePrimaryCtxRetain(out, device) }).unwrap();
    assert_eq!(unsafe { cuCtxSetCurrent(context) }, OK);
    context
}

pub(crate) fn allocate(bytes: usize) -> Result<CUdeviceptr, CUresult> {
    get(|out| unsafe { cuMemAlloc_v2(out, bytes) })
}

pub(crate) fn free(address: CUdeviceptr) -> CUresult {
    unsafe { cuMemFree_v2(address) }
}

pub(crate) fn non_blocking_stream() -> CUstream {
    get(|out| unsafe { cuStreamCreate(out, 1) }).unwrap()
}

pub(crate) fn event() -> CUevent {
    get(|out| unsafe { cuEventCreate(out, 2) }).unwrap()
}

pub(crate) fn synchronize(stream: CUstream) -> CUresult {
    unsafe { cuStreamSynchronize(stream) }
}

pub(crate) fn fill_in(stream: CUstream, address: CUdeviceptr, value: u8, bytes: usize) {
    assert_eq!(
        unsafe { cuMemsetD8Async(address, value, bytes, stream) },
        OK
    );
}

pub(crate) fn copy_in(stream: CUstream, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
    assert_eq!(unsafe { cuMemcpyAsync(to, from, bytes, stream) }, OK);
}

/// Returns the bytes at a device address, by a synchronous copy.
pub(crate) fn read(address: CUdeviceptr, bytes: usize) -> Result<Vec<u8>, CUresult> {
    let mut content = vec![0; bytes];
    let to = content.as_mut_ptr().cast::<c_void>();
    match unsafe { cuMemcpyDtoH_v2(to, address, bytes) } {
        OK => Ok(content),
        code => Err(code),
    }
}

pub(crate) fn write(address: CUdeviceptr, content: &[u8]) -> CUresult {
    let from = content.as_ptr().cast::<c_void>();
    unsafe { cuMemcpyHtoD_v2(address, from, content.len()) }
}

/// Returns whether the host can read the address. A `write` to a pipe fails where a load would fault.
pub(crate) fn can_be_read(address: CUdeviceptr) -> bool {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let written = unsafe { libc::write(ends[1], address as *const c_void, 1) };
    for end in ends {
        unsafe { libc::close(end) };
    }
    written == 1
}
