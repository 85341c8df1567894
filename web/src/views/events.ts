// The events around the chosen instant.

import { type Happening, isUnlisted, type What } from "../data/events.ts";
import { upperBound } from "../data/search.ts";
import type { Trace } from "../data/trace.ts";
import { bytesOf, type Child, copyable, fill, h, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { markText } from "../names.ts";
import type { View } from "../schedule.ts";
import { regionOf, stackCell } from "./block.ts";
import { type Column, Grid } from "./grid.ts";
import type { InstantBar } from "./instant.ts";

/** The number of events listed before the instant, and after it. */
const EVENTS_BESIDE = 12;
/** The maximum number of marks between two events that are named. */
const MARKS_NAMED = 3;
/** More than the entries of any event, so that each entry has a number of its own. */
const AT_ONCE_MAX = 256;

const TEXTS: Record<What, string> = {
  before: "before the first event",
  allocated: "allocated",
  asked: "asked to be freed",
  freed: "freed",
  reserved: "segment reserved",
  mapped: "pages mapped",
  returned: "segment given back",
  unmapped: "pages unmapped",
  paused: "paused",
  resumed: "resumed",
  failed: "request failed",
  marked: "mark",
  unknown: "not known",
};

export class EventsView implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "instants", "filter"] as const;
  readonly #model: Model;
  readonly #bar: InstantBar;
  readonly #about = h("p", { class: "quiet" });
  readonly #place = h("div");
  #grid: Grid | null = null;
  #drawnTrace: number | null = null;
  #happened: Happening[] = [];
  /** The number of each entry. It is unique in the trace. */
  #identities: number[] = [];

  constructor(model: Model, bar: InstantBar) {
    this.#model = model;
    this.#bar = bar;
    this.#place.addEventListener("keydown", (event) => this.#followFocus(event));
    this.element = section("events", "What happened", [], this.#about, this.#place);
  }

  draw(): void {
    const { state, instant, events } = this.#model;
    this.#happened = events.within(instant - EVENTS_BESIDE, instant + EVENTS_BESIDE);
    this.#identities = this.#happened.map(({ event }, i) => {
      const first = this.#happened.findIndex((other) => other.event === event);
      return event * AT_ONCE_MAX + i - first;
    });
    if (this.#grid === null || state.trace !== this.#drawnTrace) {
      this.#drawnTrace = state.trace;
      this.#grid = new Grid(
        "What happened",
        "entry",
        this.#columns(),
        { column: 0, isDescending: false },
        (row) => this.#identities[row],
        Number.POSITIVE_INFINITY,
      );
      fill(this.#place, this.#grid.element);
    }
    this.#about.textContent = this.#aboutText();
    const rows = Uint32Array.from(this.#happened.keys());
    this.#grid.show(rows, (row) => this.#happened[row].event === instant);
  }

  /** Chooses the event of the focused row, so that the whole page follows the arrow keys. */
  #followFocus({ key }: KeyboardEvent): void {
    if (key !== "ArrowUp" && key !== "ArrowDown") return;
    // The parent of a cell is its row. A stack that scrolls can have the focus, too, but its parent has no number.
    const row = document.activeElement?.parentElement;
    const event = row?.querySelector<HTMLButtonElement>("button[value]")?.value;
    if (event !== undefined) this.#bar.choose(Number(event));
  }

  #aboutText(): string {
    const { trace, instant, state } = this.#model;
    const last = Math.min(trace.end, instant + EVENTS_BESIDE);
    const first = Math.min(last, Math.max(1, instant - EVENTS_BESIDE));
    const range =
      trace.end === 0
        ? "The recording has no events."
        : `Events ${format.whole(first)} to ${format.whole(last)} of ${format.whole(trace.end)}, around the instant.`;
    const filter = state.filter === "" ? "" : " The filter leaves this list as it is.";
    return range + filter + this.#leftOutText();
  }

  /** Returns which events are not listed completely, and why. */
  #leftOutText(): string {
    const { aggregated } = this.#model.trace.summary;
    const unlisted = this.#happened.filter(isUnlisted).length;
    const unknown = this.#happened.filter(({ what }) => what === "unknown").length;
    const texts: string[] = [];
    if (unlisted > 0) {
      texts.push(
        ` ${format.counted(unlisted, "event")} of aggregated blocks, which are not listed one by one: of these the ` +
          "list has the bytes, rounded up, and leaves out the rest.",
      );
    }
    if (unknown > 0) {
      texts.push(
        ` What ${format.counted(unknown, "event")} did is left out: the page has no snapshots, and nothing that ` +
          "contradicts the rest of the recording" +
          (aggregated === null ? "." : ", or that happens to aggregated blocks while they are paused."),
      );
    }
    return texts.join("");
  }

  // ---- columns ----

  #columns(): Column[] {
    const { summary } = this.#model.trace;
    const of = (row: number) => this.#happened[row];
    // An entry never changes, so its number identifies the contents of its cells.
    const content = (row: number) => this.#identities[row];
    const owner = (title: string, name: "stream" | "pool", names: string[]): Column => ({
      title,
      key: (row) => this.#ownerOf(of(row))?.[name] ?? -1,
      cell: (row) => names[this.#ownerOf(of(row))?.[name] ?? -1] ?? "",
      content,
      isText: true,
    });
    const stack: Column = {
      title: "Asked for in",
      key: (row) => this.#ownerOf(of(row))?.stack ?? -1,
      cell: (row) => {
        const number = this.#ownerOf(of(row))?.stack;
        return number === undefined ? "" : stackCell(this.#model, number);
      },
      content,
      isText: true,
    };
    return [
      { title: "Event", key: content, cell: (row) => this.#eventButton(of(row)) },
      {
        title: "What",
        key: (row) => Object.keys(TEXTS).indexOf(of(row).what),
        cell: (row) => this.#text(of(row)),
        content,
        isText: true,
      },
      {
        title: "Bytes",
        key: (row) => of(row).bytes ?? -1,
        cell: (row) => bytesCell(of(row)),
        content,
      },
      { title: "Address", key: (row) => of(row).address ?? -1, cell: (row) => addressCell(of(row)), content },
      ...(summary.streams.length > 1 ? [owner("Stream", "stream", summary.streams)] : []),
      ...(summary.pools.length > 1 ? [owner("Pool", "pool", summary.pools)] : []),
      ...(summary.has_stacks ? [stack] : []),
    ];
  }

  #eventButton({ event }: Happening): HTMLElement {
    const choose = () => {
      // Focuses the cell, so that the arrow keys continue from there.
      button.closest("td")?.focus();
      this.#bar.choose(event);
    };
    const attributes = { type: "button", class: "link", value: event, click: choose };
    const button = h("button", attributes, format.whole(event));
    return button;
  }

  #text(happening: Happening): string {
    const { trace } = this.#model;
    const { what, rows } = happening;
    const more = this.#moreText(happening);
    const text = TEXTS[what] + (more === "" ? "" : `: ${more}`);
    if (isUnlisted(happening)) return `${text}; an aggregated block`;
    return what === "asked" ? text + waitText(trace, rows[0]) : text;
  }

  /** Returns the details of an entry; empty if there are none. */
  #moreText({ what, rows }: Happening): string {
    const { trace } = this.#model;
    const { summary, annotations, segments } = trace;
    switch (what) {
      case "before": {
        const there = upperBound(segments.start, 0);
        return `${format.counted(summary.initial_blocks, "block")}, ${format.counted(there, "segment")}`;
      }
      case "paused":
      case "resumed":
        return `region ${regionOf(trace, rows[0])}`;
      case "failed":
        return `the device had ${format.bytes(summary.ooms[rows[0]].device_free)} left`;
      case "marked": {
        const named = rows.slice(0, MARKS_NAMED).map((row) => `“${markText(annotations[row])}”`);
        const rest = rows.length - named.length;
        return named.join(", ") + (rest > 0 ? `, and ${format.whole(rest)} more` : "");
      }
      default:
        return "";
    }
  }

  /** Returns the stream, pool and stack of an entry, by number, as far as the page has them. */
  #ownerOf({ what, rows: [row] }: Happening): { stream: number; pool?: number; stack?: number } | undefined {
    const { blocks, segments, summary } = this.#model.trace;
    const of = ({ stream, pool, stack }: typeof blocks | typeof segments) => ({
      stream: stream[row],
      pool: pool[row],
      stack: stack[row],
    });
    if (row === undefined) return undefined;
    if (what === "allocated" || what === "asked" || what === "freed") return of(blocks);
    if (what === "reserved" || what === "mapped" || what === "returned" || what === "unmapped")
      return of(segments);
    return what === "failed" ? { stream: summary.ooms[row].stream } : undefined;
  }
}

/** Returns how long a block waits for events; empty if it is freed at once. */
function waitText({ blocks, end }: Trace, block: number): string {
  const freed = blocks.end[block];
  if (freed === blocks.freed[block] + 1) return "";
  return freed > end ? ", and waits to the end" : `, and waits until event ${format.whole(freed)}`;
}

function bytesCell({ bytes }: Happening): Child {
  return bytes === null ? "" : bytesOf(bytes);
}

function addressCell({ address }: Happening): Child {
  if (address === null) return "";
  const text = format.address(address);
  return copyable(text, text);
}
