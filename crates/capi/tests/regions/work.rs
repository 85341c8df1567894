//! The cost of a call while there are many unrelated blocks. It is measured as host memory that the calling
//! thread allocates, because code that visits every block makes a list of them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

use lowtide::*;

use crate::common::{allocate, isolated, last_error};
use crate::{MIB, allocate_in, pause, resume};

/// The system's allocator, with a counter of allocated bytes.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static ALLOCATED_BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED_BYTES.set(ALLOCATED_BYTES.get() + layout.size());
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(memory, layout) }
    }
}

const BLOCKS: usize = 4000;

/// Checks that `act` does not make a list of the blocks.
fn require_no_list(act: impl FnOnce()) {
    let before = ALLOCATED_BYTES.get();
    act();
    let allocated_bytes = ALLOCATED_BYTES.get() - before;
    assert!(allocated_bytes < 4 * BLOCKS, "{allocated_bytes}");
}

#[test]
fn blocks_of_others_are_not_looked_at() {
    isolated("work::blocks_of_others_are_not_looked_at", &[], |_| {
        let kept = allocate_in("kv", Backup::Host, MIB, 0, 1);
        // The first cycle allocates everything that is allocated once.
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        for _ in 0..BLOCKS {
            let _ = allocate(512, 0).unwrap();
        }
        require_no_list(|| {
            assert_eq!(tms_get_cpu_backup_pointer(kept.cast(), 1), ptr::null());
        });
        require_no_list(|| assert_eq!(pause("kv"), Status::Ok, "{}", last_error()));
        require_no_list(|| {
            assert_ne!(tms_get_cpu_backup_pointer(kept.cast(), 1), ptr::null());
        });
        require_no_list(|| assert_eq!(resume("kv"), Status::Ok, "{}", last_error()));
    });
}
