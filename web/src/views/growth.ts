// What grows from step to step, as `lowtide leaks` tells it.

import { filterOf, sizesText } from "../data/site.ts";
import type { Growth, Leak } from "../data/summary.ts";
import { bytesOf, type Child, copyable, fill, h, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
import type { View } from "../schedule.ts";
import { stackCell } from "./block.ts";
import { type Column, Grid } from "./grid.ts";

export class GrowthView implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "filter"] as const;
  readonly #model: Model;
  readonly #verdict = h("p", { class: "verdict" });
  readonly #about = h("p", { class: "quiet" });
  readonly #grid: Grid;
  readonly #compare = h(
    "button",
    { type: "button", click: () => this.#showDifference() },
    "Compare the first step looked at with the last",
  );

  constructor(model: Model) {
    this.#model = model;
    this.#grid = new Grid("What grew", "place", this.#columns(), { column: 1, isDescending: true });
    this.element = section(
      "growth",
      "What grew",
      [this.#compare],
      this.#verdict,
      this.#about,
      this.#grid.element,
    );
  }

  draw(): void {
    const { growth } = this.#model.trace.summary;
    const { leaks } = growth;
    fill(this.#verdict, ...verdict(growth));
    this.#about.textContent = `${stepsText(growth)} ${MEANING}`;
    this.#compare.hidden = leaks.length === 0;
    this.#grid.element.hidden = leaks.length === 0;
    this.#grid.show(Uint32Array.from(leaks.keys()));
  }

  #columns(): Column[] {
    const leak = (row: number) => this.#model.trace.summary.growth.leaks[row];
    return [
      {
        title: "Bytes a step or part",
        key: (row) => leak(row).bytes_per_step,
        cell: (row) => perStep(leak(row).bytes_per_step),
      },
      { title: "In all", key: (row) => leak(row).bytes, cell: (row) => bytesOf(leak(row).bytes) },
      {
        title: "Grew in",
        key: (row) => leak(row).grown_steps,
        cell: (row) => this.#seenText(leak(row)),
      },
      {
        title: "Confidence",
        key: (row) => leak(row).confidence,
        cell: (row) => copyable(leak(row).confidence.toFixed(2), String(leak(row).confidence)),
      },
      { title: "Place", key: (row) => row, cell: (row) => this.#placeOf(leak(row)), isText: true },
      { title: "Other views", key: (row) => row, cell: (row) => this.#onlyButton(leak(row)), isText: true },
    ];
  }

  #seenText({ grown_steps, steps }: Leak): HTMLElement {
    const { found_by, span_steps } = this.#model.trace.summary.growth;
    const whole = found_by === "parts" ? "parts" : "steps";
    const what = span_steps === 1 ? whole : `spans of ${format.whole(span_steps)} ${whole}`;
    const text = `${format.whole(grown_steps)} of ${format.whole(steps)} ${what}`;
    return copyable(text, text);
  }

  #placeOf(leak: Leak): Child {
    return "stack" in leak ? stackCell(this.#model, leak.stack) : sizesText(leak, this.#model.trace.summary);
  }

  /** A button that has every other view show one place only, and all again. */
  #onlyButton(leak: Leak): HTMLElement {
    const { store, state, trace } = this.#model;
    const filter = filterOf(leak, trace.summary);
    const isShown = state.filter === filter;
    const click = () => store.set({ filter: isShown ? "" : filter });
    const attributes = { type: "button", class: "link", "aria-pressed": String(isShown), click };
    return h("button", attributes, isShown ? "show all" : "show only this");
  }

  #showDifference(): void {
    const { state, store, trace } = this.#model;
    const { warm_up_steps, steps } = trace.summary.growth;
    const boundaries = trace.parts;
    const put = <T>(values: T[], chosen: T) => values.map((value, i) => (i === state.trace ? chosen : value));
    store.set({
      instants: put(state.instants, boundaries[warm_up_steps]),
      seconds: put(state.seconds, boundaries[steps - 1]),
      stackView: "difference",
    });
  }
}

const MEANING =
  "Of each place the least bytes of every step count: what a step itself uses comes and goes, and what is left is " +
  "what no step gives back.";

function perStep(bytes: number): HTMLElement {
  return copyable(format.bytes(Math.round(bytes)), String(bytes), `${bytes} bytes a step or part`);
}

function verdict({ leaks, found_by, steps }: Growth): Child[] {
  if (leaks.length === 0) return ["Nothing that looks like a leak."];
  const grown = leaks.reduce((sum, { bytes_per_step }) => sum + bytes_per_step, 0);
  const verb = leaks.length === 1 ? "grows" : "grow";
  const [from, step] =
    found_by === "parts"
      ? ["from part to part of the recording", `in 1/${format.whole(steps)} of it`]
      : ["from step to step", "a step"];
  return [`${format.counted(leaks.length, "place")} ${verb} ${from}, by `, perStep(grown), ` ${step}.`];
}

/** Says how the steps were found, and which of them were looked at. */
export function stepsText({ steps, found_by, annotation, warm_up_steps, span_steps }: Growth): string {
  const count = format.counted(steps, "step");
  const found = {
    annotation: `${count}, found by the program’s own mark “${shown(annotation ?? "")}”`,
    period: `${count}, found by the period of the allocations`,
    parts:
      `Steps were not found; ${format.counted(steps, "equal part")} of the recording ` +
      `${steps === 1 ? "stands" : "stand"} for them`,
  }[found_by];
  const left = warm_up_steps === 1 ? "the first is" : `the first ${format.whole(warm_up_steps)} are`;
  const spans = span_steps === 1 ? "" : `, and ${format.whole(span_steps)} are looked at as one`;
  return `${found}; ${left} left out${spans}.`;
}
