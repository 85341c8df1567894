// The gap between reserved and live bytes at one instant, by cause.
//
// Every reserved byte is looked at once: it belongs to an allocated block, to one that waits for events, or to
// no block, and then the first cause that applies takes it. So live and the causes add up to reserved.

import { Away } from "./away.ts";
import { CAUSES, type Cause } from "./summary.ts";
import { EXPANDABLE, LARGE, liveBytes, rowsAt, type Trace } from "./trace.ts";

/** What an expandable segment of small blocks maps and unmaps at a time; of large ones, the trace says. */
const SMALL_UNIT_BYTES = 2 * 2 ** 20;

export interface Gap {
  reserved: number;
  live: number;
  /** So much of what is live is in blocks that are not listed one by one. */
  folded: number;
  /** What was asked for, of the blocks that are listed. */
  requested: number;
  /** The segments that are off the device. What is in them is not in the other sums. */
  paused: number;
  causes: Record<Cause, number>;
  /** How much of the cause `private_pools` each pool has, but for what blocks add that are not listed. */
  free_in_pools: Map<number, number>;
  /** Reserved less live less the causes: 0, unless the data contradicts itself. */
  difference: number;
  blocks: number;
  segments: number;
}

/** A stretch of addresses in which free neighbours merge: a segment, or adjacent mapped ranges of one. */
export interface Run {
  address: number;
  end: number;
  stream: number;
  pool: number;
  flags: number;
}

/**
 * Returns the causes at an instant as `stream` sees them. Linear in the blocks that are there, where it is
 * near the instant before. What blocks add that are not listed is known as the main stream sees it.
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

/** Adds the free bytes of one run to their causes; `inside` are its blocks by address. */
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

/** By segments: the runs at the last instant that was asked for. */
const lastRuns = new WeakMap<Trace["segments"], { rows: Uint32Array; runs: readonly Run[] }>();

/**
 * Returns the runs at an instant, by address; those that are paused are there, too. As long as the segments stay, they
 * are the same object.
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

/** Returns the runs that segments make, which are in order of their address. */
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

/** Blocks or segments: lives of rows that have addresses. */
interface Placeable {
  start: Uint32Array;
  end: Uint32Array;
  address: Float64Array;
}

/** Which rows were there at the last instant that was asked for, by address. */
const sorted = new WeakMap<Placeable, { instant: number; rows: Uint32Array }>();

/**
 * Returns the rows that are there at an instant, by address. Sorts those only that were not there at the instant
 * before for which it was asked: linear in those that are there where that is near.
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

/** Returns the rows of two lists that are in order of their address, in that order. */
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
