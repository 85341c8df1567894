// The live bytes of a trace, divided into bands that add up to the curve of live bytes at every instant.

import type { Palette } from "../coloring.ts";
import { absencesOf } from "./absences.ts";
import type { Steps } from "./curves.ts";
import { upperBound } from "./search.ts";
import { liveBytes, rowsAt, type Trace } from "./trace.ts";

/** The bands in each step: their bytes at that instant of the step at which most bytes are live. */
export interface Stack {
  /** That instant of each step. */
  instants: Uint32Array;
  /** For each band, its bytes in each step. */
  bytes: Float64Array[];
}

export class Bands {
  /** The names and colours of all bands. The last is that of aggregated blocks, if there are some. */
  readonly names: string[];
  readonly colors: string[];
  /** The bands that ever hold anything, from the bottom of the picture to its top. */
  readonly order: number[];
  readonly #trace: Trace;
  readonly #live: Float64Array;
  /** The band of each block. */
  readonly #bandOf: Uint8Array;
  /** The live bytes of the aggregated blocks at each instant; `null` if all blocks are listed. */
  readonly #folded: Float64Array | null;
  readonly #absences;
  readonly #bucket: number;
  /** The bands in each bucket. */
  readonly #buckets: Stack;
  #newest: { steps: Steps; stack: Stack };

  /** `live` is the exact curve. Linear in the blocks and instants. */
  constructor(trace: Trace, live: Float64Array, { names, colors, single, of }: Palette) {
    this.#trace = trace;
    this.#live = live;
    this.#bandOf = new Uint8Array(trace.blocks.count);
    for (let block = 0; block < this.#bandOf.length; block++) this.#bandOf[block] = of(block);
    this.#folded = trace.folded?.liveCurve(trace.end) ?? null;
    this.#absences = absencesOf(trace);
    const isWhole = this.#folded === null;
    this.names = isWhole ? names : [...names, "aggregated blocks"];
    this.colors = isWhole ? colors : [...colors, "--aggregated"];
    this.#bucket = Math.max(1, trace.summary.bucket_events);
    const steps = { first: 0, width: this.#bucket, count: Math.floor(trace.end / this.#bucket) + 1 };
    this.#buckets = this.#read(steps);
    this.#newest = { steps, stack: this.#buckets };
    this.order = orderOf(this.#buckets.bytes, single);
  }

  /** Returns the bytes of each band at an instant. */
  at(instant: number): number[] {
    return this.#read({ first: instant, width: 1, count: 1 }).bytes.map(([bytes]) => bytes);
  }

  /** Returns the bands in each step. Linear in the blocks of these steps or, if steps are wider, in the buckets. */
  stack(steps: Steps): Stack {
    const known = this.#newest.steps;
    const isKnown = steps.first === known.first && steps.width === known.width && steps.count === known.count;
    // Steps that are wider than a bucket consist of whole buckets.
    const isWide = steps.width % this.#bucket === 0;
    if (!isKnown) this.#newest = { steps, stack: isWide ? this.#overBuckets(steps) : this.#read(steps) };
    return this.#newest.stack;
  }

  /** Returns the bands in each step, of which each is that of its highest bucket. */
  #overBuckets({ first, width, count }: Steps): Stack {
    const { instants, bytes } = this.#buckets;
    const each = width / this.#bucket;
    const chosen = Uint32Array.from({ length: count }, (_, step) => {
      const from = first / this.#bucket + step * each;
      const to = Math.min(instants.length, from + each);
      let highest = from;
      for (let i = from + 1; i < to; i++) {
        if (this.#live[instants[i]] > this.#live[instants[highest]]) highest = i;
      }
      return highest;
    });
    return {
      instants: chosen.map((bucket) => instants[bucket]),
      bytes: bytes.map((values) => Float64Array.from(chosen, (bucket) => values[bucket])),
    };
  }

  /** Returns the bands in each step by reading its blocks. */
  #read(steps: Steps): Stack {
    const instants = highest(this.#live, steps);
    const changes = this.names.map(() => new Float64Array(steps.count + 1));
    const place = placing(steps, instants);
    const { blocks } = this.#trace;
    const add = (block: number, from: number, to: number, bytes: number) => {
      const band = changes[this.#bandOf[block]];
      band[place(from)] += bytes;
      band[place(to)] -= bytes;
    };
    const addBlock = (block: number) =>
      add(block, blocks.start[block], blocks.freed[block], liveBytes(blocks, block));
    // The blocks that exist at the first of the instants, and those that start until the last.
    for (const block of rowsAt(blocks, instants[0])) addBlock(block);
    const past = upperBound(blocks.start, instants[instants.length - 1]);
    for (let block = upperBound(blocks.start, instants[0]); block < past; block++) addBlock(block);
    const { block, from, to } = this.#absences;
    for (let i = 0; i < block.length; i++) add(block[i], from[i], to[i], -liveBytes(blocks, block[i]));
    const bytes = changes.map(summed);
    const folded = this.#folded;
    if (folded !== null) bytes[bytes.length - 1] = Float64Array.from(instants, (instant) => folded[instant]);
    return { instants, bytes };
  }
}

/** Returns the first instant of each step with the most live bytes of the step. */
function highest(live: Float64Array, { first, width, count }: Steps): Uint32Array {
  return Uint32Array.from({ length: count }, (_, step) => {
    const from = first + step * width;
    const to = Math.min(live.length, from + width);
    let found = from;
    for (let instant = from + 1; instant < to; instant++) {
      if (live[instant] > live[found]) found = instant;
    }
    return found;
  });
}

/** Returns a function that returns how many of the instants, one for each step, are before another. Constant time. */
function placing({ first, width, count }: Steps, instants: Uint32Array): (instant: number) => number {
  return (instant) => {
    const step = Math.floor((instant - first) / width);
    if (step < 0) return 0;
    if (step >= count) return count;
    return instants[step] < instant ? step + 1 : step;
  };
}

/** Replaces changes by their running sums, in place. The last change belongs to no step and is left out. */
function summed(changes: Float64Array): Float64Array {
  for (let i = 1; i < changes.length; i++) changes[i] += changes[i - 1];
  return changes.subarray(0, changes.length - 1);
}

/**
 * Returns the bands that hold anything, the steadiest first: what comes and goes is at the top, where it moves no other
 * band. The bands from `single` on are last.
 */
function orderOf(bytes: Float64Array[], single: number): number[] {
  const steadiness = bytes.map((values) => {
    const most = values.reduce((most, value) => Math.max(most, value), 0);
    return most === 0 ? 0 : values.reduce((sum, value) => sum + value, 0) / most;
  });
  const held = [...steadiness.keys()].filter((band) => steadiness[band] > 0);
  const isLast = (band: number) => Number(band >= single);
  return held.sort((a, b) => isLast(a) - isLast(b) || (isLast(a) ? a - b : steadiness[b] - steadiness[a]));
}
