// The fragmentation at one instant, by cause: reserved minus live bytes, called the gap here.
//
// Every reserved byte counts once. It is in an allocated block, in a block that waits for events, or in no block. The
// first cause that applies counts it, so live bytes and the causes add up to reserved bytes.

import { Away } from "./away.ts";
import { CAUSES, type Cause } from "./summary.ts";
import { EXPANDABLE, LARGE, liveBytes, rowsAt, type Trace } from "./trace.ts";

/**
 * The unit in which an expandable segment of small blocks is mapped and unmapped. The unit for large blocks is the
 * trace's `large_page`.
 */
const SMALL_UNIT_BYTES = 2 * 2 ** 20;

export interface Gap {
  reserved: number;
  live: number;
  /** The live bytes of aggregated blocks. */
  folded: number;
  /** The requested bytes of the listed blocks. */
  requested: number;
  /** The paused bytes. No other sum includes them. */
  paused: number;
  causes: Record<Cause, number>;
  /** The free bytes of each private pool, without the correction for aggregated blocks. */
  free_in_pools: Map<number, number>;
  /** Reserved bytes minus live bytes and all causes. It is 0 unless the data contradicts itself. */
  difference: number;
  blocks: number;
  segments: number;
}

/**
 * A range of addresses in which free neighbours merge: a segment, or adjacent mapped ranges of an expandable segment.
 */
export interface Run {
  address: number;
  end: number;
  stream: number;
  pool: number;
  flags: number;
}

/**
 * Returns the fragmentation at an instant, as `stream` sees it. The part of aggregated blocks is as the main stream
 * sees it. Linear in the existing blocks if the previous call was for a near instant.
 */
export function gapAt(
  trace: Trace,
  instant: number,
  stream: number,
  away = new Away(trace, instant),
  allRuns: readonly Run[] = runsAt(trace, instant),
): Gap {
  const { blocks } = trace;
  const present = rowsByAddress(trace.blocks, instant);
  const alive = away.bytes === 0 ? present : present.filter((block) => !away.has(blocks.address[block]));
  const runs = away.bytes === 0 ? allRuns : allRuns.filter((run) => !away.has(run.address));
  const causes = Object.fromEntries(CAUSES.map((cause) => [cause, 0])) as Record<Cause, number>;
  const free_in_pools = new Map<number, number>();
  let live = 0;
  let requested = 0;
  for (const block of alive) {
    const size = blocks.size[block];
    if (instant >= blocks.freed[block]) {
      causes.waiting_for_events += size;
      continue;
    }
    const rounded = liveBytes(blocks, block);
    requested += blocks.requested[block];
    live += rounded;
    causes.rounding += size - rounded;
  }

  let reserved = 0;
  let next = 0;
  for (const run of runs) {
    reserved += run.end - run.address;
    const first = next;
    while (next < alive.length && blocks.address[alive[next]] < run.end) next++;
    const before = causes.private_pools;
    addFree(causes, trace, stream, run, alive.subarray(first, next));
    const free = causes.private_pools - before;
    if (free > 0) free_in_pools.set(run.pool, (free_in_pools.get(run.pool) ?? 0) + free);
  }
  const folded = trace.folded?.at(instant);
  if (folded !== undefined) {
    live += folded[0];
    CAUSES.forEach((cause, i) => {
      causes[cause] += folded[1 + i];
    });
  }
  const total = CAUSES.reduce((sum, cause) => sum + causes[cause], live);
  return {
    reserved,
    live,
    folded: folded?.[0] ?? 0,
    requested,
    paused: away.bytes,
    causes,
    free_in_pools,
    difference: reserved - total,
    blocks: alive.length,
    segments: rowsByAddress(trace.segments, instant).length,
  };
}

/** Adds the free bytes of one run to their causes. `inside` has the run's blocks, by address. */
function addFree(
  causes: Record<Cause, number>,
  trace: Trace,
  stream: number,
  run: Run,
  inside: Uint32Array,
): void {
  const { address, size } = trace.blocks;
  const isExpandable = (run.flags & EXPANDABLE) !== 0;
  const unit = (run.flags & LARGE) !== 0 ? trace.summary.large_page : SMALL_UNIT_BYTES;
  const add = (from: number, to: number): void => {
    if (to <= from) return;
    const bytes = to - from;
    if (run.pool !== 0) causes.private_pools += bytes;
    else if (run.stream !== stream) causes.other_streams += bytes;
    else if (isExpandable) {
      const firstUnit = Math.ceil((from - run.address) / unit);
      const lastUnit = Math.floor((to - run.address) / unit);
      const whole = Math.max(0, lastUnit - firstUnit) * unit;
      causes.cached_segments += whole;
      causes.partly_used_pages += bytes - whole;
    } else if (inside.length === 0) causes.cached_segments += bytes;
    else causes.split_remainders += bytes;
  };
  let from = run.address;
  for (const block of inside) {
    add(from, address[block]);
    from = address[block] + size[block];
  }
  add(from, run.end);
}

/** The runs that the previous call returned for these segments. */
const lastRuns = new WeakMap<Trace["segments"], { rows: Uint32Array; runs: readonly Run[] }>();

/**
 * Returns the runs at an instant, by address, including paused ones. Returns the same object as the previous call if
 * the segments are the same.
 */
export function runsAt({ segments }: Trace, instant: number): readonly Run[] {
  const rows = rowsByAddress(segments, instant);
  const last = lastRuns.get(segments);
  const isSame = last?.rows.length === rows.length && last.rows.every((row, i) => row === rows[i]);
  if (last !== undefined && isSame) return last.runs;
  const runs = runsOf(segments, rows);
  lastRuns.set(segments, { rows, runs });
  return runs;
}

/** Returns the runs of segments that are sorted by address. */
function runsOf(segments: Trace["segments"], rows: Uint32Array): Run[] {
  const runs: Run[] = [];
  for (const row of rows) {
    const address = segments.address[row];
    const end = address + segments.size[row];
    const [stream, pool, flags] = [segments.stream[row], segments.pool[row], segments.flags[row]];
    const last = runs.at(-1);
    const continues =
      last !== undefined &&
      (flags & EXPANDABLE) !== 0 &&
      last.end === address &&
      last.stream === stream &&
      last.pool === pool &&
      last.flags === flags;
    if (continues) last.end = end;
    else runs.push({ address, end, stream, pool, flags });
  }
  return runs;
}

/** Sorts rows by their address, in place. */
export function byAddress(rows: Uint32Array, address: Float64Array): Uint32Array {
  return rows.sort((a, b) => address[a] - address[b]);
}

/** Rows with lifetimes and addresses: blocks or segments. */
interface Placeable {
  start: Uint32Array;
  end: Uint32Array;
  address: Float64Array;
}

/** The rows that the previous call returned, and its instant. */
const sorted = new WeakMap<Placeable, { instant: number; rows: Uint32Array }>();

/**
 * Returns the rows that exist at an instant, by address. Sorts only the rows that did not exist at the instant of the
 * previous call. Linear in the existing rows if that instant is near.
 */
export function rowsByAddress(lives: Placeable, instant: number): Uint32Array {
  const { start, end, address } = lives;
  const known = sorted.get(lives);
  if (known?.instant === instant) return known.rows;
  const present = rowsAt(lives, instant);
  let rows = present;
  if (known === undefined) byAddress(present, address);
  else {
    const kept = known.rows.filter((row) => start[row] <= instant && instant < end[row]);
    const isNew = (row: number) => start[row] > known.instant || end[row] <= known.instant;
    rows = merged(kept, byAddress(present.filter(isNew), address), address);
  }
  sorted.set(lives, { instant, rows });
  return rows;
}

/** Merges two lists of rows that are sorted by address. */
function merged(first: Uint32Array, second: Uint32Array, address: Float64Array): Uint32Array {
  const rows = new Uint32Array(first.length + second.length);
  for (let i = 0, j = 0; i + j < rows.length; ) {
    const takesFirst = j === second.length || (i < first.length && address[first[i]] <= address[second[j]]);
    rows[i + j] = takesFirst ? first[i] : second[j];
    if (takesFirst) i++;
    else j++;
  }
  return rows;
}
