use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

use crate::support::*;
use crate::virtual_memory::create;

#[test]
fn the_nth_call_fails_once_and_changes_nothing() {
    let driver = Driver::start();
    let code = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    assert_eq!(driver.fail("cuMemCreate", 2, code), OK);
    assert!(create(PAGE).is_ok());
    assert_eq!(create(PAGE), Err(code));
    assert!(create(PAGE).is_ok());
    assert_eq!(driver.used_bytes(0), 2 * PAGE);
    assert_eq!(driver.live().handles, 2);
    assert_eq!(driver.calls("cuMemCreate"), 3);
    assert_eq!(driver.calls("cuMemMap"), 0);
}

#[test]
fn failures_are_counted_by_name_and_can_be_taken_back() {
    let driver = Driver::start();
    let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    assert_eq!(driver.fail("cuMemAlloc_v2", 1, out_of_memory), OK);
    assert_eq!(driver.fail("cuMemAlloc_v2", 2, out_of_memory), OK);
    assert_eq!(driver.fail("cuMemAlloc_v2", 3, out_of_memory), OK);
    assert!(create(PAGE).is_ok());
    assert_eq!(allocate(PAGE), Err(out_of_memory));
    assert_eq!(allocate(PAGE), Err(out_of_memory));
    driver.fail_none();
    assert!(allocate(PAGE).is_ok());
    for (name, nth, code) in [
        ("cuMemAlloc", 1, out_of_memory),
        ("cuMemCreate", 0, out_of_memory),
        ("cuMemCreate", 1, OK),
    ] {
        assert_eq!(
            driver.fail(name, nth, code),
            CUresult::CUDA_ERROR_INVALID_VALUE,
            "{name}"
        );
    }
    assert!(create(PAGE).is_ok());
}

#[test]
fn failures_of_one_call_are_one() {
    let driver = Driver::start();
    let code = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    assert_eq!(driver.fail("cuMemCreate", 1, code), OK);
    assert_eq!(driver.fail("cuMemCreate", 1, code), OK);
    assert_eq!(create(PAGE), Err(code));
    assert!(allocate(PAGE).is_ok(), "another call");
    assert!(create(PAGE).is_ok());
}

#[test]
fn calls_fail_at_random_by_a_seed() {
    let driver = Driver::start();
    let failures = |seed, per_million| {
        driver.fail_at_random(seed, per_million);
        let mut version = 0;
        let codes: Vec<_> = (0..1000)
            .map(|_| unsafe { cuCtxGetCurrent(&mut null_mut()) })
            .collect();
        assert_eq!(unsafe { cuDriverGetVersion(&mut version) }, OK);
        codes
    };
    let count = |codes: &[CUresult]| codes.iter().filter(|&&code| code != OK).count();
    let first = failures(1, 100_000);
    assert!((50..200).contains(&count(&first)), "{}", count(&first));
    assert_eq!(failures(1, 100_000), first);
    assert_ne!(failures(2, 100_000), first);
    assert_eq!(count(&failures(1, 0)), 0);
    assert_eq!(count(&failures(1, 1_000_000)), 1000);
    driver.fail_none();
    assert!(create(PAGE).is_ok());
}

#[test]
fn a_reset_forgets_everything() {
    let driver = Driver::start();
    let (address, stream) = (allocate(PAGE).unwrap(), non_blocking_stream());
    driver.hold(stream);
    fill_in(stream, address, 1, 1);
    assert_eq!(
        driver.fail("cuMemCreate", 1, CUresult::CUDA_ERROR_UNKNOWN),
        OK
    );
    driver.reset();
    assert_eq!(allocate(PAGE), Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
    assert_eq!(driver.calls("cuMemCreate"), 0);
    assert!(!can_be_read(address));
    assert_eq!(unsafe { cuInit(0) }, OK);
    // The context that was current no longer exists.
    assert_eq!(allocate(PAGE), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    make_current(0);
    assert!(create(PAGE).is_ok());
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_INVALID_HANDLE);
    let expected = Live {
        contexts: 1,
        handles: 1,
        ..Live::default()
    };
    assert_eq!(driver.live(), expected);
}

#[test]
fn errors_have_names() {
    let _driver = Driver::start();
    let text = |code, of: unsafe fn(CUresult, *mut *const i8) -> CUresult| {
        let text = get(|out| unsafe { of(code, out) })?;
        Ok::<_, CUresult>(unsafe { CStr::from_ptr(text) }.to_str().unwrap())
    };
    let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    assert_eq!(
        text(out_of_memory, cuGetErrorName),
        Ok("CUDA_ERROR_OUT_OF_MEMORY")
    );
    assert_eq!(text(out_of_memory, cuGetErrorString), Ok("out of memory"));
}

#[test]
fn functions_are_found_by_name_and_version() {
    let driver = Driver::start();
    let find = |name: &str, version| {
        let name = CString::new(name).unwrap();
        let mut found: *mut c_void = null_mut();
        let mut status = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        let code =
            unsafe { cuGetProcAddress_v2(name.as_ptr(), &mut found, version, 0, &mut status) };
        assert_eq!(code == OK, !found.is_null());
        (found.cast_const(), status)
    };
    let exported = |name: &str| driver.address_of(name);
    type Status = CUdriverProcAddressQueryResult;
    let success = Status::CU_GET_PROC_ADDRESS_SUCCESS;
    assert_eq!(
        find("cuMemAlloc", 13000),
        (exported("cuMemAlloc_v2"), success)
    );
    assert_eq!(
        find("cuMemCreate", 13000),
        (exported("cuMemCreate"), success)
    );
    let info = "cuStreamGetCaptureInfo";
    assert_eq!(
        find(info, 12000),
        (exported("cuStreamGetCaptureInfo_v2"), success)
    );
    assert_eq!(
        find(info, 13000),
        (exported("cuStreamGetCaptureInfo_v3"), success)
    );
    let missing = (null(), Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    assert_eq!(find("cuNoSuchFunction", 13000), missing);
}
