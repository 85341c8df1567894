//! Handles that the driver refuses to release, on a device of several lanes.

use std::sync::Arc;

use lowtide_core::{Bytes, CheckLevel, Config, DriverError, Stream};
use lowtide_shared::{OwnerTable, SharedAllocator};
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

const SIZE: Bytes = Bytes::mib(40);

#[test]
fn a_spare_handle_serves_the_lane_whose_reserved_bytes_it_is_part_of() {
    let config: Config = "caching:expandable_segments:True".parse().unwrap();
    let driver = SimDriver::new(SimConfig::default());
    let device = SharedAllocator::new(driver, 0, &config, Arc::new(OwnerTable::default()), None);
    let allocate = |stream| device.allocate(SIZE, stream, || Ok(false)).unwrap();
    let check = |reserved: Bytes| {
        let stats = device.with_all(|device| device.stats()).unwrap();
        assert_eq!(stats.reserved(), reserved);
        let created = device.physical().created_bytes();
        assert_eq!(created, reserved);
        let checked = device.for_each_lane(|lane| {
            lane.check_invariants(CheckLevel::Everything).unwrap();
            Ok(())
        });
        checked.unwrap();
    };
    let block = allocate(Stream(1));
    let freed = device.with_block(block, |lane| lane.free(block));
    freed.unwrap();
    let refused = FaultPlan::every(&[Call::Release], DriverError::OutOfMemory);
    device.physical().driver_mut().set_faults(refused);
    device
        .with_all(|device| device.empty_cache(None))
        .unwrap()
        .unwrap();
    device.physical().driver_mut().set_faults(FaultPlan::none());
    check(SIZE);

    allocate(Stream(2));
    check(SIZE + SIZE);
    allocate(Stream(1));
    check(SIZE + SIZE);
}
