//! Times a free and an allocation through the exported functions, with many blocks live and on several
//! threads: `cargo run --release -p lowtide-capi --example pairs`.
//!
//! Without a GPU it runs on the stand-in driver, as a hit calls none; `-- --gpu` takes the machine's own. With
//! `LOWTIDE_RECORD` set, it is what a pair costs while it is recorded.
//! Each thread has a stream, and replaces a random one of its blocks by one of a random size.
#![expect(unsafe_code, reason = "calls a C interface")]
#![expect(clippy::print_stdout, reason = "this is what it is for")]

#[path = "../../fakecuda/src/located.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "of another crate, and not all of it used"
)]
mod located;

use std::env;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use lowtide::{Status, lowtide_allocate, lowtide_deallocate, lowtide_last_error};

/// Name, threads, live blocks, smallest and largest request, how many sizes there are.
const CASES: [(&str, usize, usize, usize, usize, usize); 8] = [
    ("1 thread, 1 live, 4 KiB", 1, 1, 4 << 10, 4 << 10, 1),
    ("1 thread, 100 live, to 1 MiB", 1, 100, 512, 1 << 20, 64),
    ("1 thread, 1k live, to 32 MiB", 1, 1_000, 512, 32 << 20, 200),
    ("1 thread, 10k live, to 1 MiB", 1, 10_000, 512, 1 << 20, 500),
    (
        "1 thread, 100k live, to 64 KiB",
        1,
        100_000,
        512,
        64 << 10,
        500,
    ),
    ("2 threads, 1k live, to 1 MiB", 2, 1_000, 512, 1 << 20, 200),
    ("4 threads, 1k live, to 1 MiB", 4, 1_000, 512, 1 << 20, 200),
    (
        "16 threads, 1k live, to 1 MiB",
        16,
        1_000,
        512,
        1 << 20,
        200,
    ),
];

const PAIRS: usize = 200_000;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}

fn allocate(size: usize, stream: *mut c_void) -> *mut c_void {
    let mut memory = ptr::null_mut();
    // SAFETY: `memory` may be written to.
    let status = unsafe { lowtide_allocate(size, 0, stream, &raw mut memory) };
    // SAFETY: the text is this thread's, and no call is under way in it.
    let text = unsafe { CStr::from_ptr(lowtide_last_error()) };
    assert_eq!(status, Status::Ok, "{text:?}");
    memory
}

fn free(memory: *mut c_void) {
    assert_eq!(lowtide_deallocate(memory), Status::Ok);
}

/// Returns the nanoseconds of a pair.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes and times of a benchmark"
)]
fn churn(case: (usize, usize, usize, usize), thread: usize, start: &Barrier) -> f64 {
    let (live, min, max, kinds) = case;
    // The default stream, and names that no driver is asked about.
    let stream = ptr::without_provenance_mut(thread * 0x100);
    let mut random = Random(17 + thread as u64);
    let doublings = (max as f64 / min as f64).log2();
    let sizes: Vec<usize> = (0..kinds)
        .map(|_| {
            (min as f64 * (doublings * random.below(1 << 20) as f64 / f64::from(1 << 20)).exp2())
                as usize
        })
        .collect();
    let mut blocks: Vec<_> = (0..live)
        .map(|_| allocate(sizes[random.below(kinds)], stream))
        .collect();
    let pairs: Vec<_> = (0..PAIRS)
        .map(|_| (random.below(live), sizes[random.below(kinds)]))
        .collect();
    let mut round = || {
        for &(slot, size) in &pairs {
            free(blocks[slot]);
            blocks[slot] = allocate(size, stream);
        }
    };
    round();
    start.wait();
    let begin = Instant::now();
    round();
    let elapsed = begin.elapsed();
    blocks.into_iter().for_each(free);
    elapsed.as_nanos() as f64 / PAIRS as f64
}

fn main() {
    let is_gpu = env::args().any(|argument| argument == "--gpu");
    let only = env::args().skip(1).find(|argument| argument != "--gpu");
    // SAFETY: loading it runs nothing.
    let fake = (!is_gpu).then(|| unsafe { libloading::Library::new(located::library_path()) });
    let fake = fake.transpose().expect("the stand-in driver was built");
    for (name, threads, live, min, max, kinds) in CASES {
        if only
            .as_ref()
            .is_some_and(|only| !name.contains(only.as_str()))
        {
            continue;
        }
        let best = (0..3).map(|_| {
            let start = Barrier::new(threads);
            let times: Vec<f64> = thread::scope(|scope| {
                let spawn = |thread| {
                    let start = &start;
                    scope.spawn(move || churn((live, min, max, kinds), thread, start))
                };
                let threads: Vec<_> = (0..threads).map(spawn).collect();
                let joined = threads.into_iter().map(|thread| thread.join());
                joined.map(|time| time.expect("no thread panics")).collect()
            });
            #[expect(clippy::cast_precision_loss, reason = "there are few threads")]
            let mean = times.iter().sum::<f64>() / times.len() as f64;
            mean
        });
        println!("{name:32} {:8.1} ns", best.fold(f64::INFINITY, f64::min));
    }
    // Its memory is in use until the process ends.
    std::mem::forget(fake);
}
