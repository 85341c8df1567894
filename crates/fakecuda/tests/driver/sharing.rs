use std::ffi::c_void;
use std::fmt::Write;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::process::{printed, run};
use crate::support::*;
use crate::virtual_memory::{allow, create, map, properties, reserve};

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn export(handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let exported = get::<i32>(|out| unsafe {
        cuMemExportToShareableHandle(out.cast(), handle, DESCRIPTOR, 0)
    });
    exported.map(|number| unsafe { OwnedFd::from_raw_fd(number) })
}

fn import(file: &OwnedFd) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let number = file.as_raw_fd() as usize as *mut c_void;
    get(|out| unsafe { cuMemImportFromShareableHandle(out, number, DESCRIPTOR) })
}

fn map_anew(handle: CUmemGenericAllocationHandle) -> CUdeviceptr {
    let address = reserve(PAGE);
    assert_eq!(map(address, PAGE, handle), OK);
    assert_eq!(allow(address, PAGE, 0), OK);
    address
}

#[test]
fn a_descriptor_brings_the_same_memory_and_keeps_it() {
    let driver = Driver::start();
    let handle = create(PAGE).unwrap();
    let address = map_anew(handle);
    assert_eq!(write(address, b"shared"), OK);
    let file = export(handle).unwrap();
    let imported = import(&file).unwrap();
    assert_ne!(imported, handle);
    assert_eq!(driver.used_bytes(0), PAGE);
    let kept = get(|out| unsafe { cuMemGetAllocationPropertiesFromHandle(out, imported) });
    assert_eq!(kept, Ok(properties(0)));
    let other = map_anew(imported);
    assert_eq!(read(other, 6).unwrap(), b"shared");
    // Both handles are one piece of memory, which is used until the last of them and its mapping are gone.
    for (handle, address, left) in [(handle, address, PAGE), (imported, other, 0)] {
        assert_eq!(unsafe { cuMemRelease(handle) }, OK);
        assert_eq!(unsafe { cuMemUnmap(address, PAGE) }, OK);
        assert_eq!(driver.used_bytes(0), left);
    }
    // Only the descriptor still refers to the memory.
    let last = import(&file).unwrap();
    assert_eq!(read(map_anew(last), 6).unwrap(), b"shared");
}

#[test]
fn what_was_not_asked_for_is_not_exported() {
    let _driver = Driver::start();
    let mut plain = properties(0);
    plain.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
    let handle = get(|out| unsafe { cuMemCreate(out, PAGE, &plain, 0) }).unwrap();
    assert_eq!(export(handle).err(), Some(INVALID));
    let unrelated = OwnedFd::from(File::open("/dev/null").unwrap());
    assert_eq!(import(&unrelated), Err(INVALID));
}

#[test]
fn another_process_imports_a_descriptor() {
    let _driver = Driver::start();
    let handle = create(PAGE).unwrap();
    let address = map_anew(handle);
    assert_eq!(write(address, &[41]), OK);
    let file = export(handle).unwrap();
    // The child inherits a duplicate that is not closed when its program starts.
    let inherited = unsafe { OwnedFd::from_raw_fd(libc::dup(file.as_raw_fd())) };
    let output = run(&["import", &inherited.as_raw_fd().to_string()], &[]);
    assert_eq!(printed(&output), "used: 0\n");
    assert_eq!(read(address, 1).unwrap(), [42]);
}

#[test]
fn another_process_opens_an_allocation() {
    let _driver = Driver::start();
    let address = allocate(PAGE).unwrap();
    assert_eq!(write(address, &[41]), OK);
    let handle = get(|out| unsafe { cuIpcGetMemHandle(out, address + 100) }).unwrap();
    let mut text = String::new();
    for byte in handle.reserved {
        write!(text, "{:02x}", byte.cast_unsigned()).unwrap();
    }
    let output = run(&["open", &text], &[]);
    assert_eq!(printed(&output), "same: 1\nclosed: 0 0 1\nused: 0\n");
    assert_eq!(read(address, 1).unwrap(), [42]);
    // A process cannot open its own handle.
    let opened = get(|out| unsafe { cuIpcOpenMemHandle_v2(out, handle, 1) });
    assert_eq!(opened, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    let mapped = map_anew(create(PAGE).unwrap());
    assert_eq!(
        get(|out| unsafe { cuIpcGetMemHandle(out, mapped) }).err(),
        Some(INVALID)
    );
}
