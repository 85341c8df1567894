// The growth from step to step, as `lowtide leaks` reports it.

import { filterOf, sizesText } from "../data/site.ts";
import type { Grown, Growth, Trend } from "../data/summary.ts";
import { bytesOf, type Child, confidenceOf, copyable, fill, h, section } from "../dom.ts";
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
    this.#grid = new Grid("What grew", "call site", this.#columns(), { column: 1, isDescending: true });
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
    const { length } = this.#sites();
    fill(this.#verdict, ...verdict(growth));
    const hasSteps = growth.doubt === null || growth.found_by !== "parts" || length > 0;
    this.#about.textContent = hasSteps ? `${stepsText(growth)} ${MEANING}` : "";
    this.#compare.hidden = length === 0;
    this.#grid.element.hidden = length === 0;
    this.#grid.show(Uint32Array.from({ length }, (_, row) => row));
  }

  /** Returns the leaks, and the call sites that grew most among the others. */
  #sites(): Grown[] {
    const { leaks, spread } = this.#model.trace.summary.growth;
    return [...leaks, ...(spread?.most ?? [])];
  }

  #columns(): Column[] {
    const site = (row: number) => this.#sites()[row];
    return [
      {
        title: "Bytes a step or part",
        key: (row) => site(row).bytes_per_step,
        cell: (row) => perStep(site(row).bytes_per_step),
      },
      { title: "In all", key: (row) => site(row).bytes, cell: (row) => bytesOf(site(row).bytes) },
      {
        title: "Grew in",
        key: (row) => site(row).grown_steps,
        cell: (row) => this.#seenText(site(row)),
      },
      {
        title: "Confidence",
        key: (row) => site(row).confidence,
        cell: (row) => confidenceOf(site(row).confidence),
      },
      { title: "Call site", key: (row) => row, cell: (row) => this.#siteOf(site(row)), isText: true },
      { title: "Other views", key: (row) => row, cell: (row) => this.#onlyButton(site(row)), isText: true },
    ];
  }

  #seenText({ grown_steps, steps, times_given_back }: Trend): HTMLElement {
    const { found_by, span_steps } = this.#model.trace.summary.growth;
    const whole = found_by === "parts" ? "parts" : "steps";
    const what = span_steps === 1 ? whole : `spans of ${format.whole(span_steps)} ${whole}`;
    const back = times_given_back === 0 ? "" : `; given back ${format.counted(times_given_back, "time")}`;
    const text = `${format.whole(grown_steps)} of ${format.whole(steps)} ${what}${back}`;
    return copyable(text, text);
  }

  #siteOf(site: Grown): Child {
    return "stack" in site ? stackCell(this.#model, site.stack) : sizesText(site, this.#model.trace.summary);
  }

  /** Returns a button that makes all other views show only one call site. Another click shows all again. */
  #onlyButton(site: Grown): HTMLElement {
    const { store, state, trace } = this.#model;
    const filter = filterOf(site, trace.summary);
    const isShown = state.filter === filter;
    const click = () => (isShown ? store.set({ filter: "" }) : this.#showOnly(site, filter));
    const attributes = { type: "button", class: "link", "aria-pressed": String(isShown), click };
    return h("button", attributes, isShown ? "show all" : "show only this");
  }

  /**
   * Makes all views show only a call site. If less is there at the chosen instant than grew, chooses the first of the
   * last step: a leak of MiBs must not be shown as 0 blocks.
   */
  #showOnly(site: Grown, filter: string): void {
    const { store, state, trace, instant } = this.#model;
    store.set({ filter });
    const found = this.#model.filter.of(this.#model.blocksAt(instant), instant);
    const bytes = found.reduce((sum, block) => sum + trace.blocks.size[block], 0);
    if (bytes >= site.bytes) return;
    store.set({ instants: this.#put(state.instants, trace.parts[trace.summary.growth.steps - 1]) });
  }

  #showDifference(): void {
    const { state, store, trace } = this.#model;
    const { warm_up_steps, steps } = trace.summary.growth;
    const boundaries = trace.parts;
    store.set({
      instants: this.#put(state.instants, boundaries[warm_up_steps]),
      seconds: this.#put(state.seconds, boundaries[steps - 1]),
      stackView: "difference",
    });
  }

  /** Returns values of all traces with that of the chosen trace replaced. */
  #put<T>(values: T[], chosen: T): T[] {
    return values.map((value, i) => (i === this.#model.state.trace ? chosen : value));
  }
}

const MEANING =
  "Growth is measured on each call site’s minimum per step, so temporary memory does not count.";

function perStep(bytes: number): HTMLElement {
  return copyable(format.bytes(Math.round(bytes)), String(bytes), `${bytes} bytes a step or part`);
}

function verdict(growth: Growth): Child[] {
  return [...leaksText(growth), ...trainingText(growth), ...spreadText(growth)];
}

function leaksText({ leaks, spread, found_by, doubt }: Growth): Child[] {
  if (leaks.length === 0) {
    if (spread?.is_steady === true) return [];
    if (doubt === null) return ["Nothing that looks like a leak. "];
    return [`${doubt.charAt(0).toUpperCase()}${doubt.slice(1)}. `];
  }
  const grown = leaks.reduce((sum, { bytes_per_step }) => sum + bytes_per_step, 0);
  const verb = leaks.length === 1 ? "grows" : "grow";
  const from = found_by === "parts" ? "from part to part of the recording" : "from step to step";
  return [
    `${format.counted(leaks.length, "call site")} ${verb} ${from}, by `,
    perStep(grown),
    found_by === "parts" ? " a part. " : " a step. ",
  ];
}

/** Returns the text about memory that training allocates in few calls and keeps, which is no leak. */
function trainingText({ training }: Growth): Child[] {
  const named = [
    [training.optimizer, "optimizer state"],
    [training.gradients, "gradients"],
  ] as const;
  const kept = named.filter(([{ blocks }]) => blocks > 0);
  const parts = kept.flatMap(([{ bytes, blocks }, name], index): Child[] => [
    index === 0 ? "Training keeps " : " and ",
    bytesOf(bytes),
    ` of ${name} in ${format.counted(blocks, "block")}`,
  ]);
  return kept.length === 0 ? [] : [...parts, ": no leak. "];
}

/** Returns the text about the growth of everything else; empty if there is none to report. */
function spreadText({ leaks, spread, found_by, steps, warm_up_steps }: Growth): Child[] {
  if (spread === null) return [];
  const [what, too, other] =
    leaks.length === 0 ? ["All that is live", "", ""] : ["All else", ", too", "other "];
  const how = spread.is_steady
    ? `${what} grows steadily${too}, though no ${other}call site does`
    : `${what} grew${too}, but not steadily`;
  const part = found_by === "parts" ? "part" : "step";
  const from = `${part} ${format.whole(warm_up_steps + 1)}`;
  const to = `${part} ${format.whole(steps)}`;
  const sites = format.counted(spread.sites, "call site");
  const most = spread.sites > spread.most.length ? ", of which those that grew most are listed" : "";
  return [
    `${how}: by `,
    perStep(spread.bytes_per_step),
    ` a ${part} from ${from} to ${to} (`,
    confidenceOf(spread.confidence),
    ` to go on), in ${sites}${most}.`,
  ];
}

/** Returns how the steps were found, and which of them were left out. */
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
