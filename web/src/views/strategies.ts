// The memory that other strategies would have reserved for the same job.

import { groupOf, type Strategy } from "../data/summary.ts";
import { bytesOf, type Child, changeOf, copyable, fill, h, ratioOf, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";
import { type Column, Grid } from "./grid.ts";
import { meter } from "./meter.ts";

/** The maximum length of a bar, as a multiple of the job's own. One huge peak would make all other bars small. */
const SCALE_MAX = 2;

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
      groupOf: (row) => groupOf(model.trace.summary.strategies[row]),
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
    const column = (
      title: string,
      value: (strategy: Strategy) => number,
      cell: (strategy: Strategy) => Child,
      refused = "",
    ): Column => ({
      title,
      key: (row) => value(strategy(row)),
      cell: (row) => (strategy(row).completed ? cell(strategy(row)) : refused),
    });
    const bytes = ({ peak_reserved_bytes }: Strategy) => peak_reserved_bytes;
    const more = (strategy: Strategy) => bytes(strategy) - this.#model.trace.summary.peak_reserved.bytes;
    return [
      { title: "Strategy", key: (row) => row, cell: (row) => strategy(row).label, isText: true },
      column("Peak reserved", bytes, (strategy) => bytesOf(bytes(strategy)), "does not fit"),
      column(
        "Ratio",
        ({ ratio }) => ratio,
        ({ ratio }) => ratioOf(ratio),
      ),
      column("Against recorded", more, (strategy) => changeOf(more(strategy))),
      column(
        "Driver time",
        ({ driver_time_us }) => driver_time_us,
        ({ driver_time_us }) => this.#driverTime(driver_time_us),
      ),
      column("Live, reserved", bytes, (strategy) => this.#meter(bytes(strategy))),
    ];
  }

  /** Returns the time that the driver's calls would take, as a share of the job's time if that is known. */
  #driverTime(driver_time_us: number): Child {
    const { duration_us } = this.#model.trace.summary;
    const time = format.duration(driver_time_us);
    if (duration_us === null || duration_us === 0) return copyable(time, String(driver_time_us));
    const share = driver_time_us / duration_us;
    return copyable(`${format.percent(share)} of the job`, String(share), time);
  }

  #meter(bytes: number): HTMLElement {
    const { strategies, peak_live, peak_reserved } = this.#model.trace.summary;
    const most = Math.max(
      ...strategies
        .filter(({ completed }) => completed)
        .map(({ peak_reserved_bytes }) => peak_reserved_bytes),
    );
    const scale = Math.min(most, SCALE_MAX * Math.max(peak_live.bytes, peak_reserved.bytes));
    return meter(peak_live.bytes / scale, bytes / scale);
  }
}
