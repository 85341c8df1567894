// The lane below the chart: when frames of `tide` moved to other addresses, and how many.

import { stepAt } from "../data/curves.ts";
import { type Bar, barNear, barsOf } from "../data/moves.ts";
import { fill, h, type Tooltip } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { InstantBar } from "./instant.ts";

/** The height of the lane. The chart's axis leaves as much room, and the style sheet has it, too. */
export const LANE_HEIGHT = 34;
const BAR_HEIGHT_MAX = 22;
const BAR_HEIGHT_MIN = 2;
/** The minimum width of a bar. Single instants would be too narrow to be seen and clicked. */
const BAR_PIXELS = 4;
/** The maximum distance in pixels from the pointer to the bar that it means. */
const REACH_PIXELS = 6;

export class MovesLane {
  readonly element: HTMLElement;
  readonly #model: Model;
  readonly #instantBar: InstantBar;
  readonly #tooltip: Tooltip;
  readonly #pictures = h("div", { class: "bars" });
  /** The bars of the whole trace, so that the keyboard leads out of the view. */
  #bars: Bar[] = [];
  #view: [number, number] = [0, 1];

  constructor(model: Model, instantBar: InstantBar, tooltip: Tooltip) {
    this.#model = model;
    this.#instantBar = instantBar;
    this.#tooltip = tooltip;
    this.element = h(
      "div",
      {
        class: "moves",
        tabindex: 0,
        role: "slider",
        "aria-label": "Frames moved",
        click: (event: MouseEvent) => this.#click(event),
        keydown: (event: KeyboardEvent) => this.#press(event),
        pointermove: (event: PointerEvent) => this.#hover(event),
        pointerleave: () => this.#tooltip.hide(),
        // The chart would choose the pointer's instant, which has a move only by chance.
        pointerdown: (event: PointerEvent) => event.stopPropagation(),
      },
      h("span", { class: "name", "aria-hidden": "true" }, "frames", h("br"), "moved"),
      this.#pictures,
    );
  }

  /** Whether the trace has moves. Without them, there is no lane. */
  get isNeeded(): boolean {
    return this.#model.trace.moves.event.length > 0;
  }

  /** Draws the bars of a view that is `pixels` wide. */
  draw(view: [number, number], pixels: number): void {
    const [from, to] = view;
    const width = Math.max(1, Math.ceil(((to - from) * BAR_PIXELS) / Math.max(1, pixels)));
    this.#view = view;
    this.#bars = barsOf(this.#model.trace.moves, width);
    const shown = this.#bars.filter(({ start }) => start + width > from && start < to);
    const most = shown.reduce((most, { frames }) => Math.max(most, frames), 0);
    fill(this.#pictures, ...shown.map((bar) => this.#picture(bar, most)));
  }

  /** Names the moves at the chosen instant. */
  showInstant(): void {
    const { instant, trace } = this.#model;
    const bar = barNear(this.#bars, instant, 0);
    const text =
      bar === null ? `No frames moved at event ${format.whole(instant)}` : this.#texts(bar).join(". ");
    this.element.setAttribute("aria-valuemin", "0");
    this.element.setAttribute("aria-valuemax", String(trace.end));
    this.element.setAttribute("aria-valuenow", String(instant));
    this.element.setAttribute("aria-valuetext", text);
  }

  /** What a bar means, as a sentence. */
  get about(): string {
    const [bar] = this.#bars;
    return bar === undefined
      ? ""
      : `Each bar: the frames that moved in ${format.counted(bar.width, "event")}.`;
  }

  #picture({ start, width, frames }: Bar, most: number): HTMLElement {
    const [from, to] = this.#view;
    const { axis } = this.#model;
    const [low, high] = [axis.valueAt(from), axis.valueAt(to)];
    const percent = (instant: number) =>
      (100 * (axis.valueAt(Math.max(from, Math.min(to, instant))) - low)) / (high - low);
    const [left, right] = [percent(start), percent(start + width)];
    const height = Math.max(BAR_HEIGHT_MIN, Math.round((BAR_HEIGHT_MAX * frames) / most));
    return h("i", { style: `left: ${left}%; width: ${right - left}%; height: ${height}px` });
  }

  /** Returns how many frames moved and how much memory that is, and when. */
  #texts({ first, last, frames }: Bar): string[] {
    const { summary, stepBoundaries } = this.#model.trace;
    const bytes = format.bytes(frames * (summary.frames?.size ?? 0));
    const [from, to] = [first, last].map((instant) => stepAt(stepBoundaries, instant));
    const steps = from === null || to === null ? "" : `, ${rangeText("step", from, to)}`;
    return [`${format.counted(frames, "frame")} moved: ${bytes}`, rangeText("Event", first, last) + steps];
  }

  /** Returns the bar that a pointer means; `null` if none is near. */
  #barAt({ clientX }: MouseEvent): Bar | null {
    const { left, width } = this.#pictures.getBoundingClientRect();
    const [from, to] = this.#view;
    const { axis } = this.#model;
    const [low, high] = [axis.valueAt(from), axis.valueAt(to)];
    const perPixel = (high - low) / Math.max(1, width);
    const instantAt = (x: number) => axis.instantAt(low + x * perPixel);
    const instant = instantAt(clientX - left);
    return barNear(this.#bars, Math.floor(instant), instantAt(clientX - left + REACH_PIXELS) - instant);
  }

  #hover(event: PointerEvent): void {
    // The chart would show its own values.
    event.stopPropagation();
    const bar = this.#barAt(event);
    if (bar === null) {
      this.#tooltip.hide();
      return;
    }
    const [title, when] = this.#texts(bar);
    this.#tooltip.show(event.clientX, event.clientY, h("b", {}, title), h("div", {}, when));
  }

  #click(event: MouseEvent): void {
    const bar = this.#barAt(event);
    if (bar !== null) this.#instantBar.choose(bar.first);
  }

  #press(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { instant } = this.#model;
    const bars: Record<string, Bar | undefined> = {
      ArrowLeft: this.#bars.findLast(({ first }) => first < instant),
      ArrowRight: this.#bars.find(({ first }) => first > instant),
      Home: this.#bars.at(0),
      End: this.#bars.at(-1),
    };
    if (!(event.key in bars)) return;
    event.preventDefault();
    // The chart would move by instants.
    event.stopPropagation();
    this.#instantBar.choose(bars[event.key]?.first ?? instant);
  }
}

function rangeText(noun: string, first: number, last: number): string {
  const [from, to] = [first, last].map(format.whole);
  return first === last ? `${noun} ${from}` : `${noun}s ${from} to ${to}`;
}
