use std::ffi::CStr;
use std::ptr::null_mut;

use crate::support::*;

#[test]
fn nothing_works_before_init() {
    let _driver = Driver::before_init();
    let not_initialized = CUresult::CUDA_ERROR_NOT_INITIALIZED;
    assert_eq!(
        get(|out| unsafe { cuDeviceGetCount(out) }),
        Err(not_initialized)
    );
    assert_eq!(allocate(PAGE), Err(not_initialized));
    assert_eq!(get(|out| unsafe { cuDriverGetVersion(out) }), Ok(13000));
    assert_eq!(unsafe { cuInit(1) }, CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(unsafe { cuInit(0) }, OK);
    assert_eq!(get(|out| unsafe { cuDeviceGetCount(out) }), Ok(2));
}

#[test]
fn devices_say_what_they_are() {
    let _driver = Driver::start();
    let device = get(|out| unsafe { cuDeviceGet(out, 1) }).unwrap();
    let missing = get(|out| unsafe { cuDeviceGet(out, 2) });
    assert_eq!(missing, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let mut name = [1; 12];
    assert_eq!(
        unsafe { cuDeviceGetName(name.as_mut_ptr(), 12, device) },
        OK
    );
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    assert_eq!(name.to_str(), Ok("fakecuda de"));
    assert_eq!(
        get(|out| unsafe { cuDeviceTotalMem_v2(out, device) }),
        Ok(1 << 30)
    );
    type Attribute = CUdevice_attribute;
    let attribute =
        |attribute| get(|out| unsafe { cuDeviceGetAttribute(out, attribute, device) }).unwrap();
    let virtual_memory = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    assert_eq!(attribute(virtual_memory), 1);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED), 0);
    let uuid = |device| {
        get(|out| unsafe { cuDeviceGetUuid_v2(out, device) })
            .unwrap()
            .bytes
    };
    assert_ne!(uuid(0), uuid(1));
    let can_access = |peer| get(|out| unsafe { cuDeviceCanAccessPeer(out, 0, peer) }).unwrap();
    assert_eq!((can_access(0), can_access(1)), (0, 1));
}

#[test]
fn contexts_are_current_in_one_thread_and_stack() {
    let _driver = Driver::start();
    let current = || get(|out| unsafe { cuCtxGetCurrent(out) }).unwrap();
    let device = || get(|out| unsafe { cuCtxGetDevice(out) });
    let first = current();
    let second = get(|out| unsafe { cuDevicePrimaryCtxRetain(out, 1) }).unwrap();
    assert_eq!(unsafe { cuCtxPushCurrent_v2(second) }, OK);
    assert_eq!((current(), device()), (second, Ok(1)));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            assert_eq!(current(), null_mut());
            (device(), allocate(PAGE))
        });
        let invalid = CUresult::CUDA_ERROR_INVALID_CONTEXT;
        assert_eq!(other.join().unwrap(), (Err(invalid), Err(invalid)));
    });
    assert_eq!(get(|out| unsafe { cuCtxPopCurrent_v2(out) }), Ok(second));
    assert_eq!((current(), device()), (first, Ok(0)));
    assert_eq!(unsafe { cuCtxSetCurrent(null_mut()) }, OK);
    assert_eq!(current(), null_mut());
}

#[test]
fn the_last_release_takes_everything_of_the_context_along() {
    let driver = Driver::start();
    let again = make_current(0);
    let handle = crate::virtual_memory::create(PAGE).unwrap();
    let address = allocate(PAGE).unwrap();
    let (stream, _) = (non_blocking_stream(), event());
    let state = || {
        let (mut flags, mut active) = (1, 2);
        assert_eq!(
            unsafe { cuDevicePrimaryCtxGetState(0, &mut flags, &mut active) },
            OK
        );
        active
    };
    assert_eq!(unsafe { cuDevicePrimaryCtxRelease_v2(0) }, OK);
    assert_eq!(state(), 1);
    assert!(can_be_read(address));
    assert_eq!(unsafe { cuDevicePrimaryCtxRelease_v2(0) }, OK);
    assert_eq!(state(), 0);
    assert!(!can_be_read(address));
    let destroyed = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED;
    assert_eq!(allocate(PAGE), Err(destroyed));
    assert_eq!(unsafe { cuCtxSetCurrent(again) }, destroyed);
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_INVALID_HANDLE);
    // Handles belong to no context.
    assert_eq!(driver.used_bytes(0), PAGE);
    assert_eq!(unsafe { cuMemRelease(handle) }, OK);
    let code = unsafe { cuDevicePrimaryCtxRelease_v2(0) };
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    assert_eq!(driver.live(), Live::default());
}
