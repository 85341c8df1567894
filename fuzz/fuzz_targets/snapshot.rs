//! Bytes as a file from someone else: everything that lowtide makes of a recording is made of it, the page of a report, leaks,
//! replays, and files that read back. Nothing panics, no arithmetic overflows, and no more memory is taken than the
//! file justifies (run with `-rss_limit_mb=2048`).
//!
//! Not covered: large recordings, of which replays would take too long.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/history/tests/common/everything.rs"]
mod everything;

fuzz_target!(|data: &[u8]| {
    everything::make_everything(data);
});
