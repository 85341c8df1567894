//! Copies that are retained after a resume, and the blocks that they belong to.

use std::ffi::{c_int, c_void};
use std::{fs, ptr};

use lowtide::*;

use crate::common::{allocate, check, fill, isolated};
use crate::{MIB, allocate_in, host_copy, pause, pause_all, region, resume, resume_all};

#[test]
fn a_retained_copy_stays_until_the_next_pause() {
    let test = "copies::a_retained_copy_stays_until_the_next_pause";
    isolated(test, &[], |_| {
        let kept = allocate_in("kv", Backup::Host, 5 * MIB, 0, 1);
        let other = allocate_in("other", Backup::Host, 5 * MIB, 0, 2);
        let in_file = allocate_in("kv", Backup::Disk, MIB, 0, 3);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause_all(), Status::Ok);
        let (copy, size) = host_copy(kept).unwrap();
        assert_eq!(resume_all(), Status::Ok);
        // The copy does not change when the program writes later.
        fill(kept, 5 * MIB, 4);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        check(copy, size, 1);
        assert_eq!(host_copy(in_file), Err(Status::InvalidArgument));
        assert!(region("kv", Backup::Host, 0).host_bytes >= 5 << 20);
        let late = allocate_in("kv", Backup::Host, 5 * MIB, 0, 5);
        assert_eq!(host_copy(late), Err(Status::InvalidArgument));
        assert_eq!(lowtide_deallocate(late), Status::Ok);

        // A resume decides whether a copy is retained. The next pause reuses its memory.
        assert_eq!(lowtide_retain_backups(false), Status::Ok);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(host_copy(kept), Ok((copy, size)));
        check(copy, size, 4);
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert!(host_copy(other).is_ok(), "it was not paused since");

        // A copy is released with the region's last segment, or by `lowtide_release_backups`.
        assert_eq!(lowtide_deallocate(other), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(region("other", Backup::Host, 0).host_bytes, 0);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(lowtide_release_backups(), Status::Ok);
        assert!(host_copy(kept).is_ok(), "it is paused");
        assert_eq!(resume("kv"), Status::Ok);
        assert!(host_copy(kept).is_ok());
        assert_eq!(lowtide_release_backups(), Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert_eq!(region("kv", Backup::Host, 0).host_bytes, 0);
        check(kept, 5 * MIB, 4);
    });
}

/// The size of one slot: page-locked memory through which a device's contents are copied.
const SLOT_BYTES: u64 = 4 << 20;

/// The largest number of slots: two for each thread that copies.
const SLOTS_MAX: u64 = 32;

fn kept_host_bytes(device: c_int) -> Result<u64, Status> {
    let mut bytes = u64::MAX;
    // SAFETY: `bytes` may be written to.
    match unsafe { lowtide_kept_host_bytes(device, &raw mut bytes) } {
        Status::Ok => Ok(bytes),
        status => Err(status),
    }
}

/// Returns the mapped bytes of this process.
fn mapped_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: takes a number only.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages * u64::try_from(page_bytes).unwrap()
}

#[test]
fn memory_that_a_resume_leaves_is_counted_until_it_goes_back() {
    let test = "copies::memory_that_a_resume_leaves_is_counted_until_it_goes_back";
    isolated(test, &[("FAKECUDA_DEVICES", "2")], |_| {
        assert_eq!(kept_host_bytes(0), Ok(0));
        let memory = allocate_in("kv", Backup::Host, 40 * MIB, 0, 1);
        assert_eq!(kept_host_bytes(9), Err(Status::InvalidArgument));
        assert_eq!(kept_host_bytes(0), Ok(0), "no backup was made");
        assert_eq!(pause("kv"), Status::Ok);
        // The slots are idle and counted. The copy itself belongs to the region.
        let in_pause = kept_host_bytes(0).unwrap();
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(region("kv", Backup::Host, 0).host_bytes, 0);
        let kept = kept_host_bytes(0).unwrap();
        assert!(kept >= in_pause + (40 << 20), "{kept}");
        assert_eq!(kept_host_bytes(1), Ok(0), "it is the device's");
        assert_eq!(lowtide_page_lock_backups(), Status::Ok);
        let mapped = mapped_bytes();
        assert_eq!(lowtide_release_backups(), Status::Ok);
        assert_eq!(kept_host_bytes(0), Ok(0));
        let gone = mapped - mapped_bytes();
        // A slot gets memory when a copy first needs it. The addresses of the other slots have no memory and are
        // released too. The program's own host memory may shrink a little meanwhile.
        let not_made = SLOTS_MAX * SLOT_BYTES - in_pause;
        let beside = { gone.checked_sub(kept) }
            .filter(|&beside| beside < not_made + (1 << 20))
            .map(|beside| beside % SLOT_BYTES);
        assert!(
            beside.is_some_and(|bytes| bytes < 1 << 20),
            "{gone} of {kept}"
        );
        check(memory, 40 * MIB, 1);
    });
}

/// A block that was allocated after the pause has no copy, even if the copy of an earlier block at its address is
/// retained.
#[test]
fn a_copy_is_of_its_block_alone() {
    isolated("copies::a_copy_is_of_its_block_alone", &[], |_| {
        let first = allocate_in("kv", Backup::Host, 5 * MIB, 0, 1);
        let other = allocate_in("kv", Backup::Host, 5 * MIB, 0, 2);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let kept = host_copy(other);
        assert!(kept.is_ok() && host_copy(first).is_ok());
        assert_eq!(lowtide_deallocate(first), Status::Ok);
        let second = allocate_in("kv", Backup::Host, 5 * MIB, 0, 3);
        assert_eq!(second, first, "the address is used again");
        assert_eq!(host_copy(second), Err(Status::InvalidArgument));
        assert_eq!(tms_get_cpu_backup_pointer(second.cast(), 1), ptr::null());
        assert_eq!(host_copy(other), kept);
        // After the next pause it has one.
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let (copy, size) = host_copy(second).unwrap();
        check(copy, size, 3);
    });
}

/// A tensor may begin anywhere in a block, for example one that was imported from another library.
#[test]
fn a_copy_is_found_from_within_its_block() {
    let test = "copies::a_copy_is_found_from_within_its_block";
    isolated(test, &[], |_| {
        let [first, second] = [1, 2].map(|seed| allocate_in("kv", Backup::Host, 3000, 0, seed));
        let within = |memory: *mut c_void, distance| memory.wrapping_byte_add(distance);
        assert_eq!(pause("kv"), Status::Ok);
        for memory in [first, second] {
            let (copy, size) = host_copy(memory).unwrap();
            assert_eq!(size, 3000);
            let inner = host_copy(within(memory, 1030)).unwrap();
            assert_eq!(inner, (within(copy, 1030), 1970));
            // The bytes that rounding added belong to no allocation.
            assert_eq!(host_copy(within(memory, 3000)), Err(Status::NotAllocated));
        }
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(host_copy(within(first, 1030)), Err(Status::InvalidArgument));
        let outside = allocate(MIB, 0).unwrap();
        assert_eq!(host_copy(within(outside, 512)), Err(Status::NotAllocated));
    });
}

/// Pauses without copies do not count in the time of copies.
#[test]
fn time_is_counted_where_something_is_copied() {
    let test = "copies::time_is_counted_where_something_is_copied";
    isolated(test, &[], |_| {
        allocate_in("kv", Backup::Host, 30 * MIB, 0, 1);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let kept = region("kv", Backup::Host, 0);
        assert!(0 < kept.save_ns && kept.save_ns <= kept.pause_ns);
        assert!(0 < kept.restore_ns && kept.restore_ns <= kept.resume_ns);
        assert_eq!(kept.last_save_ns, kept.save_ns);
        assert_eq!(kept.last_restore_ns, kept.restore_ns);
        // SAFETY: null means every region.
        assert_eq!(unsafe { lowtide_pause_and_drop(ptr::null()) }, Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        let dropped = region("kv", Backup::Host, 0);
        assert!(dropped.pause_ns > kept.pause_ns && dropped.resume_ns > kept.resume_ns);
        assert_eq!(dropped.save_ns, kept.save_ns);
        assert_eq!(dropped.restore_ns, kept.restore_ns);
        assert_eq!((dropped.last_save_ns, dropped.last_restore_ns), (0, 0));
    });
}

/// The retained copy is older than the dropped contents.
#[test]
fn a_region_that_is_dropped_has_no_copy_left() {
    let test = "copies::a_region_that_is_dropped_has_no_copy_left";
    isolated(test, &[], |_| {
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 1);
        assert_eq!(lowtide_retain_backups(true), Status::Ok);
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok);
        assert!(host_copy(kept).is_ok());
        // SAFETY: null means every region.
        assert_eq!(unsafe { lowtide_pause_and_drop(ptr::null()) }, Status::Ok);
        assert_eq!(host_copy(kept), Err(Status::InvalidArgument));
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(region("kv", Backup::Host, 0).last_restored_bytes, 0);
    });
}
