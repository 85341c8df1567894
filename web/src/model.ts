// The traces and what is computed from them. Results are kept for later calls.

import { type Palette, paletteOf } from "./coloring.ts";
import { Away } from "./data/away.ts";
import { type Axis, BY_EVENT, byTime } from "./data/axis.ts";
import { Bands } from "./data/bands.ts";
import type { Container } from "./data/container.ts";
import { Curves } from "./data/curves.ts";
import { Events } from "./data/events.ts";
import { type Gap, gapAt, type Run, rowsByAddress, runsAt } from "./data/gap.ts";
import { offeredGroupings } from "./data/groupings.ts";
import { Filter } from "./data/rows.ts";
import { type Placed, placedOf } from "./data/segments.ts";
import { CAUSES, groupOf, type NamedInstant, type Summary, type TraceSummary } from "./data/summary.ts";
import { rowsAt, Trace } from "./data/trace.ts";
import { type Tree, treeOf } from "./data/tree.ts";
import { shortNames, titleOf } from "./names.ts";
import type { BandsBy, Coloring, State, Store } from "./state.ts";

export class Model {
  readonly summary: Summary;
  readonly store: Store;
  readonly #container: Container;
  readonly #kept = new Map<string, unknown>();

  constructor(summary: Summary, container: Container, store: Store) {
    this.summary = summary;
    this.store = store;
    this.#container = container;
  }

  /** Whether the blocks have been read. Until then, access to them throws an error. */
  get isWhole(): boolean {
    return this.#container.isWhole;
  }

  get state(): Readonly<State> {
    return this.store.state;
  }

  /** Shows another trace. If it was the one to compare with, the two change places. */
  chooseTrace(trace: number): void {
    const other = trace === this.state.other ? this.state.trace : this.state.other;
    // Numbers of stacks are different in another trace.
    const filter = this.state.filter.replaceAll(/-?\bstack:\d+(?:-\d+)?\s*/g, "");
    this.store.set({ trace, other, view: null, filter });
  }

  /** Returns the short name of a trace. */
  nameOf(index: number): string {
    return this.#keep("names", () => shortNames(this.summary.traces.map(({ name }) => name)))[index];
  }

  /** The chosen trace. */
  get trace(): Trace {
    return this.traceOf(this.state.trace);
  }

  get instant(): number {
    return this.state.instants[this.state.trace];
  }

  get second(): number | null {
    return this.state.seconds[this.state.trace];
  }

  /** The instants from the first chosen to the second, the earlier first; the whole trace if there is no second. */
  get range(): [number, number] {
    const { instant, second } = this;
    if (second === null) return [0, this.trace.end];
    return second < instant ? [second, instant] : [instant, second];
  }

  /** The horizontal axis of the chart: by event unless time was chosen and is recorded. */
  get axis(): Axis {
    const { trace, state } = this;
    const isByTime = state.axis === "time" && trace.hasTimes;
    return isByTime ? this.#keep(`axis ${state.trace}`, () => byTime(trace)) : BY_EVENT;
  }

  /**
   * Whether the chart can show curves of other traces. By time it cannot: all curves have points at the same instants,
   * and other traces have few events when this one has many.
   */
  get hasOthers(): boolean {
    return this.summary.traces.length > 1 && this.axis === BY_EVENT;
  }

  traceOf(index: number): Trace {
    const { traces, strings } = this.summary;
    return this.#keep(`trace ${index}`, () => new Trace(this.#container, index, traces[index], strings));
  }

  /** The events of the chosen trace. */
  get events(): Events {
    return this.#keep(`events ${this.state.trace}`, () => new Events(this.trace));
  }

  get curves(): Curves {
    return this.curvesOf(this.state.trace);
  }

  curvesOf(index: number): Curves {
    return this.#keep(`curves ${index}`, () => new Curves(this.traceOf(index)));
  }

  /** What blocks are coloured by: the choice, or their size if it does not divide the blocks of this trace. */
  get coloring(): Coloring {
    const { coloring } = this.state;
    const offered: Coloring[] = [...offeredGroupings(this.trace.summary), "age"];
    return offered.includes(coloring) ? coloring : "size";
  }

  /** Returns the colours of the chosen trace's blocks. */
  palette(coloring: Coloring): Palette {
    const at = coloring === "age" ? this.instant : "";
    return this.#keepLast(`palette ${coloring}`, `${this.state.trace} ${at}`, () =>
      paletteOf(this, coloring, this.instant),
    );
  }

  /** What live bytes in the chart are divided by: the choice, if it divides the blocks of this trace. */
  get bandsBy(): BandsBy {
    const { bands } = this.state;
    return offeredGroupings(this.trace.summary).find((name) => name === bands) ?? "none";
  }

  /** The bands of the chart; `null` if live bytes are not divided. */
  get bands(): Bands | null {
    const { bandsBy } = this;
    if (bandsBy === "none") return null;
    return this.#keepLast("bands", `${this.state.trace} ${bandsBy}`, () => {
      return new Bands(this.trace, this.curves.exact("live"), this.palette(bandsBy));
    });
  }

  /** Returns the tree of a trace, with the frames of libraries if they are shown. */
  treeOf(index: number): Tree {
    const hasLibraries = this.state.frames === "all";
    return this.#keep(`tree ${index} ${hasLibraries}`, () => treeOf(this.traceOf(index), hasLibraries));
  }

  /**
   * Returns the instant that the report names, for instance a peak or the end; `null` if it names none. An
   * out-of-memory error has priority.
   */
  named(instant: number): NamedInstant | null {
    return namedAt(this.trace.summary, instant);
  }

  /** Returns the stream that sees the fragmentation: that of a named instant, otherwise the main stream. */
  streamAt(instant: number): number {
    return this.named(instant)?.stream ?? this.trace.summary.main_stream;
  }

  gapAt(instant: number): Gap {
    return this.#keepLast("gap", `${this.state.trace} ${instant}`, () => {
      const named = this.named(instant);
      const { aggregated } = this.trace.summary;
      const gap = gapAt(
        this.trace,
        instant,
        this.streamAt(instant),
        this.awayAt(instant),
        this.runsAt(instant),
      );
      // What other streams see of aggregated blocks is known at named instants only.
      return named === null || aggregated === null ? gap : { ...gap, ...sumsOf(named) };
    });
  }

  /** Returns the blocks of the chosen trace that exist at an instant. */
  blocksAt(instant: number): Uint32Array {
    return this.#keepLast("blocks", `${this.state.trace} ${instant}`, () =>
      rowsAt(this.trace.blocks, instant),
    );
  }

  /** Returns the same blocks as `blocksAt`, by address. */
  placedAt(instant: number): Placed {
    return this.#keepLast("placed", `${this.state.trace} ${instant}`, () => {
      return placedOf(rowsByAddress(this.trace.blocks, instant), this.trace);
    });
  }

  /** Returns the runs of the chosen trace at an instant, by address. */
  runsAt(instant: number): readonly Run[] {
    return this.#keepLast("runs", `${this.state.trace} ${instant}`, () => runsAt(this.trace, instant));
  }

  /** The name of memory in which there is no listed block. */
  get freeName(): string {
    return this.trace.summary.aggregated ? "free or aggregated" : "free";
  }

  /** Returns the paused memory of the chosen trace at an instant. */
  awayAt(instant: number): Away {
    return this.#keepLast("away", `${this.state.trace} ${instant}`, () => new Away(this.trace, instant));
  }

  /** The paused memory at the chosen instant. */
  get away(): Away {
    return this.awayAt(this.instant);
  }

  /** Returns the pause that covers an address at the chosen instant; `null` if none does. */
  pauseAt(address: number): number | null {
    return this.away.pauseAt(address);
  }

  get filter(): Filter {
    const { trace, filter } = this.state;
    return this.#keepLast("filter", `${trace} ${filter}`, () => {
      const stateAt = (block: number, instant: number) => this.stateAt(block, instant);
      return new Filter(this.trace, filter, () => this.#stackTexts(trace), stateAt);
    });
  }

  /** Returns the state of a block at an instant in words; empty if the block does not exist then. */
  stateAt(block: number, instant: number): string {
    const { start, freed, end, address } = this.trace.blocks;
    if (instant < start[block] || instant >= end[block]) return "";
    const state = instant < freed[block] ? "allocated" : "waiting for events";
    return this.awayAt(instant).has(address[block]) ? `${state}, paused` : state;
  }

  /** Returns the title of a stack (`titleOf`). */
  stackTitle(stack: number): string {
    const titles = this.#keep(`titles ${this.state.trace}`, () => new Map<number, string>());
    let title = titles.get(stack);
    if (title === undefined) {
      title = titleOf(Array.from(this.trace.stackFrames(stack), (number) => this.trace.frame(number)));
      titles.set(stack, title);
    }
    return title;
  }

  /** Returns every stack of a trace as one text in lower case, for searching. */
  #stackTexts(index: number): string[] {
    return this.#keep(`stack texts ${index}`, () => {
      const trace = this.traceOf(index);
      const frames = Array.from({ length: trace.frameCount }, (_, i) => {
        const frame = trace.frame(i);
        return `${frame.function} ${frame.file}:${frame.line}`.toLowerCase();
      });
      return Array.from({ length: trace.stackCount }, (_, stack) =>
        Array.from(trace.stackFrames(stack), (frame) => frames[frame]).join("\n"),
      );
    });
  }

  /** Returns the result for a key. Computes it if it is not kept. */
  #keep<T>(key: string, make: () => T): T {
    if (!this.#kept.has(key)) this.#kept.set(key, make());
    return this.#kept.get(key) as T;
  }

  /** Returns the result for a key, like `#keep`, but keeps only the last two results of a kind. */
  #keepLast<T>(kind: string, key: string, make: () => T): T {
    const kept = this.#keep(`last ${kind}`, () => [] as { key: string; value: T }[]);
    const known = kept.find((entry) => entry.key === key);
    if (known !== undefined) return known.value;
    const value = make();
    kept.unshift({ key, value });
    kept.splice(2);
    return value;
  }
}

/** Returns what the report says of an instant, an out-of-memory error first; `null` if it says nothing. */
export function namedAt({ instants }: TraceSummary, instant: number): NamedInstant | null {
  const there = instants.filter(({ event }) => event === instant);
  return there.find(({ label }) => /^out of memory/i.test(label)) ?? there[0] ?? null;
}

function sumsOf({
  live,
  reserved,
  requested,
  paused,
  causes,
}: NamedInstant): Omit<Gap, "blocks" | "segments" | "folded" | "free_in_pools"> {
  const difference = CAUSES.reduce((rest, cause) => rest - causes[cause], reserved - live);
  return { live, reserved, requested, paused, causes, difference };
}

/** Returns the state that the page shows first: the first out-of-memory error, otherwise the peak live bytes. */
export function initialState(traces: TraceSummary[]): State {
  const [first] = traces;
  // `direct` repeats the live curve. A strategy that needs more than was recorded would make the other curves small.
  const better = first.strategies.filter(
    (strategy) => groupOf(strategy) === 0 && strategy.peak_reserved_bytes < first.peak_reserved.bytes,
  );
  return {
    trace: 0,
    other: traces.length > 1 ? 1 : 0,
    instants: traces.map(({ ooms, peak_live }) => ooms[0]?.event ?? peak_live.event),
    seconds: traces.map(() => null),
    view: null,
    axis: "events",
    curves: [
      "live",
      "reserved",
      ...(first.peak_paused > 0 ? ["paused"] : []),
      ...better.map(({ label }) => `${label}/reserved`),
    ],
    bands: "none",
    coloring: first.tags.length > 1 ? "tag" : first.has_stacks ? "site" : "size",
    stackView: "instant",
    frames: "own",
    table: "holders",
    filter: "",
  };
}
