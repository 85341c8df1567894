//! How much of the host's memory the process has, by who has it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts what lowtide and the test hold. The stand-in driver has one of its own.
pub(crate) struct Counted;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does all.
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

/// Bytes of the host's memory.
pub(crate) struct Figures {
    /// What lowtide and the test hold.
    pub(crate) heap: usize,
    /// All that `malloc` has handed out: with what the stand-in driver holds.
    malloc: usize,
    /// What is resident: of files, which are the stand-in's devices, and of no file.
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
