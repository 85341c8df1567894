// An icicle graph of bytes by call stack, or by stream and size, at one instant or between two.
//
// It is drawn on a canvas. d3-flame-graph 5.0.0 makes an SVG element for each box. It takes 110 to 160 ms to show
// another instant with 1,900 boxes (bench/record/amd-epyc-2-cores/2026-11-23/flame_graph.txt).

import {
  allocatedIn,
  difference,
  find,
  type Picture,
  pathNodes,
  pathOf,
  single,
  weightsAt,
} from "../data/picture.ts";
import { firstRows } from "../data/rows.ts";
import { type Label, merged, type Tree } from "../data/tree.ts";
import {
  bytesOf,
  changeOf,
  choice,
  copyable,
  fill,
  fitCanvas,
  h,
  percentOf,
  Room,
  section,
  type Tooltip,
} from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
import type { View } from "../schedule.ts";
import type { StackView } from "../state.ts";
import { CATEGORY_COLORS, color, onThemeChange } from "../theme.ts";

const ROW_HEIGHT = 20;
const HEIGHT_MAX = 480;
/** The minimum width of a box in pixels. Narrower boxes are not drawn. */
const WIDTH_MIN = 0.5;
const TABLE_ROWS = 25;

const VIEW_TEXTS: readonly (readonly [StackView, string])[] = [
  ["instant", "At the instant"],
  ["peak", "At the peak"],
  ["range", "Allocated over the range"],
  ["difference", "First to second instant"],
  ["traces", "Against another trace"],
];

interface Box {
  node: number;
  x: number;
  y: number;
  width: number;
}

export class Icicle implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "other", "instants", "seconds", "stackView", "frames", "filter"] as const;
  readonly #model: Model;
  readonly #tooltip: Tooltip;
  readonly #mode;
  readonly #other = h("select", {
    "aria-label": "The other trace",
    change: () => this.#model.store.set({ other: Number(this.#other.value) }),
  });
  readonly #hides = h("input", {
    type: "checkbox",
    change: () => this.#model.store.set({ frames: this.#hides.checked ? "own" : "all" }),
  });
  readonly #hiding = h("label", { class: "check" }, this.#hides, "Hide library frames");
  readonly #title = h("p", { class: "verdict" });
  readonly #canvas = h("canvas", { "aria-hidden": "true" });
  readonly #scroll = h("div", {
    class: "canvas-scroll",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "icicle graph",
    "aria-describedby": "stacks-keys",
  });
  readonly #room = new Room(this.#scroll, () => this.#lay());
  readonly #path = h("p", { class: "path", "aria-live": "polite" });
  readonly #table = h("div", { class: "rest" });
  readonly #tableTitle = h("summary");
  readonly #details = h("details", {}, this.#tableTitle, this.#table);
  #picture: Picture | null = null;
  /** The picture that the table shows. */
  #listed: Picture | null = null;
  #boxes: Box[] = [];
  #root = 0;
  #focus = 0;
  #drawn = "";

  constructor(model: Model, tooltip: Tooltip) {
    this.#model = model;
    this.#tooltip = tooltip;
    this.#mode = choice("Bytes by stack", VIEW_TEXTS, (stackView) => model.store.set({ stackView }));
    this.element = section(
      "stacks",
      "Who holds it",
      [this.#hiding, this.#mode.element, this.#other],
      this.#title,
      this.#scroll,
      this.#path,
      h(
        "p",
        { class: "quiet keys", id: "stacks-keys" },
        "Click a box to widen it, and once more to go up. Keys: arrows, Enter widens, Escape comes back. The filter of " +
          "the tables dims what it does not find.",
      ),
      h("div", { class: "scroll" }, this.#details),
    );
    this.#details.addEventListener("toggle", () => this.drawRest());
    this.#scroll.append(this.#canvas);
    this.#scroll.addEventListener("pointermove", (event) => this.#hover(event));
    this.#scroll.addEventListener("pointerleave", () => tooltip.hide());
    this.#scroll.addEventListener("click", (event) => {
      const box = this.#boxUnder(event);
      if (box !== null) this.#widen(box.node);
    });
    this.#scroll.addEventListener("keydown", (event) => {
      if (this.#press(event.key)) event.preventDefault();
    });
    onThemeChange(() => this.#paint());
  }

  draw(): void {
    const { state, summary } = this.#model;
    const modes = VIEW_TEXTS.map(([mode]) => mode);
    this.#mode.show(state.stackView, summary.traces.length > 1 ? modes : modes.slice(0, -1));
    this.#drawOther();
    this.#hiding.hidden = !this.#model.trace.summary.has_stacks;
    this.#hides.checked = state.frames === "own";
    const { trace, other, instants, seconds, stackView, frames } = state;
    const wanted = JSON.stringify([trace, other, instants, seconds, stackView, frames]);
    if (wanted !== this.#drawn) {
      this.#drawn = wanted;
      const labels = this.#picture === null ? [] : pathOf(this.#picture.tree, this.#root);
      this.#picture = this.#make();
      // A box stays wide from instant to instant, if it still exists.
      this.#root = find(this.#picture, labels);
      this.#focus = this.#root;
      this.#drawTitle(this.#picture);
    }
    this.#lay();
  }

  /** Draws the table if it is open. It is slow, so it waits until instants stop changing. */
  drawRest(): void {
    const picture = this.#picture;
    if (picture === null || !this.#details.open || picture === this.#listed) return;
    this.#listed = picture;
    this.#drawTable(picture);
  }

  // ---- the picture ----

  #make(): Picture {
    const { trace, instant, second, state } = this.#model;
    const tree = this.#model.treeOf(state.trace);
    const at = (moment: number) => weightsAt(trace, tree, moment);
    const text = (moment: number) => `event ${format.whole(moment)}`;
    switch (state.stackView) {
      case "instant":
        return single(tree, at(instant), `Live at ${text(instant)}`);
      case "peak": {
        const { event } = trace.summary.peak_live;
        return single(tree, at(event), `Live at the peak, ${text(event)}`);
      }
      case "range": {
        const [from, to] = this.#model.range;
        const without = trace.summary.aggregated ? ", without aggregated blocks" : "";
        const title = `Allocated from ${text(from)} to ${text(to)}, freed or not${without}`;
        return single(tree, allocatedIn(trace, tree, from, to), title);
      }
      case "difference": {
        const to = second ?? trace.end;
        const hint = second === null ? " (the end: no second instant is chosen)" : "";
        return difference(tree, at(instant), at(to), `Live, from ${text(instant)} to ${text(to)}${hint}`);
      }
      case "traces":
        return this.#againstOther(tree, at(instant));
    }
  }

  #againstOther(tree: Tree, own: Float64Array): Picture {
    const { state } = this.#model;
    const other = this.#model.traceOf(state.other);
    const otherTree = this.#model.treeOf(state.other);
    const moment = state.instants[state.other];
    const weights = weightsAt(other, otherTree, moment);
    const both = merged(tree, otherTree);
    const before = new Float64Array(both.tree.parent.length);
    const after = new Float64Array(both.tree.parent.length);
    own.forEach((bytes, node) => {
      before[both.nodeOfFirst[node]] += bytes;
    });
    weights.forEach((bytes, node) => {
      after[both.nodeOfSecond[node]] += bytes;
    });
    const name = (index: number) =>
      `${this.#model.nameOf(index)} at event ${format.whole(state.instants[index])}`;
    return difference(both.tree, before, after, `Live, from ${name(state.trace)} to ${name(state.other)}`);
  }

  #drawOther(): void {
    const { state, summary } = this.#model;
    this.#other.hidden = state.stackView !== "traces";
    if (this.#other.hidden) return;
    const options = summary.traces.map((_, i) => {
      const option = h("option", { value: i }, this.#model.nameOf(i));
      option.selected = i === state.other;
      return option;
    });
    fill(this.#other, ...options);
  }

  // ---- boxes ----

  #lay(): void {
    const picture = this.#picture;
    if (picture === null) return;
    const width = this.#room.width - 2;
    this.#boxes = [];
    const ancestors = pathNodes(picture.tree, this.#root);
    ancestors.forEach((node, depth) => {
      this.#boxes.push({ node, x: 0, y: depth * ROW_HEIGHT, width });
    });
    const scale = width / Math.max(1, picture.width[this.#root]);
    const open: Box[] = this.#boxes.slice(-1);
    for (let box = open.pop(); box !== undefined; box = open.pop()) {
      let x = box.x;
      for (const node of picture.childrenOf(box.node)) {
        const child = { node, x, y: box.y + ROW_HEIGHT, width: picture.width[node] * scale };
        x += child.width;
        // Children are sorted by width, so the remaining ones are narrower.
        if (child.width < WIDTH_MIN) break;
        this.#boxes.push(child);
        open.push(child);
      }
    }
    this.#paint();
    this.#drawPath();
    this.#scroll.setAttribute("aria-label", `${picture.title}: ${format.bytes(picture.after[0])}`);
  }

  #paint(): void {
    const picture = this.#picture;
    if (picture === null || this.#room.width === 0) return;
    const height = this.#boxes.reduce((most, { y }) => Math.max(most, y + ROW_HEIGHT), ROW_HEIGHT);
    this.#scroll.style.height = `${Math.min(HEIGHT_MAX, height + 2)}px`;
    const context = fitCanvas(this.#canvas, this.#room.width - 2, height);
    context.textBaseline = "middle";
    const isFound = this.#finder(picture.tree);
    const rootY = (pathNodes(picture.tree, this.#root).length - 1) * ROW_HEIGHT;
    for (const box of this.#boxes) {
      this.#paintBox(context, picture, box, box.y < rootY || !isFound(box.node));
    }
  }

  /**
   * Returns a function that returns whether the filter finds a node: by its text, or by its blocks if the text does not
   * show that.
   */
  #finder({ labels, label, parent, nodeOfBlock }: Tree): (node: number) => boolean {
    const { filter, state, trace, instant } = this.#model;
    if (filter.isEmpty) return () => true;
    // A hidden frame is in no node's text, but in its blocks' stacks.
    if (!filter.isExact && state.frames === "all") {
      const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
      return (node) => {
        const { text, place } = labels[label[node]];
        return words.some((word) => `${text} ${place}`.toLowerCase().includes(word));
      };
    }
    const found = new Uint8Array(parent.length);
    for (let block = 0; block < trace.blocks.count; block++) {
      if (!filter.has(block, instant)) continue;
      for (let node = nodeOfBlock(block); found[node] === 0; node = parent[node]) found[node] = 1;
    }
    return (node) => found[node] === 1;
  }

  #paintBox(context: CanvasRenderingContext2D, picture: Picture, box: Box, isDim: boolean): void {
    const { node, x, y, width } = box;
    context.globalAlpha = isDim ? 0.4 : 1;
    context.fillStyle = picture.isDifference ? changeColor(picture, node) : boxColor(picture.tree, node);
    context.fillRect(x, y, Math.max(WIDTH_MIN, width - (width > 3 ? 1 : 0)), ROW_HEIGHT - 1);
    if (node === this.#focus && document.activeElement === this.#scroll) {
      context.strokeStyle = color("--ink");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(1, width - 3), ROW_HEIGHT - 3);
    }
    if (width < 34) return;
    const label = picture.tree.labels[picture.tree.label[node]];
    context.fillStyle = color("--on-box");
    const bytes = picture.isDifference
      ? format.change(picture.after[node] - picture.before[node])
      : format.bytes(picture.after[node]);
    const text = node === 0 ? `${picture.isDifference ? "change" : "all"}  ${bytes}` : shown(label.text);
    context.fillText(shortened(context, text, width - 10), x + 5, y + ROW_HEIGHT / 2);
    if (node === 0) return;
    // Adds the bytes and the file, if there is room.
    context.globalAlpha *= 0.65;
    let room = width - widthOf(context, text) - 30;
    const needed = widthOf(context, bytes);
    if (needed > room) return;
    context.fillText(bytes, x + width - needed - 6, y + ROW_HEIGHT / 2);
    room -= needed + 12;
    const place = shown(label.place.split("/").slice(-1)[0]);
    if (place === "" || widthOf(context, place) > room) return;
    context.fillText(place, x + 13 + widthOf(context, text), y + ROW_HEIGHT / 2);
  }

  #boxUnder(event: MouseEvent): Box | null {
    const bounds = this.#canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    return (
      this.#boxes.find(
        (box) => y >= box.y && y < box.y + ROW_HEIGHT && x >= box.x && x < box.x + box.width,
      ) ?? null
    );
  }

  #hover(event: PointerEvent): void {
    const box = this.#boxUnder(event);
    const picture = this.#picture;
    if (box === null || picture === null) {
      this.#tooltip.hide();
      return;
    }
    const label = picture.tree.labels[picture.tree.label[box.node]];
    const lines = [shown(label.place), this.#bytesText(picture, box.node)].filter(Boolean);
    this.#tooltip.show(
      event.clientX,
      event.clientY,
      h("b", {}, shown(label.text)),
      ...lines.map((line) => h("div", {}, line)),
    );
  }

  #bytesText(picture: Picture, node: number): string {
    const [before, after] = [picture.before[node], picture.after[node]];
    if (!picture.isDifference) {
      return `${format.bytes(after)}, ${format.percent(after / Math.max(1, picture.after[0]))} of all`;
    }
    return `${format.bytes(before)} → ${format.bytes(after)}: ${format.change(after - before)}`;
  }

  #widen(node: number): void {
    this.#root = node === this.#root && this.#picture !== null ? this.#picture.tree.parent[node] : node;
    this.#focus = this.#root;
    this.#lay();
  }

  #drawPath(): void {
    const picture = this.#picture;
    if (picture === null) return;
    const label = picture.tree.labels[picture.tree.label[this.#focus]];
    const [before, after] = [picture.before[this.#focus], picture.after[this.#focus]];
    const figures = picture.isDifference
      ? [changeOf(after - before), quiet(": "), bytesOf(before), quiet(" → "), bytesOf(after)]
      : [bytesOf(after), quiet(", "), percentOf(after / Math.max(1, picture.after[0])), quiet(" of all")];
    const isAll = this.#focus === 0;
    const name = isAll ? label.text : copyable(shown(label.text), label.text);
    const place = isAll ? " " : ` ${shown(label.place)} `;
    // The share of the root is always 100 %, so it is not shown.
    const isShort = isAll && !picture.isDifference;
    fill(this.#path, h("b", {}, name), place, ...(isShort ? figures.slice(0, 1) : figures));
  }

  #press(key: string): boolean {
    const picture = this.#picture;
    if (picture === null) return false;
    const { tree } = picture;
    const siblings = this.#focus === 0 ? [0] : picture.childrenOf(tree.parent[this.#focus]);
    const place = siblings.indexOf(this.#focus);
    const moves: Record<string, number | undefined> = {
      ArrowDown: picture.childrenOf(this.#focus)[0],
      ArrowUp: tree.parent[this.#focus],
      ArrowRight: siblings[place + 1],
      ArrowLeft: siblings[place - 1],
    };
    if (key in moves) {
      this.#focus = moves[key] ?? this.#focus;
      this.#paint();
      this.#drawPath();
    } else if (key === "Enter") this.#widen(this.#focus);
    else if (key === "Escape") this.#widen(0);
    else return false;
    return true;
  }

  // ---- the table beside it ----

  #drawTitle(picture: Picture): void {
    const { title, isDifference, before, after } = picture;
    fill(this.#title, title, ": ", isDifference ? changeOf(after[0] - before[0]) : bytesOf(after[0]), ".");
    this.#tableTitle.textContent = isDifference ? "The largest changes as a table" : "The largest as a table";
  }

  /** Draws the nodes with the most bytes, or with the largest changes, as a table. Bytes of children do not count. */
  #drawTable(picture: Picture): void {
    const { tree } = picture;
    const own = (total: Float64Array) => {
      const values = total.slice();
      for (let node = 1; node < values.length; node++) values[tree.parent[node]] -= total[node];
      return values;
    };
    const after = own(picture.after);
    const before = picture.isDifference ? own(picture.before) : picture.before;
    const size = (node: number) => Math.abs(after[node] - before[node]);
    const nodes: number[] = [];
    for (let node = 1; node < after.length; node++) if (size(node) > 0) nodes.push(node);
    const largest = firstRows(Uint32Array.from(nodes), size, true, TABLE_ROWS);
    const rows = Array.from(largest, (node) => {
      const path = pathNodes(tree, node).slice(1).reverse();
      return h(
        "tr",
        {},
        picture.isDifference ? h("td", {}, changeOf(after[node] - before[node])) : null,
        picture.isDifference ? h("td", {}, bytesOf(before[node])) : null,
        h("td", {}, bytesOf(after[node])),
        h("td", { class: "text" }, pathDetails(tree, path)),
      );
    });
    const head = picture.isDifference ? ["Change", "First", "Second", "Where"] : ["Bytes", "Where"];
    const rest = nodes.length - rows.length;
    fill(
      this.#table,
      h(
        "table",
        {},
        h("caption", { class: "quiet" }, picture.title),
        h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, ...rows),
      ),
      rest > 0 ? h("p", { class: "quiet" }, `${format.whole(rest)} more with less`) : null,
    );
  }
}

function quiet(text: string): HTMLElement {
  return h("span", { class: "quiet" }, text);
}

function pathDetails(tree: Tree, path: number[]): HTMLElement {
  const labels = path.map((node) => tree.labels[tree.label[node]]);
  const item = ({ text, place }: { text: string; place: string }) =>
    h("li", {}, h("b", {}, text), h("span", {}, ` ${place}`));
  const [first] = labels;
  return h(
    "details",
    {},
    h("summary", {}, h("b", {}, shown(first.text)), ` ${shown(first.place)}`),
    h("ol", { class: "frames", tabindex: 0, "aria-label": "Stack" }, ...labels.map(item)),
  );
}

/** The name of each label's colour. */
const colors = new WeakMap<Label, string>();

/** Returns the colour of a box. Boxes of sources in the same directory have the same colour. */
function boxColor(tree: Tree, node: number): string {
  if (node === 0) return color("--box-root");
  const label = tree.labels[tree.label[node]];
  let name = colors.get(label);
  if (name === undefined) {
    const source = label.place.replace(/:\d+$/, "").split("/").slice(-2, -1)[0] ?? label.text;
    let hash = 0;
    for (let i = 0; i < source.length; i++) hash = (hash * 31 + source.charCodeAt(i)) >>> 0;
    name = `--box-${hash % CATEGORY_COLORS}`;
    colors.set(label, name);
  }
  return color(name);
}

function changeColor(picture: Picture, node: number): string {
  const net = picture.after[node] - picture.before[node];
  const share = Math.abs(net) / Math.max(1, picture.width[node]);
  const name = net > 0 ? "--grown" : "--shrunk";
  return `color-mix(in srgb, ${color(name)} ${Math.round(12 + 50 * share)}%, ${color("--box-root")})`;
}

function shortened(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (widthOf(context, text) <= width) return text;
  let length = Math.max(1, Math.floor(text.length * (width / widthOf(context, text))));
  while (length > 1 && widthOf(context, `${text.slice(0, length)}…`) > width) length--;
  return `${text.slice(0, length)}…`;
}

/** The widths of texts in the font of boxes. */
const widths = new Map<string, number>();
/** The maximum number of widths that are kept. Names repeat from instant to instant, but bytes do not. */
const WIDTHS_MAX = 10_000;

function widthOf(context: CanvasRenderingContext2D, text: string): number {
  let width = widths.get(text);
  if (width === undefined) {
    width = context.measureText(text).width;
    if (widths.size === WIDTHS_MAX) widths.clear();
    widths.set(text, width);
  }
  return width;
}
