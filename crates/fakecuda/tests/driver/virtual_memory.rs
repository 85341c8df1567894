use crate::support::*;

pub(crate) fn properties(device: i32) -> CUmemAllocationProp {
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.requestedHandleTypes =
        CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties
}

pub(crate) fn create(bytes: usize) -> Result<CUmemGenericAllocationHandle, CUresult> {
    get(|out| unsafe { cuMemCreate(out, bytes, &properties(0), 0) })
}

pub(crate) fn reserve(bytes: usize) -> CUdeviceptr {
    get(|out| unsafe { cuMemAddressReserve(out, bytes, 0, 0, 0) }).unwrap()
}

pub(crate) fn map(
    address: CUdeviceptr,
    bytes: usize,
    handle: CUmemGenericAllocationHandle,
) -> CUresult {
    unsafe { cuMemMap(address, bytes, 0, handle, 0) }
}

pub(crate) fn allow(address: CUdeviceptr, bytes: usize, device: i32) -> CUresult {
    set_access(
        address,
        bytes,
        device,
        CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    )
}

fn set_access(
    address: CUdeviceptr,
    bytes: usize,
    device: i32,
    flags: CUmemAccess_flags,
) -> CUresult {
    let location = properties(device).location;
    let description = CUmemAccessDesc { location, flags };
    unsafe { cuMemSetAccess(address, bytes, &description, 1) }
}

fn unmap(address: CUdeviceptr, bytes: usize) -> CUresult {
    unsafe { cuMemUnmap(address, bytes) }
}

fn release(handle: CUmemGenericAllocationHandle) -> CUresult {
    unsafe { cuMemRelease(handle) }
}

fn unreserve(address: CUdeviceptr, bytes: usize) -> CUresult {
    unsafe { cuMemAddressFree(address, bytes) }
}

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;

#[test]
fn a_handle_mapped_twice_shows_the_same_bytes_twice() {
    let _driver = Driver::start();
    let handle = create(PAGE).unwrap();
    let range = reserve(4 * PAGE);
    let (one, two) = (range, range + 2 * PAGE as u64);
    for address in [one, two] {
        assert_eq!(map(address, PAGE, handle), OK);
        assert_eq!(allow(address, PAGE, 0), OK);
    }
    assert_eq!(write(one + 1000, b"through one"), OK);
    assert_eq!(read(two + 1000, 11).unwrap(), b"through one");
    assert_eq!(write(two + 1000, b"and back"), OK);
    assert_eq!(read(one + 1000, 11).unwrap(), b"and backone");
    assert_eq!(unmap(one, PAGE), OK);
    assert_eq!(read(two + 1000, 8).unwrap(), b"and back");
    assert!(!can_be_read(one) && can_be_read(two));
}

#[test]
fn only_what_is_mapped_with_access_can_be_touched() {
    let _driver = Driver::start();
    let range = reserve(3 * PAGE);
    let handle = create(PAGE).unwrap();
    let address = range + PAGE as u64;
    assert!(!can_be_read(address));
    assert_eq!(map(address, PAGE, handle), OK);
    assert!(!can_be_read(address));
    assert_eq!(allow(address, PAGE, 0), OK);
    assert!(can_be_read(address) && can_be_read(address + PAGE as u64 - 1));
    assert!(!can_be_read(range) && !can_be_read(address + PAGE as u64));
    assert_eq!(
        set_access(
            address,
            PAGE,
            0,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE
        ),
        OK
    );
    assert!(!can_be_read(address));
    assert_eq!(allow(address, PAGE, 0), OK);
    assert_eq!(unmap(address, PAGE), OK);
    assert!(!can_be_read(address));
    // A new mapping starts without access.
    assert_eq!(map(address, PAGE, handle), OK);
    assert!(!can_be_read(address));
}

#[test]
fn memory_lives_until_it_is_released_and_unmapped_everywhere() {
    let driver = Driver::start();
    let range = reserve(2 * PAGE);
    let handle = create(PAGE).unwrap();
    assert_eq!(driver.used_bytes(0), PAGE);
    let (one, two) = (range, range + PAGE as u64);
    assert_eq!(map(one, PAGE, handle), OK);
    assert_eq!(map(two, PAGE, handle), OK);
    assert_eq!(allow(range, 2 * PAGE, 0), OK);
    assert_eq!(write(one, b"kept"), OK);
    assert_eq!(driver.used_bytes(0), PAGE);
    assert_eq!(release(handle), OK);
    assert_eq!(release(handle), INVALID);
    assert_eq!(driver.used_bytes(0), PAGE);
    assert_eq!(read(two, 4).unwrap(), b"kept");
    // The mapping can still be turned into its handle.
    let again = get(|out| unsafe { cuMemRetainAllocationHandle(out, two as *mut _) }).unwrap();
    assert_eq!(again, handle);
    assert_eq!(unmap(range, 2 * PAGE), OK);
    assert_eq!(driver.used_bytes(0), PAGE);
    assert_eq!(release(again), OK);
    assert_eq!(driver.used_bytes(0), 0);
    assert_eq!(unreserve(range, 2 * PAGE), OK);
    assert_eq!(
        driver.live(),
        Live {
            contexts: 1,
            ..Live::default()
        }
    );
}

#[test]
fn handles_are_mapped_whole() {
    let _driver = Driver::start();
    let range = reserve(4 * PAGE);
    let handle = create(2 * PAGE).unwrap();
    assert_eq!(map(range, PAGE, handle), NOT_SUPPORTED);
    assert_eq!(map(range, 3 * PAGE, handle), NOT_SUPPORTED);
    let with_offset = unsafe { cuMemMap(range, PAGE, PAGE, handle, 0) };
    assert_eq!(with_offset, NOT_SUPPORTED);
    assert_eq!(map(range + MIB as u64, 2 * PAGE, handle), INVALID);
    assert_eq!(map(range + 3 * PAGE as u64, 2 * PAGE, handle), INVALID);
    assert_eq!(map(range + PAGE as u64, 2 * PAGE, handle), OK);
    assert_eq!(map(range, 2 * PAGE, handle), INVALID);
    assert_eq!(unmap(range + PAGE as u64, PAGE), INVALID);
    assert_eq!(unmap(range, 2 * PAGE), INVALID);
    assert_eq!(allow(range + PAGE as u64, PAGE, 0), INVALID);
    assert_eq!(allow(range, 3 * PAGE, 0), INVALID);
    assert_eq!(unreserve(range, 4 * PAGE), INVALID);
    assert_eq!(unmap(range + PAGE as u64, 2 * PAGE), OK);
    assert_eq!(unreserve(range, 2 * PAGE), INVALID);
    assert_eq!(unreserve(range, 4 * PAGE), OK);
    assert_eq!(unreserve(range, 4 * PAGE), INVALID);
    assert_eq!(map(range, 2 * PAGE, handle), INVALID);
}

#[test]
fn many_mappings_are_unmapped_in_one_call() {
    let driver = Driver::start();
    let range = reserve(8 * PAGE);
    let handles: Vec<_> = (0..8).map(|_| create(PAGE).unwrap()).collect();
    for (index, &handle) in handles.iter().enumerate() {
        assert_eq!(map(range + (index * PAGE) as u64, PAGE, handle), OK);
    }
    assert_eq!(allow(range, 8 * PAGE, 0), OK);
    assert_eq!(unsafe { cuMemsetD8_v2(range, 3, 8 * PAGE) }, OK);
    assert_eq!(read(range + 7 * PAGE as u64, 2).unwrap(), [3, 3]);
    assert_eq!(unmap(range + 2 * PAGE as u64, 4 * PAGE), OK);
    assert_eq!(driver.live().mappings, 4);
    // Neither gaps nor an empty range are errors.
    assert_eq!(unmap(range, 8 * PAGE), OK);
    assert_eq!(driver.live().mappings, 0);
    assert!(!can_be_read(range));
    assert_eq!(unmap(range, 8 * PAGE), OK);
}

#[test]
fn what_is_unmapped_starts_in_a_reservation_and_cuts_no_mapping() {
    let driver = Driver::start();
    let range = reserve(6 * PAGE);
    let page = |index: usize| range + (index * PAGE) as u64;
    assert_eq!(map(page(1), PAGE, create(PAGE).unwrap()), OK);
    assert_eq!(map(page(3), 2 * PAGE, create(2 * PAGE).unwrap()), OK);
    assert_eq!(unmap(range, 4 * PAGE), INVALID);
    assert_eq!(unmap(page(4), 2 * PAGE), INVALID);
    assert_eq!(unmap(page(1), 0), INVALID);
    assert_eq!(driver.live().mappings, 2);
    assert_eq!(unmap(page(2), PAGE), OK);
    assert_eq!(driver.live().mappings, 2);
    assert_eq!(unmap(range, 6 * PAGE), OK);
    assert_eq!(driver.live().mappings, 0);
    assert_eq!(unreserve(range, 6 * PAGE), OK);
    assert_eq!(unmap(range, PAGE), INVALID);
    let allocation = allocate(PAGE).unwrap();
    assert_eq!(unmap(allocation, PAGE), INVALID);
    assert!(can_be_read(allocation));
}

#[test]
fn the_range_of_an_address_is_asked_for_allocations_only() {
    let _driver = Driver::start();
    let range = reserve(PAGE);
    assert_eq!(map(range, PAGE, create(PAGE).unwrap()), OK);
    let (mut base, mut bytes) = (0, 0);
    let code = unsafe { cuMemGetAddressRange_v2(&mut base, &mut bytes, range) };
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_FOUND);
}

#[test]
fn sizes_and_properties_are_checked() {
    let driver = Driver::start();
    for bytes in [0, MIB, PAGE + 512] {
        assert_eq!(create(bytes), Err(INVALID));
        let reserved = get(|out| unsafe { cuMemAddressReserve(out, bytes, 0, 0, 0) });
        assert_eq!(reserved, Err(INVALID));
    }
    let unaligned = get(|out| unsafe { cuMemAddressReserve(out, PAGE, 3, 0, 0) });
    assert_eq!(unaligned, Err(INVALID));
    let create_with = |properties: &CUmemAllocationProp| {
        get(|out| unsafe { cuMemCreate(out, PAGE, properties, 0) })
    };
    assert_eq!(
        create_with(&properties(2)),
        Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
    );
    let mut fabric = properties(0);
    fabric.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
    assert_eq!(
        create_with(&fabric),
        Err(CUresult::CUDA_ERROR_NOT_PERMITTED)
    );
    let mut rdma = properties(0);
    rdma.allocFlags.gpuDirectRDMACapable = 1;
    let handle = create_with(&rdma).unwrap();
    let kept = get(|out| unsafe { cuMemGetAllocationPropertiesFromHandle(out, handle) }).unwrap();
    assert_eq!(kept, rdma);
    driver.set_attribute(
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        0,
    );
    assert_eq!(create_with(&rdma), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    let granularity =
        |option| get(|out| unsafe { cuMemGetAllocationGranularity(out, &properties(0), option) });
    type Option = CUmemAllocationGranularity_flags;
    assert_eq!(
        granularity(Option::CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        Ok(PAGE)
    );
    assert_eq!(
        granularity(Option::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        Ok(PAGE)
    );
}

#[test]
fn a_reservation_may_be_far_larger_than_the_device_and_lies_where_it_is_asked_to() {
    let _driver = Driver::start();
    let bytes = 1 << 40;
    let range = reserve(bytes);
    assert_eq!(range % PAGE as u64, 0);
    assert_eq!(unreserve(range, bytes), OK);
    let again = get(|out| unsafe { cuMemAddressReserve(out, PAGE, 0, range, 0) }).unwrap();
    assert_eq!(again, range);
    // Addresses in use are not returned again.
    let other = get(|out| unsafe { cuMemAddressReserve(out, PAGE, 0, range, 0) }).unwrap();
    assert_ne!(other, range);
    let aligned = get(|out| unsafe { cuMemAddressReserve(out, PAGE, 1 << 30, 0, 0) }).unwrap();
    assert_eq!(aligned % (1 << 30), 0);
}

#[test]
fn access_is_each_devices_own() {
    let _driver = Driver::start();
    let range = reserve(PAGE);
    let handle = create(PAGE).unwrap();
    assert_eq!(map(range, PAGE, handle), OK);
    assert_eq!(allow(range, PAGE, 1), OK);
    // Device 0 has the memory but no access to it. The error affects only its context.
    let stream = non_blocking_stream();
    fill_in(stream, range, 1, 100);
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(allocate(MIB), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    make_current(1);
    let stream = non_blocking_stream();
    fill_in(stream, range, 2, 100);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(range, 2).unwrap(), [2, 2]);
}
