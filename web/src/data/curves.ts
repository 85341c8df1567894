// The curves of the chart. Each step shows the minimum and maximum of a curve. Steps of one instant are exact for
// `live` and `reserved`.

import { absencesOf } from "./absences.ts";
import { upperBound } from "./search.ts";
import { CAUSES, groupOf } from "./summary.ts";
import { liveBytes, type Trace } from "./trace.ts";

/** The minimum and maximum of a curve in each step. */
export interface Envelope {
  min: Float64Array;
  max: Float64Array;
}

/**
 * A division of a range of instants into steps, which are not the job's steps. Step i starts at `first + i * width`.
 */
export interface Steps {
  first: number;
  width: number;
  count: number;
}

export class Curves {
  readonly #trace: Trace;
  readonly #exact = new Map<string, Float64Array>();

  constructor(trace: Trace) {
    this.#trace = trace;
  }

  /**
   * Returns the names of the available curves: `live`, `reserved`, `paused`, the causes, and `<label>/reserved` for
   * each strategy, that with the lowest peak first in its group.
   */
  get names(): string[] {
    const strategies = [...this.#trace.summary.strategies]
      .sort((a, b) => groupOf(a) - groupOf(b) || a.peak_reserved_bytes - b.peak_reserved_bytes)
      .map(({ label }) => `${label}/reserved`);
    return ["live", "reserved", "paused", ...CAUSES, ...strategies].filter(
      (name) => name === "live" || name === "reserved" || this.#trace.curve(name) !== null,
    );
  }

  /** Returns about `wanted` steps, or fewer, that cover the instants from `from` to `to`. */
  steps(from: number, to: number, wanted: number): Steps {
    const end = this.#trace.end;
    const low = Math.max(0, Math.floor(from));
    const high = Math.min(end, Math.ceil(to));
    const bucket = this.#bucket;
    let width = Math.max(1, Math.ceil((high - low + 1) / wanted));
    // Steps wider than a bucket consist of whole buckets, so that they can be computed from the buckets.
    if (width > bucket) width = Math.ceil(width / bucket) * bucket;
    const first = Math.floor(low / width) * width;
    return { first, width, count: Math.floor((high - first) / width) + 1 };
  }

  /** Returns whether narrow steps show the curve's own values and not those of a bucket. */
  isExact(name: string): boolean {
    return name === "reserved" || name === "live";
  }

  envelope(name: string, steps: Steps): Envelope {
    const buckets = this.#trace.curve(name);
    return buckets !== null && this.#isByBuckets(name, steps)
      ? overBuckets(buckets, this.#bucket, steps)
      : overValues(this.exact(name), steps);
  }

  /** Returns whether the envelope can be computed before the blocks are read. */
  isEarly(name: string, steps: Steps): boolean {
    return this.#trace.curve(name) !== null && this.#isByBuckets(name, steps);
  }

  #isByBuckets(name: string, steps: Steps): boolean {
    return !this.isExact(name) || steps.width % this.#bucket === 0;
  }

  get #bucket(): number {
    return Math.max(1, this.#trace.summary.bucket_events);
  }

  /**
   * Returns the envelope of a curve from its buckets alone, without reading blocks; `null` if there is no such curve.
   */
  overview(name: string, steps: Steps): Envelope | null {
    const buckets = this.#trace.curve(name);
    return buckets && overBuckets(buckets, this.#bucket, steps);
  }

  /** Returns `live` or `reserved` at every instant, computed from blocks, segments and pauses. */
  exact(name: string): Float64Array {
    let values = this.#exact.get(name);
    if (values === undefined) {
      values = name === "live" ? liveCurve(this.#trace) : reservedCurve(this.#trace);
      this.#exact.set(name, values);
    }
    return values;
  }
}

/** Returns the boundaries of a job's steps that lie within a view, and the index of the first. */
export function stepsWithin(
  boundaries: Uint32Array,
  from: number,
  to: number,
): { first: number; marks: Uint32Array } {
  const first = from === 0 ? 0 : upperBound(boundaries, from - 1);
  return { first, marks: boundaries.subarray(first, upperBound(boundaries, to)) };
}

/** Returns the number of the step that contains an instant, counted from 1; `null` if none does. */
export function stepAt(boundaries: Uint32Array, instant: number): number | null {
  const step = upperBound(boundaries, instant);
  return step === 0 || step >= boundaries.length ? null : step;
}

/** Returns the smallest power of ten n for which n items, each `pixels` wide, take at least `wanted` pixels. */
export function everyFitting(pixels: number, wanted: number): number {
  let every = 1;
  while (pixels * every < wanted) every *= 10;
  return every;
}

/** Returns the marks that are at least `distance` from all earlier ones that are returned. Linear time. */
export function spaced<T extends { x: number }>(marks: readonly T[], distance: number): T[] {
  // Each cell is as wide as the distance, so it holds one mark at most.
  const taken = new Map<number, number>();
  return marks.filter(({ x }) => {
    const cell = Math.floor(x / distance);
    const isNear = [cell - 1, cell, cell + 1].some(
      (near) => Math.abs((taken.get(near) ?? Number.POSITIVE_INFINITY) - x) < distance,
    );
    if (!isNear) taken.set(cell, x);
    return !isNear;
  });
}

function liveCurve(trace: Trace): Float64Array {
  const { count, start, freed } = trace.blocks;
  const values = new Float64Array(trace.end + 2);
  for (let i = 0; i < count; i++) {
    const bytes = liveBytes(trace.blocks, i);
    values[start[i]] += bytes;
    values[Math.min(freed[i], trace.end + 1)] -= bytes;
  }
  trace.folded?.addLiveChanges(values);
  const { block, from, to } = absencesOf(trace);
  for (let i = 0; i < block.length; i++) {
    const bytes = liveBytes(trace.blocks, block[i]);
    values[from[i]] -= bytes;
    values[to[i]] += bytes;
  }
  return summed(values);
}

function reservedCurve(trace: Trace): Float64Array {
  const { segments, pauses } = trace;
  const values = new Float64Array(trace.end + 2);
  for (const { count, start, end, size, sign } of [
    { ...segments, sign: 1 },
    { ...pauses, sign: -1 },
  ]) {
    for (let i = 0; i < count; i++) {
      values[start[i]] += sign * size[i];
      values[Math.min(end[i], trace.end + 1)] -= sign * size[i];
    }
  }
  return summed(values);
}

/** Replaces changes by their running sums, in place. The last element belongs to no instant and is left out. */
function summed(changes: Float64Array): Float64Array {
  let value = 0;
  for (let i = 0; i < changes.length; i++) changes[i] = value += changes[i];
  return changes.subarray(0, changes.length - 1);
}

function overValues(values: Float64Array, { first, width, count }: Steps): Envelope {
  const min = new Float64Array(count);
  const max = new Float64Array(count);
  for (let step = 0; step < count; step++) {
    const from = first + step * width;
    const to = Math.min(values.length, from + width);
    let low = values[from];
    let high = low;
    for (let i = from + 1; i < to; i++) {
      const value = values[i];
      if (value < low) low = value;
      if (value > high) high = value;
    }
    min[step] = low;
    max[step] = high;
  }
  return { min, max };
}

function overBuckets(buckets: Envelope, bucket: number, { first, width, count }: Steps): Envelope {
  const min = new Float64Array(count);
  const max = new Float64Array(count);
  const last = buckets.max.length - 1;
  for (let step = 0; step < count; step++) {
    const from = Math.min(last, Math.floor((first + step * width) / bucket));
    const to = Math.min(last, Math.floor((first + (step + 1) * width - 1) / bucket));
    let low = buckets.min[from];
    let high = buckets.max[from];
    for (let i = from + 1; i <= to; i++) {
      low = Math.min(low, buckets.min[i]);
      high = Math.max(high, buckets.max[i]);
    }
    min[step] = low;
    max[step] = high;
  }
  return { min, max };
}
