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
  /** The requests of those that are paused, which are not live. */
  paused: number;
  largest: number;
  /** One of them, for what is the same for all. */
  block: number;
}

/** Returns the groups of these blocks by a key; `isPaused` tells which of them are off the device. */
export function grouped(
  trace: Trace,
  rows: Uint32Array,
  keyOf: (block: number) => number,
  isPaused: (block: number) => boolean = () => false,
): Group[] {
  const groups = new Map<number, Group>();
  for (const block of rows) {
    const bytes = liveBytes(trace.blocks, block);
    const key = keyOf(block);
    let group = groups.get(key);
    if (group === undefined) {
      group = { key, blocks: 0, live: 0, paused: 0, largest: 0, block };
      groups.set(key, group);
    }
    group.blocks++;
    group[isPaused(block) ? "paused" : "live"] += bytes;
    if (bytes > group.largest) group.largest = bytes;
  }
  return [...groups.values()];
}

/** What a block has by number: `stack:12`, or a request of `size:1921-2048` bytes, both ends included. */
const EXACT = /^(stack|size):(\d+)(?:-(\d+))?$/;

/** A block that has an address in it. */
const ADDRESS = /^(?:address:)?(0x[0-9a-f]{6,})$/;

/** What states a block may be in, by how it is asked for: `state:waiting`, or its beginning. */
const STATES = ["allocated", "waiting", "paused"];

/** A word that names what it asks for. A place in a file has a dot before its colon, and a C++ name has two colons. */
const KEYED = /^([a-z_]+):[^:]/;

/** A word, or several in quotes, which may be left open at the end; "-" before it excludes what has it. */
const WORD = /(-?)(?:"([^"]*)"?|([^\s"]\S*))/g;

/** What a filter asks of each block. */
interface Word {
  text: string;
  isExcluded: boolean;
  isQuoted: boolean;
}

function wordsOf(text: string): Word[] {
  return Array.from(text.toLowerCase().matchAll(WORD), ([, sign, quoted, bare]) => ({
    text: quoted ?? bare,
    isExcluded: sign === "-",
    isQuoted: quoted !== undefined,
  })).filter((word) => word.text !== "");
}

/** A filter by words, all of which must hold: in a block's stack, tag, stream or pool, or by number or state. */
export class Filter {
  readonly isEmpty: boolean;
  /** Whether there is more than bare words in it, so that a text alone does not tell what passes. */
  readonly isExact: boolean;
  /** Words that ask for something that there is not to ask for, as `color:red` and `size:big` do. */
  readonly unknown: string[];
  readonly #words: Test[];

  /** `stateAt` tells a block's state at an instant, in words; nothing of one that is not there then. */
  constructor(
    trace: Trace,
    text: string,
    stackTexts: () => string[],
    stateAt: (block: number, instant: number) => string = () => "",
  ) {
    const words = wordsOf(text);
    this.isEmpty = words.length === 0;
    this.isExact = words.some((word) => word.isQuoted || word.isExcluded || isByNumber(word.text));
    this.unknown = words
      .filter((word) => !word.isQuoted && !isUnderstood(trace, word.text, stackTexts))
      .map((word) => word.text);
    this.#words = words.map(({ text: word, isExcluded, isQuoted }) => {
      const exact = isQuoted ? null : (byNumber(trace, word) ?? byState(word, stateAt));
      const holds = exact ?? byText(trace, word, stackTexts());
      return isExcluded ? (block, instant) => !holds(block, instant) : holds;
    });
  }

  /** Returns whether a block passes, by its state at the instant. */
  has(block: number, instant: number): boolean {
    return this.#words.every((holds) => holds(block, instant));
  }

  /** Returns those of the rows that pass, by their states at the instant. */
  of(rows: Uint32Array, instant: number): Uint32Array {
    return this.isEmpty ? rows : rows.filter((row) => this.has(row, instant));
  }
}

/** Whether something holds of a block at an instant. */
type Test = (block: number, instant: number) => boolean;

function isByNumber(word: string): boolean {
  return EXACT.test(word) || ADDRESS.test(word) || stateOf(word) !== null;
}

/** Returns whether a word asks for what there is: what it finds nothing of, if it is so written, is another matter. */
function isUnderstood(trace: Trace, word: string, stackTexts: () => string[]): boolean {
  const key = KEYED.exec(word)?.[1];
  if (key === undefined || isByNumber(word) || key === "stream") return true;
  const { pools, tags } = trace.summary;
  return [...pools, ...tags, ...stackTexts()].some((text) => text.toLowerCase().includes(word));
}

/** Returns the state that a word asks for; `null` if it asks for none that there is. */
function stateOf(word: string): string | null {
  const [, begin] = /^state:(.+)$/.exec(word) ?? [];
  return STATES.find((state) => begin !== undefined && state.startsWith(begin)) ?? null;
}

/** Returns what holds of the blocks that are in the state that a word asks for. */
function byState(word: string, stateAt: (block: number, instant: number) => string): Test | null {
  const state = stateOf(word);
  return state === null ? null : (block, instant) => stateAt(block, instant).includes(state);
}

function byNumber(trace: Trace, word: string): Test | null {
  const [, hex] = ADDRESS.exec(word) ?? [];
  if (hex !== undefined) {
    const { address, size } = trace.blocks;
    const wanted = Number(hex);
    const isStream = trace.summary.streams.map((name) => name.toLowerCase() === word);
    return (block) =>
      (wanted >= address[block] && wanted < address[block] + size[block]) ||
      isStream[trace.blocks.stream[block]];
  }
  const [, kind, first, last] = EXACT.exec(word) ?? [];
  if (kind === undefined) return null;
  const [from, to] = [Number(first), Number(last ?? first)];
  const column = kind === "stack" ? trace.blocks.stack : trace.blocks.requested;
  return (block) => column[block] >= from && column[block] <= to;
}

function byText(trace: Trace, word: string, stackTexts: string[]): Test {
  const { streams, pools, tags } = trace.summary;
  const { stack, stream, pool, tag } = trace.blocks;
  const isStream = (name: string) => `stream:${name}`.toLowerCase() === word;
  // One that has exactly this name is meant alone, and not also those whose names begin like it.
  const isNamed = streams.some(isStream);
  const hasStack = Uint8Array.from(stackTexts, (text) => Number(text.includes(word)));
  const hasStream = streams.map((name) =>
    isNamed ? isStream(name) : `stream ${name}`.includes(word) || `stream:${name}`.includes(word),
  );
  const hasPool = pools.map((name) => name.toLowerCase().includes(word));
  const hasTag = tags.map((name) => name.toLowerCase().includes(word));
  return (block) =>
    hasStack[stack[block]] === 1 || hasTag[tag[block]] || hasStream[stream[block]] || hasPool[pool[block]];
}
