// Recordings made by hand or at random, as objects, and the page's data of them.

import {
  CAUSES,
  type Cause,
  type Failure,
  type Frames,
  type Growth,
  type Strategy,
  type Summary,
  type TraceSummary,
} from "../../src/data/summary.ts";
import { Trace } from "../../src/data/trace.ts";
import { container, opened, type Values } from "./encode.ts";

export interface Block {
  start: number;
  freed: number;
  end: number;
  address: number;
  size: number;
  requested: number;
  stream: number;
  pool: number;
  stack: number;
  tag: number;
  /** 0 where it is left out. */
  category?: number;
  module?: number;
}

export interface Segment {
  start: number;
  /** As `start` where it is left out. */
  made?: number;
  /** 0, the empty one, where it is left out. */
  stack?: number;
  end: number;
  address: number;
  size: number;
  stream: number;
  pool: number;
  flags: number;
}

/** A segment that is off the device for some instants. */
export interface Pause {
  start: number;
  end: number;
  address: number;
  size: number;
  /** The region's tag; "kv" where it is left out. */
  region?: string;
}

export interface Recording {
  name: string;
  events: number;
  streams: string[];
  pools: string[];
  /** For each pool, the tag of its region; none where it is left out. */
  pool_regions?: string[];
  tags: string[];
  /** The names of the categories; none where they are left out. */
  categories?: string[];
  /** The paths of modules; none where they are left out. */
  modules?: string[];
  /** Each stack as frames, innermost first: "function file:line". The first is the empty one. */
  stacks: string[][];
  blocks: Block[];
  segments: Segment[];
  pauses?: Pause[];
  /** Microseconds between events; 0: no times. */
  pace_us: number;
  /** The events whose times are recorded, and these in microseconds; by the pace where it is left out. */
  times?: { event: number; time_us: number }[];
  ooms: (Pick<Failure, "event" | "requested"> & Partial<Failure>)[];
  annotations: { event: number; name: string; stage: number }[];
  bucket_events: number;
  /** The instants at which steps begin, and where the last ends. */
  steps: number[];
  growth: Growth;
  strategies?: Strategy[];
  replay_notes?: string[];
  frames?: Frames;
  /** The instants at which frames moved, and how many did; none where it is left out. */
  moves?: { event: number; frames: number }[];
  /** Whether its end is missing. */
  is_cut_off?: boolean;
  /** How many events came after its last, of which its segments tell; none where it is left out. */
  missed_events?: number;
  /** Blocks of smaller requests are not listed. */
  folded_below?: number;
}

function regionOf({ region = "kv" }: Pause): string {
  return region;
}

/** Returns the tags of the regions that are paused, each once. */
function regionsOf({ pauses = [] }: Recording): string[] {
  return [...new Set(pauses.map(regionOf))];
}

function isFolded({ folded_below = 0 }: Recording, { requested }: Block): boolean {
  return requested < folded_below;
}

export interface Counted {
  live: number;
  reserved: number;
  requested: number;
  paused: number;
  causes: Record<Cause, number>;
}

const u32 = (values: ArrayLike<number>): Values => ({ kind: "u32", values });
const u64 = (values: ArrayLike<number>): Values => ({ kind: "u64", values });

/** Returns the summary and the columns of some recordings. */
export function dataOf(recordings: Recording[]): { summary: Summary; columns: Record<string, Values> } {
  const strings: string[] = [];
  const columns: Record<string, Values> = {};
  const numbers = new Map<string, number>();
  const intern = (text: string): number => {
    let number = numbers.get(text);
    if (number === undefined) {
      number = strings.push(text) - 1;
      numbers.set(text, number);
    }
    return number;
  };
  const traces = recordings.map((recording, i) => {
    addRows(columns, `${i}/`, recording);
    addStacks(columns, `${i}/`, recording, intern);
    if (recording.folded_below !== undefined) addFolded(columns, `${i}/folded/`, recording);
    const curves = curvesOf(recording);
    for (const [name, { min, max }] of Object.entries(curves)) {
      columns[`${i}/curves/${name}/min`] = u64(min);
      columns[`${i}/curves/${name}/max`] = u64(max);
    }
    for (const { label, peak_reserved_bytes } of recording.strategies ?? []) {
      columns[`${i}/curves/${label}/reserved/max`] = u64([peak_reserved_bytes]);
    }
    return summaryOf(recording);
  });
  return { summary: { version: "0.0.0", traces, strings }, columns: withBlocksLast(columns) };
}

/** Returns a recording as the page reads it. */
export function traceOf(recording: Recording): Trace {
  const { summary, columns } = dataOf([recording]);
  return new Trace(opened(container(columns)), 0, summary.traces[0], summary.strings);
}

/** Returns columns in the order in which a page has them. */
function withBlocksLast(columns: Record<string, Values>): Record<string, Values> {
  const isOfBlocks = ([name]: [string, Values]) => /\/(blocks|folded)\//.test(name);
  const entries = Object.entries(columns);
  const others = entries.filter((entry) => !isOfBlocks(entry));
  return Object.fromEntries([...others, ...entries.filter(isOfBlocks)]);
}

function addRows(columns: Record<string, Values>, prefix: string, recording: Recording): void {
  const blocks = recording.blocks.filter((block) => !isFolded(recording, block));
  blocks.sort((a, b) => a.start - b.start);
  const segments = recording.segments.slice().sort((a, b) => a.start - b.start);
  columns[`${prefix}blocks/start`] = u32(blocks.map(({ start }) => start));
  columns[`${prefix}blocks/held`] = u32(blocks.map(({ start, freed }) => freed - start));
  columns[`${prefix}blocks/pending`] = u32(blocks.map(({ freed, end }) => end - freed));
  columns[`${prefix}blocks/address`] = u64(blocks.map(({ address }) => address));
  columns[`${prefix}blocks/requested`] = u64(blocks.map(({ requested }) => requested));
  columns[`${prefix}blocks/padding`] = u64(blocks.map(({ size, requested }) => size - requested));
  for (const name of ["stream", "pool", "stack", "tag"] as const) {
    columns[`${prefix}blocks/${name}`] = u32(blocks.map((block) => block[name]));
  }
  if (recording.categories !== undefined) {
    columns[`${prefix}blocks/category`] = u32(blocks.map(({ category }) => category ?? 0));
  }
  if (recording.modules !== undefined) {
    columns[`${prefix}blocks/module`] = u32(blocks.map(({ module }) => module ?? 0));
  }
  columns[`${prefix}segments/made`] = u32(segments.map(({ start, made }) => made ?? start));
  columns[`${prefix}segments/stack`] = u32(segments.map(({ stack }) => stack ?? 0));
  for (const name of ["start", "end", "stream", "pool", "flags"] as const) {
    columns[`${prefix}segments/${name}`] = u32(segments.map((segment) => segment[name]));
  }
  for (const name of ["address", "size"] as const) {
    columns[`${prefix}segments/${name}`] = u64(segments.map((segment) => segment[name]));
  }
  const pauses = recording.pauses ?? [];
  columns[`${prefix}pauses/start`] = u32(pauses.map(({ start }) => start));
  columns[`${prefix}pauses/end`] = u32(pauses.map(({ end }) => end));
  const regions = regionsOf(recording);
  columns[`${prefix}pauses/region`] = u32(pauses.map((pause) => regions.indexOf(regionOf(pause))));
  columns[`${prefix}pauses/address`] = u64(pauses.map(({ address }) => address));
  columns[`${prefix}pauses/size`] = u64(pauses.map(({ size }) => size));
  columns[`${prefix}steps/boundaries`] = u32(recording.steps);
  const moves = recording.moves ?? [];
  columns[`${prefix}moves/event`] = u32(moves.map(({ event }) => event));
  columns[`${prefix}moves/frames`] = u64(moves.map(({ frames }) => frames));
  if (recording.pace_us > 0) {
    const { events, pace_us } = recording;
    const times = recording.times ?? [0, events].map((event) => ({ event, time_us: event * pace_us }));
    columns[`${prefix}events/time_event`] = u32(times.map(({ event }) => event));
    columns[`${prefix}events/time_us`] = u64(times.map(({ time_us }) => time_us));
  }
}

/** Adds by how much what all blocks come to is more than what those do that are listed. */
function addFolded(columns: Record<string, Values>, prefix: string, recording: Recording): void {
  const listed = { ...recording, blocks: recording.blocks.filter((block) => !isFolded(recording, block)) };
  const [instants, numbers, distinct] = [[], [], []] as [number[], number[], number[][]];
  const known = new Map<string, number>();
  let before = new Array<number>(1 + CAUSES.length).fill(0);
  for (let instant = 0; instant <= recording.events; instant++) {
    const [all, some] = [recording, listed].map((which) => count(which, instant));
    const more = [all.live - some.live, ...CAUSES.map((cause) => all.causes[cause] - some.causes[cause])];
    const change = more.map((bytes, part) => bytes - before[part]);
    before = more;
    if (change.every((bytes) => bytes === 0)) continue;
    const key = change.join();
    if (!known.has(key)) known.set(key, distinct.push(change) - 1);
    instants.push(instant);
    numbers.push(known.get(key) ?? 0);
  }
  columns[`${prefix}instant`] = u32(instants);
  columns[`${prefix}change`] = u32(numbers);
  ["live", ...CAUSES].slice(0, -1).forEach((name, part) => {
    const stored = distinct.map((change) => (change[part] < 0 ? -2 * change[part] - 1 : 2 * change[part]));
    columns[`${prefix}changes/${name}`] = u64(stored);
  });
}

function addStacks(
  columns: Record<string, Values>,
  prefix: string,
  recording: Recording,
  intern: (text: string) => number,
): void {
  const frames = [...new Set(recording.stacks.flat())];
  const parts = frames.map((frame) => /^(.*) (\S*):(\d+)$/.exec(frame) ?? ["", frame, "", "0"]);
  columns[`${prefix}frames/function`] = u32(parts.map((part) => intern(part[1])));
  columns[`${prefix}frames/file`] = u32(parts.map((part) => intern(part[2])));
  columns[`${prefix}frames/line`] = u32(parts.map((part) => Number(part[3])));
  columns[`${prefix}frames/owner`] = u32(parts.map((part) => (part[2].startsWith("torch/") ? 2 : 0)));
  let end = 0;
  columns[`${prefix}stacks/ends`] = u32(
    recording.stacks.map((stack) => {
      end += stack.length;
      return end;
    }),
  );
  const places = new Map(frames.map((frame, i) => [frame, i]));
  columns[`${prefix}stacks/frames`] = u32(recording.stacks.flat().map((frame) => places.get(frame) ?? 0));
  columns[`${prefix}annotations/event`] = u32(recording.annotations.map(({ event }) => event));
  columns[`${prefix}annotations/name`] = u32(recording.annotations.map(({ name }) => intern(name)));
  columns[`${prefix}annotations/stage`] = u32(recording.annotations.map(({ stage }) => stage));
}

function summaryOf(recording: Recording): TraceSummary {
  const curves = pointsOf(recording);
  const hidden = recording.blocks.filter((block) => isFolded(recording, block));
  const peak = (name: "live" | "reserved") => {
    const event = curves[name].indexOf(curves[name].reduce((a, b) => Math.max(a, b)));
    return { event, bytes: curves[name][event] };
  };
  const named = (label: string, event: number) => ({
    event,
    label,
    ...count(recording, event),
    stream: 0,
  });
  return {
    name: recording.name,
    device: 0,
    events: recording.events,
    duration_us: recording.pace_us > 0 ? recording.events * recording.pace_us : null,
    has_stacks: recording.stacks.length > 1,
    settings: "",
    strategy: "caching",
    sizes: "verified",
    main_stream: 0,
    streams: recording.streams,
    pools: recording.pools,
    pool_regions: recording.pool_regions ?? recording.pools.map(() => ""),
    tags: recording.tags,
    categories: recording.categories ?? [],
    modules: recording.modules ?? [],
    regions: regionsOf(recording),
    large_page: 20 * 2 ** 20,
    bucket_events: recording.bucket_events,
    peak_live: peak("live"),
    peak_reserved: peak("reserved"),
    peak_paused: Math.max(...curves.paused),
    frames: recording.frames ?? null,
    // Of the first three it is known what was free for them.
    ooms: recording.ooms.map((oom, i) => {
      return { stream: 0, device_free: 0, largest_free: i < 3 ? 0 : null, ...oom };
    }),
    instants: [
      named("Peak live", peak("live").event),
      named("Peak reserved", peak("reserved").event),
      ...recording.ooms.map(({ event }) => named("Out of memory", event)),
      named("End", recording.events),
    ],
    aggregated:
      recording.folded_below === undefined
        ? null
        : { blocks: hidden.length, size_max: recording.folded_below, events_max: recording.events },
    strategies: recording.strategies ?? [],
    replay_notes: recording.replay_notes ?? [],
    growth: recording.growth,
    initial_blocks: recording.blocks.filter(({ start }) => start === 0).length,
    is_cut_off: recording.is_cut_off ?? false,
    missed_events: recording.missed_events ?? 0,
    skipped_events: 0,
    contradictions: 0,
  };
}

/** Counts one instant byte by byte of its description: blocks and segments as objects, nothing shared with src. */
export function count(recording: Recording, instant: number): Counted {
  const causes = Object.fromEntries(CAUSES.map((cause) => [cause, 0])) as Record<Cause, number>;
  const pauses = (recording.pauses ?? []).filter(({ start, end }) => start <= instant && instant < end);
  const isThere = ({ start, end, address }: { start: number; end: number; address: number }) =>
    start <= instant &&
    instant < end &&
    !pauses.some((pause) => pause.address <= address && address < pause.address + pause.size);
  const blocks = recording.blocks.filter(isThere);
  const segments = recording.segments.filter(isThere);
  let [live, requested] = [0, 0];
  for (const block of blocks) {
    if (block.freed <= instant) causes.waiting_for_events += block.size;
    else {
      const bytes = Math.min(block.size, Math.ceil(block.requested / 512) * 512);
      live += bytes;
      requested += block.requested;
      causes.rounding += block.size - bytes;
    }
  }
  for (const segment of segments) {
    const end = segment.address + segment.size;
    const covered = (from: number, to: number) =>
      blocks.reduce(
        (sum, { address, size }) => sum + Math.max(0, Math.min(to, address + size) - Math.max(from, address)),
        0,
      );
    const free = segment.size - covered(segment.address, end);
    if (segment.pool !== 0) causes.private_pools += free;
    else if (segment.stream !== 0) causes.other_streams += free;
    else if ((segment.flags & 2) !== 0) {
      const unit = (segment.flags & 1) !== 0 ? 20 * 2 ** 20 : 2 * 2 ** 20;
      for (let from = segment.address; from < end; from += unit) {
        const unitFree = Math.min(unit, end - from) - covered(from, Math.min(end, from + unit));
        if (unitFree === unit) causes.cached_segments += unit;
        else causes.partly_used_pages += unitFree;
      }
    } else if (free === segment.size) causes.cached_segments += free;
    else causes.split_remainders += free;
  }
  const sum = (rows: { size: number }[]) => rows.reduce((sum, { size }) => sum + size, 0);
  return { live, requested, reserved: sum(segments), paused: sum(pauses), causes };
}

/** Returns live, reserved and paused bytes at every instant. */
function pointsOf(recording: Recording): { live: number[]; reserved: number[]; paused: number[] } {
  if (recording.pauses !== undefined) {
    const all = Array.from({ length: recording.events + 1 }, (_, instant) => count(recording, instant));
    return {
      live: all.map(({ live }) => live),
      reserved: all.map(({ reserved }) => reserved),
      paused: all.map(({ paused }) => paused),
    };
  }
  const live = new Array<number>(recording.events + 1).fill(0);
  const reserved = new Array<number>(recording.events + 1).fill(0);
  const add = (values: number[], start: number, end: number, bytes: number) => {
    values[start] += bytes;
    if (end < values.length) values[end] -= bytes;
  };
  for (const { start, freed, size, requested } of recording.blocks) {
    add(live, start, freed, Math.min(size, Math.ceil(requested / 512) * 512));
  }
  for (const { start, end, size } of recording.segments) add(reserved, start, end, size);
  for (let i = 1; i <= recording.events; i++) {
    live[i] += live[i - 1];
    reserved[i] += reserved[i - 1];
  }
  return { live, reserved, paused: [0] };
}

function curvesOf(recording: Recording): Record<string, { min: number[]; max: number[] }> {
  const { paused, ...kept } = pointsOf(recording);
  const curves: Record<string, number[]> = recording.pauses === undefined ? kept : { ...kept, paused };
  return Object.fromEntries(
    Object.entries(curves).map(([name, values]) => {
      const buckets: number[][] = [];
      for (let i = 0; i < values.length; i += recording.bucket_events) {
        buckets.push(values.slice(i, i + recording.bucket_events));
      }
      const min = buckets.map((bucket) => bucket.reduce((a, b) => Math.min(a, b)));
      const max = buckets.map((bucket) => bucket.reduce((a, b) => Math.max(a, b)));
      return [name, { min, max }];
    }),
  );
}
