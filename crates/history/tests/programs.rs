//! Tests with generated programs that the history of an allocator's events equals the allocator's own state at
//! every instant.

use lowtide_core::{
    Action, Bytes, Config, DeviceAddress, DeviceAllocator, Event, Fragmentation, MempoolId,
    PoolSetting, Stream,
};
use lowtide_history::{BlockSizes, History};
use lowtide_sim::{SimConfig, SimDriver};
use lowtide_trace::{NoteId, StackId, Trace, TraceEvent};
use proptest::prelude::*;

const CONFIGS: [&str; 13] = [
    "caching",
    "caching:expandable_segments:True",
    "caching:expandable_segments:True,large_segment_size_mb:40",
    "caching:max_split_size_mb:20,roundup_power2_divisions:4",
    "bfc",
    "bfc:fragmentation_fraction:0.1",
    "pool",
    "buddy",
    "buddy:arena_size_mb:16",
    "slab",
    "slab:arena_size_mb:16",
    "direct",
    "tide",
];

/// The private pool of some requests.
const POOL: MempoolId = MempoolId(0, 7);

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc {
        size: u64,
        stream: u64,
        is_private: bool,
    },
    Free {
        index: usize,
    },
    /// Frees a block that another stream still uses.
    FreeWhileUsed {
        index: usize,
    },
    /// The streams finish their work on all freed blocks.
    Pass,
    EmptyCache,
    /// Pauses or resumes the private pool's memory.
    PauseOrResume,
}

fn op() -> impl Strategy<Value = Op> {
    // Most are small, so that several pages for small requests are mapped and unmapped.
    let size = prop_oneof![
        1 => 1_u64..3000,
        4 => 1_u64..1_048_577,
        1 => 1_u64..3_000_000,
        1 => 1_u64..90_000_000,
    ];
    let stream = prop_oneof![4 => Just(0_u64), 1 => 1_u64..3];
    let alloc = (size, stream, prop::bool::weighted(0.2));
    prop_oneof![
        6 => alloc.prop_map(|(size, stream, is_private)| Op::Alloc { size, stream, is_private }),
        4 => any::<usize>().prop_map(|index| Op::Free { index }),
        1 => any::<usize>().prop_map(|index| Op::FreeWhileUsed { index }),
        1 => Just(Op::Pass),
        1 => Just(Op::EmptyCache),
        1 => Just(Op::PauseOrResume),
    ]
}

/// An allocator, and its recorded events and states.
struct Job {
    allocator: DeviceAllocator<SimDriver>,
    held: Vec<DeviceAddress>,
    events: Vec<Event>,
    sizes: Vec<Bytes>,
    /// The states by the number of events: the fragmentation for requests in each stream, and the paused bytes.
    listed: Vec<(u32, [Fragmentation; 3], Bytes)>,
    large_page: Bytes,
    /// Whether the private pool's memory is paused.
    is_away: bool,
}

impl Job {
    fn new(config: &Config) -> Job {
        let driver = SimDriver::new(SimConfig {
            capacity: Some(Bytes::gib(1)),
            ..SimConfig::default()
        });
        let mut allocator = DeviceAllocator::new(driver, 0, config);
        allocator.lane_mut().event_log().record(true);
        allocator.lane_mut().create_or_retain_pool(POOL);
        Job {
            allocator,
            held: Vec::new(),
            events: Vec::new(),
            sizes: Vec::new(),
            listed: Vec::new(),
            large_page: config.large_page(),
            is_away: false,
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Alloc {
                size,
                stream,
                is_private,
            } => {
                let pool = if is_private { POOL } else { MempoolId::DEFAULT };
                let block = self
                    .allocator
                    .allocate_in(pool, Bytes(size), Stream(stream));
                self.held.extend(block);
            }
            Op::Free { index } | Op::FreeWhileUsed { index } if !self.held.is_empty() => {
                let address = self.held.swap_remove(index % self.held.len());
                if matches!(op, Op::FreeWhileUsed { .. }) {
                    self.allocator.driver().hold_stream(Stream(9));
                    self.allocator
                        .lane_mut()
                        .record_stream(address, Stream(9))
                        .expect("it is held");
                }
                self.allocator.free(address).expect("it is held");
            }
            Op::Free { .. } | Op::FreeWhileUsed { .. } => {}
            Op::Pass => {
                self.allocator.driver().resume_stream(Stream(9));
                self.allocator
                    .lane_mut()
                    .process_events()
                    .expect("the device answers");
            }
            Op::EmptyCache => self
                .allocator
                .empty_cache(None)
                .expect("the device answers"),
            Op::PauseOrResume => self.pause_or_resume(),
        }
        let events: Vec<Event> = self.allocator.lane_mut().event_log().take().collect();
        let block = events.iter().find(|event| event.action == Action::Alloc);
        if let Some(block) = block {
            let block = self
                .allocator
                .lane()
                .allocation(block.address)
                .expect("it was just handed out");
            self.sizes.push(block.size);
        }
        self.events.extend(events);
        let mut segments = self.allocator.segments();
        if self.is_away {
            segments.retain(|segment| segment.pool != POOL);
        }
        let fragmentations =
            [0, 1, 2].map(|stream| Fragmentation::of(&segments, Stream(stream), self.large_page));
        let instant = u32::try_from(self.events.len()).expect("few events");
        self.listed
            .push((instant, fragmentations, self.paused_bytes()));
    }

    /// Pauses or resumes the pool like a region. A region's segments do not grow.
    fn pause_or_resume(&mut self) {
        let mut segments = self.allocator.segments();
        segments.retain(|segment| segment.pool == POOL);
        if segments.iter().any(|segment| segment.is_expandable) {
            return;
        }
        let is_back = self.is_away;
        self.is_away = !is_back;
        // Segments that were released while they were paused do not exist any more.
        let changes = segments.into_iter().map(|segment| Event {
            action: if is_back {
                Action::SegmentResumed
            } else {
                Action::SegmentPaused
            },
            pool: segment.pool,
            address: segment.address,
            size: segment.size,
            stream: segment.stream,
        });
        self.events.extend(changes);
        let region = self.is_away.then(|| "kv".into());
        self.allocator
            .lane_mut()
            .set_pool(POOL, PoolSetting::Paused(region))
            .expect("it is there");
    }

    fn paused_bytes(&self) -> Bytes {
        let segments = self.allocator.segments().into_iter();
        let away = segments.filter(|segment| self.is_away && segment.pool == POOL);
        away.map(|segment| segment.size).sum()
    }

    fn trace(&self, config: &Config) -> Trace {
        let events = self.events.iter().map(|&event| TraceEvent {
            event,
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        });
        let mut trace = Trace {
            events: events.collect(),
            segments: self.allocator.segments(),
            ..Trace::default()
        };
        match config {
            Config::Caching(_) => trace.settings.conf = config.to_conf().into(),
            _ => trace.settings.strategy = config.to_string().into(),
        }
        trace
    }
}

fn check(config: &str, program: &[Op]) -> Result<(), TestCaseError> {
    let config: Config = config.parse().expect("a configuration");
    let mut job = Job::new(&config);
    for &op in program {
        job.apply(op);
    }
    let trace = job.trace(&config);
    let history = History::new(&trace, &BlockSizes::known(job.sizes.clone()));
    prop_assert_eq!(history.contradictions, 0);
    if !trace.settings.strategy.is_empty() {
        let sizes = BlockSizes::of(&trace, &());
        // If a share of the limit may be wasted, the recording does not have that share.
        let is_known = !trace
            .settings
            .strategy
            .raw()
            .contains("fragmentation_fraction")
            || job.sizes.is_empty();
        prop_assert_eq!(sizes.are_verified(), is_known);
        if is_known {
            prop_assert_eq!(&History::new(&trace, &sizes).blocks, &history.blocks);
        }
    }
    for &(instant, fragmentations, paused) in &job.listed {
        let fragmentation =
            fragmentations[usize::try_from(history.main_stream.0).expect("three streams")];
        let part =
            usize::try_from(u64::from(instant) / history.levels.part_instants()).expect("few");
        let mut curves = vec![fragmentation.reserved, fragmentation.live];
        curves.extend(fragmentation.causes);
        curves.push(paused);
        for (curve, bytes) in curves.into_iter().enumerate() {
            // So few events have a part each.
            prop_assert_eq!(history.levels.least(curve)[part], bytes.get());
            prop_assert_eq!(history.levels.most(curve)[part], bytes.get());
        }
    }
    let last = job.listed.last();
    let last = last
        .map(|&(_, fragmentations, _)| fragmentations)
        .unwrap_or_default();
    prop_assert_eq!(history.end.paused, job.paused_bytes());
    prop_assert_eq!(
        history.end.fragmentation,
        last[usize::try_from(history.main_stream.0).expect("three")]
    );
    for refusal in &history.refusals {
        let causes: Bytes = refusal.moment.fragmentation.causes.iter().copied().sum();
        prop_assert_eq!(
            refusal.moment.fragmentation.live + causes,
            refusal.moment.fragmentation.reserved
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        // A failure becomes a test of its own instead.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_history_is_what_the_allocator_lists(program in prop::collection::vec(op(), 1..200)) {
        for config in CONFIGS {
            check(config, &program)?;
        }
    }
}
