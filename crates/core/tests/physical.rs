//! The table of a device's handles and of the addresses at which they are mapped, on a simulated device.

use lowtide_core::{Bytes, DeviceAddress, Driver, DriverError, MappedRange, Physical};
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

const PAGE: Bytes = Bytes::mib(2);

fn physical() -> Physical<SimDriver> {
    Physical::new(SimDriver::new(SimConfig::default()), None)
}

fn reserved(physical: &mut Physical<SimDriver>) -> DeviceAddress {
    let addresses = physical.driver_mut().reserve(Bytes::mib(8));
    addresses.expect("the device has addresses")
}

/// Returns the bytes that the table and the device count.
fn created(physical: &Physical<SimDriver>) -> [Bytes; 2] {
    [physical.created_bytes(), physical.driver().created_bytes()]
}

#[test]
fn a_handle_counts_once_at_however_many_addresses_it_is_mapped() {
    let mut physical = physical();
    let start = reserved(&mut physical);
    let [handle, other] = [(); 2].map(|()| physical.create(PAGE).unwrap());
    assert_eq!(created(&physical), [PAGE + PAGE; 2]);
    for (offset, handle) in [(0, handle), (2, other), (4, handle)] {
        physical.map(start + Bytes::mib(offset), handle).unwrap();
    }
    assert_eq!(created(&physical), [PAGE + PAGE; 2]);
    let shown: Vec<_> = physical.views().map(|(_, view)| view.handle).collect();
    assert_eq!(shown, [handle, other, handle]);

    physical.unmap(start, PAGE).unwrap();
    assert_eq!(physical.view(start), None);
    assert_eq!(
        created(&physical),
        [PAGE + PAGE; 2],
        "the other view shows it"
    );
    physical.unmap(start + PAGE, PAGE + PAGE).unwrap();
    physical.release(handle).unwrap();
    assert_eq!(created(&physical), [PAGE; 2]);
    physical.release(other).unwrap();
    assert_eq!(created(&physical), [Bytes::ZERO; 2]);
}

#[test]
fn a_view_has_access_once_the_driver_gave_it() {
    let mut physical = physical();
    let start = reserved(&mut physical);
    let handle = physical.create(PAGE).unwrap();
    physical.map(start, handle).unwrap();
    assert!(!physical.view(start).unwrap().has_access);
    physical.set_access(start, PAGE).unwrap();
    assert!(physical.view(start).unwrap().has_access);
    physical.unmap(start, PAGE).unwrap();
    physical.map(start, handle).unwrap();
    assert!(
        !physical.view(start).unwrap().has_access,
        "the view is another"
    );
}

#[test]
fn a_range_that_is_unmapped_is_not_shared() {
    let mut physical = physical();
    let start = reserved(&mut physical);
    let handle = physical.create(PAGE).unwrap();
    physical.map(start, handle).unwrap();
    let range = physical.mapped_range(start + Bytes(5), Bytes(1)).unwrap();
    let handles = |physical: &Physical<SimDriver>, range: &MappedRange| {
        let handles = physical.handles(range, Bytes::ZERO)?;
        Some(handles.collect::<Vec<_>>())
    };
    assert_eq!(handles(&physical, &range), Some(vec![(handle, PAGE)]));
    physical.unmap(start, PAGE).unwrap();
    physical.map(start, handle).unwrap();
    assert_eq!(handles(&physical, &range), None);
}

#[test]
fn a_call_that_fails_changes_nothing() {
    let mut physical = physical();
    let start = reserved(&mut physical);
    let fail = |physical: &mut Physical<SimDriver>, call| {
        let faults = FaultPlan::nth(call, 1, DriverError::OutOfMemory);
        physical.driver_mut().set_faults(faults);
    };
    fail(&mut physical, Call::Create);
    assert!(physical.create(PAGE).is_err());
    assert_eq!(created(&physical), [Bytes::ZERO; 2]);
    let handle = physical.create(PAGE).unwrap();

    fail(&mut physical, Call::Map);
    assert!(physical.map(start, handle).is_err());
    assert_eq!(physical.view(start), None);
    physical.map(start, handle).unwrap();

    fail(&mut physical, Call::SetAccess);
    assert!(physical.set_access(start, PAGE).is_err());
    assert!(!physical.view(start).unwrap().has_access);
    physical.set_access(start, PAGE).unwrap();

    fail(&mut physical, Call::Unmap);
    assert!(physical.unmap(start, PAGE).is_err());
    assert!(physical.view(start).unwrap().has_access);
    physical.unmap(start, PAGE).unwrap();

    fail(&mut physical, Call::Release);
    assert!(physical.release(handle).is_err());
    assert_eq!(created(&physical), [PAGE; 2]);
    physical.release(handle).unwrap();
    assert_eq!(created(&physical), [Bytes::ZERO; 2]);
}
