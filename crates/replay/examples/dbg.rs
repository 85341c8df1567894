fn main() {
    let path = std::env::args().nth(1).unwrap();
    let s = lowtide_trace::read(path.as_ref()).unwrap();
    let t = &s.traces[0];
    println!(
        "initial segs {} blocks {} pending {}",
        t.initial.segments.len(),
        t.initial.blocks.len(),
        t.initial
            .blocks
            .iter()
            .filter(|b| b.status != lowtide_core::BlockStatus::Allocated)
            .count()
    );
    for b in t
        .initial
        .blocks
        .iter()
        .filter(|b| b.status != lowtide_core::BlockStatus::Allocated)
    {
        println!("{b:?}");
    }
    let rel = t.events.iter().filter(|e| {
        matches!(
            e.event.action,
            lowtide_core::Action::SegmentFree | lowtide_core::Action::SegmentUnmap
        )
    });
    println!(
        "released {} known {}",
        rel.clone().count(),
        rel.filter(|e| e.pool_known).count()
    );
    for (i, e) in t.events.iter().enumerate().take(8) {
        println!("{i} {e:?}");
    }
}
