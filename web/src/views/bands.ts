// The bands in the chart, and their legend: their names, and their bytes at the chosen instant and at the peak.

import type { Bands } from "../data/bands.ts";
import type { Steps } from "../data/curves.ts";
import { GROUPINGS } from "../data/groupings.ts";
import { bytesFigure, bytesOf, type Child, type Figure, fill, h } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";

export class BandsLegend {
  readonly element = h("div", { class: "bands" });
  readonly #model: Model;
  readonly #at = h("span");
  /** The bytes at the chosen instant: of each band from the top of the picture, and of all. */
  #figures: Figure[] = [];

  constructor(model: Model) {
    this.#model = model;
  }

  /** Makes the rows for the chosen bands. */
  draw(): void {
    const { bands } = this.#model;
    this.element.hidden = bands === null;
    if (bands !== null) this.#make(bands);
  }

  /** Shows the bytes at the chosen instant. */
  show(): void {
    const { bands, instant } = this.#model;
    if (bands === null) return;
    this.#at.textContent = format.whole(instant);
    rowsOf(bands.at(instant), bands).forEach((bytes, row) => {
      this.#figures[row].show(bytes);
    });
  }

  #make(bands: Bands): void {
    const { bandsBy, trace } = this.#model;
    const what = bandsBy === "none" ? "" : GROUPINGS[bandsBy].text;
    const { event } = trace.summary.peak_live;
    const names: Child[] = topFirst(bands).map((band) => {
      const key = h("i", { class: "key", style: `background: var(${bands.colors[band]})` });
      const name = h("span", { title: bands.names[band] }, bands.names[band]);
      return h("div", { class: "name" }, key, name);
    });
    const rows = rowsOf(bands.at(event), bands);
    this.#figures = rows.map(bytesFigure);
    const body = [...names, "Live"].map((name, row) =>
      h(
        "tr",
        { class: row === names.length ? "sum" : null },
        h("th", { scope: "row" }, name),
        h("td", {}, this.#figures[row].element),
        h("td", {}, bytesOf(rows[row])),
      ),
    );
    const head = [
      [what],
      ["At event", h("br"), this.#at],
      ["At the peak,", h("br"), `event ${format.whole(event)}`],
    ];
    fill(
      this.element,
      h(
        "table",
        { "aria-label": `Live bytes by ${what.toLowerCase()}` },
        h("thead", {}, h("tr", {}, ...head.map((title) => h("th", { scope: "col" }, ...title)))),
        h("tbody", {}, ...body),
      ),
    );
  }
}

/** Returns the bands in the order of legends: as they stand in the picture. */
export function topFirst({ order }: Bands): number[] {
  return order.toReversed();
}

/** Returns the upper edge of each band in each step, from the top. */
export function edgesOf(bands: Bands, steps: Steps): Float64Array[] {
  const { bytes } = bands.stack(steps);
  let edge = new Float64Array(steps.count);
  const edges = bands.order.map((band) => {
    edge = edge.map((below, step) => below + bytes[band][step]);
    return edge;
  });
  return edges.reverse();
}

/** Returns the names and bytes of the bands at an instant, from the top. That at the height `pointed` stands out. */
export function bandLines(bands: Bands, instant: number, pointed: number): HTMLDivElement[] {
  const bytes = bands.at(instant);
  let top = bytes.reduce((sum, more) => sum + more, 0);
  return topFirst(bands).flatMap((band) => {
    if (bytes[band] === 0) return [];
    const isPointed = pointed <= top && pointed > top - bytes[band];
    top -= bytes[band];
    const key = h("i", { class: "key", style: `background: var(${bands.colors[band]})` });
    const name = h("span", {}, bands.names[band]);
    const line = isPointed ? "line pointed" : "line";
    return [h("div", { class: line }, key, name, h("b", {}, format.bytes(bytes[band])))];
  });
}

/** Returns the bytes of each band from the top of the picture, and of all. */
function rowsOf(bytes: number[], bands: Bands): number[] {
  return [...topFirst(bands).map((band) => bytes[band]), bytes.reduce((sum, more) => sum + more, 0)];
}
