// What the page is told in words and single numbers: the JSON beside the columns.
//
// Every event number is an instant: instant k is what there is after k events, so 0 lies before the first
// event and `events` after the last. Bytes are bytes.

/** Why reserved bytes are not live, in the order in which the causes are looked for. */
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
  /** The segments that are off the device; in none of the others. */
  paused: number;
  causes: Record<Cause, number>;
  /** Whose gap it is: other streams' free memory is a cause. An index into `streams`. */
  stream: number;
}

export interface Strategy {
  label: string;
  peak_reserved_bytes: number;
  ratio: number;
  completed: boolean;
}

/** Somewhere that no step gives everything back to: a stack, or requests of about one size in one stream. */
export type Site = { stack: number } | { size_max: number; stream: number };

/** How live bytes grew from step to step. */
export interface Trend {
  bytes: number;
  bytes_per_step: number;
  /** They grew in so many of `steps`. */
  grown_steps: number;
  steps: number;
  /** So many times most of what had grown was given back. */
  times_given_back: number;
  /** How sure it is that they go on growing: at most 1. */
  confidence: number;
}

/** A place that has more in the last step than after the first ones. */
export type Grown = Site & Trend;

/** Growth of no place that can be named alone. */
export interface Spread extends Trend {
  is_steady: boolean;
  /** In so many places. */
  places: number;
  /** Of those, the ones that grew most, that first. */
  most: Grown[];
}

/** Memory that is allocated at the end. */
export interface Kept {
  bytes: number;
  blocks: number;
}

export interface Growth {
  steps: number;
  /** Why it is not known what leaks, as a sentence without its end. */
  doubt: string | null;
  /** What training makes in few calls and keeps. */
  training: { optimizer: Kept; gradients: Kept };
  /** Where steps were not found, equal parts stand for them. */
  found_by: "annotation" | "period" | "parts";
  annotation: string | null;
  /** So many, the first, were left out. */
  warm_up_steps: number;
  /** So many were looked at as one. */
  span_steps: number;
  /** What grew most comes first. */
  leaks: Grown[];
  /** How all that is in no leak grew together, where that is steady or much. */
  spread: Spread | null;
}

/** A request that was refused. */
export interface Failure {
  event: number;
  requested: number;
  /** An index into `streams`. */
  stream: number;
  /** What the device had left. */
  device_free: number;
  /** The largest free block of its stream and pool; `null` of those that are not told one by one. */
  largest_free: number | null;
}

/** The memory of a job that ran under `tide`: pieces of one size, each shown at one address at a time. */
export interface Frames {
  size: number;
  /** The most that there were at once. */
  peak: number;
  /** How often one moved to another address. */
  moved: number;
  /** In how many steps any did. */
  moving_steps: number;
  /** The step with the most moves, counted from 1, and its first event; `null` where no step has any. */
  busiest: { number: number; event: number; moved: number } | null;
}

export interface TraceSummary {
  name: string;
  /** `null` for the host's pinned memory. */
  device: number | null;
  events: number;
  duration_us: number | null;
  has_stacks: boolean;
  /** `PYTORCH_CUDA_ALLOC_CONF`, as the job had it. */
  settings: string;
  /** The allocator with the settings in force; "" for the host's pinned memory. */
  strategy: string;
  /** Whether the sizes of blocks are known: by a replay that led to the recorded addresses, or by those. */
  sizes: "verified" | "estimated";
  /** An index into `streams`. */
  main_stream: number;
  streams: string[];
  /** The first is the default pool. */
  pools: string[];
  /** For each pool, the tag of the region whose memory it has; "" where it is of none. */
  pool_regions: string[];
  /** The first is "", for blocks without one. */
  tags: string[];
  /** The tags of the regions that were paused. */
  regions: string[];
  /** How much an expandable segment of large blocks maps and unmaps at a time. */
  large_page: number;
  bucket_events: number;
  peak_live: Point;
  peak_reserved: Point;
  /** The most bytes that were paused at once. */
  peak_paused: number;
  /** `null` unless the job ran under `tide`. */
  frames: Frames | null;
  ooms: Failure[];
  instants: NamedInstant[];
  /** Blocks that are in all sums and curves, but not listed. */
  aggregated: { blocks: number; size_max: number; events_max: number } | null;
  strategies: Strategy[];
  /** What there is to know of these, each a sentence without its capital and its end. */
  replay_notes: string[];
  growth: Growth;
  /** How many were there before the first event. */
  initial_blocks: number;
  /** The recording's end is missing: it was made until the job was killed. */
  is_cut_off: boolean;
  /** So many events at least came after the last, while the snapshot was taken. */
  missed_events: number;
  /** Entries that say nothing about memory, or that this version does not know. */
  skipped_events: number;
  /** Events that could not be, for instance blocks that overlap; what they say is left out. */
  contradictions: number;
}

export interface Summary {
  version: string;
  traces: TraceSummary[];
  strings: string[];
}
