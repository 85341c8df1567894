// Rows of the tables: chosen, grouped and ordered without an object for each block.

import { liveBytes, type Trace } from "./trace.ts";

/**
 * Returns the first `limit` of the rows in order of their key, ties by row. Linear in the rows, but for
 * those that are returned.
 */
export function firstRows(
  rows: Uint32Array,
  key: (row: number) => number,
  isDescending: boolean,
  limit: number,
): Uint32Array {
  const sign = isDescending ? -1 : 1;
  const keys = new Float64Array(rows.length);
  for (let i = 0; i < rows.length; i++) keys[i] = sign * key(rows[i]);
  let positions = Uint32Array.from(rows.keys());
  if (rows.length > 4 * limit) {
    const bound = quantile(keys, limit);
    positions = positions.filter((position) => keys[position] <= bound);
  }
  positions.sort((a, b) => keys[a] - keys[b] || a - b);
  return positions.subarray(0, limit).map((position) => rows[position]);
}

/** Returns a value that at least `rank` of the values do not exceed, and not many more. */
function quantile(values: Float64Array, rank: number): number {
  // A sample's order is close enough: what it lets through too many is sorted, and too few is tried again.
  const stride = Math.max(1, Math.floor(values.length / 4096));
  const sample = new Float64Array(Math.ceil(values.length / stride));
  for (let i = 0; i < sample.length; i++) sample[i] = values[i * stride];
  sample.sort();
  for (let place = Math.ceil((2 * rank) / stride) + 1; place < sample.length; place *= 2) {
    let within = 0;
    for (let i = 0; i < values.length; i++) if (values[i] <= sample[place]) within++;
    if (within >= rank) return sample[place];
  }
  return Number.POSITIVE_INFINITY;
}

/** Blocks with something in common, as sums. */
export interface Group {
  /** What they have in common: a stack, or a size. */
  key: number;
  blocks: number;
  live: number;
  largest: number;
  /** One of them, for what is the same for all. */
  block: number;
}

/** Returns the groups of these blocks by a key. */
export function grouped(trace: Trace, rows: Uint32Array, keyOf: (block: number) => number): Group[] {
  const groups = new Map<number, Group>();
  for (const block of rows) {
    const bytes = liveBytes(trace.blocks, block);
    const key = keyOf(block);
    const group = groups.get(key);
    if (group === undefined) groups.set(key, { key, blocks: 1, live: bytes, largest: bytes, block });
    else {
      group.blocks++;
      group.live += bytes;
      if (bytes > group.largest) group.largest = bytes;
    }
  }
  return [...groups.values()];
}

/** A filter by text: every word must be in a block's stack, tag, stream or pool. */
export class Filter {
  readonly isEmpty: boolean;
  readonly #trace: Trace;
  readonly #words: { stack: Uint8Array; stream: boolean[]; pool: boolean[]; tag: boolean[] }[];

  constructor(trace: Trace, text: string, stackTexts: () => string[]) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const { streams, pools, tags } = trace.summary;
    this.#trace = trace;
    this.isEmpty = words.length === 0;
    this.#words = words.map((word) => ({
      stack: Uint8Array.from(stackTexts(), (stack) => Number(stack.includes(word))),
      stream: streams.map((stream) => `stream ${stream}`.includes(word) || `stream:${stream}`.includes(word)),
      pool: pools.map((pool) => pool.toLowerCase().includes(word)),
      tag: tags.map((tag) => tag.toLowerCase().includes(word)),
    }));
  }

  has(block: number): boolean {
    const { stack, stream, pool, tag } = this.#trace.blocks;
    return this.#words.every(
      (word) =>
        word.stack[stack[block]] === 1 ||
        word.tag[tag[block]] ||
        word.stream[stream[block]] ||
        word.pool[pool[block]],
    );
  }

  /** Returns those of the rows that pass. */
  of(rows: Uint32Array): Uint32Array {
    return this.isEmpty ? rows : rows.filter((row) => this.has(row));
  }
}
