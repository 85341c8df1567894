// The memory that other strategies would have reserved for the same job.

import { bytesOf, changeOf, fill, h, ratioOf, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";
import { type Column, Grid } from "./grid.ts";
import { meter } from "./meter.ts";

export class Strategies implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace"] as const;
  readonly #model: Model;
  readonly #grid: Grid;
  readonly #notes = h("ul", { class: "notes", "aria-label": "About these replays" });

  constructor(model: Model) {
    this.#model = model;
    this.#grid = new Grid("Replayed strategies", "strategy", this.#columns(), {
      column: 1,
      isDescending: false,
    });
    this.element = section(
      "strategies",
      "The same job under other strategies",
      [],
      h("p", { class: "quiet" }, "Replayed event by event on a simulated device."),
      this.#notes,
      this.#grid.element,
    );
  }

  draw(): void {
    const { strategies, replay_notes } = this.#model.trace.summary;
    this.element.hidden = strategies.length === 0;
    this.#notes.hidden = replay_notes.length === 0;
    fill(this.#notes, ...replay_notes.map((note) => h("li", {}, `${format.capital(note)}.`)));
    this.#grid.show(Uint32Array.from(strategies.keys()));
  }

  #columns(): Column[] {
    const strategy = (row: number) => this.#model.trace.summary.strategies[row];
    const live = () => this.#model.trace.summary.peak_live.bytes;
    const bytes = (row: number) => strategy(row).peak_reserved_bytes;
    const most = () =>
      Math.max(...this.#model.trace.summary.strategies.map((each) => each.peak_reserved_bytes));
    return [
      { title: "Strategy", key: (row) => row, cell: (row) => strategy(row).label, isText: true },
      {
        title: "Peak reserved",
        key: (row) => (strategy(row).completed ? bytes(row) : Number.POSITIVE_INFINITY),
        cell: (row) => (strategy(row).completed ? bytesOf(bytes(row)) : "does not fit"),
      },
      {
        title: "Ratio",
        key: (row) => (strategy(row).completed ? strategy(row).ratio : Number.POSITIVE_INFINITY),
        cell: (row) => (strategy(row).completed ? ratioOf(strategy(row).ratio) : ""),
      },
      {
        title: "Against recorded",
        key: (row) => (strategy(row).completed ? this.#more(row) : Number.POSITIVE_INFINITY),
        cell: (row) => (strategy(row).completed ? changeOf(this.#more(row)) : ""),
      },
      {
        title: "Live, reserved",
        key: bytes,
        cell: (row) => meter(live() / most(), bytes(row) / most()),
      },
    ];
  }

  #more(row: number): number {
    const { strategies, peak_reserved } = this.#model.trace.summary;
    return strategies[row].peak_reserved_bytes - peak_reserved.bytes;
  }
}
