// All traces of the report beside each other: ranks, or before and after.

import { bytesOf, countOf, h, ratioOf, section } from "../dom.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";
import { type Column, Grid } from "./grid.ts";
import { meter } from "./meter.ts";

export class Traces implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace"] as const;
  readonly #model: Model;
  readonly #grid: Grid;

  constructor(model: Model) {
    this.#model = model;
    this.#grid = new Grid("All traces", "trace", this.#columns(), { column: 0, isDescending: false });
    this.element = section("traces", "All traces", [], this.#grid.element);
    this.element.hidden = model.summary.traces.length < 2;
  }

  draw(): void {
    const { traces } = this.#model.summary;
    this.#grid.show(Uint32Array.from(traces.keys()));
  }

  #columns(): Column[] {
    const { traces } = this.#model.summary;
    const most = Math.max(...traces.map(({ peak_reserved }) => peak_reserved.bytes));
    const bytes = (title: string, value: (row: number) => number): Column => ({
      title,
      key: value,
      cell: (row) => bytesOf(value(row)),
    });
    return [
      { title: "Trace", key: (row) => row, cell: (row) => this.#link(row), isText: true },
      bytes("Peak live", (row) => traces[row].peak_live.bytes),
      bytes("Peak reserved", (row) => traces[row].peak_reserved.bytes),
      {
        title: "Ratio",
        key: (row) => ratio(traces[row]),
        cell: (row) => ratioOf(ratio(traces[row])),
      },
      {
        title: "Out of memory",
        key: (row) => traces[row].ooms.length,
        cell: (row) => countOf(traces[row].ooms.length),
      },
      {
        title: "Live, reserved",
        key: (row) => traces[row].peak_reserved.bytes,
        cell: (row) => meter(traces[row].peak_live.bytes / most, traces[row].peak_reserved.bytes / most),
      },
    ];
  }

  #link(row: number): HTMLElement {
    const isShown = row === this.#model.state.trace;
    const show = () => this.#model.chooseTrace(row);
    const button = h("button", { type: "button", class: "link", click: show }, this.#model.nameOf(row));
    if (isShown) button.setAttribute("aria-current", "true");
    return button;
  }
}

function ratio(trace: { peak_live: { bytes: number }; peak_reserved: { bytes: number } }): number {
  return trace.peak_reserved.bytes / trace.peak_live.bytes;
}
