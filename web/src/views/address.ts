// The address space at the chosen instant: segments to scale, with their blocks.

import type { Palette } from "../coloring.ts";
import type { Away, Part } from "../data/away.ts";
import type { Run } from "../data/gap.ts";
import { GROUPING_NAMES, GROUPINGS, offeredGroupings } from "../data/groupings.ts";
import { fittingScale, type Layout, LINE_HEIGHT, layOut, type Piece } from "../data/layout.ts";
import type { Filter } from "../data/rows.ts";
import { upperBound } from "../data/search.ts";
import { segmentAt } from "../data/segments.ts";
import { liveBytes, type Trace } from "../data/trace.ts";
import { bytesFigure, choice, type Figure, fill, fitCanvas, h, Room, section, type Tooltip } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
import type { View } from "../schedule.ts";
import type { Coloring } from "../state.ts";
import { color, onThemeChange } from "../theme.ts";
import { ageText, blockDetails, regionOf } from "./block.ts";
import { hatchOf, Ink } from "./ink.ts";
import { segmentDetails, segmentLines } from "./segment.ts";

const HEIGHT_MAX = 420;
const COLORING_TEXTS: readonly (readonly [Coloring, string])[] = [
  ...GROUPING_NAMES.map((name) => [name, GROUPINGS[name].text] as const),
  ["age", "Age"],
];

/** The values that are the same for all blocks of a picture and determine how they look. */
interface Brush {
  filter: Filter;
  away: Away;
  instant: number;
  ink: Ink;
}

export class AddressView implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "instants", "coloring", "filter"] as const;
  readonly #model: Model;
  readonly #tooltip: Tooltip;
  readonly #coloring;
  readonly #canvas = h("canvas", { "aria-hidden": "true" });
  readonly #space = h("div", { class: "space" });
  readonly #scroll = h("div", {
    class: "canvas-scroll",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "map of memory",
    "aria-describedby": "address-keys",
  });
  readonly #room = new Room(this.#scroll, () => this.#lay());
  readonly #legend = h("ul", { class: "legend still", "aria-label": "Colours" });
  /** The legend's entry for each colour, created once for a palette. */
  #keys: { element: HTMLElement; bytes: Figure }[] = [];
  readonly #freeKey = h("li");
  readonly #pausedBytes = bytesFigure();
  readonly #pausedKey = h(
    "li",
    {},
    h("i", { class: "key paused" }),
    "paused",
    " ",
    this.#pausedBytes.element,
  );
  readonly #details = h("div", { class: "picked", "aria-live": "polite" });
  #zoom = 1;
  #layout: Layout = { lines: [], height: 0 };
  /** The height of the visible part and its scroll position; `null` if the browser has to be asked for this. */
  #height = 0;
  #scrollTop: number | null = null;
  /** The values that the layout was computed for. */
  #laid: readonly unknown[] = [];
  #placedRuns: readonly Run[] = [];
  /** The same runs in drawing order. */
  #runs: Run[] = [];
  /** The blocks at the instant, by address, and their addresses. */
  #blocks: Uint32Array = new Uint32Array(0);
  #addresses: Float64Array = new Float64Array(0);
  #palette: Palette = { of: () => 0, names: [], single: 0, colors: [] };
  #picked: number | null = null;
  /** The chosen segment, if free memory in it was clicked. */
  #pickedSegment: number | null = null;
  #place = "";

  constructor(model: Model, tooltip: Tooltip) {
    this.#model = model;
    this.#tooltip = tooltip;
    this.#coloring = choice("Colour blocks by", COLORING_TEXTS, (coloring) => model.store.set({ coloring }));
    const tool = (text: string, label: string, factor: number) =>
      h("button", { type: "button", "aria-label": label, click: () => this.#zoomBy(factor) }, text);
    this.element = section(
      "address",
      "Address space",
      [
        h("span", { class: "quiet" }, "Colour by"),
        this.#coloring.element,
        h("div", { class: "tools" }, tool("+", "Larger", 2), tool("−", "Smaller", 0.5)),
      ],
      this.#legend,
      this.#scroll,
      h(
        "p",
        { class: "quiet keys", id: "address-keys" },
        "Click a block, or what is free of a segment, to keep it below. Keys: arrows go from block to block and from line to line, + − change the " +
          "scale. Every block and every segment is also in the tables.",
      ),
      this.#details,
    );
    this.#space.append(this.#canvas);
    this.#scroll.append(this.#space);
    this.#scroll.addEventListener("scroll", () => {
      this.#scrollTop = null;
      requestAnimationFrame(() => this.#paint());
    });
    this.#scroll.addEventListener("pointermove", (event) => this.#hover(event));
    this.#scroll.addEventListener("pointerleave", () => tooltip.hide());
    this.#scroll.addEventListener("click", (event) => this.#click(event));
    this.#scroll.addEventListener("keydown", (event) => {
      if (this.#press(event.key)) event.preventDefault();
    });
    this.#scroll.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    onThemeChange(() => this.#paint());
  }

  draw(): void {
    const { trace, instant, state } = this.#model;
    const { summary } = trace;
    const place = `${state.trace} ${instant}`;
    if (place !== this.#place) {
      this.#place = place;
      this.#orderRuns(this.#model.runsAt(instant));
      const placed = this.#model.placedAt(instant);
      this.#blocks = placed.blocks;
      this.#addresses = placed.addresses;
      this.#pickedSegment = null;
      if (this.#picked !== null && !this.#blocks.includes(this.#picked)) this.#picked = null;
    }
    this.#coloring.show(this.#model.coloring, [...offeredGroupings(summary), "age"]);
    const palette = this.#model.palette(this.#model.coloring);
    if (palette !== this.#palette) {
      this.#palette = palette;
      this.#makeLegend();
    }
    this.#lay();
    this.#showLegend();
    this.#drawPicked();
    const isPaused = this.#model.away.bytes > 0;
    const paused = isPaused ? this.#runs.filter((run) => this.#pausedParts(run).length > 0).length : 0;
    this.#scroll.setAttribute(
      "aria-label",
      `Address space at event ${format.whole(instant)}: ${format.counted(this.#runs.length, "segment")}, ` +
        (paused === 0 ? "" : `${format.whole(paused)} of them paused, `) +
        format.counted(this.#blocks.length, "block"),
    );
  }

  #pausedParts({ address, end }: Run): Part[] {
    return this.#model.away.within(address, end);
  }

  #orderRuns(runs: readonly Run[]): void {
    if (runs === this.#placedRuns) return;
    this.#placedRuns = runs;
    this.#runs = [...runs].sort((a, b) => a.pool - b.pool || a.stream - b.stream || a.address - b.address);
  }

  #lay(): void {
    const width = this.#room.width - 2;
    const { away, trace } = this.#model;
    // Blocks change from instant to instant, but segments mostly stay, so the layout is kept.
    const laid = [trace, this.#runs, width, this.#zoom, away.bytes === 0 ? null : away];
    if (laid.some((value, i) => value !== this.#laid[i])) {
      this.#laid = laid;
      const headings = this.#headings();
      const scale = fittingScale(this.#runs, headings.size, width, HEIGHT_MAX - 40) / this.#zoom;
      this.#layout = layOut(this.#runs, (run) => headings.get(groupOf(run)) ?? "", width, scale);
      this.#height = Math.min(HEIGHT_MAX, this.#layout.height + 4);
      this.#scroll.style.height = `${this.#height}px`;
      this.#space.style.height = `${this.#layout.height}px`;
    }
    this.#paint();
  }

  /** Returns the heading of the segments of each pool and stream. */
  #headings(): Map<string, string> {
    const { trace } = this.#model;
    const { streams, pools } = trace.summary;
    const sums = new Map<string, { run: Run; count: number; bytes: number; paused: Part[] }>();
    for (const run of this.#runs) {
      const sum = sums.get(groupOf(run)) ?? { run, count: 0, bytes: 0, paused: [] };
      sum.count++;
      sum.bytes += run.end - run.address;
      sum.paused.push(...this.#pausedParts(run));
      sums.set(groupOf(run), sum);
    }
    return new Map(
      Array.from(sums, ([group, { run, count, bytes, paused }]) => [
        group,
        `${pools[run.pool]} · stream ${streams[run.stream]} · ` +
          `${format.counted(count, "segment")}, ${format.bytes(bytes)}${pausedText(trace, paused, bytes)}`,
      ]),
    );
  }

  #paint(): void {
    const { width } = this.#room;
    if (width === 0 || this.#place === "") return;
    this.#scrollTop ??= this.#scroll.scrollTop;
    const scrollTop = Math.min(this.#scrollTop, Math.max(0, this.#layout.height - this.#height));
    const context = fitCanvas(this.#canvas, width, this.#height);
    this.#canvas.style.transform = `translateY(${scrollTop}px)`;
    context.fillStyle = color("--ink-2");
    const { instant, filter, away } = this.#model;
    const brush = { filter, away, instant, ink: new Ink(this.#palette.colors) };
    for (const line of this.#layout.lines) {
      const y = line.y - scrollTop;
      if (y > this.#height + LINE_HEIGHT || y < -2 * LINE_HEIGHT) continue;
      if (line.heading !== null) context.fillText(line.heading, 0, y - 7);
      for (const piece of line.pieces) this.#paintPiece(brush, piece, y);
    }
    brush.ink.paint(context, () => hatchOf(context, scrollTop));
  }

  #paintPiece(brush: Brush, piece: Piece, y: number): void {
    const { blocks } = this.#model.trace;
    const { away, ink } = brush;
    ink.free(piece.x, y, piece.width);
    const scale = piece.width / (piece.to - piece.from);
    const xOf = (address: number) => piece.x + (address - piece.from) * scale;
    let drawnTo = Number.NEGATIVE_INFINITY;
    let outline: { x: number; width: number } | null = null;
    for (let i = Math.max(0, upperBound(this.#addresses, piece.from) - 1); i < this.#blocks.length; i++) {
      const block = this.#blocks[i];
      const start = Math.max(piece.from, this.#addresses[i]);
      const blockEnd = this.#addresses[i] + blocks.size[block];
      const end = Math.min(piece.to, blockEnd);
      if (start >= piece.to) break;
      if (end <= start) continue;
      const [x, right] = [xOf(start), xOf(end)];
      // Many blocks may share a pixel. Only the first one is drawn.
      if (right < drawnTo + 0.5) continue;
      drawnTo = right;
      // Leaves a thin line of the segment's colour between neighbours that are wide enough.
      const width = Math.max(0.75, right - x - (right - x > 3 ? 0.75 : 0));
      this.#paintBlock(brush, block, x, y, width, end === blockEnd ? scale : 0);
      if (block === this.#picked) outline = { x, width };
    }
    if (away.bytes > 0) {
      for (const { from, to } of away.within(piece.from, piece.to))
        ink.hatched(xOf(from), y, (to - from) * scale);
    }
    outline ??= this.#outlineOf(piece, xOf);
    if (outline !== null) ink.outlined(outline.x, y, outline.width);
  }

  /** Returns the part of the chosen segment that lies on a piece; `null` if there is none. */
  #outlineOf(piece: Piece, xOf: (address: number) => number): { x: number; width: number } | null {
    if (this.#pickedSegment === null) return null;
    const { address, size } = this.#model.trace.segments;
    const from = Math.max(piece.from, address[this.#pickedSegment]);
    const to = Math.min(piece.to, address[this.#pickedSegment] + size[this.#pickedSegment]);
    return from < to ? { x: xOf(from), width: xOf(to) - xOf(from) } : null;
  }

  /**
   * Paints a block, and the bytes at its end that rounding added. `roundingScale` is the pixels per byte of these; 0 if
   * they are not on this piece.
   */
  #paintBlock(
    { filter, away, instant, ink }: Brush,
    block: number,
    x: number,
    y: number,
    width: number,
    roundingScale: number,
  ): void {
    const { blocks } = this.#model.trace;
    const isPaused = away.bytes > 0 && away.has(blocks.address[block]);
    const isWaiting = instant >= blocks.freed[block];
    const isFound = filter.isEmpty || filter.has(block, instant) || block === this.#picked;
    ink.block(this.#palette.of(block), isFound, isWaiting || isPaused, x, y, width);
    const rounding = (blocks.size[block] - liveBytes(blocks, block)) * roundingScale;
    if (rounding > 1 && !isWaiting) ink.rounding(x + width - rounding, y, rounding);
  }

  #makeLegend(): void {
    const { names, colors } = this.#palette;
    this.#keys = names.map((name, i) => {
      const bytes = bytesFigure();
      const key = h("i", { class: "key", style: `background: var(${colors[i]})` });
      return { element: h("li", {}, key, name, " ", bytes.element), bytes };
    });
    fill(this.#freeKey, h("i", { class: "key free" }), this.#model.freeName);
    fill(this.#legend, ...this.#keys.map(({ element }) => element), this.#freeKey);
  }

  #showLegend(): void {
    const sums = new Float64Array(this.#keys.length);
    const { blocks } = this.#model.trace;
    for (const block of this.#blocks) sums[this.#palette.of(block)] += blocks.size[block];
    this.#keys.forEach(({ element, bytes }, i) => {
      element.hidden = sums[i] === 0;
      bytes.show(sums[i]);
    });
    const paused = this.#model.away.bytes;
    this.#pausedBytes.show(paused);
    if (paused === 0) this.#pausedKey.remove();
    else if (!this.#pausedKey.isConnected) this.#legend.append(this.#pausedKey);
  }

  // ---- hover, pick, keys ----

  #blockUnder(event: PointerEvent | MouseEvent): number | null {
    const address = this.#addressUnder(event);
    if (address === null) return null;
    const place = upperBound(this.#addresses, address) - 1;
    if (place < 0) return null;
    const block = this.#blocks[place];
    const { blocks } = this.#model.trace;
    return address < blocks.address[block] + blocks.size[block] ? block : null;
  }

  #addressUnder(event: MouseEvent): number | null {
    const box = this.#scroll.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + this.#scroll.scrollTop;
    const line = this.#layout.lines.find((line) => y >= line.y && y < line.y + LINE_HEIGHT);
    const piece = line?.pieces.find((piece) => x >= piece.x && x < piece.x + piece.width);
    if (piece === undefined) return null;
    return piece.from + ((x - piece.x) / piece.width) * (piece.to - piece.from);
  }

  #hover(event: PointerEvent): void {
    const block = this.#blockUnder(event);
    const address = this.#addressUnder(event);
    if (address === null) {
      this.#tooltip.hide();
      return;
    }
    const { trace, instant } = this.#model;
    const { blocks, summary } = trace;
    const pause = this.#model.pauseAt(address);
    const region = pause === null ? [] : [`paused with region ${regionOf(trace, pause)}`];
    const segment = segmentAt(trace, address, instant);
    if (block === null) {
      const of = segment === null ? [] : segmentLines(this.#model, segment);
      const more = [this.#freeText(address), ...region, ...of];
      const what = this.#model.freeName + (pause === null ? "" : ", paused");
      this.#tooltip.show(
        event.clientX,
        event.clientY,
        h("b", {}, what),
        ...more.map((line) => h("div", {}, line)),
      );
      return;
    }
    const tag = shown(summary.tags[blocks.tag[block]]);
    const more = [
      `${this.#model.stateAt(block, instant)}, ${ageText(trace, block, instant)}`,
      ...region,
      `stream ${summary.streams[blocks.stream[block]]}, ${summary.pools[blocks.pool[block]]}${tag ? `, ${tag}` : ""}`,
      ...(summary.has_stacks ? [this.#model.stackTitle(blocks.stack[block])] : []),
    ];
    this.#tooltip.show(
      event.clientX,
      event.clientY,
      h("b", {}, `${format.bytes(blocks.requested[block])} in ${format.bytes(blocks.size[block])}`),
      ...more.map((line) => h("div", {}, line)),
    );
  }

  #freeText(address: number): string {
    const { blocks } = this.#model.trace;
    const run = this.#runs.find((run) => address >= run.address && address < run.end);
    const place = upperBound(this.#addresses, address) - 1;
    const before = place < 0 ? 0 : blocks.address[this.#blocks[place]] + blocks.size[this.#blocks[place]];
    const from = Math.max(run?.address ?? 0, before);
    const to = Math.min(run?.end ?? 0, this.#addresses[place + 1] ?? Number.POSITIVE_INFINITY);
    return `${format.bytes(to - from)} at ${format.address(from)}`;
  }

  #click(event: MouseEvent): void {
    const block = this.#blockUnder(event);
    const address = this.#addressUnder(event);
    const { trace, instant } = this.#model;
    this.#pick(block, block === null && address !== null ? segmentAt(trace, address, instant) : null);
  }

  #pick(block: number | null, segment: number | null = null): void {
    this.#picked = block;
    this.#pickedSegment = segment;
    this.#paint();
    this.#drawPicked();
  }

  #drawPicked(): void {
    const { trace, instant } = this.#model;
    const block = this.#picked;
    const segment =
      block === null ? this.#pickedSegment : segmentAt(trace, trace.blocks.address[block], instant);
    fill(
      this.#details,
      ...(block === null ? [] : blockDetails(this.#model, block, instant)),
      ...(segment === null ? [] : segmentDetails(this.#model, segment)),
    );
  }

  #press(key: string): boolean {
    switch (key) {
      case "ArrowRight":
      case "ArrowLeft":
        this.#step(key === "ArrowRight" ? 1 : -1);
        return true;
      case "ArrowDown":
      case "ArrowUp":
        this.#stepLine(key === "ArrowDown" ? 1 : -1);
        return true;
      case "+":
      case "=":
        this.#zoomBy(2);
        return true;
      case "-":
        this.#zoomBy(0.5);
        return true;
      case "Escape":
        this.#pick(null);
        return true;
      default:
        return false;
    }
  }

  /** Returns the blocks in drawing order. */
  #inOrder(): number[] {
    const found: number[] = [];
    for (const run of this.#runs) {
      for (let i = upperBound(this.#addresses, run.address - 1); this.#addresses[i] < run.end; i++) {
        found.push(this.#blocks[i]);
      }
    }
    return found;
  }

  #step(by: number): void {
    const order = this.#inOrder();
    const at = this.#picked === null ? -1 : order.indexOf(this.#picked);
    this.#pickInSight(order[Math.max(0, Math.min(order.length - 1, at < 0 ? 0 : at + by))]);
  }

  #stepLine(by: number): void {
    const address = this.#picked === null ? null : this.#model.trace.blocks.address[this.#picked];
    const { lines } = this.#layout;
    const here = lines.findIndex(({ pieces }) =>
      pieces.some(({ from, to }) => address !== null && address >= from && address < to),
    );
    for (let i = here < 0 ? 0 : here + by; i >= 0 && i < lines.length; i += by) {
      for (const piece of lines[i].pieces) {
        const place = upperBound(this.#addresses, piece.from - 1);
        if (this.#addresses[place] < piece.to) {
          this.#pickInSight(this.#blocks[place]);
          return;
        }
      }
    }
  }

  #pickInSight(block: number | undefined): void {
    if (block === undefined) return;
    const address = this.#model.trace.blocks.address[block];
    const line = this.#layout.lines.find(({ pieces }) =>
      pieces.some(({ from, to }) => address >= from && address < to),
    );
    const { scrollTop, clientHeight } = this.#scroll;
    if (line !== undefined && (line.y < scrollTop || line.y + LINE_HEIGHT > scrollTop + clientHeight)) {
      this.#scroll.scrollTop = line.y - clientHeight / 2;
    }
    this.#pick(block);
  }

  #wheel(event: WheelEvent): void {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.#zoomBy(2 ** (-event.deltaY / 240));
  }

  #zoomBy(factor: number): void {
    const before = this.#layout.height;
    const middle = (this.#scroll.scrollTop + this.#scroll.clientHeight / 2) / Math.max(1, before);
    this.#zoom = Math.max(1 / 4, Math.min(256, this.#zoom * factor));
    this.#lay();
    this.#scroll.scrollTop = middle * this.#layout.height - this.#scroll.clientHeight / 2;
    this.#scrollTop = null;
    this.#paint();
  }
}

/** Returns the end of a heading: the paused bytes of a group and their regions. */
function pausedText(trace: Trace, parts: Part[], bytes: number): string {
  if (parts.length === 0) return "";
  const paused = parts.reduce((sum, { from, to }) => sum + to - from, 0);
  const regions = new Set(parts.map(({ pause }) => regionOf(trace, pause)));
  const share = paused === bytes ? "" : `${format.bytes(paused)} of it `;
  return `, ${share}paused (${[...regions].join(", ")})`;
}

function groupOf({ pool, stream }: Run): string {
  return `${pool} ${stream}`;
}
