// The curves that the chart can show: their names, their colours, and the buttons that show or hide them.

import { CAUSES } from "../data/summary.ts";
import { fill, h } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { CATEGORY_COLORS } from "../theme.ts";
import { CAUSE_TEXTS } from "./gap.ts";

/** The curves of all other traces. They are drawn behind those of the chosen trace. */
export const OTHERS = [
  { key: "others/live", name: "live", title: "Live of all others" },
  { key: "others/reserved", name: "reserved", title: "Reserved of all others" },
];

/** The curves of the job as it was recorded. */
const RECORDED = ["live", "reserved", "paused"];

export class Legend {
  readonly element = h("div", {
    class: "curves",
    role: "group",
    "aria-label": "Curves; press to show or hide",
  });
  readonly #model: Model;

  constructor(model: Model) {
    this.#model = model;
  }

  draw(): void {
    const { store, curves } = this.#model;
    const button = (name: string) => {
      const isShown = this.#model.state.curves.includes(name);
      const toggle = () => {
        const now = this.#model.state.curves;
        store.set({ curves: isShown ? now.filter((other) => other !== name) : [...now, name] });
      };
      const key = h("i", { class: "key", style: `background: var(${colorOf(this.#model, name)})` });
      const text = nameOf(name) + this.#ratioText(name);
      return h(
        "li",
        {},
        h("button", { type: "button", "aria-pressed": String(isShown), click: toggle }, key, text),
      );
    };
    const isCause = (name: string) => (CAUSES as readonly string[]).includes(name);
    const groups = [
      ["Recorded", curves.names.filter((name) => RECORDED.includes(name))],
      ["The gap", curves.names.filter(isCause)],
      ["Other traces", this.#model.hasOthers ? OTHERS.map(({ key }) => key) : []],
      ["Replayed", curves.names.filter((name) => name.endsWith("/reserved"))],
    ] as const;
    const items = groups.flatMap(([title, names]) =>
      names.length === 0
        ? []
        : [
            h("span", { class: "quiet" }, title),
            h("ul", { class: "legend", "aria-label": title }, ...names.map(button)),
          ],
    );
    const focused = [...this.element.querySelectorAll("button")].indexOf(
      document.activeElement as HTMLButtonElement,
    );
    fill(this.element, ...items);
    if (focused >= 0) this.element.querySelectorAll("button")[focused]?.focus();
  }

  #ratioText(name: string): string {
    const found = this.#model.trace.summary.strategies.find(({ label }) => `${label}/reserved` === name);
    if (found === undefined) return "";
    return found.completed ? ` ${format.ratio(found.ratio)}×` : " (does not fit)";
  }
}

export function nameOf(name: string): string {
  const others = OTHERS.find(({ key }) => key === name);
  if (others !== undefined) return others.title;
  const cause = CAUSES.find((cause) => cause === name);
  if (cause !== undefined) return CAUSE_TEXTS[cause].title;
  if (name === "live") return "Live";
  if (name === "reserved") return "Reserved";
  if (name === "paused") return "Paused";
  return name.slice(0, name.lastIndexOf("/"));
}

/** Returns the name of a curve's colour in the style sheet. */
export function colorOf(model: Model, name: string): string {
  if (name === "live") return "--live";
  if (name === "reserved") return "--reserved";
  if (name === "paused") return "--paused";
  if (OTHERS.some(({ key }) => key === name)) return "--ink-3";
  const cause = (CAUSES as readonly string[]).indexOf(name);
  if (cause >= 0) return `--cause-${cause}`;
  const strategy = model.trace.summary.strategies.findIndex(({ label }) => `${label}/reserved` === name);
  // `--c0` looks like the colour of live bytes.
  return `--c${1 + (strategy % (CATEGORY_COLORS - 1))}`;
}
