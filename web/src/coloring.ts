// The colours of blocks, and what they mean.

import { GROUPINGS, type Groups, mostHeld, type Source } from "./data/groupings.ts";
import type { Trace } from "./data/trace.ts";
import * as format from "./format.ts";
import type { Coloring } from "./state.ts";

export interface Palette {
  /** Returns the index of a block's colour in `names` and `colors`. */
  of: (block: number) => number;
  names: string[];
  /** How many of the colours are one group's. The rest is for all others. */
  single: number;
  /** The name of each colour in the style sheet. */
  colors: string[];
}

/** The number of the style sheet's colours for areas: `--fill-0` and on. */
const FILL_COLORS = 10;
/** The upper bound of each age class except the last, as a share of the recording. */
const AGE_BOUNDS = [0.001, 0.01, 0.1, 0.5];

/** Returns the palette of a trace. Only that of ages depends on the instant. */
export function paletteOf(source: Source, coloring: Coloring, instant: number): Palette {
  const { trace } = source;
  if (coloring === "age") return scale(agesAt(trace, instant));
  const groups = GROUPINGS[coloring].groupsOf(source);
  if (coloring === "size") return scale(groups);
  return groups.names.length <= FILL_COLORS ? filled(groups) : largest(trace, groups);
}

function agesAt({ end, blocks }: Trace, instant: number): Groups {
  const bounds = AGE_BOUNDS.map((share) => Math.max(1, Math.round(share * end)));
  const names = bounds.map((bound) => `up to ${format.counted(bound, "event")} old`);
  const of = (block: number) => bounds.filter((bound) => instant - blocks.start[block] > bound).length;
  return { names: [...names, "older"], of };
}

/** Returns a palette in which darker colours are for larger or older blocks. */
function scale({ names, of }: Groups): Palette {
  return { of, names, single: names.length, colors: names.map((_, i) => `--s${i}`) };
}

function filled({ names, of }: Groups): Palette {
  return { of, names, single: names.length, colors: names.map((_, i) => `--fill-${i}`) };
}

/**
 * Returns a palette in which the groups that hold most at one instant have a colour each, and all others share one. The
 * colours do not depend on the chosen instant.
 */
function largest(trace: Trace, groups: Groups): Palette {
  const most = mostHeld(trace, groups);
  const order = [...most.keys()].sort((a, b) => most[b] - most[a]).slice(0, FILL_COLORS);
  const colorOf = new Uint8Array(most.length).fill(FILL_COLORS);
  order.forEach((group, color) => {
    colorOf[group] = color;
  });
  const { colors, names } = filled({ ...groups, names: order.map((group) => groups.names[group]) });
  const others = format.whole(most.length - FILL_COLORS);
  return {
    of: (block) => colorOf[groups.of(block)],
    single: FILL_COLORS,
    names: [...names, `everything else (${others})`],
    colors: [...colors, "--rest"],
  };
}
