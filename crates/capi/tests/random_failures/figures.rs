//! The host memory of the process, by owner.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with a counter of live bytes of lowtide and the test. The stand-in driver has its own
/// allocator.
pub(crate) struct Counted;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) };
    }
}

/// Bytes of host memory.
pub(crate) struct Figures {
    /// Live bytes of lowtide and the test.
    pub(crate) heap: usize,
    /// All bytes allocated by `malloc`, including those of the stand-in driver.
    malloc: usize,
    /// Resident bytes of shared memory, which is that of the stand-in's devices. `anonymous` is the other
    /// resident memory, without files.
    shared: usize,
    pub(crate) anonymous: usize,
}

impl Figures {
    pub(crate) fn now() -> Figures {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kib = |name: &str| -> usize {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let text = line.and_then(|line| line.trim().strip_suffix(" kB"));
            text.and_then(|text| text.trim().parse().ok()).unwrap()
        };
        // SAFETY: takes nothing.
        let malloc = unsafe { libc::mallinfo2() };
        Figures {
            heap: LIVE.load(Ordering::Relaxed),
            malloc: malloc.uordblks + malloc.hblkhd,
            shared: kib("RssShmem:") << 10,
            anonymous: kib("RssAnon:") << 10,
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = |bytes: usize| bytes >> 10;
        write!(
            f,
            "heap {} KiB, malloc {} KiB, resident {} KiB and of devices {} KiB",
            kib(self.heap),
            kib(self.malloc),
            kib(self.anonymous),
            kib(self.shared)
        )
    }
}
