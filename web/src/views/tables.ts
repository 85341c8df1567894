// The tables: largest holders, most frequent sizes, longest-lived blocks, and the blocks and segments at the instant.

import { type Group, grouped } from "../data/rows.ts";
import { type Content, contentOf, placedOf } from "../data/segments.ts";
import { rowsAt } from "../data/trace.ts";
import {
  bytesOf,
  type Child,
  changeOf,
  choice,
  copyable,
  countOf,
  fill,
  h,
  percentOf,
  section,
} from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
import type { View } from "../schedule.ts";
import type { TableName } from "../state.ts";
import { spanText, stackCell } from "./block.ts";
import { type Column, Grid } from "./grid.ts";
import { requestsText, segmentAge } from "./segment.ts";

const TABLE_TEXTS: readonly (readonly [TableName, string])[] = [
  ["holders", "Largest holders"],
  ["sizes", "Most frequent sizes"],
  ["lifetimes", "Longest-lived"],
  ["blocks", "Blocks at the instant"],
  ["segments", "Segments"],
];

/** The stream, pool, tag and stack of each row, by number. */
interface Owners {
  stream: Uint32Array;
  pool: Uint32Array;
  tag?: Uint32Array;
  stack: Uint32Array;
}

const FILTER_HELP =
  "Words that all have to be found. -word leaves out what has it, and quotes keep words together. " +
  "stream:7 is that stream, size:1000-2048 requests of so many bytes, address:0x7f… the block that has it, " +
  "state:waiting what waits for events at the instant; there are state:allocated and state:paused, too.";

export class Tables implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "instants", "seconds", "table", "filter"] as const;
  readonly #model: Model;
  readonly #choice;
  readonly #filter: HTMLInputElement;
  readonly #about = h("p", { class: "quiet" });
  readonly #place = h("div");
  #grid: Grid | null = null;
  #kind = "";
  #groups: Group[] = [];
  /** The contents of each segment. */
  #contents = new Map<number, Content>();
  /** The live bytes of each group at the second instant. */
  #later = new Map<number, number>();

  constructor(model: Model) {
    this.#model = model;
    this.#choice = choice("Table", TABLE_TEXTS, (table) => model.store.set({ table }));
    this.#filter = h("input", {
      type: "search",
      id: "filter",
      placeholder: "frame, tag, stream, pool",
      spellcheck: "false",
      autocomplete: "off",
      title: FILTER_HELP,
      "aria-label": "Filter by frame, tag, stream or pool",
      input: () => model.store.set({ filter: this.#filter.value }),
    });
    this.element = section(
      "tables",
      "Tables",
      [this.#choice.element, h("label", { class: "filter" }, "Filter ", this.#filter)],
      this.#about,
      this.#place,
    );
  }

  draw(): void {
    const { state, trace } = this.#model;
    this.#choice.show(state.table);
    if (this.#filter.value !== state.filter) this.#filter.value = state.filter;
    const hasSecond = this.#model.second !== null;
    const kind = `${state.table} ${state.trace} ${hasSecond}`;
    const rows = this.#rows();
    if (kind !== this.#kind || this.#grid === null) {
      this.#kind = kind;
      this.#grid = this.#gridOf(state.table);
      fill(this.#place, this.#grid.element);
    }
    const left = state.filter === "" ? [] : [...this.#unknownText(), ...this.#leftText(rows)];
    fill(this.#about, this.#aboutText(), ...left, this.#foldedText());
    this.#grid.show(rows);
    const hasNone = trace.blocks.count === 0 && trace.summary.aggregated === null;
    if (hasNone) this.#about.textContent = "The recording has no blocks.";
  }

  #aboutText(): string {
    const { state, instant, second, trace } = this.#model;
    const [from, to] = this.#model.range;
    const range =
      second === null ? "the whole recording" : `events ${format.whole(from)} to ${format.whole(to)}`;
    const texts: Record<TableName, string> = {
      holders:
        `Live bytes at event ${format.whole(instant)}, by ${trace.summary.has_stacks ? "stack" : "size"}, stream, pool and tag` +
        (second === null ? "." : `, and how they change until event ${format.whole(second)}.`),
      sizes: `Requests by their size in ${range}.`,
      lifetimes: `Blocks by how long they were held, in ${range}.`,
      blocks: `Blocks that are there at event ${format.whole(instant)}.`,
      segments: `Segments at event ${format.whole(instant)}, an expandable one by its mapped parts.`,
    };
    return texts[state.table];
  }

  /** Returns a text about the words of the filter that are not understood. */
  #unknownText(): Child[] {
    const { unknown } = this.#model.filter;
    if (unknown.length === 0) return [];
    const words = unknown.map((word) => `“${word}”`).join(", ");
    return [
      h("b", {}, ` The filter’s ${words} ${unknown.length === 1 ? "is" : "are"} not understood`),
      ": there are stack:3, size:1000-2048, stream:7, address:0x7f…, state:waiting (or allocated, or " +
        "paused), and words.",
    ];
  }

  /** Returns how many rows pass the filter, and their bytes. */
  #leftText(rows: Uint32Array): Child[] {
    const { blocks, segments } = this.#model.trace;
    const ofGroup = (row: number) => this.#groups[row].live;
    const ofBlock = (row: number) => blocks.requested[row];
    const texts: Record<TableName, [string, (row: number) => number, string]> = {
      holders: ["holder", ofGroup, "live"],
      sizes: ["size", ofGroup, "of requests"],
      lifetimes: ["block", ofBlock, "of requests"],
      blocks: ["block", ofBlock, "of requests"],
      segments: [
        "segment",
        (row) => (this.#model.pauseAt(segments.address[row]) === null ? segments.size[row] : 0),
        "reserved",
      ],
    };
    const [noun, bytesOfRow, what] = texts[this.#model.state.table];
    const bytes = rows.reduce((sum, row) => sum + bytesOfRow(row), 0);
    return [` The filter leaves ${format.counted(rows.length, noun)}: `, bytesOf(bytes), ` ${what}.`];
  }

  #foldedText(): string {
    const { aggregated } = this.#model.trace.summary;
    if (aggregated === null) return "";
    const live = format.bytes(this.#model.gapAt(this.#model.instant).folded);
    return ` ${format.counted(aggregated.blocks, "aggregated block")} not listed, with ${live} live at the instant.`;
  }

  /** Computes the contents of the chosen table. Returns its rows: blocks, segments, or indices into `#groups`. */
  #rows(): Uint32Array {
    const { state, trace, instant, second, filter } = this.#model;
    switch (state.table) {
      case "holders":
        this.#groups = this.#holdersAt(instant);
        this.#later = new Map();
        if (second !== null) this.#addLater(second);
        return Uint32Array.from(this.#groups.keys());
      case "sizes":
        this.#groups = grouped(
          trace,
          filter.of(this.#madeInRange(), instant),
          (block) => trace.blocks.requested[block],
        );
        return Uint32Array.from(this.#groups.keys());
      case "lifetimes":
        return filter.of(this.#madeInRange(), instant);
      case "blocks":
        return filter.of(this.#model.blocksAt(instant), instant);
      case "segments":
        return this.#segmentsAt(instant);
    }
  }

  /** Returns the segments at an instant in which a block passes the filter; all segments if there is no filter. */
  #segmentsAt(instant: number): Uint32Array {
    const { trace, filter } = this.#model;
    const placed = this.#model.placedAt(instant);
    const found = filter.isEmpty ? placed : placedOf(filter.of(placed.blocks, instant), trace);
    this.#contents = new Map();
    return rowsAt(trace.segments, instant).filter((segment) => {
      this.#contents.set(segment, contentOf(trace, segment, instant, placed));
      return filter.isEmpty || contentOf(trace, segment, instant, found).blocks > 0;
    });
  }

  #holdersAt(instant: number): Group[] {
    const { trace, filter } = this.#model;
    const { address, freed } = trace.blocks;
    const allocated = this.#model.blocksAt(instant).filter((block) => instant < freed[block]);
    const away = this.#model.awayAt(instant);
    return grouped(trace, filter.of(allocated, instant), this.#holderKey(), (block) =>
      away.has(address[block]),
    );
  }

  /** Adds the holders at the second instant, including those that do not exist at the first. */
  #addLater(second: number): void {
    const known = new Set(this.#groups.map(({ key }) => key));
    for (const group of this.#holdersAt(second)) {
      this.#later.set(group.key, group.live);
      if (!known.has(group.key)) this.#groups.push({ ...group, blocks: 0, live: 0, paused: 0, largest: 0 });
    }
  }

  #holderKey(): (block: number) => number {
    const { blocks, summary } = this.#model.trace;
    const { streams, pools, tags } = summary;
    const first = summary.has_stacks ? blocks.stack : blocks.requested;
    return (block) =>
      ((first[block] * streams.length + blocks.stream[block]) * pools.length + blocks.pool[block]) *
        tags.length +
      blocks.tag[block];
  }

  #madeInRange(): Uint32Array {
    const { start } = this.#model.trace.blocks;
    const [from, to] = this.#model.range;
    const all = Uint32Array.from(start.keys());
    if (from === 0 && to >= this.#model.trace.end) return all;
    return all.filter((block) => start[block] > from && start[block] <= to);
  }

  // ---- columns ----

  #gridOf(table: TableName): Grid {
    switch (table) {
      case "holders":
        return new Grid(
          "Largest holders",
          "holder",
          this.#holderColumns(),
          {
            column: this.#model.second === null ? 0 : 1,
            isDescending: true,
          },
          (row) => this.#groups[row].key,
        );
      case "sizes":
        return new Grid(
          "Most frequent sizes",
          "size",
          this.#sizeColumns(),
          {
            column: 1,
            isDescending: true,
          },
          (row) => this.#groups[row].key,
        );
      case "lifetimes":
        return new Grid(
          "Longest-lived blocks",
          "block",
          this.#lifetimeColumns(),
          {
            column: 0,
            isDescending: true,
          },
          (block) => block,
        );
      case "blocks":
        return new Grid(
          "Blocks at the instant",
          "block",
          this.#blockColumns(),
          {
            column: 0,
            isDescending: true,
          },
          (block) => block,
        );
      case "segments":
        return new Grid(
          "Segments at the instant",
          "segment",
          this.#segmentColumns(),
          {
            column: 2,
            isDescending: true,
          },
          (segment) => segment,
        );
    }
  }

  #holderColumns(): Column[] {
    const group = (row: number) => this.#groups[row];
    const grown = (row: number) => (this.#later.get(group(row).key) ?? 0) - group(row).live;
    const isBySize = !this.#model.trace.summary.has_stacks;
    const largest: Column = {
      title: "Largest",
      key: (row) => group(row).largest,
      cell: (row) => bytesOf(group(row).largest),
    };
    const shareOf = (row: number) =>
      group(row).live / Math.max(1, this.#model.gapAt(this.#model.instant).live);
    const share: Column = {
      title: "Of all live",
      key: (row) => group(row).live,
      cell: (row) => percentOf(shareOf(row)),
      content: shareOf,
    };
    const change: Column = { title: "Change", key: grown, cell: (row) => changeOf(grown(row)) };
    const paused: Column = {
      title: "Paused",
      key: (row) => group(row).paused,
      cell: (row) => bytesOf(group(row).paused),
    };
    return [
      { title: "Live", key: (row) => group(row).live, cell: (row) => bytesOf(group(row).live) },
      ...(this.#model.second === null ? [share] : [change]),
      ...(this.#model.trace.summary.peak_paused > 0 ? [paused] : []),
      { title: "Blocks", key: (row) => group(row).blocks, cell: (row) => countOf(group(row).blocks) },
      ...(isBySize ? [] : [largest]),
      ...this.#whereColumns((row) => group(row).block, isBySize),
    ];
  }

  #sizeColumns(): Column[] {
    const group = (row: number) => this.#groups[row];
    return [
      { title: "Request", key: (row) => group(row).key, cell: (row) => bytesOf(group(row).key) },
      { title: "Requests", key: (row) => group(row).blocks, cell: (row) => countOf(group(row).blocks) },
      { title: "All together", key: (row) => group(row).live, cell: (row) => bytesOf(group(row).live) },
      {
        title: "Exact request",
        key: (row) => group(row).key,
        cell: (row) => copyable(`${format.whole(group(row).key)} bytes`, String(group(row).key)),
      },
    ];
  }

  #lifetimeColumns(): Column[] {
    const { trace } = this.#model;
    const { start, freed } = trace.blocks;
    const held = (block: number) => Math.min(freed[block], trace.end) - start[block];
    const isOpen = (block: number) => start[block] === 0 || freed[block] > trace.end;
    const event = (value: number) =>
      value > trace.end ? "never" : copyable(format.whole(value), String(value));
    return [
      {
        title: "Held for",
        key: held,
        cell: (block) => spanText(trace, start[block], Math.min(freed[block], trace.end), isOpen(block)),
        content: (block) => block,
      },
      this.#requestColumn(),
      {
        title: "Made at",
        key: (block) => start[block],
        cell: (block) => (start[block] === 0 ? "before" : event(start[block])),
      },
      { title: "Freed at", key: (block) => freed[block], cell: (block) => event(freed[block]) },
      ...this.#whereColumns((block) => block, false),
    ];
  }

  #blockColumns(): Column[] {
    const { trace } = this.#model;
    const { blocks } = trace;
    const address = (block: number) => format.address(blocks.address[block]);
    return [
      this.#requestColumn(),
      { title: "Size", key: (block) => blocks.size[block], cell: (block) => bytesOf(blocks.size[block]) },
      {
        title: "Address",
        key: (block) => blocks.address[block],
        cell: (block) => copyable(address(block), address(block)),
      },
      {
        title: "Age",
        key: (block) => -blocks.start[block],
        cell: (block) => spanText(trace, blocks.start[block], this.#model.instant, blocks.start[block] === 0),
        content: (block) => `${blocks.start[block]} ${this.#model.instant}`,
      },
      {
        title: "State",
        key: (block) =>
          Number(this.#model.instant >= blocks.freed[block]) +
          2 * Number(this.#model.awayAt(this.#model.instant).has(blocks.address[block])),
        cell: (block) => this.#model.stateAt(block, this.#model.instant),
        isText: true,
      },
      ...this.#whereColumns((block) => block, false),
    ];
  }

  #segmentColumns(): Column[] {
    const { trace } = this.#model;
    const { segments } = trace;
    const content = (segment: number) => this.#contents.get(segment) as Content;
    const bytes = (title: string, key: (segment: number) => number): Column => ({
      title,
      key,
      cell: (segment) => bytesOf(key(segment)),
    });
    const address = (segment: number) => format.address(segments.address[segment]);
    return [
      bytes("Size", (segment) => segments.size[segment]),
      bytes("Live", (segment) => content(segment).live),
      bytes(format.capital(this.#model.freeName), (segment) => content(segment).free),
      {
        title: "Blocks",
        key: (segment) => content(segment).blocks,
        cell: (segment) => countOf(content(segment).blocks),
      },
      {
        title: "Address",
        key: (segment) => segments.address[segment],
        cell: (segment) => copyable(address(segment), address(segment)),
      },
      {
        title: "Age",
        key: (segment) => -segments.made[segment],
        cell: (segment) => segmentAge(trace, segment, this.#model.instant),
        content: (segment) => `${segment} ${this.#model.instant}`,
      },
      {
        title: "Requests",
        key: (segment) => segments.flags[segment],
        cell: (segment) => requestsText(this.#model, segment),
        content: (segment) => requestsText(this.#model, segment),
        isText: true,
      },
      ...this.#ownerColumns(segments, (segment) => segment),
    ];
  }

  #requestColumn(): Column {
    const { blocks } = this.#model.trace;
    return {
      title: "Request",
      key: (block) => blocks.requested[block],
      cell: (block) => bytesOf(blocks.requested[block]),
    };
  }

  /** Returns the columns that show where a row's block belongs: its request, if `isBySize`, and its owners. */
  #whereColumns(blockOf: (row: number) => number, isBySize: boolean): Column[] {
    const { blocks } = this.#model.trace;
    const owners = this.#ownerColumns(blocks, blockOf);
    if (!isBySize) return owners;
    const size = (row: number) => blocks.requested[blockOf(row)];
    return [{ title: "Request", key: size, cell: (row) => bytesOf(size(row)) }, ...owners];
  }

  /**
   * Returns the columns of stream, pool, tag and stack, without those that are the same for all rows of the trace.
   * Segments have no tag.
   */
  #ownerColumns(of: Owners, placeOf: (row: number) => number): Column[] {
    const { summary } = this.#model.trace;
    const text = (title: string, column: Uint32Array, name: (value: number) => Child): Column => ({
      title,
      key: (row) => column[placeOf(row)],
      cell: (row) => name(column[placeOf(row)]),
      isText: true,
    });
    const columns: Column[] = [];
    if (summary.streams.length > 1)
      columns.push(text("Stream", of.stream, (stream) => summary.streams[stream]));
    if (summary.pools.length > 1) columns.push(text("Pool", of.pool, (pool) => summary.pools[pool]));
    if (of.tag !== undefined && summary.tags.length > 1)
      columns.push(text("Tag", of.tag, (tag) => shown(summary.tags[tag])));
    if (summary.has_stacks) columns.push(text("Stack", of.stack, (stack) => stackCell(this.#model, stack)));
    return columns;
  }
}
