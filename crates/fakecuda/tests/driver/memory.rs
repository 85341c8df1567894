use std::ffi::c_void;

use crate::support::*;

#[test]
fn allocations_hold_what_was_written() {
    let _driver = Driver::start();
    let first = allocate(3 * MIB + 5).unwrap();
    let second = allocate(600).unwrap();
    let content: Vec<u8> = (0..600).map(|index| (index % 251) as u8).collect();
    assert_eq!(write(second, &content), OK);
    assert_eq!(unsafe { cuMemsetD8_v2(first, 7, 3 * MIB + 5) }, OK);
    assert_eq!(unsafe { cuMemcpy(first + 100, second, 600) }, OK);
    let seen = read(first, 3 * MIB + 5).unwrap();
    assert_eq!(&seen[..100], [7; 100]);
    assert_eq!(&seen[100..700], content);
    assert!(seen[700..].iter().all(|&byte| byte == 7));
    assert_eq!(read(second, 600).unwrap(), content);
}

#[test]
fn an_allocation_is_freed_once_and_whole() {
    let driver = Driver::start();
    let address = allocate(MIB).unwrap();
    assert_eq!(free(address + 512), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert!(can_be_read(address));
    assert_eq!(free(address), OK);
    assert!(!can_be_read(address));
    assert_eq!(free(address), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(driver.used_bytes(0), 0);
    assert_eq!(read(address, 1), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(free(0), OK);
}

#[test]
fn capacity_is_a_limit_and_both_devices_have_their_own() {
    let driver = Driver::start();
    driver.set_capacity(0, 10 << 20);
    let first = allocate(6 * MIB).unwrap();
    assert_eq!(allocate(5 * MIB), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let (mut free_bytes, mut total_bytes) = (0, 0);
    assert_eq!(
        unsafe { cuMemGetInfo_v2(&mut free_bytes, &mut total_bytes) },
        OK
    );
    assert_eq!((free_bytes, total_bytes), (4 * MIB, 10 * MIB));
    make_current(1);
    let other = allocate(5 * MIB).unwrap();
    assert_eq!(
        (driver.used_bytes(0), driver.used_bytes(1)),
        (6 * MIB, 6 * MIB)
    );
    assert_eq!(free(first), OK);
    assert_eq!(free(other), OK);
    assert_eq!((driver.used_bytes(0), driver.used_bytes(1)), (0, 0));
}

#[test]
fn allocations_smaller_than_a_page_share_pages() {
    let driver = Driver::start();
    // The number of pages that an H200 used for each case.
    let cases: [(&[usize], usize); 12] = [
        (&[512; 64], 1),
        (&[MIB; 64], 32),
        (&[MIB + 1; 64], 64),
        (&[3 * MIB; 64], 128),
        (&[512; 4096], 1),
        (&[512; 4097], 2),
        (&[MIB, MIB - 512, 512], 1),
        (&[MIB + MIB / 2, 512], 1),
        (&[600 << 10; 5], 2),
        (&[3 * MIB, MIB], 3),
        (&[PAGE, 512], 2),
        (&[512], 1),
    ];
    for (sizes, pages) in cases {
        let allocated = sizes.iter().map(|&bytes| allocate(bytes).unwrap());
        let addresses: Vec<_> = allocated.collect();
        let case = (sizes[0], sizes.len());
        assert_eq!(driver.used_bytes(0), pages * PAGE, "{case:?}");
        for address in addresses {
            assert_eq!(free(address), OK);
        }
        assert_eq!(driver.used_bytes(0), 0, "{case:?}");
    }
}

#[test]
fn a_shared_page_is_filled_again_and_goes_with_its_last_allocation() {
    let driver = Driver::start();
    driver.set_capacity(0, 2 * PAGE as u64);
    let halves: Vec<_> = (0..4).map(|_| allocate(MIB).unwrap()).collect();
    assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(free(halves[0]), OK);
    assert_eq!(driver.used_bytes(0), 2 * PAGE);
    let small = allocate(512).unwrap();
    assert_eq!(allocate(MIB), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!((free(small), free(halves[1])), (OK, OK));
    assert_eq!(driver.used_bytes(0), PAGE);
    let whole = allocate(PAGE).unwrap();
    assert_eq!((free(halves[2]), free(halves[3])), (OK, OK));
    assert_eq!(driver.used_bytes(0), PAGE);
    assert_eq!(free(whole), OK);
    assert_eq!(driver.used_bytes(0), 0);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let driver = Driver::start();
    assert_eq!(allocate(0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(
        allocate(usize::MAX),
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    );
    assert_eq!(
        allocate(usize::MAX - PAGE),
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    );
    assert_eq!(driver.used_bytes(0), 0);
    assert_eq!(driver.live().allocations, 0);
}

#[test]
fn an_address_shows_what_it_belongs_to() {
    let _driver = Driver::start();
    let address = allocate(5000).unwrap();
    let (mut base, mut bytes) = (0, 0);
    assert_eq!(
        unsafe { cuMemGetAddressRange_v2(&mut base, &mut bytes, address + 4999) },
        OK
    );
    assert_eq!((base, bytes), (address, 5000));
    assert_eq!(
        unsafe { cuMemGetAddressRange_v2(&mut base, &mut bytes, address + 5000) },
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    let attribute = |attribute, address| {
        let mut value = 0_u32;
        let to = (&raw mut value).cast::<c_void>();
        match unsafe { cuPointerGetAttribute(to, attribute, address) } {
            OK => Ok(value),
            code => Err(code),
        }
    };
    let memory_type = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let ordinal = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    assert_eq!(attribute(memory_type, address), Ok(2));
    assert_eq!(attribute(ordinal, address + 1), Ok(0));
    let on_the_stack = 0_u8;
    let unknown = &raw const on_the_stack as CUdeviceptr;
    assert_eq!(
        attribute(memory_type, unknown),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
    let pinned = get(|out| unsafe { cuMemHostAlloc(out, 100, 0) }).unwrap();
    assert_eq!(attribute(memory_type, pinned as CUdeviceptr), Ok(1));
    assert_eq!(unsafe { cuMemFreeHost(pinned) }, OK);
}

#[test]
fn pinned_and_managed_memory_cost_the_device_nothing() {
    let driver = Driver::start();
    let pinned = get(|out| unsafe { cuMemHostAlloc(out, 3 * MIB, 1) }).unwrap();
    let managed = get(|out| unsafe { cuMemAllocManaged(out, 3 * MIB, 1) }).unwrap();
    assert_eq!(driver.used_bytes(0), 0);
    unsafe { pinned.cast::<u8>().add(MIB).write(9) };
    let pinned = pinned as CUdeviceptr;
    assert_eq!(unsafe { cuMemcpy(managed, pinned, 3 * MIB) }, OK);
    assert_eq!(unsafe { (managed as *const u8).add(MIB).read() }, 9);
    assert_eq!(
        unsafe { cuMemFreeHost(managed as *mut c_void) },
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(free(pinned), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(unsafe { cuMemFreeHost(pinned as *mut c_void) }, OK);
    assert_eq!(free(managed), OK);
    let mut own = vec![0_u8; 100];
    let own = own.as_mut_ptr().cast::<c_void>();
    assert_eq!(unsafe { cuMemHostRegister_v2(own, 100, 0) }, OK);
    assert_eq!(
        unsafe { cuMemHostRegister_v2(own.wrapping_byte_add(50), 100, 0) },
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    );
    assert_eq!(driver.live().host_allocations, 1);
    assert_eq!(unsafe { cuMemHostUnregister(own) }, OK);
    assert_eq!(
        unsafe { cuMemHostUnregister(own) },
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    );
}
