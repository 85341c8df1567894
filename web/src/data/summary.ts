// The part of the page's data that is no column: names, texts and single numbers, as JSON.
//
// An event number is an instant. Instant k is the state after k events, so 0 is before the first event and `events` is
// after the last. Sizes are in bytes.

/** The reasons why reserved bytes are not live. Each byte counts for the first one that applies. */
export const CAUSES = [
  "rounding",
  "waiting_for_events",
  "private_pools",
  "other_streams",
  "cached_segments",
  "partly_used_pages",
  "split_remainders",
] as const;

export type Cause = (typeof CAUSES)[number];

export interface Point {
  event: number;
  bytes: number;
}

export interface NamedInstant {
  event: number;
  label: string;
  live: number;
  reserved: number;
  requested: number;
  /** The paused bytes. No other sum includes them. */
  paused: number;
  causes: Record<Cause, number>;
  /** The stream that sees this fragmentation: free memory of other streams is a cause. An index into `streams`. */
  stream: number;
}

export interface Strategy {
  label: string;
  peak_reserved_bytes: number;
  ratio: number;
  /** The time that the driver's calls would take. */
  driver_time_us: number;
  completed: boolean;
}

/**
 * Returns the group in which a strategy is listed. `direct` waits for the device at each free, so it comes after the
 * others, though it reserves least. Strategies with which the job does not fit come last.
 */
export function groupOf({ label, completed }: Strategy): number {
  if (!completed) return 2;
  return label === "direct" ? 1 : 0;
}

/** A call site: a stack or, for blocks without one, a size class and an index into `streams`. */
export type Site = { stack: number } | { size_max: number; stream: number };

/** The growth of live bytes from step to step. */
export interface Trend {
  bytes: number;
  bytes_per_step: number;
  /** The number of `steps` in which live bytes grew. */
  grown_steps: number;
  steps: number;
  /** How many times most of the growth was freed. */
  times_given_back: number;
  /** The confidence that live bytes continue to grow, in [0, 1]. */
  confidence: number;
}

/** A call site with more live bytes in the last step than after the first ones. */
export type Grown = Site & Trend;

/** The growth that belongs to no single call site. */
export interface Spread extends Trend {
  is_steady: boolean;
  /** The number of call sites that it is spread over. */
  sites: number;
  /** The call sites that grew most, in descending order. */
  most: Grown[];
}

/** Memory that is allocated at the end. */
export interface Kept {
  bytes: number;
  blocks: number;
}

export interface Growth {
  steps: number;
  /**
   * The reason why leaks cannot be distinguished from other growth. A sentence without its first capital and its full
   * stop.
   */
  doubt: string | null;
  /** The memory that training allocates in few calls and keeps. */
  training: { optimizer: Kept; gradients: Kept };
  /** How the steps were found. `parts` means that they were not: equal parts of the recording replace them. */
  found_by: "annotation" | "period" | "parts";
  annotation: string | null;
  /** The number of first steps that were left out. */
  warm_up_steps: number;
  /** The number of steps that are treated as one. */
  span_steps: number;
  /** The leaks, those that grew most first. */
  leaks: Grown[];
  /** The growth of everything that is no leak, if it is steady or large. */
  spread: Spread | null;
}

/** A request that ended in an out-of-memory error. */
export interface Failure {
  event: number;
  requested: number;
  /** An index into `streams`. */
  stream: number;
  /** The free memory of the device. */
  device_free: number;
  /** The largest free block of the request's stream and pool; `null` except for the first errors. */
  largest_free: number | null;
}

/** The frames of a job that ran under `tide`: pieces of memory of one size, each used at one address at a time. */
export interface Frames {
  size: number;
  /** The peak number of frames. */
  peak: number;
  /** The number of addresses that showed a frame at some time. */
  addresses: number;
  /** How often a frame moved to another address. */
  moved: number;
  /** The number of steps in which a frame moved. */
  moving_steps: number;
  /** The step with the most moves, counted from 1, and its first event; `null` if no step has any. */
  busiest: { number: number; event: number; moved: number } | null;
}

export interface TraceSummary {
  name: string;
  /** The number of the device; `null` for pinned host memory. */
  device: number | null;
  events: number;
  duration_us: number | null;
  has_stacks: boolean;
  /** The job's `PYTORCH_CUDA_ALLOC_CONF`. */
  settings: string;
  /** The allocator with the settings in force; empty for pinned host memory. */
  strategy: string;
  /** Whether all block sizes are those of the job (`verified`), or some are estimated. */
  sizes: "verified" | "estimated";
  /** An index into `streams`. */
  main_stream: number;
  streams: string[];
  /** The names of the pools. The first is the default pool. */
  pools: string[];
  /** The tag of the region whose memory each pool holds; empty if there is none. */
  pool_regions: string[];
  /** The tags of blocks. The first is empty, for blocks without a tag. */
  tags: string[];
  /** The names of the categories, by the numbers of blocks; empty if neither stacks nor the program show them. */
  categories: string[];
  /** The paths of modules with `*` for numbers, by the numbers of blocks; the first is that of no module. */
  modules: string[];
  /** The tags of the regions that were paused. */
  regions: string[];
  /** The unit in which an expandable segment of large blocks is mapped and unmapped. */
  large_page: number;
  bucket_events: number;
  peak_live: Point;
  peak_reserved: Point;
  /** The peak paused bytes. */
  peak_paused: number;
  /** `null` unless the job ran under `tide`. */
  frames: Frames | null;
  ooms: Failure[];
  instants: NamedInstant[];
  /** The aggregated blocks: all sums and curves include them, but they are not listed one by one. */
  aggregated: { blocks: number; size_max: number; events_max: number } | null;
  strategies: Strategy[];
  /** Notes on the replays. Each is a sentence without its first capital and its full stop. */
  replay_notes: string[];
  growth: Growth;
  /** The number of blocks from before the first event. */
  initial_blocks: number;
  /** Whether the end of the recording is missing, for instance because the job was killed. */
  is_cut_off: boolean;
  /** The minimum number of events after the last one, while the snapshot was taken. */
  missed_events: number;
  /** The number of entries that do not concern memory or that this version does not know. */
  skipped_events: number;
  /** The number of events that cannot have happened, for instance blocks that overlap. They are left out. */
  contradictions: number;
}

export interface Summary {
  version: string;
  traces: TraceSummary[];
  strings: string[];
}
