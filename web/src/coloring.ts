// The colours of blocks, and what they mean.

import { liveBytes } from "./data/trace.ts";
import * as format from "./format.ts";
import type { Model } from "./model.ts";
import { shown } from "./names.ts";
import type { Coloring } from "./state.ts";
import { CATEGORY_COLORS } from "./theme.ts";

export interface Palette {
  /** Returns the index of a block's colour in `names` and `colors`. */
  of: (block: number) => number;
  names: string[];
  /** The name of each colour in the style sheet. */
  colors: string[];
}

const MIB = 2 ** 20;
/** The lower bound of each size class except the first. */
const SIZE_BOUNDS = [MIB / 16, MIB, 10 * MIB, 100 * MIB, 1024 * MIB];
const SIZE_NAMES = ["below 64 KiB", "to 1 MiB", "to 10 MiB", "to 100 MiB", "to 1 GiB", "1 GiB and more"];
/** The upper bound of each age class except the last, as a share of the recording. */
const AGE_BOUNDS = [0.001, 0.01, 0.1, 0.5];

export function paletteOf(model: Model, coloring: Coloring): Palette {
  const { trace } = model;
  const { blocks, summary } = trace;
  switch (coloring) {
    case "size":
      return scale(SIZE_NAMES, (block) => SIZE_BOUNDS.filter((bound) => blocks.size[block] >= bound).length);
    case "age":
      return agesAt(model);
    case "stream":
      return categories(
        summary.streams.map((stream) => `stream ${stream}`),
        (block) => blocks.stream[block],
      );
    case "pool":
      return categories(summary.pools, (block) => blocks.pool[block]);
    case "tag":
      return ranked(
        model,
        (block) => blocks.tag[block],
        (tag) => shown(summary.tags[tag]) || "no tag",
      );
    case "stack":
      return titles(model);
  }
}

/** Returns a palette in which stacks with the same title share a colour. */
function titles(model: Model): Palette {
  const { trace } = model;
  const numbers = new Map<string, number>();
  const titleOfStack = Uint32Array.from({ length: Math.max(1, trace.stackCount) }, (_, stack) => {
    const title = model.stackTitle(stack);
    const number = numbers.get(title) ?? numbers.size;
    numbers.set(title, number);
    return number;
  });
  const names = [...numbers.keys()];
  return ranked(
    model,
    (block) => titleOfStack[trace.blocks.stack[block]],
    (title) => names[title],
  );
}

function agesAt(model: Model): Palette {
  const { trace, instant } = model;
  const bounds = AGE_BOUNDS.map((share) => Math.max(1, Math.round(share * trace.end)));
  const names = bounds.map((bound) => `up to ${format.counted(bound, "event")} old`);
  return scale([...names, "older"], (block) => {
    const age = instant - trace.blocks.start[block];
    return bounds.filter((bound) => age > bound).length;
  });
}

function scale(names: string[], of: Palette["of"]): Palette {
  return { of, names, colors: names.map((_, i) => `--s${i}`) };
}

/** Returns a palette in which the first categories have a colour each. All others share the last colour. */
function categories(names: string[], of: Palette["of"]): Palette {
  const shown = names.slice(0, CATEGORY_COLORS);
  const rest = names.length > shown.length ? [`${names.length - shown.length} others`] : [];
  return {
    of: (block) => Math.min(of(block), CATEGORY_COLORS),
    names: [...shown, ...rest],
    colors: [...shown.map((_, i) => `--fill-${i}`), ...rest.map(() => "--rest")],
  };
}

/**
 * Returns a palette of categories ranked by bytes times lifetime over the whole recording. The ranking does not depend
 * on the instant, so each category keeps its colour.
 */
function ranked(model: Model, keyOf: (block: number) => number, nameOf: (value: number) => string): Palette {
  const { trace } = model;
  const bytes = new Map<number, number>();
  const { count, start, end } = trace.blocks;
  for (let block = 0; block < count; block++) {
    const weight = liveBytes(trace.blocks, block) * (end[block] - start[block]);
    bytes.set(keyOf(block), (bytes.get(keyOf(block)) ?? 0) + weight);
  }
  const order = [...bytes.keys()].sort((a, b) => (bytes.get(b) ?? 0) - (bytes.get(a) ?? 0));
  const place = new Map(order.map((value, i) => [value, i]));
  return categories(order.map(nameOf), (block) => place.get(keyOf(block)) ?? CATEGORY_COLORS);
}
