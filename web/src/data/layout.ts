// The layout of the address space: segments one after the other, to scale, in lines that fill the width.

import type { Run } from "./gap.ts";

/** The part of a run that lies on one line. */
export interface Piece {
  run: number;
  /** The addresses that it covers. */
  from: number;
  to: number;
  x: number;
  width: number;
}

export interface Line {
  y: number;
  /** The heading above the line if a new group begins. */
  heading: string | null;
  pieces: Piece[];
}

export interface Layout {
  lines: Line[];
  height: number;
}

export const LINE_HEIGHT = 20;
const LINE_GAP = 4;
const HEADING_HEIGHT = 26;
const RUN_GAP = 3;
/** The minimum width of a run in pixels. A narrower one would not be visible. */
const WIDTH_MIN = 2;

/** Returns the layout of runs at a scale, in the given order. */
export function layOut(
  runs: readonly Run[],
  headingOf: (run: Run) => string,
  width: number,
  bytesPerPixel: number,
): Layout {
  const lines: Line[] = [];
  let y = 0;
  let x = 0;
  let line: Line | null = null;
  let heading = "";
  const breakLine = (text: string | null = null) => {
    line = { y: text === null ? y : y + HEADING_HEIGHT, heading: text, pieces: [] };
    lines.push(line);
    y = line.y + LINE_HEIGHT + LINE_GAP;
    x = 0;
    return line;
  };
  runs.forEach((run, index) => {
    const text = headingOf(run);
    if (text !== heading || line === null) {
      heading = text;
      line = breakLine(text);
    }
    const wanted = Math.max(WIDTH_MIN, (run.end - run.address) / bytesPerPixel);
    if (x > 0 && x + wanted > width && (wanted <= width || width - x < width / 4)) line = breakLine();
    let from = run.address;
    while (from < run.end) {
      if (x > 0 && width - x < 1) line = breakLine();
      const rest = (run.end - from) / bytesPerPixel;
      const fits = rest <= width - x;
      const to = fits ? run.end : Math.min(run.end, from + Math.floor((width - x) * bytesPerPixel));
      const drawn = fits ? Math.max(from === run.address ? WIDTH_MIN : 1, rest) : width - x;
      line.pieces.push({ run: index, from, to, x, width: drawn });
      x += drawn + (to === run.end ? RUN_GAP : 0);
      from = to;
    }
  });
  return { lines, height: y };
}

/** Returns the scale, in bytes per pixel, at which the runs take about `height`. */
export function fittingScale(runs: readonly Run[], groups: number, width: number, height: number): number {
  const bytes = runs.reduce((sum, run) => sum + run.end - run.address, 0);
  const lines = Math.max(
    2,
    Math.floor((height - groups * (HEADING_HEIGHT + LINE_HEIGHT)) / (LINE_HEIGHT + LINE_GAP)),
  );
  const room = Math.max(width, lines * width - Math.min(runs.length, 400) * RUN_GAP);
  return Math.max(1, bytes / room);
}
