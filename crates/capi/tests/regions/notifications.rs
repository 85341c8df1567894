//! The events of regions that are paused and resumed, for observers that register the memory elsewhere.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use lowtide::*;

use crate::common::{allocate, check, fill, is_tide, isolated, last_error};
use crate::{MIB, allocate_in, pause, region, resume};

const WORD: usize = 0x6e63_636c;

/// An observer that registers every segment, and accesses it while it is registered, as NCCL does.
#[derive(Default)]
struct Registrations {
    /// By address.
    segments: BTreeMap<u64, u64>,
    /// The paused segments among them.
    paused: BTreeMap<u64, u64>,
    pauses: usize,
    resumes: usize,
}

impl Registrations {
    fn on(&mut self, event: &Event) {
        let (address, size) = (event.address, event.size);
        match event.action {
            Action::SegmentAlloc => {
                assert_eq!(self.segments.insert(address, size), None);
            }
            Action::SegmentFree => {
                assert_eq!(self.segments.remove(&address), Some(size));
                self.paused.remove(&address);
            }
            Action::SegmentPaused => {
                self.pauses += 1;
                assert_eq!(self.segments.get(&address), Some(&size));
                assert_eq!(self.paused.insert(address, size), None);
            }
            Action::SegmentResumed => {
                self.resumes += 1;
                assert_eq!(self.paused.remove(&address), Some(size));
            }
            _ => return,
        }
        if event.action != Action::SegmentFree {
            // The memory is mapped at this moment, both after it was mapped and before it is unmapped. No block
            // uses its last word.
            let last = usize::try_from(address + size).unwrap() - 8;
            let last = ptr::with_exposed_provenance_mut::<usize>(last);
            // SAFETY: it lies in the segment, and no block uses it.
            unsafe { last.write_volatile(WORD) };
        }
    }
}

unsafe extern "C" fn observe(context: *mut c_void, event: *const Event) {
    // SAFETY: it is the context that `lowtide_observe_events` got.
    let registrations = unsafe { &*context.cast::<Mutex<Registrations>>() };
    // SAFETY: it is valid for the call.
    registrations.lock().unwrap().on(unsafe { &*event });
}

/// Returns the sizes of the segments that are shown as paused, in MiB.
fn shown_as_paused() -> Vec<u64> {
    unsafe extern "C" fn visit(
        context: *mut c_void,
        segment: *const Segment,
        _blocks: *const Block,
        _count: usize,
    ) {
        // SAFETY: `context` is the value passed below.
        let seen = unsafe { &mut *context.cast::<Vec<u64>>() };
        // SAFETY: it is valid for the call.
        let segment = unsafe { &*segment };
        if segment.is_paused {
            seen.push(segment.size >> 20);
        }
    }
    let mut seen: Vec<u64> = Vec::new();
    // SAFETY: `visit` takes such a context.
    let status = unsafe { lowtide_visit_segments(0, Some(visit), (&raw mut seen).cast()) };
    assert_eq!(status, Status::Ok);
    seen.sort_unstable();
    seen
}

/// A visitor sees the paused segments without having observed the events. Here nothing observed them.
#[test]
fn what_is_paused_is_shown_so() {
    isolated("notifications::what_is_paused_is_shown_so", &[], |fake| {
        let outside = allocate(MIB, 0).unwrap();
        let kept = allocate_in("kv", Backup::Host, 30 * MIB, 0, 1);
        let freed = allocate_in("kv", Backup::None, 40 * MIB, 0, 2);
        assert_eq!(shown_as_paused(), [0; 0]);
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert_eq!(shown_as_paused(), [30, 40]);
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        assert_eq!(shown_as_paused(), [30, 40], "segments stay");
        // The failure is in one of the two regions.
        fake.fail("cuMemSetAccess", 1, 999);
        assert_eq!(resume("kv"), Status::Driver);
        fake.fail_none();
        assert_eq!(shown_as_paused(), [30]);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        assert_eq!(shown_as_paused(), [0; 0]);
        for memory in [outside, kept] {
            assert_eq!(lowtide_deallocate(memory), Status::Ok);
        }
    });
}

#[test]
fn registrations_follow_a_pause_and_a_resume() {
    let test = "notifications::registrations_follow_a_pause_and_a_resume";
    isolated(test, &[], |fake| {
        let registrations = Mutex::new(Registrations::default());
        let context = ptr::from_ref(&registrations).cast_mut().cast();
        // SAFETY: it takes such a context, which outlives its use.
        let status = unsafe { lowtide_observe_events(Some(observe), context) };
        assert_eq!(status, Status::Ok);
        let outside = allocate(MIB, 0).unwrap();
        fill(outside, MIB, 9);
        // What tide maps is no segment.
        let outside_segments = usize::from(!is_tide());
        let kept = allocate_in("kv", Backup::Host, 29 * MIB, 0, 1);
        let freed = allocate_in("kv", Backup::Host, 40 * MIB + 1, 0, 2);
        let counts = || {
            let seen = registrations.lock().unwrap();
            (
                seen.segments.len() - outside_segments,
                seen.paused.len(),
                seen.pauses,
                seen.resumes,
            )
        };
        assert_eq!(counts(), (2, 0, 0, 0));
        assert_eq!(pause("kv"), Status::Ok, "{}", last_error());
        assert_eq!(counts(), (2, 2, 2, 0));
        assert_eq!(pause("kv"), Status::Ok);
        assert_eq!(counts(), (2, 2, 2, 0), "once");
        // A segment that is freed while it is paused is not resumed.
        assert_eq!(lowtide_deallocate(freed), Status::Ok);
        assert_eq!(resume("kv"), Status::Ok, "{}", last_error());
        assert_eq!(counts(), (1, 0, 2, 1));
        check(kept, 29 * MIB, 1);

        // A pause that fails before any unmapping, and one that is undone.
        for (call, pauses) in [("cuCtxSynchronize", 2), ("cuMemUnmap", 3)] {
            fake.fail(call, 1, 999);
            assert_eq!(pause("kv"), Status::Driver, "{call}");
            fake.fail_none();
            assert_eq!(region("kv", Backup::Host, 0).state, RegionState::Mapped);
            assert_eq!(counts(), (1, 0, pauses, pauses - 1), "{call}");
        }
        // After a failed resume nothing is mapped.
        assert_eq!(pause("kv"), Status::Ok);
        fake.fail("cuMemSetAccess", 1, 999);
        assert_eq!(resume("kv"), Status::Driver);
        fake.fail_none();
        assert_eq!(counts(), (1, 1, 4, 2));
        assert_eq!(resume("kv"), Status::Ok);
        assert_eq!(counts(), (1, 0, 4, 3));
        check(kept, 29 * MIB, 1);
        assert_eq!(lowtide_deallocate(kept), Status::Ok);
        assert_eq!(lowtide_reset(), Status::Ok);
        assert_eq!(counts(), (0, 0, 4, 3));
        check(outside, MIB, 9);
        // SAFETY: null removes the observer.
        let ended = unsafe { lowtide_observe_events(None, ptr::null_mut()) };
        assert_eq!(ended, Status::Ok);
    });
}
