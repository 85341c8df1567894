// The bytes that aggregated blocks add to live bytes and to fragmentation. These blocks are not listed one by one. The
// page has their changes at each instant instead, exact to the byte.

import { upperBound } from "./search.ts";
import { CAUSES, type Cause } from "./summary.ts";

/** The parts of reserved bytes: live bytes and the causes. */
export const GAP_PARTS = ["live", ...CAUSES] as const;

/** The number of changes between two checkpoints. The sum of a part at an instant takes at most this many additions. */
const CHECKPOINT_CHANGES = 1024;

export class Folded {
  /** The instants with a change, in order, and the number of the change at each. */
  readonly #instants: Uint32Array;
  readonly #numbers: Uint32Array;
  /** The bytes that each distinct change adds to a part, by part. */
  readonly #changes: Float64Array[];
  /** The sums of the parts at each checkpoint. */
  readonly #checkpoints: Float64Array;

  /**
   * `columnOf` returns the stored distinct changes of a part. The last part is not stored, because the parts of each
   * change sum up to 0.
   */
  constructor(instants: Uint32Array, numbers: Uint32Array, columnOf: (part: string) => Float64Array) {
    this.#instants = instants;
    this.#numbers = numbers;
    this.#changes = GAP_PARTS.slice(0, -1).map((part) => columnOf(part).map(signed));
    const [live] = this.#changes;
    this.#changes.push(live.map((_, i) => -this.#changes.reduce((sum, part) => sum + part[i], 0)));
    const count = Math.floor(numbers.length / CHECKPOINT_CHANGES) + 1;
    this.#checkpoints = new Float64Array(count * GAP_PARTS.length);
    const sums = new Float64Array(GAP_PARTS.length);
    for (let i = 0; i < count; i++) {
      this.#checkpoints.set(sums, i * GAP_PARTS.length);
      this.#add(sums, i * CHECKPOINT_CHANGES, Math.min(numbers.length, (i + 1) * CHECKPOINT_CHANGES));
    }
  }

  /**
   * Returns the bytes of each part at an instant, in the order of `GAP_PARTS`. Causes are as the main stream sees them.
   */
  at(instant: number): Float64Array {
    const past = upperBound(this.#instants, instant);
    const checkpoint = Math.floor(past / CHECKPOINT_CHANGES);
    const first = checkpoint * GAP_PARTS.length;
    const sums = this.#checkpoints.slice(first, first + GAP_PARTS.length);
    this.#add(sums, checkpoint * CHECKPOINT_CHANGES, past);
    return sums;
  }

  /** Returns the change of each part at an instant; `null` if nothing changes. */
  changeAt(instant: number): Record<"live" | Cause, number> | null {
    const place = upperBound(this.#instants, instant) - 1;
    if (place < 0 || this.#instants[place] !== instant) return null;
    const change = this.#numbers[place];
    const parts = GAP_PARTS.map((part, i) => [part, this.#changes[i][change]]);
    return Object.fromEntries(parts) as Record<"live" | Cause, number>;
  }

  /** Adds the changes of live bytes to `values`, by instant. */
  addLiveChanges(values: Float64Array): void {
    const [live] = this.#changes;
    for (let i = 0; i < this.#instants.length; i++) values[this.#instants[i]] += live[this.#numbers[i]];
  }

  /** Returns the live bytes at every instant. */
  liveCurve(end: number): Float64Array {
    const values = new Float64Array(end + 1);
    this.addLiveChanges(values);
    for (let instant = 1; instant <= end; instant++) values[instant] += values[instant - 1];
    return values;
  }

  #add(sums: Float64Array, from: number, to: number): void {
    for (let part = 0; part < sums.length; part++) {
      const changes = this.#changes[part];
      for (let i = from; i < to; i++) sums[part] += changes[this.#numbers[i]];
    }
  }
}

/** Returns the signed number that is stored: 0, -1, 1, -2, 2 for 0, 1, 2, 3, 4. */
function signed(stored: number): number {
  return stored % 2 === 0 ? stored / 2 : -(stored + 1) / 2;
}
