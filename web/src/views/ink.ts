// How the address space is painted: what looks the same in one go.

import { LINE_HEIGHT } from "../data/layout.ts";
import { h } from "../dom.ts";
import { color } from "../theme.ts";

/** How far apart the lines are that what is paused is hatched with. */
const HATCH_STEP = 6;

/**
 * Everything that is to be painted, by what it is painted with: a canvas paints what looks the same in one go much
 * faster than one by one.
 */
export class Ink {
  readonly #colors: string[];
  readonly #free: number[] = [];
  /** By colour, then as found or not and as there or not. */
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

  /** Paints all of it, what lies above last; `hatch` is only made where something is hatched. */
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
    // Lines are seen without colours, too.
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

/** Returns the lines that what is paused is hatched with: they go with the picture when it is scrolled. */
export function hatchOf(context: CanvasRenderingContext2D, scrollTop: number): CanvasPattern | string {
  const ratio = window.devicePixelRatio || 1;
  const size = Math.round(HATCH_STEP * ratio);
  const tile = h("canvas", { width: size, height: size });
  const pen = tile.getContext("2d");
  if (pen !== null) {
    pen.strokeStyle = color("--ink");
    pen.lineWidth = ratio;
    // Once through the middle, and the corners of the lines beside it.
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
