// All traces of the report side by side: the ranks of a job, or before and after a change.

import type { Growth } from "../data/summary.ts";
import { bytesOf, type Child, confidenceOf, copyable, countOf, h, ratioOf, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shownOrder } from "../names.ts";
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
    const order = shownOrder(traces.map((_, row) => this.#model.nameOf(row)));
    const most = Math.max(...traces.map(({ peak_reserved }) => peak_reserved.bytes));
    const bytes = (title: string, value: (row: number) => number): Column => ({
      title,
      key: value,
      cell: (row) => bytesOf(value(row)),
    });
    return [
      { title: "Trace", key: (row) => order.indexOf(row), cell: (row) => this.#link(row), isText: true },
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
        title: "Grows, a step or part",
        key: (row) => grown(traces[row].growth).bytes_per_step,
        cell: (row) => grownCell(traces[row].growth),
      },
      {
        title: "Confidence",
        key: (row) => grown(traces[row].growth).confidence,
        cell: (row) => {
          const { bytes_per_step, confidence } = grown(traces[row].growth);
          return bytes_per_step === 0 ? "–" : confidenceOf(confidence);
        },
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

/** Returns the sum of all steady growth in a trace, and the highest confidence in any of it. */
function grown({ leaks, spread }: Growth): { bytes_per_step: number; confidence: number } {
  const steady = [...leaks, ...(spread?.is_steady === true ? [spread] : [])];
  return {
    bytes_per_step: steady.reduce((sum, { bytes_per_step }) => sum + bytes_per_step, 0),
    confidence: steady.reduce((most, { confidence }) => Math.max(most, confidence), 0),
  };
}

function grownCell(growth: Growth): Child {
  const { bytes_per_step } = grown(growth);
  if (bytes_per_step === 0) return growth.doubt === null ? "nothing" : "not known";
  return copyable(format.bytes(Math.round(bytes_per_step)), String(bytes_per_step));
}

function ratio(trace: { peak_live: { bytes: number }; peak_reserved: { bytes: number } }): number {
  return trace.peak_reserved.bytes / trace.peak_live.bytes;
}
