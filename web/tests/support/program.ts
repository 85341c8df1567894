// A recording made of one action an event, as real ones are, with the list of these actions: what a page has to tell
// of it, event by event.

import type { Block, Pause, Recording, Segment } from "./recording.ts";
import { generator, simulate } from "./simulate.ts";

const MIB = 2 ** 20;
const PAGE = 20 * MIB;

/** What an event did; without a place where the block is not listed, and "unknown" where nothing tells of it. */
export interface Action {
  what: string;
  bytes: number | null;
  address: number | null;
}

export interface Program {
  recording: Recording;
  /** What each event did, the first event's first. */
  actions: Action[];
}

const UNKNOWN: Action = { what: "unknown", bytes: null, address: null };

class Writer {
  readonly blocks: Block[] = [];
  readonly segments: Segment[] = [];
  readonly pauses: Pause[] = [];
  readonly ooms: Recording["ooms"] = [];
  readonly #never: number;
  readonly #foldedBelow: number;
  readonly #random: () => number;
  #heap = 0x7f00_0000_0000;

  constructor(seed: number, events: number, foldedBelow: number) {
    this.#random = generator(seed);
    this.#never = events + 1;
    this.#foldedBelow = foldedBelow;
  }

  /** Does something that can be done; nothing that a page tells of if it happens upon what cannot. */
  act(event: number): Action {
    const actions = [
      ...[this.#allocate, this.#allocate, this.#allocate, this.#ask, this.#free, this.#free],
      ...[this.#reserve, this.#cut, this.#giveBack, this.#pause, this.#resume, this.#fail],
    ];
    const isAsked = this.blocks.some(({ freed, end }) => freed === event - 1 && end === this.#never);
    const action = isAsked && this.#random() < 0.5 ? this.#free : actions[this.#below(actions.length)];
    return action.call(this, event) ?? UNKNOWN;
  }

  #below(bound: number): number {
    return Math.floor(this.#random() * bound);
  }

  #oneOf<T>(rows: T[]): T | undefined {
    return rows[this.#below(rows.length)];
  }

  #present(): Segment[] {
    return this.segments.filter(({ end }) => end === this.#never);
  }

  /** The pause under way of the memory at an address. */
  #pauseOf({ address }: { address: number }): Pause | undefined {
    return this.pauses.find(
      (pause) =>
        pause.end === this.#never && address >= pause.address && address < pause.address + pause.size,
    );
  }

  #isEmpty(segment: Segment): boolean {
    const { address, size } = segment;
    return !this.blocks.some(
      (block) => block.end === this.#never && block.address >= address && block.address < address + size,
    );
  }

  #told(what: string, block: Block, bytes: number): Action | null {
    if (block.requested >= this.#foldedBelow) return { what, bytes: block.requested, address: block.address };
    return this.#pauseOf(block) === undefined ? { what, bytes, address: null } : null;
  }

  #allocate(event: number): Action | null {
    const segment = this.#oneOf(this.#present().filter((segment) => this.#pauseOf(segment) === undefined));
    if (segment === undefined) return null;
    const inside = this.blocks.filter(
      ({ address }) => address >= segment.address && address < segment.address + segment.size,
    );
    const address = Math.max(segment.address, ...inside.map((block) => block.address + block.size));
    const requested = 1 + this.#below(MIB);
    const size = Math.ceil(requested / 512) * 512;
    if (address + size > segment.address + segment.size) return null;
    const { stream, pool } = segment;
    const ends = { freed: this.#never, end: this.#never };
    const block = {
      start: event,
      ...ends,
      address,
      size,
      requested,
      stream,
      pool,
      stack: 1 + this.#below(9),
      tag: 0,
    };
    this.blocks.push(block);
    return this.#told("allocated", block, size);
  }

  #ask(event: number): Action | null {
    const block = this.#oneOf(this.blocks.filter(({ freed }) => freed === this.#never));
    if (block === undefined) return null;
    block.freed = event;
    return this.#told("asked", block, block.size);
  }

  #free(event: number): Action | null {
    // What was asked for just before is done at once, as it is where no other stream uses a block.
    const asked = this.blocks.find(({ freed, end }) => freed === event - 1 && end === this.#never);
    const block = asked ?? this.#oneOf(this.blocks.filter(({ end }) => end === this.#never));
    if (block === undefined) return null;
    block.freed = Math.min(block.freed, event);
    block.end = event;
    return this.#told("freed", block, block.size);
  }

  #reserve(event: number): Action {
    const isExpandable = this.#random() < 0.5;
    const size = (1 + this.#below(4)) * PAGE;
    const address = this.#heap;
    this.#heap += 8 * PAGE;
    const whose = { stream: this.#below(2), pool: this.#below(2), flags: isExpandable ? 3 : 1, stack: 1 };
    this.segments.push({ start: event, end: this.#never, address, size, ...whose });
    return { what: isExpandable ? "mapped" : "reserved", bytes: size, address };
  }

  /** Unmaps the second page of some pages, of which one or two parts are left, paused as before. */
  #cut(event: number): Action | null {
    const long = ({ size, flags }: Segment) => (flags & 2) !== 0 && size >= 2 * PAGE;
    const segment = this.#oneOf(this.#present().filter((row) => long(row) && this.#isEmpty(row)));
    if (segment === undefined) return null;
    const pause = this.#pauseOf(segment);
    segment.end = event;
    if (pause !== undefined) pause.end = event;
    const address = segment.address + PAGE;
    const left = [
      { address: segment.address, size: PAGE },
      { address: address + PAGE, size: segment.size - 2 * PAGE },
    ].filter(({ size }) => size > 0);
    const made = segment.made ?? segment.start;
    for (const part of left) {
      this.segments.push({ ...segment, ...part, start: event, made, end: this.#never });
      if (pause !== undefined) this.pauses.push({ ...part, start: event, end: this.#never });
    }
    return { what: "unmapped", bytes: PAGE, address };
  }

  #giveBack(event: number): Action | null {
    const segment = this.#oneOf(this.#present().filter((row) => this.#isEmpty(row)));
    if (segment === undefined) return null;
    const pause = this.#pauseOf(segment);
    if (pause !== undefined) pause.end = event;
    segment.end = event;
    const what = (segment.flags & 2) !== 0 ? "unmapped" : "returned";
    return { what, bytes: segment.size, address: segment.address };
  }

  #pause(event: number): Action | null {
    const segment = this.#oneOf(this.#present().filter((row) => this.#pauseOf(row) === undefined));
    if (segment === undefined) return null;
    const { address, size } = segment;
    this.pauses.push({ start: event, end: this.#never, address, size });
    return { what: "paused", bytes: size, address };
  }

  #resume(event: number): Action | null {
    const pause = this.#oneOf(this.pauses.filter(({ end }) => end === this.#never));
    if (pause === undefined) return null;
    pause.end = event;
    return { what: "resumed", bytes: pause.size, address: pause.address };
  }

  #fail(event: number): Action {
    this.ooms.push({ event, requested: 3 * PAGE, stream: 1 });
    return { what: "failed", bytes: 3 * PAGE, address: null };
  }
}

/** Returns a recording of so many random actions, of which blocks of smaller requests than so many are not listed. */
export function program(seed: number, events: number, foldedBelow = 0): Program {
  const writer = new Writer(seed, events, foldedBelow);
  const actions = Array.from({ length: events }, (_, i) => writer.act(i + 1));
  const { blocks, segments, pauses, ooms } = writer;
  const recording = {
    ...simulate({ seed, steps: 1, requestsPerStep: 1 }),
    ...{ events, blocks, segments, pauses, ooms },
    annotations: [],
    steps: [0, events],
    bucket_events: 1,
    ...(foldedBelow > 0 ? { folded_below: foldedBelow } : {}),
  };
  return { recording, actions };
}
