// The effects of each event, inferred from the rows that begin or end at its instant.

import { upperBound } from "./search.ts";
import { EXPANDABLE, type Trace } from "./trace.ts";

export type What =
  | "before"
  | "allocated"
  | "asked"
  | "freed"
  | "reserved"
  | "mapped"
  | "returned"
  | "unmapped"
  | "paused"
  | "resumed"
  | "failed"
  | "marked"
  | "unknown";

/** One effect of an event, or the marks right after it. */
export interface Happening {
  event: number;
  what: What;
  /** The indices of the blocks, segments, pauses, failures or annotations concerned; empty if they are not listed. */
  rows: readonly number[];
  bytes: number | null;
  address: number | null;
}

/**
 * The look-up table divides instants into stretches of 2^6. Longer stretches take more time, shorter ones more memory.
 */
const STRETCH_BITS = 6;

/** An index of rows by instant. A look-up reads only the rows of one stretch of instants. */
class ByInstant {
  readonly #instants: Uint32Array;
  /** The rows, grouped by stretch of instants, and the end of each group. */
  readonly #rows: Uint32Array;
  readonly #ends: Uint32Array;

  /** Indexes the rows with instants from `first` to `last`. Linear time. */
  constructor(instants: Uint32Array, first: number, last: number) {
    this.#instants = instants;
    const stretches = (last >>> STRETCH_BITS) + 1;
    // The rows of stretch s are counted in `ends[s + 1]`. Summed up, `ends[s]` is the start of stretch s, and adding
    // its rows moves this to its end.
    const ends = new Uint32Array(stretches + 1);
    for (const instant of instants) {
      if (instant >= first && instant <= last) ends[(instant >>> STRETCH_BITS) + 1]++;
    }
    for (let i = 1; i <= stretches; i++) ends[i] += ends[i - 1];
    const rows = new Uint32Array(ends[stretches]);
    for (let row = 0; row < instants.length; row++) {
      const instant = instants[row];
      if (instant >= first && instant <= last) rows[ends[instant >>> STRETCH_BITS]++] = row;
    }
    [this.#rows, this.#ends] = [rows, ends];
  }

  /** Returns the rows with this instant, in order. */
  at(instant: number): number[] {
    const stretch = instant >>> STRETCH_BITS;
    const rows: number[] = [];
    for (let i = stretch === 0 ? 0 : this.#ends[stretch - 1]; i < this.#ends[stretch]; i++) {
      if (this.#instants[this.#rows[i]] === instant) rows.push(this.#rows[i]);
    }
    return rows;
  }
}

export class Events {
  readonly #trace: Trace;
  readonly #freed: ByInstant;
  readonly #ended: ByInstant;
  readonly #segmentsGone: ByInstant;
  readonly #pausesOver: ByInstant;
  readonly #failed: ByInstant;
  readonly #marked: ByInstant;

  /** Indexes the rows of a trace. Linear in the rows. Later look-ups do not read all rows. */
  constructor(trace: Trace) {
    this.#trace = trace;
    // No event caused the state at instant 0. A row whose end is after the last event did not end.
    const ofEvents = (instants: Uint32Array) => new ByInstant(instants, 1, trace.end);
    this.#freed = ofEvents(trace.blocks.freed);
    this.#ended = ofEvents(trace.blocks.end);
    this.#segmentsGone = ofEvents(trace.segments.end);
    this.#pausesOver = ofEvents(trace.pauses.end);
    this.#failed = ofEvents(eventsOf(trace.summary.ooms));
    // A mark comes after the event that it names; a mark with event 0 comes before the first event.
    this.#marked = new ByInstant(eventsOf(trace.annotations), 0, trace.end);
  }

  /**
   * Returns what happened from one event to another, both included, in order. Each event has at least one entry, which
   * may be `unknown`. Event 0 stands for the state before the first event.
   */
  within(from: number, to: number): Happening[] {
    const happened: Happening[] = [];
    for (let event = Math.max(0, from); event <= Math.min(to, this.#trace.end); event++) {
      happened.push(...(event === 0 ? [happening(0, "before")] : this.#at(event)));
      const marks = this.#marked.at(event);
      if (marks.length > 0) happened.push(happening(event, "marked", marks));
    }
    return happened;
  }

  #at(event: number): Happening[] {
    const known = [
      ...this.#failedAt(event),
      ...this.#blocksAt(event),
      ...this.#segmentsAt(event),
      ...this.#pausesAt(event),
      ...this.#unlistedAt(event),
    ];
    return known.length === 0 ? [happening(event, "unknown")] : known;
  }

  #failedAt(event: number): Happening[] {
    const { ooms } = this.#trace.summary;
    return this.#failed.at(event).map((row) => happening(event, "failed", [row], ooms[row].requested));
  }

  #blocksAt(event: number): Happening[] {
    const { start, end, requested, address } = this.#trace.blocks;
    const of = (what: What) => (row: number) => happening(event, what, [row], requested[row], address[row]);
    return [
      ...this.#freed
        .at(event)
        .filter((row) => end[row] > event)
        .map(of("asked")),
      ...this.#ended.at(event).map(of("freed")),
      ...rowsOf(start, event).map(of("allocated")),
    ];
  }

  /**
   * Returns what happened to segments. If part of a segment is released, the segment ends and its remaining parts
   * start. Only the bytes between these were released.
   */
  #segmentsAt(event: number): Happening[] {
    const { segments } = this.#trace;
    const { start, made, address, size, flags } = segments;
    const isExpandable = (row: number) => (flags[row] & EXPANDABLE) !== 0;
    const started = rowsOf(start, event);
    const gone = this.#segmentsGone.at(event).sort((a, b) => address[a] - address[b]);
    const happened: Happening[] = [];
    if (gone.length > 0) {
      const left = started.filter((row) => made[row] < event);
      const bytes = sum(gone, size) - sum(left, size);
      const before = left.find((row) => address[row] === address[gone[0]]);
      const first = address[gone[0]] + (before === undefined ? 0 : size[before]);
      happened.push(happening(event, isExpandable(gone[0]) ? "unmapped" : "returned", gone, bytes, first));
    }
    for (const row of started.filter((row) => made[row] === event)) {
      const what = isExpandable(row) ? "mapped" : "reserved";
      happened.push(happening(event, what, [row], size[row], address[row]));
    }
    return happened;
  }

  /**
   * Returns what was paused or resumed. Nothing was if a segment ended: its pause ends with it, and the pauses of its
   * remaining parts are not new.
   */
  #pausesAt(event: number): Happening[] {
    if (this.#segmentsGone.at(event).length > 0) return [];
    const { start, address, size } = this.#trace.pauses;
    const of = (what: What) => (row: number) => happening(event, what, [row], size[row], address[row]);
    return [...rowsOf(start, event).map(of("paused")), ...this.#pausesOver.at(event).map(of("resumed"))];
  }

  /** Returns what happened to an aggregated block, inferred from the change of the sums. */
  #unlistedAt(event: number): Happening[] {
    const change = this.#trace.folded?.changeAt(event) ?? null;
    // A pause or resume changes the sums by all blocks of a segment.
    const isPause =
      rowsOf(this.#trace.pauses.start, event).length > 0 || this.#pausesOver.at(event).length > 0;
    if (change === null || isPause) return [];
    const { live, rounding, waiting_for_events: waiting } = change;
    const of = (what: What, bytes: number) => [happening(event, what, [], bytes)];
    if (waiting > 0) return of("asked", Math.abs(live));
    if (live > 0 || rounding > 0) return of("allocated", live);
    if (live < 0 || rounding < 0) return of("freed", Math.abs(live));
    return waiting < 0 ? of("freed", -waiting) : [];
  }
}

function eventsOf(rows: readonly { event: number }[]): Uint32Array {
  return Uint32Array.from(rows, ({ event }) => event);
}

function happening(
  event: number,
  what: What,
  rows: readonly number[] = [],
  bytes: number | null = null,
  address: number | null = null,
): Happening {
  return { event, what, rows, bytes, address };
}

/** Returns the rows with a value in a sorted column. */
function rowsOf(sorted: Uint32Array, value: number): number[] {
  const [from, to] = [upperBound(sorted, value - 1), upperBound(sorted, value)];
  return Array.from({ length: to - from }, (_, i) => from + i);
}

function sum(rows: readonly number[], column: Float64Array): number {
  return rows.reduce((bytes, row) => bytes + column[row], 0);
}

/** Returns whether a happening concerns an aggregated block, which is not listed. */
export function isUnlisted({ what, rows }: Happening): boolean {
  return rows.length === 0 && (what === "allocated" || what === "asked" || what === "freed");
}
