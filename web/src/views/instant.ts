// The bar at the top of the page: the chosen instant, and the second one that it is compared with.

import { bytesFigure, changeFigure, type Figure, fill, h } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";
import { within } from "../state.ts";

export class InstantBar implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "instants", "seconds"] as const;
  readonly #model: Model;
  readonly #input = h("input", {
    type: "number",
    min: 0,
    id: "instant",
    "aria-describedby": "instant-of",
    change: () => this.choose(Number(this.#input.value)),
  });
  readonly #of = h("span", { class: "quiet", id: "instant-of" });
  readonly #jump = h("select", {
    "aria-label": "Go to",
    change: () => {
      if (this.#jump.value !== "") this.choose(Number(this.#jump.value));
    },
  });
  readonly #readout = h("dl", { class: "readout", "aria-live": "polite" });
  readonly #live = bytesFigure();
  readonly #reserved = bytesFigure();
  readonly #gap = bytesFigure();
  readonly #paused = bytesFigure();
  readonly #set = h(
    "button",
    { type: "button", title: "Choose a second instant", click: () => this.#openSecond() },
    "Compare…",
  );
  readonly #secondInput = h("input", {
    type: "number",
    id: "second",
    min: 0,
    change: () => this.chooseSecond(Number(this.#secondInput.value)),
  });
  readonly #grown = changeFigure();
  readonly #second = h(
    "div",
    { class: "second" },
    h("label", { for: "second" }, "Second"),
    this.#secondInput,
    h("span", { class: "quiet" }, "live"),
    h("span", {}, this.#grown.element),
    h("button", { type: "button", "aria-label": "Swap the two instants", click: () => this.#swap() }, "⇄"),
    h(
      "button",
      { type: "button", "aria-label": "Without a second instant", click: () => this.chooseSecond(null) },
      "×",
    ),
  );

  #drawnTrace: number | null = null;

  constructor(model: Model) {
    this.#model = model;
    const step = (by: number, label: string, text: string) =>
      h(
        "button",
        { type: "button", "aria-label": label, click: () => this.choose(model.instant + by) },
        text,
      );
    this.element = h(
      "div",
      { class: "instant", role: "region", "aria-label": "The chosen instant" },
      h(
        "div",
        { class: "pick" },
        h("label", { for: "instant" }, "Instant"),
        step(-1, "One event back", "‹"),
        this.#input,
        step(1, "One event on", "›"),
        this.#of,
        this.#jump,
      ),
      this.#readout,
      this.#set,
      this.#second,
    );
  }

  /** Makes all views show an instant of the chosen trace. The chart moves if the instant is outside of it. */
  choose(instant: number): void {
    const { state, trace, store } = this.#model;
    const chosen = within(Number.isFinite(instant) ? instant : this.#model.instant, trace.end);
    const instants = state.instants.with(state.trace, chosen);
    if (state.view === null || (chosen >= state.view[0] && chosen <= state.view[1])) store.set({ instants });
    else store.set({ instants, view: centered(state.view[1] - state.view[0], chosen, trace.end) });
  }

  chooseSecond(instant: number | null): void {
    const { state, trace, store } = this.#model;
    const chosen = instant === null ? null : within(instant, trace.end);
    store.set({ seconds: state.seconds.with(state.trace, chosen) });
  }

  draw(): void {
    const { trace, instant, second, state } = this.#model;
    const gap = this.#model.gapAt(instant);
    if (state.trace !== this.#drawnTrace) {
      this.#drawnTrace = state.trace;
      this.#drawJumps();
      this.#drawReadout();
    }
    this.#input.max = String(trace.end);
    this.#input.value = String(instant);
    const time = trace.timeAt(instant);
    this.#of.textContent =
      `of ${format.whole(trace.end)}` + (time === null ? "" : ` · ${format.duration(time)}`);
    this.#showJump();
    this.#live.show(gap.live);
    this.#reserved.show(gap.reserved);
    this.#gap.show(gap.reserved - gap.live);
    this.#paused.show(gap.paused);
    this.#set.hidden = second !== null;
    this.#second.hidden = second === null;
    if (second === null) return;
    this.#secondInput.max = String(trace.end);
    this.#secondInput.value = String(second);
    this.#grown.show(this.#model.gapAt(second).live - gap.live);
  }

  #drawReadout(): void {
    const figure = (name: string, { element }: Figure) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, element));
    const { peak_paused } = this.#model.trace.summary;
    fill(
      this.#readout,
      figure("Live", this.#live),
      figure("Reserved", this.#reserved),
      figure("Gap", this.#gap),
      peak_paused > 0 ? figure("Paused", this.#paused) : null,
    );
  }

  #drawJumps(): void {
    const options = this.#model.trace.summary.instants.map(({ event, label }) =>
      h("option", { value: event }, `${format.capital(label)} (${format.whole(event)})`),
    );
    fill(this.#jump, h("option", { value: "" }, "Go to…"), ...options);
  }

  #showJump(): void {
    const { trace, instant } = this.#model;
    const named = this.#model.named(instant);
    const place = named === null ? -1 : trace.summary.instants.indexOf(named);
    if (this.#jump.selectedIndex !== place + 1) this.#jump.selectedIndex = place + 1;
  }

  #openSecond(): void {
    if (!this.#model.isWhole) return;
    this.chooseSecond(this.#model.instant);
    this.draw();
    this.#secondInput.focus();
  }

  #swap(): void {
    const { instant, second } = this.#model;
    this.chooseSecond(instant);
    if (second !== null) this.choose(second);
  }
}

/** Returns a range of `span` events around an instant. It is moved as needed to lie within the trace. */
function centered(span: number, instant: number, end: number): [number, number] {
  const from = Math.max(0, Math.min(end - span, Math.round(instant - span / 2)));
  return [from, from + span];
}
