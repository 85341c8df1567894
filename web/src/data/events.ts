// What happened, event by event, as far as the rows tell: an event is what begins or ends a row at its instant.

import { EXPANDABLE, type Trace, upperBound } from "./trace.ts";

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

/** One thing that an event did, or that came right after it. */
export interface Happening {
  event: number;
  what: What;
  /** The rows that it is of: blocks, segments, pauses, failures or annotations; none where these are not listed. */
  rows: readonly number[];
  bytes: number | null;
  address: number | null;
}

/** Instants are looked through by stretches of 2^6: more would take longer to, fewer more memory. */
const STRETCH_BITS = 6;

/** The rows of a column of instants, to be found by these without a look at all. */
class ByInstant {
  readonly #instants: Uint32Array;
  /** The rows by stretches of instants, and where the stretches end. */
  readonly #rows: Uint32Array;
  readonly #ends: Uint32Array;

  /** Rows of instants before `first` or after `last` are not found. Linear time. */
  constructor(instants: Uint32Array, first: number, last: number) {
    this.#instants = instants;
    const stretches = (last >>> STRETCH_BITS) + 1;
    // Counted one place on, so that each place is where a stretch begins, and ends once its rows are in.
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

  /** Returns the rows of an instant, in order. */
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

  /** Linear in the rows, once; what is asked then takes no look at all of them. */
  constructor(trace: Trace) {
    this.#trace = trace;
    // What was so before the first event is no event's doing, and what ends after the last never ended.
    const ofEvents = (instants: Uint32Array) => new ByInstant(instants, 1, trace.end);
    this.#freed = ofEvents(trace.blocks.freed);
    this.#ended = ofEvents(trace.blocks.end);
    this.#segmentsGone = ofEvents(trace.segments.end);
    this.#pausesOver = ofEvents(trace.pauses.end);
    this.#failed = ofEvents(eventsOf(trace.summary.ooms));
    // Marks have times of their own: they come after the event whose number they have, or before the first.
    this.#marked = new ByInstant(eventsOf(trace.annotations), 0, trace.end);
  }

  /**
   * Returns what happened from one event to another, both included and in order: of each event something, if only
   * that it is not known what. 0 stands for what was there before the first.
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

  /** Where a segment is cut, it ends, and what is left of it starts: only what is between went back. */
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

  /** A pause that ends with its segment is no resume, and what is left of that begins no other pause. */
  #pausesAt(event: number): Happening[] {
    if (this.#segmentsGone.at(event).length > 0) return [];
    const { start, address, size } = this.#trace.pauses;
    const of = (what: What) => (row: number) => happening(event, what, [row], size[row], address[row]);
    return [...rowsOf(start, event).map(of("paused")), ...this.#pausesOver.at(event).map(of("resumed"))];
  }

  /** What happened to a block that is not listed, which is known by what it changed of the sums. */
  #unlistedAt(event: number): Happening[] {
    const change = this.#trace.folded?.changeAt(event) ?? null;
    // A pause takes all blocks of a segment off the sums.
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

/** Returns the rows that have a value in a sorted column. */
function rowsOf(sorted: Uint32Array, value: number): number[] {
  const [from, to] = [upperBound(sorted, value - 1), upperBound(sorted, value)];
  return Array.from({ length: to - from }, (_, i) => from + i);
}

function sum(rows: readonly number[], column: Float64Array): number {
  return rows.reduce((bytes, row) => bytes + column[row], 0);
}

/** Returns whether a happening is of a block that is not listed. */
export function isUnlisted({ what, rows }: Happening): boolean {
  return rows.length === 0 && (what === "allocated" || what === "asked" || what === "freed");
}
