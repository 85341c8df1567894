// The times for which the program holds blocks in paused memory.

import { byAddress } from "./gap.ts";
import { upperBound } from "./search.ts";
import type { Pauses, Trace } from "./trace.ts";

/** A block is paused, and held by the program, at instants `from <= k < to`. It may be so several times. */
export interface Absences {
  block: Uint32Array;
  from: Uint32Array;
  to: Uint32Array;
}

export function absencesOf({ blocks, pauses }: Trace): Absences {
  const [found, from, to]: [number[], number[], number[]] = [[], [], []];
  const rows = byAddress(Uint32Array.from(pauses.count > 0 ? blocks.address.keys() : []), blocks.address);
  const addresses = Float64Array.from(rows, (row) => blocks.address[row]);
  for (const times of pausesByRange(pauses)) {
    const address = pauses.address[times[0]];
    const past = addressesBefore(addresses, address + pauses.size[times[0]]);
    const ends = Uint32Array.from(times, (pause) => pauses.end[pause]);
    for (let place = addressesBefore(addresses, address); place < past; place++) {
      const block = rows[place];
      const [start, freed] = [blocks.start[block], blocks.freed[block]];
      // Pauses of one range follow each other, so `ends` is sorted.
      for (let i = upperBound(ends, start); i < times.length && pauses.start[times[i]] < freed; i++) {
        found.push(block);
        from.push(Math.max(start, pauses.start[times[i]]));
        to.push(Math.min(freed, ends[i]));
      }
    }
  }
  return { block: Uint32Array.from(found), from: Uint32Array.from(from), to: Uint32Array.from(to) };
}

/** Returns the indices of the pauses, grouped by their range of addresses. Each group is in order. */
function pausesByRange({ count, address, size }: Pauses): number[][] {
  const ranges = new Map<string, number[]>();
  for (let pause = 0; pause < count; pause++) {
    const range = `${address[pause]} ${size[pause]}`;
    const known = ranges.get(range);
    if (known === undefined) ranges.set(range, [pause]);
    else known.push(pause);
  }
  return [...ranges.values()];
}

/** Returns how many of the sorted addresses are less than `address`. */
function addressesBefore(addresses: Float64Array, address: number): number {
  return upperBound(addresses, address - 1);
}
