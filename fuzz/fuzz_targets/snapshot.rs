//! Bytes as a file from someone else: the reader answers, and never panics or takes memory that the
//! file does not justify (run with `-rss_limit_mb=2048`).
//!
//! Not covered: whether what it reads is what was written; the reader's own tests compare that.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = lowtide_trace::read_from(data) else {
        return;
    };
    for trace in &snapshot.traces {
        let _ = trace.peak_live_bytes();
    }
});
