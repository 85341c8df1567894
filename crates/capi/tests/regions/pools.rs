//! Memory pools of graphs that belong to a region.

use std::ffi::c_int;
use std::ptr;

use lowtide::*;

use crate::common::{allocate, check, fill, isolated};
use crate::{MIB, c_text, host_copy, pause, region, resume, trim};

/// A graph may use what is free in its pool.
#[test]
fn a_region_with_a_graphs_pool_does_not_end() {
    let test = "pools::a_region_with_a_graphs_pool_does_not_end";
    isolated(test, &[], |_| {
        let pool = Mempool {
            capture: 4,
            user: 0,
        };
        let tag = c_text("graph");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let added = unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(added, Status::Ok);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        let between = allocate(4 * MIB, 0).unwrap();
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        assert_eq!(lowtide_deallocate(between), Status::Ok);
        for away in [RegionState::Mapped, RegionState::Paused] {
            assert_eq!(trim("graph", Backup::Host, 0), Status::Ok);
            assert_eq!(region("graph", Backup::Host, 0).state, away);
            assert_eq!(pause("graph"), Status::Ok);
        }
        assert_eq!(resume("graph"), Status::Ok);
        fill(between, 4 * MIB, 1);
        check(between, 4 * MIB, 1);
    });
}

#[test]
fn a_graphs_pool_is_paused_with_its_region() {
    let test = "pools::a_graphs_pool_is_paused_with_its_region";
    isolated(test, &[], |fake| {
        let pool = Mempool {
            capture: 4,
            user: 0,
        };
        let tag = c_text("graph");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let add = |pool| unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(add(pool), Status::Ok);
        assert_eq!(add(pool), Status::Ok, "it has that memory already");
        // SAFETY: the text ends with a zero byte.
        let other = unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), Backup::Disk as c_int) };
        assert_eq!(other, Status::Pool, "it has another source");
        let start = fake.used_bytes(0);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        let static_input = allocate(4 * MIB, 0).unwrap();
        let between = allocate(64 * MIB, 0).unwrap();
        assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
        fill(static_input, 4 * MIB, 1);
        assert_eq!(lowtide_deallocate(between), Status::Ok);
        for round in 0..3 {
            assert_eq!(pause("graph"), Status::Ok);
            assert_eq!(fake.used_bytes(0), start);
            assert_eq!(resume("graph"), Status::Ok);
            check(static_input, 4 * MIB, 1);
            // A replay writes there, though the program holds nothing.
            fill(between, 64 * MIB, round);
            check(between, 64 * MIB, round);
        }
        // One that comes while the region is paused is paused, too.
        assert_eq!(pause("graph"), Status::Ok);
        let late = Mempool {
            capture: 5,
            user: 0,
        };
        assert_eq!(add(late), Status::Ok);
        // SAFETY: there is no filter.
        let routed =
            unsafe { lowtide_begin_allocate_to_pool(0, late, None, ptr::null_mut(), None) };
        assert_eq!(routed, Status::Ok);
        assert_eq!(allocate(1000, 0), Err(Status::Paused));
        assert_eq!(lowtide_end_allocate_to_pool(0, late), Status::Ok);
        // A graph that ends while its memory is away takes nothing with it.
        assert_eq!(lowtide_deallocate(static_input), Status::Ok);
        for _ in 0..2 {
            assert_eq!(lowtide_release_pool(0, pool), Status::Ok);
        }
        assert_eq!(resume("graph"), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(fake.used_bytes(0), start);
    });
}

/// The number of a pool that has ended may be another's, which no region pauses.
#[test]
fn a_pool_that_has_ended_is_in_no_region() {
    let test = "pools::a_pool_that_has_ended_is_in_no_region";
    isolated(test, &[], |_| {
        let pool = Mempool {
            capture: 0,
            user: 7,
        };
        let allocate_in_pool = |seed| {
            // SAFETY: there is no filter.
            let routed =
                unsafe { lowtide_begin_allocate_to_pool(0, pool, None, ptr::null_mut(), None) };
            assert_eq!(routed, Status::Ok);
            let memory = allocate(3 * MIB, 0);
            assert_eq!(lowtide_end_allocate_to_pool(0, pool), Status::Ok);
            let memory = memory.unwrap();
            fill(memory, 3 * MIB, seed);
            memory
        };
        let end = |memory| {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
            while lowtide_release_pool(0, pool) == Status::Ok {}
            assert_eq!(lowtide_reset(), Status::Ok);
        };
        let tag = c_text("kv");
        let host = Backup::Host as c_int;
        // SAFETY: the text ends with a zero byte.
        let add = || unsafe { lowtide_region_pool(0, pool, tag.as_ptr(), host) };
        assert_eq!(add(), Status::Ok);
        end(allocate_in_pool(1));

        let other = allocate_in_pool(2);
        assert_eq!(add(), Status::Pool, "it has other segments");
        assert_eq!(pause("kv"), Status::Ok);
        check(other, 3 * MIB, 2);
        fill(other, 3 * MIB, 3);
        assert_eq!(resume("kv"), Status::Ok);
        check(other, 3 * MIB, 3);
        end(other);

        assert_eq!(add(), Status::Ok, "it is new");
        let memory = allocate_in_pool(4);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(host_copy(memory).unwrap().1, 3 * MIB);
        assert_eq!(resume("kv"), Status::Ok);
        check(memory, 3 * MIB, 4);
    });
}
