use lowtide_replay::*;
use std::time::Instant;
fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap();
    let verify = args.next().unwrap() == "verify";
    let cap: u64 = args.next().unwrap().parse().unwrap();
    for path in args {
        let t = Instant::now();
        let snapshot = lowtide_trace::read(path.as_ref()).unwrap();
        let read = t.elapsed();
        for trace in &snapshot.traces {
            let config: lowtide_core::Config = if name == "auto" {
                lowtide_core::Config::parse("caching", &trace.settings.conf).unwrap()
            } else {
                name.parse().unwrap()
            };
            let t = Instant::now();
            let out = Job::new(trace)
                .replay(
                    &config,
                    &Options {
                        capacity: (cap > 0).then_some(lowtide_core::Bytes(cap)),
                        verify,
                        timeline_points: 0,
                    },
                    &(),
                )
                .unwrap();
            if let Ok(json) = std::fs::read_to_string(format!("{path}.stats.json")) {
                let recorded: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&json).unwrap();
                let ours: std::collections::BTreeMap<String, i64> = out.stats.entries().into_iter().collect();
                let mut n = 0;
                for (k, v) in &recorded { n += 1; if ours.get(k).copied() != v.as_i64() { println!("   {k}: recorded {v} ours {:?}", ours.get(k)); } }
                println!("   {n} keys; ours has extra {:?}", ours.keys().filter(|k| !recorded.contains_key(*k)).collect::<Vec<_>>());
            }
            let v = out.verified.as_ref().map(|v| {
                (
                    v.compared,
                    v.same_address,
                    v.first_difference.as_ref().map(|d| d.to_string()),
                )
            });
            println!(
                "{} read {:?} replay {:?} ns/op {:.0} ok {} oom {:?} res {:.3} ratio {:.4} da {} df {} maps {} unmaps {} retries {} drv {:.0} us {:?}",
                path.rsplit('/').next().unwrap(),
                read,
                t.elapsed(),
                out.ns_per_op,
                out.completed,
                out.oom_at_event,
                out.peak_reserved_bytes.get() as f64 / (1u64 << 30) as f64,
                out.reserved_ratio,
                out.device_allocs,
                out.device_frees,
                out.maps,
                out.unmaps,
                out.retries,
                out.driver_time_us,
                v
            );
        }
    }
}
