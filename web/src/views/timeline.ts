// The chart of memory over a trace's instants, from the whole recording down to single events.

import uPlot from "uplot";
import { BY_EVENT } from "../data/axis.ts";
import { everyFitting, type Steps, spaced, stepAt, stepsWithin } from "../data/curves.ts";
import { GROUPING_NAMES, GROUPINGS, offeredGroupings } from "../data/groupings.ts";
import { bytesOf, choice, fill, h, section, type Tooltip } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { markText, shown } from "../names.ts";
import type { View } from "../schedule.ts";
import type { AxisName, BandsBy } from "../state.ts";
import { color, onThemeChange } from "../theme.ts";
import { BandsLegend, bandLines, edgesOf, topFirst } from "./bands.ts";
import { type Gestures, installGestures } from "./gestures.ts";
import type { InstantBar } from "./instant.ts";
import { colorOf, Legend, nameOf, OTHERS } from "./legend.ts";
import { LANE_HEIGHT, MovesLane } from "./moves.ts";

const HEIGHT = 340;
const AXIS_FONT = "12px system-ui, sans-serif";
/** The maximum distance in pixels from the pointer at which the curve of another trace is named. */
const OTHER_PIXELS_MAX = 12;

/**
 * The most annotations that are marked by full lines. More lines would hide the curves, so they are marked at the top
 * only.
 */
const WHOLE_MARKS_MAX = 8;
/** The minimum number of events that the chart shows. */
const SPAN_MIN = 8;
/** The minimum distances in pixels between marks, and between the numbers of steps. */
const MARK_PIXELS_MIN = 4;
const STEP_NUMBER_PIXELS = 64;
/** The height of a step's mark in pixels. Its number stands above it, where no other mark crosses it. */
const STEP_HEIGHT = 7;

/** A mark of an out-of-memory error or an annotation. `name` is that of its colour. */
interface Mark {
  x: number;
  text: string;
  name: string;
  /** Whether it is a line from top to bottom. */
  isWhole: boolean;
}

const AXIS_TEXTS: readonly (readonly [AxisName, string])[] = [
  ["events", "By event"],
  ["time", "By time"],
];

const BANDS_TEXTS: readonly (readonly [BandsBy, string])[] = [
  ["none", "None"],
  ...GROUPING_NAMES.map((name) => [name, GROUPINGS[name].text] as const),
];

export class Timeline implements View, Gestures {
  readonly element: HTMLElement;
  readonly shows = ["trace", "view", "axis", "curves", "bands", "instants", "seconds"] as const;
  readonly #model: Model;
  readonly #bar: InstantBar;
  readonly #tooltip: Tooltip;
  readonly #legend: Legend;
  readonly #axis;
  readonly #bandsBy;
  readonly #bandsLegend: BandsLegend;
  readonly #lane: MovesLane;
  readonly #plotPlace = h("div", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": "Memory over time",
    "aria-describedby": "timeline-keys",
  });
  readonly #level = h("p", { class: "quiet level", id: "timeline-level", "aria-live": "polite" });
  readonly #details = h("details");
  readonly #table = h("div", { class: "scroll" });
  readonly #at = h("div", { class: "mark" });
  readonly #to = h("div", { class: "mark second" });
  readonly #between = h("div", { class: "between" });
  #plot: uPlot | null = null;
  #drawnCurves = "";
  #drawnData = "";

  constructor(model: Model, bar: InstantBar, tooltip: Tooltip) {
    this.#model = model;
    this.#bar = bar;
    this.#tooltip = tooltip;
    this.#legend = new Legend(model);
    this.#lane = new MovesLane(model, bar, tooltip);
    this.#bandsLegend = new BandsLegend(model);
    this.#bandsBy = choice("Stack live bytes by", BANDS_TEXTS, (bands) => model.store.set({ bands }));
    this.#axis = choice("Horizontal axis", AXIS_TEXTS, (axis) => model.store.set({ axis }));
    const tool = (text: string, label: string, click: () => void) =>
      h("button", { type: "button", "aria-label": label, click }, text);
    this.element = section(
      "timeline",
      "Memory over time",
      [
        h("span", { class: "stack-by" }, h("span", { class: "quiet" }, "Stack by"), this.#bandsBy.element),
        this.#axis.element,
        h(
          "div",
          { class: "tools" },
          tool("+", "Zoom in", () => this.zoom(0.5, this.#model.instant)),
          tool("−", "Zoom out", () => this.zoom(2, this.#model.instant)),
          tool("All", "All of the recording", () => this.#model.store.set({ view: null })),
        ),
      ],
      this.#legend.element,
      h("div", { class: "with-bands" }, this.#plotPlace, this.#bandsLegend.element),
      this.#level,
      h(
        "p",
        { class: "quiet keys", id: "timeline-keys" },
        "Click: an instant. Drag: zoom. Shift+drag: a range. Wheel after a click, or Ctrl and wheel: zoom. " +
          "Keys: ← → (Shift: one event), + − 0, Page Up and Down, Home, End, S: second instant.",
      ),
      this.#details,
    );
    this.#details.append(h("summary", {}, "Curves as a table"), this.#table);
    this.#details.addEventListener("toggle", () => this.#drawTable());
    installGestures(this.#plotPlace, this);
    onThemeChange(() => {
      this.#legend.draw();
      this.#plot?.redraw(false);
    });
  }

  /**
   * Whether the chart can be drawn before the blocks are read. It can if all its curves come from buckets, without bands,
   * and its table is closed.
   */
  get isEarly(): boolean {
    if (this.#model.bandsBy !== "none") return false;
    const steps = this.#steps();
    return !this.#details.open && this.#shown().every((name) => this.#model.curves.isEarly(name, steps));
  }

  draw(): void {
    const { state, trace, bandsBy } = this.#model;
    const curves = `${state.trace} ${state.axis} ${bandsBy} ${state.curves.join(" ")}`;
    if (curves !== this.#drawnCurves) {
      this.#drawnCurves = curves;
      this.#bandsBy.show(bandsBy, ["none", ...offeredGroupings(trace.summary)]);
      this.#legend.draw();
      // It may leave less width to the chart.
      this.#bandsLegend.draw();
      this.#rebuild();
      this.#drawnData = "";
    }
    const plot = this.#plot;
    if (plot === null) return;
    const width = this.#plotPlace.clientWidth;
    const [from, to] = this.view;
    const { axis } = this.#model;
    this.#axis.element.hidden = !trace.hasTimes;
    this.#axis.show(state.axis);
    const data = `${curves} ${from} ${to} ${width}`;
    if (data !== this.#drawnData) {
      this.#drawnData = data;
      if (plot.width !== width) plot.setSize({ width, height: HEIGHT + this.#laneHeight });
      const steps = this.#steps();
      plot.batch(() => {
        plot.setData(this.#dataOf(steps), false);
        plot.setScale("x", { min: axis.valueAt(from), max: axis.valueAt(to) });
        plot.setScale("y", { min: 0, max: this.#highest(steps) });
      });
      this.#lane.draw([from, to], plot.over.clientWidth);
      this.#showLevel(steps);
    }
    this.#placeMarks();
    this.#lane.showInstant();
    this.#bandsLegend.show();
    this.#drawTable();
    this.#plotPlace.setAttribute("aria-label", this.#aboutText());
  }

  #aboutText(): string {
    const { bandsBy, trace } = this.#model;
    const [from, to] = this.view.map(format.whole);
    if (trace.end === 0) return "Memory over time, without an event";
    const bands = bandsBy === "none" ? "" : `, live bytes by ${GROUPINGS[bandsBy].text.toLowerCase()}`;
    return `Memory over time${bands}, events ${from} to ${to} of ${format.whole(trace.end)}`;
  }

  get #laneHeight(): number {
    return this.#lane.isNeeded ? LANE_HEIGHT : 0;
  }

  #steps(): Steps {
    // A line of one pixel can be seen, but not a band.
    const pixels = this.#model.bandsBy === "none" ? 1 : 2;
    return this.#model.curves.steps(...this.view, Math.max(200, this.#plotPlace.clientWidth / pixels));
  }

  // ---- gestures and keys ----

  get view(): [number, number] {
    return this.#model.state.view ?? [0, Math.max(1, this.#model.trace.end)];
  }

  get over(): HTMLElement | null {
    return this.#plot?.over ?? null;
  }

  instantAt(x: number): number {
    const { axis } = this.#model;
    const [low, high] = this.view.map(axis.valueAt);
    return axis.instantAt(low + (x / Math.max(1, this.over?.clientWidth ?? 1)) * (high - low));
  }

  choose(instant: number): void {
    this.#bar.choose(Math.floor(instant));
  }

  chooseAt(x: number): void {
    this.#bar.choose(this.#drawnAt(x));
  }

  /** Returns the instant that is drawn at a distance from the left edge: of bands, that of the step's most live bytes. */
  #drawnAt(x: number): number {
    const { bands, trace } = this.#model;
    const instant = Math.max(0, Math.min(trace.end, Math.floor(this.instantAt(x))));
    const steps = this.#steps();
    return bands?.stack(steps).instants[Math.floor((instant - steps.first) / steps.width)] ?? instant;
  }

  move(by: number): void {
    this.choose(this.#model.instant + by);
  }

  chooseSecond(): void {
    this.#bar.chooseSecond(this.#model.second === null ? this.#model.instant : null);
  }

  chooseRange(from: number, to: number): void {
    this.#bar.choose(Math.floor(from));
    this.#bar.chooseSecond(Math.floor(to));
  }

  show(from: number, to: number): void {
    const { trace, store } = this.#model;
    const span = Math.min(trace.end, Math.max(SPAN_MIN, to - from));
    const low = Math.max(0, Math.min(trace.end - span, (from + to - span) / 2));
    const isAll = span >= trace.end;
    store.set({ view: isAll ? null : [Math.round(low), Math.round(low + span)] });
  }

  zoom(factor: number, around = this.#model.instant): void {
    const [from, to] = this.view;
    const { axis } = this.#model;
    const [low, high] = [axis.valueAt(from), axis.valueAt(to)];
    const center = around < from || around > to ? (low + high) / 2 : axis.valueAt(around);
    this.show(
      axis.instantAt(center - (center - low) * factor),
      axis.instantAt(center + (high - center) * factor),
    );
  }

  pan(by: number): void {
    const [from, to] = this.view;
    this.show(from + by, to + by);
  }

  select(left: number, width: number): void {
    this.#plot?.setSelect({ left, width, top: 0, height: this.over?.clientHeight ?? 0 }, false);
  }

  hover(x: number, pointerX: number, pointerY: number): void {
    if (!this.#model.isWhole) return;
    const instant = this.#drawnAt(x);
    const time = this.#model.trace.timeAt(instant);
    const here = this.#model.curves.steps(instant, instant, 1);
    const lines = this.#shown()
      .reverse()
      .map((name) => {
        const { min, max } = this.#model.curves.envelope(name, here);
        const least = min[0] === max[0] ? "" : `${format.bytes(min[0])} to `;
        const key = h("i", { class: "key", style: `background: var(${colorOf(this.#model, name)})` });
        return h("div", { class: "line" }, key, nameOf(name), h("b", {}, `${least}${format.bytes(max[0])}`));
      });
    lines.push(...this.#bandLines(instant, pointerY));
    const other = this.#otherNear(x, pointerY);
    if (other !== null) lines.push(other);
    const title =
      `Event ${format.whole(instant)}${time === null ? "" : `, ${format.duration(time)}`}` +
      this.#stepText(instant);
    this.#tooltip.show(pointerX, pointerY, h("b", {}, title), ...lines);
  }

  #bandLines(instant: number, pointerY: number): HTMLDivElement[] {
    const { bands } = this.#model;
    const plot = this.#plot;
    if (bands === null || plot === null) return [];
    return bandLines(bands, instant, plot.posToVal(pointerY - plot.over.getBoundingClientRect().top, "y"));
  }

  /** Returns the name and value of another trace's curve near the pointer; `null` if none is near. */
  #otherNear(x: number, pointerY: number): HTMLDivElement | null {
    const plot = this.#plot;
    if (plot === null) return null;
    const row = plot.posToIdx(x);
    const y = pointerY - plot.over.getBoundingClientRect().top;
    let nearest = OTHER_PIXELS_MAX;
    let found: HTMLDivElement | null = null;
    const others = this.#others();
    // The curves of this trace are the last series, each with its minimum and maximum.
    const first = plot.data.length - 2 * this.#curves().length - others.length;
    others.forEach(({ index, name }, i) => {
      const value = plot.data[first + i][row];
      if (value == null) return;
      const distance = Math.abs(plot.valToPos(value, "y") - y);
      if (distance >= nearest) return;
      nearest = distance;
      const text = `${shown(this.#model.nameOf(index))}, ${nameOf(name).toLowerCase()}`;
      found = h("div", { class: "line" }, text, h("b", {}, format.bytes(value)));
    });
    return found;
  }

  leave(): void {
    this.#tooltip.hide();
  }

  #stepText(instant: number): string {
    const step = stepAt(this.#model.trace.stepBoundaries, instant);
    return step === null ? "" : `, step ${format.whole(step)}`;
  }

  // ---- the chart ----

  #rebuild(): void {
    this.#plot?.destroy();
    const { series, fills } = this.#seriesOf();
    const axis = { stroke: () => color("--ink-2"), font: AXIS_FONT };
    const grid = { stroke: () => color("--grid"), width: 1 };
    this.#plotPlace.replaceChildren();
    this.#plot = new uPlot(
      {
        width: this.#plotPlace.clientWidth,
        height: HEIGHT + this.#laneHeight,
        padding: [null, () => this.#halfLabel(), null, null],
        legend: { show: false },
        cursor: { drag: { x: false, y: false, setScale: false }, y: false, points: { show: false } },
        scales: { x: { time: false, auto: false }, y: { auto: false } },
        axes: [
          {
            ...axis,
            grid: { show: false },
            // The lane lies between the curves and the labels.
            ticks: { ...grid, size: 5 + this.#laneHeight },
            size: (this.#model.trace.hasTimes ? 46 : 32) + this.#laneHeight,
            space: 90,
            incrs: WHOLE_STEPS,
            values: (_plot, splits, _axis, _space, increment) =>
              splits.map((split) => this.#labelOf(split, increment)),
          },
          {
            ...axis,
            grid,
            ticks: { show: false },
            size: 74,
            incrs: BINARY_STEPS,
            values: (_plot, splits) => splits.map((split) => format.bytes(split)),
          },
        ],
        series,
        bands: fills,
        hooks: { draw: [(plot) => this.#drawSteps(plot), (plot) => this.#drawMoments(plot)] },
      },
      [[], ...series.slice(1).map(() => [])] as uPlot.AlignedData,
      this.#plotPlace,
    );
    this.#plot.over.append(this.#between, this.#to, this.#at);
    if (this.#lane.isNeeded) this.#plot.over.append(this.#lane.element);
  }

  /** Returns the series of the chart in the order in which they are drawn, and the fills between two of them. */
  #seriesOf(): { series: uPlot.Series[]; fills: uPlot.Band[] } {
    const { bands } = this.#model;
    const paths = uPlot.paths.stepped?.({ align: 1 });
    const stepped = { points: { show: false }, ...(paths === undefined ? {} : { paths }) };
    const series: uPlot.Series[] = [{}];
    const fills: uPlot.Band[] = [];
    const line = (name: string) => ({ ...stepped, stroke: () => color(colorOf(this.#model, name)) });
    if (bands !== null) {
      // What is drawn later covers half of this line. On top, it would hide bands that are as narrow.
      if (this.#hasLive) series.push({ ...line("live"), width: 1 });
      // Each band covers all that is below its edge.
      const names = topFirst(bands).map((band) => bands.colors[band]);
      series.push(...names.map((name) => ({ ...stepped, fill: () => color(name), width: 0 })));
    }
    for (const _ of this.#others()) {
      series.push({ stroke: () => `${color("--ink-3")}90`, width: 0.75, points: { show: false } });
    }
    for (const name of this.#curves()) {
      // All memory under the live curve is in use.
      const area = name === "live" ? { fill: () => `${color("--live")}22` } : {};
      const width = name === "live" ? 1.5 : 1.25;
      series.push({ ...line(name), width }, { ...line(name), ...area, width: 0 });
      const top = series.length - 2;
      fills.push({ series: [top, top + 1], fill: () => color(colorOf(this.#model, name)) + "38" });
    }
    return { series, fills };
  }

  #shown(): string[] {
    // Live is drawn last, so that no other curve hides it.
    const shown = this.#model.curves.names.filter((name) => this.#model.state.curves.includes(name));
    return shown.reverse();
  }

  get #hasLive(): boolean {
    return this.#model.state.curves.includes("live");
  }

  /** Returns the curves that are drawn by themselves. With bands, live is not one of them. */
  #curves(): string[] {
    return this.#shown().filter((name) => name !== "live" || this.#model.bands === null);
  }

  #dataOf(steps: Steps): uPlot.AlignedData {
    const { axis, bands } = this.#model;
    const x = new Float64Array(steps.count + 1);
    for (let i = 0; i <= steps.count; i++) x[i] = axis.valueAt(steps.first + i * steps.width);
    // Repeats each last value, so that it extends to the right edge. The edge of all bands is that of live.
    const edges = bands === null ? [] : edgesOf(bands, steps).map(extended);
    const data: (Float64Array | (number | null)[])[] = [
      x,
      ...edges.slice(0, this.#hasLive ? 1 : 0),
      ...edges,
      ...this.#others().map((other) => this.#dataOfOther(other, steps)),
    ];
    for (const name of this.#curves()) {
      const { min, max } = this.#model.curves.envelope(name, steps);
      data.push(extended(max), extended(min));
    }
    return data as uPlot.AlignedData;
  }

  /** Returns the curves of all other traces that are shown. */
  #others(): { index: number; name: string }[] {
    const { state, summary, hasOthers } = this.#model;
    if (!hasOthers) return [];
    const indices = [...summary.traces.keys()].filter((index) => index !== state.trace);
    return OTHERS.filter(({ key }) => state.curves.includes(key)).flatMap(({ name }) =>
      indices.map((index) => ({ index, name })),
    );
  }

  #dataOfOther({ index, name }: { index: number; name: string }, steps: Steps): (number | null)[] {
    const { end } = this.#model.traceOf(index);
    const found = this.#model.curvesOf(index).overview(name, steps);
    const at = (step: number) => (steps.first + step * steps.width > end ? null : (found?.max[step] ?? null));
    return Array.from({ length: steps.count + 1 }, (_, step) => at(Math.min(step, steps.count - 1)));
  }

  #highest(steps: Steps): number {
    let highest = 1;
    for (const other of this.#others()) {
      for (const value of this.#dataOfOther(other, steps))
        if (value !== null && value > highest) highest = value;
    }
    const live = this.#model.bands === null ? [] : ["live"];
    for (const name of [...live, ...this.#shown()]) {
      for (const value of this.#model.curves.envelope(name, steps).max) if (value > highest) highest = value;
    }
    // Leaves room for the names of marks above the curves.
    const { annotations, summary } = this.#model.trace;
    return highest * (annotations.length + summary.ooms.length > 0 ? 1.12 : 1.04);
  }

  /** Returns the label at a value of the horizontal axis: the event and its time, the one that the axis counts first. */
  #labelOf(value: number, increment: number): string {
    const { trace, axis } = this.#model;
    const instant = axis.instantAt(value);
    const event = format.whole(instant);
    if (axis !== BY_EVENT) return `${format.seconds(value, increment)}\n${event}`;
    const time = trace.timeAt(instant);
    return time === null ? event : `${event}\n${format.duration(time)}`;
  }

  /** Returns how far the last label of the instants extends beyond the chart's right edge. */
  #halfLabel(): number {
    const context = h("canvas").getContext("2d");
    if (context === null) return 0;
    context.font = AXIS_FONT;
    const { trace, axis } = this.#model;
    const lines = this.#labelOf(axis.valueAt(trace.end), 1).split("\n");
    return Math.ceil(Math.max(...lines.map((line) => context.measureText(line).width)) / 2) + 2;
  }

  /** Draws marks at the bottom where steps begin. If they are too close, only every tenth or hundredth is marked. */
  #drawSteps({ ctx, bbox, valToPos }: uPlot): void {
    const [from, to] = this.view;
    const { trace, axis } = this.#model;
    const boundaries = trace.stepBoundaries;
    const { first, marks } = stepsWithin(boundaries, from, to);
    if (marks.length === 0) return;
    const ratio = uPlot.pxRatio;
    const pixels = bbox.width / ratio / marks.length;
    const marked = everyFitting(pixels, MARK_PIXELS_MIN);
    const numbered = everyFitting(pixels, STEP_NUMBER_PIXELS);
    const all = Array.from(marks, (event, i) => ({
      x: valToPos(axis.valueAt(event), "x", true),
      step: first + i + 1,
    }));
    const bottom = bbox.top + bbox.height;
    let right = 0;
    ctx.save();
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    ctx.fillStyle = color(this.#model.bands === null ? "--ink-3" : "--ink");
    ctx.globalAlpha = 0.7;
    // Steps differ in length, so some may be close although most are not.
    for (const { x, step } of spaced(
      all.filter(({ step }) => step % marked === 0),
      MARK_PIXELS_MIN * ratio,
    )) {
      ctx.fillRect(x, bottom - STEP_HEIGHT * ratio, ratio, STEP_HEIGHT * ratio);
      // The last boundary is the end of the last step and has no number.
      const isNumbered = step % numbered === 0 && step < boundaries.length;
      const text = `step ${format.whole(step)}`;
      const end = x + ctx.measureText(text).width;
      if (!isNumbered || x < right || end > bbox.left + bbox.width) continue;
      ctx.fillText(text, x, bottom - (STEP_HEIGHT + 1) * ratio);
      right = end + 8 * ratio;
    }
    ctx.restore();
  }

  /**
   * Returns the marks of out-of-memory errors and annotations in the view that have room. Errors have priority, and
   * starts have it over ends.
   */
  #marks({ valToPos }: uPlot): Mark[] {
    const { summary, annotations } = this.#model.trace;
    const [from, to] = this.view;
    const isWithin = ({ event }: { event: number }) => event >= from && event <= to;
    const within = annotations.filter(isWithin);
    const isWhole = within.length <= WHOLE_MARKS_MAX;
    const x = (event: number) => valToPos(this.#model.axis.valueAt(event), "x", true);
    const failures = summary.ooms.filter(isWithin).map(({ event, requested }) => {
      return { x: x(event), text: `out of memory: ${format.bytes(requested)}`, name: "--bad", isWhole: true };
    });
    const [ends, starts] = [true, false].map((isEnd) =>
      within
        .filter(({ stage }) => (stage === 1) === isEnd)
        .map((annotation) => {
          return { x: x(annotation.event), text: markText(annotation), name: "--ink-3", isWhole };
        }),
    );
    return spaced([...failures, ...starts, ...ends], MARK_PIXELS_MIN * uPlot.pxRatio);
  }

  /** Draws marks of out-of-memory errors and annotations, and their names if there is room. */
  #drawMoments(plot: uPlot): void {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const marks = this.#marks(plot);
    const end = bbox.left + bbox.width;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    for (const { x, name, isWhole } of marks) {
      ctx.fillStyle = color(name);
      ctx.globalAlpha = name === "--bad" ? 1 : 0.35;
      ctx.fillRect(x, bbox.top, ratio, isWhole ? bbox.height : 5 * ratio);
    }
    ctx.globalAlpha = 1;
    // A name must not cross a whole line.
    const taken = marks.filter(({ isWhole }) => isWhole).map(({ x }) => [x, x + ratio]);
    for (const { x, text, name } of marks) {
      const width = ctx.measureText(text).width;
      // An out-of-memory error is mostly at the end of a recording, where only the left side has room.
      const isLeft = name === "--bad" && x + width + 8 * ratio > end;
      const left = isLeft ? x - width - 4 * ratio : x + 4 * ratio;
      const right = left + width;
      if (right > end || taken.some(([start, end]) => left < end + 2 * ratio && right > start - 2 * ratio))
        continue;
      ctx.fillStyle = color(name);
      ctx.fillText(text, left, bbox.top + 6 * ratio);
      taken.push([left - 6 * ratio, right + 6 * ratio]);
    }
    ctx.restore();
  }

  #placeMarks(): void {
    const [from, to] = this.view;
    const { instant, second, axis } = this.#model;
    const [low, high] = [axis.valueAt(from), axis.valueAt(to)];
    const scale = (this.over?.clientWidth ?? 0) / (high - low);
    const x = (instant: number) => (axis.valueAt(instant) - low) * scale;
    const place = (element: HTMLElement, instant: number | null) => {
      element.hidden = instant === null || instant < from || instant > to;
      if (instant !== null) element.style.left = `${x(instant)}px`;
    };
    place(this.#at, instant);
    place(this.#to, second);
    this.#between.hidden = second === null;
    if (second !== null) {
      const [first, last] = this.#model.range.map((value) => x(Math.max(from, Math.min(to, value))));
      this.#between.style.left = `${first}px`;
      this.#between.style.width = `${last - first}px`;
    }
  }

  #showLevel(steps: Steps): void {
    const [from, to] = this.view;
    const { bucket_events } = this.#model.trace.summary;
    const { curves, bands } = this.#model;
    const others = this.#shown().some((name) => !curves.isExact(name));
    const isExact = curves.isExact("live");
    const which = isExact ? "Curves other than live and reserved" : "Curves other than reserved";
    if (this.#model.trace.end === 0) {
      this.#level.textContent = "No events: what was held when the recording was made.";
      return;
    }
    this.#level.textContent =
      `Events ${format.whole(from)} to ${format.whole(to)}. ` +
      (steps.width === 1
        ? "Every event by itself."
        : `Each point is ${format.whole(steps.width)} events, from their least to their most bytes.`) +
      (bands !== null && steps.width > 1 ? " The bands are those at its most live bytes." : "") +
      (others && steps.width < bucket_events && bucket_events > 1
        ? ` ${which}: least and most of ${format.whole(bucket_events)} events.`
        : "") +
      (this.#lane.isNeeded ? ` ${this.#lane.about}` : "");
  }

  /** Draws the curves as a table: their values at the chosen instant, and their minimum and maximum in the view. */
  #drawTable(): void {
    if (!this.#details.open || !this.#model.isWhole) return;
    const { curves, instant } = this.#model;
    const [from, to] = this.view;
    const here = curves.steps(instant, instant, 1);
    const whole = curves.steps(from, to, 1000);
    const rows = curves.names.map((name) => {
      const at = curves.envelope(name, here);
      const shown = curves.envelope(name, whole);
      const highest = shown.max.reduce((most, value) => Math.max(most, value), 0);
      const lowest = shown.min.reduce((least, value) => Math.min(least, value), Number.POSITIVE_INFINITY);
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, nameOf(name)),
        h("td", {}, bytesOf(at.max[0])),
        h("td", {}, bytesOf(lowest)),
        h("td", {}, bytesOf(highest)),
      );
    });
    const head = ["Curve", `At event ${format.whole(instant)} (at most)`, "Least shown", "Most shown"];
    fill(
      this.#table,
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, ...rows),
      ),
    );
  }
}

const WHOLE_STEPS = [1, 2, 5]
  .flatMap((digit) => Array.from({ length: 13 }, (_, i) => digit * 10 ** i))
  .sort((a, b) => a - b);
const BINARY_STEPS = Array.from({ length: 44 }, (_, i) => 2 ** i);

function extended(values: Float64Array): Float64Array {
  const longer = new Float64Array(values.length + 1);
  longer.set(values);
  longer[values.length] = values[values.length - 1];
  return longer;
}
