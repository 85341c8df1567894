//! Memory of regions that is released to the device.

use std::ptr;

use lowtide::*;

use crate::common::{Live, TIDE, allocate, allocate_on, check, is_tide, isolated, last_error};
use crate::{MIB, allocate_in, enter, host_copy, leave, pause, region, resume, trim};

/// With a region's last block its copy, retained or not, its memory and its addresses are released.
#[test]
fn a_region_that_nothing_uses_ends() {
    isolated("returns::a_region_that_nothing_uses_ends", &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let (used, before) = (fake.used_bytes(0), fake.live());
        assert_eq!(trim("kv", Backup::Host, 0), Status::Ok, "there is none");
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        for is_paused in [false, true] {
            let [kept, freed] = [1, 2].map(|seed| allocate_in("kv", Backup::Host, MIB, 0, seed));
            let dropped = allocate_in("kv", Backup::None, MIB, 0, 3);
            assert_eq!(pause("kv"), Status::Ok);
            assert_eq!(lowtide_page_lock_backups(), Status::Ok);
            let (copy, size) = host_copy(kept).unwrap();
            if !is_paused {
                assert_eq!(resume("kv"), Status::Ok);
            }
            // Memory in use is unchanged.
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
            assert_eq!(trim("kv", Backup::Host, 0), Status::Ok);
            assert_eq!(host_copy(kept), Ok((copy, size)));
            check(copy, size, 1);
            let away = [RegionState::Mapped, RegionState::Paused][usize::from(is_paused)];
            assert_eq!(region("kv", Backup::Host, 0).state, away);

            assert_eq!(lowtide_deallocate(kept), Status::Ok);
            assert_eq!(trim("kv", Backup::Host, 1), Status::Ok, "there is none");
            assert_eq!(trim("kv", Backup::Host, 0), Status::Ok, "{}", last_error());
            let shown = region("kv", Backup::Host, 0);
            assert_eq!(shown.state, RegionState::Mapped);
            assert_eq!((shown.mapped_bytes, shown.host_bytes), (0, 0));
            assert_eq!(region("kv", Backup::None, 0).state, away);

            assert_eq!(resume("kv"), Status::Ok);
            assert_eq!(lowtide_deallocate(dropped), Status::Ok);
            assert_eq!(trim("kv", Backup::None, 0), Status::Ok);
            assert_eq!(fake.used_bytes(0), used);
            assert_eq!(lowtide_release_idle_backups(), Status::Ok);
            let live = fake.live();
            assert_eq!(live.handles, before.handles, "{live:?}");
            assert_eq!(live.host_allocations, 0, "{live:?}");
        }
        // The region is like one that was never paused.
        let again = allocate_in("kv", Backup::Host, MIB, 0, 4);
        check(again, MIB, 4);
        // SAFETY: null is no tag, and is refused.
        let refused = unsafe { lowtide_region_trim(0, ptr::null(), 0) };
        assert_eq!(refused, Status::InvalidArgument);
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
    });
}

/// A region's free memory is released like other free memory.
#[test]
fn free_memory_of_a_region_goes_back() {
    let test = "returns::free_memory_of_a_region_goes_back";
    isolated(test, &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let (used, before) = (fake.used_bytes(0), fake.live());
        for _ in 0..3 {
            let held: Vec<_> = (0..20)
                .map(|seed| allocate_in("kv", Backup::None, 30 * MIB, 0, seed))
                .collect();
            for &memory in &held {
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            }
            assert!(fake.used_bytes(0) > used, "it is cached");
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), used);
        }
        let memory = |live: Live| (live.reservations, live.handles, live.mappings);
        assert_eq!(memory(fake.live()), memory(before));
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
    });
}

/// What is cached outside a region serves the region's requests where the device is full, and the other way round.
#[test]
fn cached_memory_moves_between_a_region_and_the_rest() {
    let test = "returns::cached_memory_moves_between_a_region_and_the_rest";
    isolated(test, &[("FAKECUDA_CAPACITY", "209715200")], |_| {
        for seed in 0..3 {
            let outside = allocate(150 * MIB, 0).unwrap();
            assert_eq!(lowtide_deallocate(outside), Status::Ok);
            let inside = allocate_in("kv", Backup::Host, 150 * MIB, 0, seed);
            assert_eq!(allocate(150 * MIB, 0), Err(Status::OutOfMemory));
            check(inside, 150 * MIB, seed);
            assert_eq!(lowtide_deallocate(inside), Status::Ok);
        }
    });
}

/// Where the device is full, a region's request and a resume release what is missing of `tide`'s idle memory.
#[test]
fn a_region_takes_as_much_idle_memory_as_is_missing() {
    let test = "returns::a_region_takes_as_much_idle_memory_as_is_missing";
    let variables = [TIDE, ("FAKECUDA_CAPACITY", "209715200")];
    isolated(test, &variables, |fake| {
        let outside = [60, 60].map(|mib| allocate(mib * MIB, 0).unwrap());
        for memory in outside {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
        let inside = allocate_in("kv", Backup::None, 100 * MIB, 0, 1);
        assert_eq!(fake.used_bytes(0), 200 << 20, "20 MiB were missing");
        check(inside, 100 * MIB, 1);
        assert_eq!(pause("kv"), Status::Ok);
        let outside = allocate(150 * MIB, 0).unwrap();
        assert_eq!(lowtide_deallocate(outside), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(fake.used_bytes(0), 200 << 20, "50 MiB were missing");
        // What the margin needs is not known here. The request does not fail for that.
        assert_eq!(lowtide_set_memory_margin(10 << 20), Status::Ok);
        allocate_in("kv", Backup::None, 40 * MIB, 0, 2);
    });
}

/// A stream may be destroyed once its memory is free, whether or not other blocks share the piece.
#[test]
fn memory_goes_back_whose_stream_has_ended() {
    let test = "returns::memory_goes_back_whose_stream_has_ended";
    isolated(test, &[], |fake| {
        let kept = allocate_in("kv", Backup::None, 256 * MIB, 0, 1);
        let used = fake.used_bytes(0);
        for resets_before in [false, true] {
            let stream = fake.stream();
            enter("kv", Backup::None);
            let memory = allocate_on(12 * MIB, 0, stream);
            assert!(memory.is_ok(), "{}", last_error());
            let beside = allocate(12 * MIB, 0).unwrap();
            leave();
            assert_eq!(lowtide_deallocate(memory.unwrap()), Status::Ok);
            if resets_before {
                assert_eq!(lowtide_reset(), Status::Ok);
            }
            fake.destroy_stream(stream);
            assert_eq!(lowtide_deallocate(beside), Status::Ok);
            assert_eq!(lowtide_reset(), Status::Ok);
            assert_eq!(fake.used_bytes(0), used, "{resets_before}");
        }
        check(kept, 256 * MIB, 1);
    });
}

/// A thread's own default stream has a number that is not a handle, and any other may have been destroyed. A driver that
/// gets one of those may crash.
#[test]
fn the_driver_is_asked_for_no_stream() {
    let test = "returns::the_driver_is_asked_for_no_stream";
    isolated(test, &[], |fake| {
        let _outside = allocate(MIB, 0).unwrap();
        let used = fake.used_bytes(0);
        let names = ["cuStreamSynchronize", "cuCtxSynchronize"];
        let of_thread = ptr::without_provenance_mut(3);
        for stream in [fake.stream(), of_thread] {
            enter("kv", Backup::None);
            let memory = allocate_on(12 * MIB, 0, stream);
            leave();
            assert!(memory.is_ok(), "{}", last_error());
            assert_eq!(lowtide_deallocate(memory.unwrap()), Status::Ok);
            let before = names.map(|name| fake.calls(name));
            assert_eq!(lowtide_reset(), Status::Ok);
            let after = names.map(|name| fake.calls(name));
            // `tide` waits for the whole device, too, before it releases.
            let waits = 1 + u64::from(is_tide());
            let calls = [after[0] - before[0], after[1] - before[1]];
            assert_eq!((calls, fake.used_bytes(0)), ([0, waits], used));
        }
    });
}
