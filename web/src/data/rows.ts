// The rows of the tables: filtered, grouped and sorted without an object for each block.

import { liveBytes, type Trace } from "./trace.ts";

/**
 * Returns the first `limit` rows by key. Rows with equal keys keep their order. Linear in the rows, except for sorting
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

/** Returns a value that at least `rank` of the values, and not many more, do not exceed. */
function quantile(values: Float64Array, rank: number): number {
  // A sample is accurate enough. If the value lets too many pass, they are sorted; if too few, a larger one is tried.
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

/** The sums of blocks with the same key. */
export interface Group {
  /** The shared property as a number, such as a size. */
  key: number;
  blocks: number;
  live: number;
  /** The bytes of paused blocks. `live` does not include them. */
  paused: number;
  largest: number;
  /** One of the blocks, for the properties that all of them share. */
  block: number;
}

/** Returns the sums of blocks by key. `isPaused` returns whether a block is paused. */
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

/** A word that selects blocks by number: `stack:12`, or requests of `size:1921-2048` bytes, both ends included. */
const EXACT = /^(stack|size):(\d+)(?:-(\d+))?$/;

/** A word that selects the block that contains an address. */
const ADDRESS = /^(?:address:)?(0x[0-9a-f]{6,})$/;

/**
 * The states that a word can select. `state:waiting` and the start of a state, such as `state:wait`, are understood.
 */
const STATES = ["allocated", "waiting", "paused"];

/** A word with a key before a colon. The name of a source file has a dot there, and a C++ name has two colons. */
const KEYED = /^([a-z_]+):[^:]/;

/** A word, or several in quotes. The closing quote is optional. A "-" in front excludes the blocks that match. */
const WORD = /(-?)(?:"([^"]*)"?|([^\s"]\S*))/g;

/** One condition of a filter. */
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

/**
 * A filter by words. A block passes if each word matches its stack, tag, stream or pool, or selects its number or
 * state.
 */
export class Filter {
  readonly isEmpty: boolean;
  /**
   * Whether a word is quoted, is excluded, or selects by number or state. Then a node's text does not show whether it
   * passes.
   */
  readonly isExact: boolean;
  /** The words that have a key but select nothing known, such as `color:red` and `size:big`. */
  readonly unknown: string[];
  readonly #words: Test[];

  /** `stateAt` returns the state of a block at an instant in words; empty if the block does not exist then. */
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

  /** Returns whether a block passes. Its state is that at the instant. */
  has(block: number, instant: number): boolean {
    return this.#words.every((holds) => holds(block, instant));
  }

  /** Returns the rows that pass at the instant. */
  of(rows: Uint32Array, instant: number): Uint32Array {
    return this.isEmpty ? rows : rows.filter((row) => this.has(row, instant));
  }
}

/** A test of a block at an instant. */
type Test = (block: number, instant: number) => boolean;

function isByNumber(word: string): boolean {
  return EXACT.test(word) || ADDRESS.test(word) || stateOf(word) !== null;
}

/**
 * Returns whether a word can be understood, even if it matches no block. A word with an unknown key must occur in the
 * name of a pool or tag, or in a stack.
 */
function isUnderstood(trace: Trace, word: string, stackTexts: () => string[]): boolean {
  const key = KEYED.exec(word)?.[1];
  if (key === undefined || isByNumber(word) || key === "stream") return true;
  const { pools, tags } = trace.summary;
  return [...pools, ...tags, ...stackTexts()].some((text) => text.toLowerCase().includes(word));
}

/** Returns the state that a word selects; `null` if it selects none. */
function stateOf(word: string): string | null {
  const [, begin] = /^state:(.+)$/.exec(word) ?? [];
  return STATES.find((state) => begin !== undefined && state.startsWith(begin)) ?? null;
}

/** Returns the test of a word that selects a state; `null` if it selects none. */
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
  // The exact name of a stream selects only this stream, and not others whose names start with it.
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
