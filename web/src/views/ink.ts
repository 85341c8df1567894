// The painting of the address space, with everything of one style painted together.

import { LINE_HEIGHT } from "../data/layout.ts";
import { h } from "../dom.ts";
import { color } from "../theme.ts";

/** The distance between the hatching lines of paused memory, in pixels. */
const HATCH_STEP = 6;

/**
 * The rectangles to be painted, grouped by style. A canvas paints all rectangles of one style much faster together than
 * one by one.
 */
export class Ink {
  readonly #colors: string[];
  readonly #free: number[] = [];
  /** The blocks by colour, then by whether the filter found them, then by whether they are faint. */
  readonly #blocks: number[][];
  readonly #roundings: number[] = [];
  readonly #hatched: number[] = [];
  readonly #outlined: number[] = [];

  constructor(colors: string[]) {
    this.#colors = colors;
    this.#blocks = Array.from({ length: 4 * colors.length }, () => []);
  }

  free(x: number, y: number, width: number): void {
    this.#free.push(x, y, width);
  }

  block(color: number, isFound: boolean, isFaint: boolean, x: number, y: number, width: number): void {
    this.#blocks[4 * color + (isFound ? 0 : 2) + (isFaint ? 1 : 0)].push(x, y, width);
  }

  rounding(x: number, y: number, width: number): void {
    this.#roundings.push(x, y, width);
  }

  hatched(x: number, y: number, width: number): void {
    this.#hatched.push(x, y, width);
  }

  outlined(x: number, y: number, width: number): void {
    this.#outlined.push(x, y, width);
  }

  /** Paints everything, the top layers last. `hatch` is called only if something is hatched. */
  paint(context: CanvasRenderingContext2D, hatch: () => CanvasPattern | string): void {
    const paint = (places: number[], alpha: number, style: () => CanvasPattern | string) => {
      if (places.length === 0) return;
      context.globalAlpha = alpha;
      context.fillStyle = style();
      for (let i = 0; i < places.length; i += 3) {
        context.fillRect(places[i], places[i + 1], places[i + 2], LINE_HEIGHT);
      }
    };
    paint(this.#free, 1, () => color("--free"));
    this.#blocks.forEach((places, i) => {
      const alpha = (i & 2 ? 0.15 : 1) * (i & 1 ? 0.4 : 1);
      paint(places, alpha, () => color(this.#colors[i >> 2]));
    });
    paint(this.#roundings, 0.55, () => color("--free"));
    // The hatching is visible without colours, too.
    paint(this.#hatched, 0.7, hatch);
    context.globalAlpha = 1;
    context.strokeStyle = color("--ink");
    context.lineWidth = 2;
    for (let i = 0; i < this.#outlined.length; i += 3) {
      const [x, y, width] = this.#outlined.slice(i, i + 3);
      context.strokeRect(x + 1, y + 1, Math.max(1, width - 2), LINE_HEIGHT - 2);
    }
  }
}

/** Returns the hatching of paused memory. It moves with the picture when that is scrolled. */
export function hatchOf(context: CanvasRenderingContext2D, scrollTop: number): CanvasPattern | string {
  const ratio = window.devicePixelRatio || 1;
  const size = Math.round(HATCH_STEP * ratio);
  const tile = h("canvas", { width: size, height: size });
  const pen = tile.getContext("2d");
  if (pen !== null) {
    pen.strokeStyle = color("--ink");
    pen.lineWidth = ratio;
    // One line through the middle, and the corners of the lines beside it.
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 1, size + 1);
      pen.lineTo(shift + size + 1, -1);
    }
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern?.setTransform(new DOMMatrix().translate(0, -scrollTop).scale(1 / ratio));
  return pattern ?? "transparent";
}
