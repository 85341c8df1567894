// What is paused at one instant: segments that are there, with their blocks, while their memory is off the device.

import { rowsAt, type Trace, upperBound } from "./trace.ts";

/** A stretch of addresses, and the pause that it is in. */
export interface Part {
  from: number;
  to: number;
  pause: number;
}

export class Away {
  /** How much is paused. */
  readonly bytes: number;
  /** The pauses under way, by address; no two overlap. */
  readonly #pauses: Uint32Array;
  readonly #starts: Float64Array;
  readonly #ends: Float64Array;

  constructor({ pauses }: Trace, instant: number) {
    this.#pauses = rowsAt(pauses, instant).sort((a, b) => pauses.address[a] - pauses.address[b]);
    this.#starts = Float64Array.from(this.#pauses, (pause) => pauses.address[pause]);
    this.#ends = Float64Array.from(this.#pauses, (pause) => pauses.address[pause] + pauses.size[pause]);
    this.bytes = this.#pauses.reduce((sum, pause) => sum + pauses.size[pause], 0);
  }

  /** Returns the pause that the memory at an address is in; `null` where it is on the device. */
  pauseAt(address: number): number | null {
    const place = upperBound(this.#starts, address) - 1;
    return place >= 0 && address < this.#ends[place] ? this.#pauses[place] : null;
  }

  has(address: number): boolean {
    return this.pauseAt(address) !== null;
  }

  /** Returns the parts of a stretch of addresses that are paused, in order. */
  within(from: number, to: number): Part[] {
    const parts: Part[] = [];
    for (let place = upperBound(this.#ends, from); this.#starts[place] < to; place++) {
      const [start, end] = [Math.max(from, this.#starts[place]), Math.min(to, this.#ends[place])];
      parts.push({ from: start, to: end, pause: this.#pauses[place] });
    }
    return parts;
  }
}
