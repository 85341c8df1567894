// The ways to group blocks: by what they are for, by the code that allocated them, by their tags, and so on.

import * as format from "../format.ts";
import { shown } from "../names.ts";
import type { TraceSummary } from "./summary.ts";
import { liveBytes, type Trace } from "./trace.ts";

/** The blocks of a trace in groups. */
export interface Groups {
  names: string[];
  /** Returns the number of a block's group. */
  of: (block: number) => number;
}

/** What groups are made from. */
export interface Source {
  trace: Trace;
  /** Returns the title of a stack. Stacks with the same title are one call site. */
  stackTitle(stack: number): string;
}

interface Grouping {
  /** The noun of one of its groups. */
  text: string;
  /** Whether it divides the blocks of a trace. */
  isOffered: (summary: TraceSummary) => boolean;
  groupsOf: (source: Source) => Groups;
}

const MIB = 2 ** 20;
/** The lower bound of each size class except the first. */
const SIZE_BOUNDS = [MIB / 16, MIB, 10 * MIB, 100 * MIB, 1024 * MIB];
const SIZE_NAMES = ["below 64 KiB", "to 1 MiB", "to 10 MiB", "to 100 MiB", "to 1 GiB", "1 GiB and more"];

/** All groupings, in the order in which they are offered. Another column of blocks is another line. */
export const GROUPINGS = {
  category: byColumn("Category", "category", ({ categories }) => categories.map(format.words)),
  module: byColumn("Module", "module", ({ modules }) => modules.map((path) => shown(path) || "no module")),
  site: { text: "Call site", isOffered: ({ has_stacks }) => has_stacks, groupsOf: byTitle },
  tag: byColumn("Tag", "tag", ({ tags }) => tags.map((tag) => shown(tag) || "no tag")),
  stream: byColumn("Stream", "stream", ({ streams }) => streams.map((stream) => `stream ${stream}`)),
  pool: byColumn("Pool", "pool", ({ pools }) => pools.map(shown)),
  size: { text: "Size", isOffered: () => true, groupsOf: bySize },
} satisfies Record<string, Grouping>;

export type GroupingName = keyof typeof GROUPINGS;

export const GROUPING_NAMES = Object.keys(GROUPINGS) as GroupingName[];

/** Returns the groupings that divide the blocks of a trace, each with its text. */
export function offeredGroupings(summary: TraceSummary): GroupingName[] {
  return GROUPING_NAMES.filter((name) => GROUPINGS[name].isOffered(summary));
}

/** Returns the grouping by a column of numbers, which `namesOf` names. */
function byColumn(text: string, column: string, namesOf: (summary: TraceSummary) => string[]): Grouping {
  return {
    text,
    isOffered: (summary) => namesOf(summary).length > 1,
    groupsOf: ({ trace }) => {
      const numbers = trace.blockColumn(column);
      return { names: namesOf(trace.summary), of: (block) => numbers[block] };
    },
  };
}

function byTitle(source: Source): Groups {
  const { trace } = source;
  const numbers = new Map<string, number>();
  const titleOfStack = Uint32Array.from({ length: Math.max(1, trace.stackCount) }, (_, stack) => {
    const title = source.stackTitle(stack);
    const number = numbers.get(title) ?? numbers.size;
    numbers.set(title, number);
    return number;
  });
  const { stack } = trace.blocks;
  return { names: [...numbers.keys()], of: (block) => titleOfStack[stack[block]] };
}

function bySize({ trace }: Source): Groups {
  const { size } = trace.blocks;
  return {
    names: SIZE_NAMES,
    of: (block) => SIZE_BOUNDS.filter((bound) => size[block] >= bound).length,
  };
}

/**
 * Returns the most live bytes that each group holds at one instant. Paused blocks count, too. Linear in the blocks and
 * instants.
 */
export function mostHeld(trace: Trace, { names, of }: Groups): Float64Array {
  const { blocks } = trace;
  const { start, freed } = blocks;
  const order = byFreed(trace);
  const held = new Float64Array(names.length);
  const most = new Float64Array(names.length);
  let free = 0;
  for (let block = 0; block < blocks.count; block++) {
    for (; freed[order[free]] <= start[block]; free++)
      held[of(order[free])] -= liveBytes(blocks, order[free]);
    const group = of(block);
    held[group] += liveBytes(blocks, block);
    if (held[group] > most[group]) most[group] = held[group];
  }
  return most;
}

/** Returns the blocks in the order in which they were freed. */
function byFreed({ blocks, end }: Trace): Uint32Array {
  const { count, freed } = blocks;
  // Counts how many are freed before each instant, which is where those that are freed at it begin.
  const next = new Uint32Array(end + 3);
  for (let block = 0; block < count; block++) next[freed[block] + 1]++;
  for (let instant = 1; instant < next.length; instant++) next[instant] += next[instant - 1];
  const order = new Uint32Array(count);
  for (let block = 0; block < count; block++) order[next[freed[block]]++] = block;
  return order;
}
