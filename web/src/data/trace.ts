// One recording: its blocks and segments as columns, and look-ups in them. There is no object for each block, because a
// page may have 1.5 million of them.

import type { Container } from "./container.ts";
import { Folded } from "./folded.ts";
import { upperBound } from "./search.ts";
import type { TraceSummary } from "./summary.ts";

/** The lifetimes of blocks. A block exists at instants `start <= k < end`, and is freed by the program at `freed`. */
export interface Blocks {
  count: number;
  start: Uint32Array;
  freed: Uint32Array;
  end: Uint32Array;
  address: Float64Array;
  size: Float64Array;
  requested: Float64Array;
  stream: Uint32Array;
  pool: Uint32Array;
  stack: Uint32Array;
  tag: Uint32Array;
}

/** Ranges of memory from the driver. An expandable segment has one row for each mapped range. */
export interface Segments {
  count: number;
  start: Uint32Array;
  /** The instant since which its memory exists. It is before `start` for the remaining part of a longer segment. */
  made: Uint32Array;
  end: Uint32Array;
  address: Float64Array;
  size: Float64Array;
  stream: Uint32Array;
  pool: Uint32Array;
  flags: Uint32Array;
  /** The stack that took its memory from the driver. */
  stack: Uint32Array;
}

/** The paused segments. A segment is paused at instants `start <= k < end`. */
export interface Pauses {
  count: number;
  start: Uint32Array;
  end: Uint32Array;
  region: Uint32Array;
  address: Float64Array;
  size: Float64Array;
}

/** The instants at which frames of `tide` moved to other addresses, in order, and how many did. */
export interface Moves {
  event: Uint32Array;
  frames: Float64Array;
}

export const LARGE = 1;
export const EXPANDABLE = 2;

/** Live bytes count each request rounded up to a multiple of this. */
const GRANULE_BYTES = 512;

/** The owners of frames: the program itself, a Python package that it uses, PyTorch's Python code, and its operators. */
export const PROGRAM = 0;
export const PACKAGE = 1;
export const PYTORCH = 2;
export const OPERATOR = 3;

export interface Frame {
  function: string;
  file: string;
  line: number;
  /**
   * The owner of the code: one of the above, or other. Other code shows how memory was allocated, but not for what.
   */
  owner: number;
}

export interface Annotation {
  event: number;
  name: string;
  stage: number;
}

export class Trace {
  readonly summary: TraceSummary;
  readonly annotations: Annotation[];
  readonly #container: Container;
  readonly #prefix: string;
  readonly #strings: string[];
  #blocks: Blocks | null = null;
  #segments: Segments | null = null;
  #pauses: Pauses | null = null;
  #folded: Folded | null = null;

  constructor(container: Container, index: number, summary: TraceSummary, strings: string[]) {
    this.summary = summary;
    this.#container = container;
    this.#prefix = `${index}/`;
    this.#strings = strings;
    const names = this.#u32("annotations/name");
    const stages = this.#u32("annotations/stage");
    this.annotations = Array.from(this.#u32("annotations/event"), (event, i) => ({
      event,
      name: strings[names[i]],
      stage: stages[i],
    }));
  }

  get blocks(): Blocks {
    this.#blocks ??= this.#readBlocks();
    return this.#blocks;
  }

  /** The number of listed blocks. It is known before the blocks are read. */
  get blockCount(): number {
    return this.#container.count(`${this.#prefix}blocks/start`);
  }

  /** Returns a column with a number for each block; empty if there is no such column. */
  blockColumn(name: string): Uint32Array {
    return this.#u32(`blocks/${name}`);
  }

  get segments(): Segments {
    this.#segments ??= this.#readSegments();
    return this.#segments;
  }

  get pauses(): Pauses {
    this.#pauses ??= this.#readPauses();
    return this.#pauses;
  }

  /** The moves of frames; none for other strategies than `tide`. */
  get moves(): Moves {
    return { event: this.#u32("moves/event"), frames: this.#u64("moves/frames") };
  }

  /** The sums of the aggregated blocks; `null` if all blocks are listed. */
  get folded(): Folded | null {
    if (this.summary.aggregated === null) return null;
    this.#folded ??= new Folded(this.#u32("folded/instant"), this.#u32("folded/change"), (part) =>
      this.#u64(`folded/changes/${part}`),
    );
    return this.#folded;
  }

  /** The last instant, which is the number of events. */
  get end(): number {
    return this.summary.events;
  }

  /** Returns the minimum and maximum of a curve in each bucket; `null` if there is no such curve. */
  curve(name: string): { min: Float64Array; max: Float64Array } | null {
    const path = `${this.#prefix}curves/${name}/`;
    if (!this.#container.has(path + "max")) return null;
    const max = this.#container.u64(path + "max");
    return { min: this.#container.has(path + "min") ? this.#container.u64(path + "min") : max, max };
  }

  get stackCount(): number {
    return this.#u32("stacks/ends").length;
  }

  get frameCount(): number {
    return this.#u32("frames/function").length;
  }

  /** Returns the numbers of a stack's frames, innermost first. */
  stackFrames(stack: number): Uint32Array {
    const ends = this.#u32("stacks/ends");
    const frames = this.#u32("stacks/frames");
    return frames.subarray(stack === 0 ? 0 : ends[stack - 1], ends[stack] ?? 0);
  }

  frame(number: number): Frame {
    return {
      function: this.#strings[this.#u32("frames/function")[number]],
      file: this.#strings[this.#u32("frames/file")[number]],
      line: this.#u32("frames/line")[number],
      owner: this.#u32("frames/owner")[number],
    };
  }

  /** The boundaries of the steps, or of the equal parts that replace them. The last one is the end of the last step. */
  get parts(): Uint32Array {
    return this.#u32("steps/boundaries");
  }

  /** The boundaries of the steps; empty if no steps were found. */
  get stepBoundaries(): Uint32Array {
    return this.summary.growth.found_by === "parts" ? new Uint32Array(0) : this.parts;
  }

  get hasTimes(): boolean {
    return this.#container.has(this.#prefix + "events/time_us");
  }

  /** Returns the microseconds since the first event, interpolated between recorded times; `null` if there are none. */
  timeAt(instant: number): number | null {
    const times = this.#u64("events/time_us");
    const events = this.#u32("events/time_event");
    if (times.length === 0) return null;
    const after = upperBound(events, instant);
    if (after === 0) return times[0];
    if (after === events.length) return times[after - 1];
    const span = events[after] - events[after - 1];
    const share = span === 0 ? 0 : (instant - events[after - 1]) / span;
    return times[after - 1] + share * (times[after] - times[after - 1]);
  }

  #readBlocks(): Blocks {
    // Some columns are stored as the difference to another column, which gzip cannot find.
    const start = this.#u32("blocks/start");
    const requested = this.#u64("blocks/requested");
    const held = this.#u32("blocks/held");
    const pending = this.#u32("blocks/pending");
    const padding = this.#u64("blocks/padding");
    const freed = sums(new Uint32Array(start.length), start, held);
    return {
      count: start.length,
      start,
      freed,
      end: sums(new Uint32Array(start.length), freed, pending),
      address: this.#u64("blocks/address"),
      size: sums(new Float64Array(start.length), requested, padding),
      requested,
      stream: this.#u32("blocks/stream"),
      pool: this.#u32("blocks/pool"),
      stack: this.#u32("blocks/stack"),
      tag: this.#u32("blocks/tag"),
    };
  }

  #readSegments(): Segments {
    const start = this.#u32("segments/start");
    return {
      count: start.length,
      start,
      made: this.#u32("segments/made"),
      end: this.#u32("segments/end"),
      address: this.#u64("segments/address"),
      size: this.#u64("segments/size"),
      stream: this.#u32("segments/stream"),
      pool: this.#u32("segments/pool"),
      flags: this.#u32("segments/flags"),
      stack: this.#u32("segments/stack"),
    };
  }

  #readPauses(): Pauses {
    const start = this.#u32("pauses/start");
    return {
      count: start.length,
      start,
      end: this.#u32("pauses/end"),
      region: this.#u32("pauses/region"),
      address: this.#u64("pauses/address"),
      size: this.#u64("pauses/size"),
    };
  }

  #u32(name: string): Uint32Array {
    return this.#container.u32(this.#prefix + name);
  }

  #u64(name: string): Float64Array {
    return this.#container.u64(this.#prefix + name);
  }
}

/** Stores the sums of two columns in a third and returns it. `map` would take twice as long. */
function sums<T extends Uint32Array | Float64Array>(into: T, first: T, second: T): T {
  for (let i = 0; i < into.length; i++) into[i] = first[i] + second[i];
  return into;
}

/** Returns a block's live bytes: its request rounded up, but at most the size of the block. */
export function liveBytes(blocks: Blocks, block: number): number {
  const rounded = Math.ceil(blocks.requested[block] / GRANULE_BYTES) * GRANULE_BYTES;
  return Math.min(rounded, blocks.size[block]);
}

/** Rows that exist at instants `start <= k < end`, in order of their start. */
interface Lives {
  start: Uint32Array;
  end: Uint32Array;
}

/** The minimum number of rows between two checkpoints. */
const CHECKPOINT_ROWS = 8192;

/** The rows before row `first` that have not ended when row `first - 1` starts. */
interface Checkpoint {
  first: number;
  rows: Uint32Array;
}

/** The checkpoints of rows, in order, as far as they were needed. */
const checkpoints = new WeakMap<Lives, Checkpoint[]>();

/**
 * Returns the indices of the rows that exist at an instant, in order of their start. Linear in these and in the rows
 * after the checkpoint before. Earlier rows are read once, to create the checkpoints.
 */
export function rowsAt(rows: Lives, instant: number): Uint32Array {
  const { start, end } = rows;
  const last = upperBound(start, instant);
  const before = checkpointAt(rows, last);
  const found = new Uint32Array(before.rows.length + last - before.first);
  let count = 0;
  for (const row of before.rows) if (end[row] > instant) found[count++] = row;
  for (let row = before.first; row < last; row++) if (end[row] > instant) found[count++] = row;
  return found.subarray(0, count);
}

/** Returns the last checkpoint at or before a row. Creates the checkpoints that are missing. */
function checkpointAt(rows: Lives, row: number): Checkpoint {
  let known = checkpoints.get(rows);
  if (known === undefined) {
    known = [{ first: 0, rows: new Uint32Array(0) }];
    checkpoints.set(rows, known);
  }
  let newest = known[known.length - 1];
  for (let next = nextFirst(newest); next <= row; next = nextFirst(newest)) {
    newest = checkpointAfter(rows, newest, next);
    known.push(newest);
  }
  let place = known.length - 1;
  while (known[place].first > row) place--;
  return known[place];
}

/**
 * Returns the `first` of the next checkpoint. At least as many rows follow a checkpoint as it holds. So all checkpoints
 * together hold at most as many rows as there are.
 */
function nextFirst({ first, rows }: Checkpoint): number {
  return first + Math.max(CHECKPOINT_ROWS, rows.length);
}

function checkpointAfter({ start, end }: Lives, before: Checkpoint, first: number): Checkpoint {
  const begun = start[first - 1];
  const rows = new Uint32Array(before.rows.length + first - before.first);
  let count = 0;
  for (const row of before.rows) if (end[row] > begun) rows[count++] = row;
  for (let row = before.first; row < first; row++) if (end[row] > begun) rows[count++] = row;
  return { first, rows: rows.slice(0, count) };
}
