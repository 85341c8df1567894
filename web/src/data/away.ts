// The paused memory at one instant. Its segments and blocks exist, but their memory is not on the device.

import { upperBound } from "./search.ts";
import { rowsAt, type Trace } from "./trace.ts";

/** A paused range of addresses, and the index of its pause. */
export interface Part {
  from: number;
  to: number;
  pause: number;
}

export class Away {
  /** The size of all paused memory. */
  readonly bytes: number;
  /** The indices of the pauses at this instant, by address. Pauses do not overlap. */
  readonly #pauses: Uint32Array;
  readonly #starts: Float64Array;
  readonly #ends: Float64Array;

  constructor({ pauses }: Trace, instant: number) {
    this.#pauses = rowsAt(pauses, instant).sort((a, b) => pauses.address[a] - pauses.address[b]);
    this.#starts = Float64Array.from(this.#pauses, (pause) => pauses.address[pause]);
    this.#ends = Float64Array.from(this.#pauses, (pause) => pauses.address[pause] + pauses.size[pause]);
    this.bytes = this.#pauses.reduce((sum, pause) => sum + pauses.size[pause], 0);
  }

  /** Returns the pause that covers an address; `null` if its memory is on the device. */
  pauseAt(address: number): number | null {
    const place = upperBound(this.#starts, address) - 1;
    return place >= 0 && address < this.#ends[place] ? this.#pauses[place] : null;
  }

  has(address: number): boolean {
    return this.pauseAt(address) !== null;
  }

  /** Returns the paused parts of a range of addresses, in order. */
  within(from: number, to: number): Part[] {
    const parts: Part[] = [];
    for (let place = upperBound(this.#ends, from); this.#starts[place] < to; place++) {
      const [start, end] = [Math.max(from, this.#starts[place]), Math.min(to, this.#ends[place])];
      parts.push({ from: start, to: end, pause: this.#pauses[place] });
    }
    return parts;
  }
}
