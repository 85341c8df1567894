// The bars below the chart: how many frames moved in so many instants.

import type { Moves } from "./trace.ts";

/** The frames that moved in `width` successive instants from `start` on. */
export interface Bar {
  start: number;
  width: number;
  /** The first and the last of these instants at which frames moved. */
  first: number;
  last: number;
  frames: number;
}

/** Returns a bar for each multiple of `width` that is followed by moves, in order. */
export function barsOf({ event, frames }: Moves, width: number): Bar[] {
  const bars: Bar[] = [];
  event.forEach((instant, i) => {
    const start = instant - (instant % width);
    let bar = bars.at(-1);
    if (bar?.start !== start) {
      bar = { start, width, first: instant, last: instant, frames: 0 };
      bars.push(bar);
    }
    bar.last = instant;
    bar.frames += frames[i];
  });
  return bars;
}

/** Returns the bar that is nearest to an instant and at most `reach` instants away; `null` if there is none. */
export function barNear(bars: readonly Bar[], instant: number, reach: number): Bar | null {
  const distance = ({ start, width }: Bar) => Math.max(start - instant, instant - (start + width - 1), 0);
  const near = bars.filter((bar) => distance(bar) <= reach);
  return near.reduce<Bar | null>(
    (best, bar) => (best === null || distance(bar) < distance(best) ? bar : best),
    null,
  );
}
