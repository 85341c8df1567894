// A made-up training job of any length, on an allocator of a few lines: the same for the same seed.
//
// Every step makes activations, frees them in reverse, and keeps one block: a leak, planted to be found. It
// has two streams, a private pool and an expandable segment, so that every cause of the gap occurs.

import type { Growth } from "../../src/data/summary.ts";
import type { Block, Recording, Segment } from "./recording.ts";

const MIB = 2 ** 20;
const LARGE = 1;
const EXPANDABLE = 2;
/** What blocks are for, by their stacks. The first, of blocks without a stack, is that of none. */
const CATEGORIES = ["unknown", "optimizer_state", "parameters", "activations", "kv_cache"];
const MODULES = ["", "layers.*.attn", "head"];

export interface Job {
  name?: string;
  seed: number;
  steps: number;
  requestsPerStep: number;
  leakBytes?: number;
  hasStacks?: boolean;
}

/** Where one stream's requests of one pool go. */
interface Place {
  stream: number;
  pool: number;
  flags: number;
  /** Free addresses by size. */
  free: Map<number, number[]>;
  /** Where the newest segment still has room. */
  next: number;
  end: number;
}

export function simulate(job: Job): Recording {
  const random = generator(job.seed);
  const blocks: Block[] = [];
  const segments: Segment[] = [];
  const stacks = job.hasStacks === false ? [[]] : makeStacks(random);
  const places = [
    { stream: 0, pool: 0, flags: LARGE },
    { stream: 0, pool: 0, flags: LARGE | EXPANDABLE },
    { stream: 1, pool: 0, flags: LARGE },
    { stream: 0, pool: 1, flags: LARGE },
  ].map((place) => ({ ...place, free: new Map<number, number[]>(), next: 0, end: 0 }));
  let event = 0;
  let heap = 0x7f00_0000_0000;

  const grow = (place: Place, size: number, stack: number) => {
    const bytes = Math.ceil(size / (20 * MIB)) * 20 * MIB;
    // An expandable segment goes on where it ended; a plain one lies somewhere else.
    const isContinued = (place.flags & EXPANDABLE) !== 0 && place.end > 0;
    const address = isContinued ? place.end : place.flags & EXPANDABLE ? 0x7e00_0000_0000 : heap;
    if ((place.flags & EXPANDABLE) === 0) heap += bytes + 64 * MIB;
    const { stream, pool, flags } = place;
    segments.push({ start: event, end: 0, address, size: bytes, stream, pool, flags, stack });
    if (!isContinued) place.next = address;
    place.end = address + bytes;
  };
  const allocate = (place: Place, requested: number, stack: number, tag: number): Block => {
    event++;
    const size = Math.ceil(requested / 512) * 512 + (random() < 0.1 ? 512 : 0);
    let address = place.free.get(size)?.pop();
    if (address === undefined) {
      if (place.next + size > place.end) grow(place, size, stack);
      address = place.next;
      place.next += size;
    }
    const { stream, pool } = place;
    const category = stack % CATEGORIES.length;
    const block = {
      start: event,
      freed: 0,
      end: 0,
      address,
      size,
      requested,
      stream,
      pool,
      stack,
      tag,
      category,
      module: category % MODULES.length,
    };
    blocks.push(block);
    return block;
  };
  const free = (place: Place, block: Block, isPending: boolean) => {
    event++;
    block.freed = event;
    // What waits is given back two events later, which nobody reuses.
    block.end = isPending ? event + 2 : event;
    const list = place.free.get(block.size);
    if (isPending) return;
    if (list === undefined) place.free.set(block.size, [block.address]);
    else list.push(block.address);
  };

  const boundaries = [0];
  for (let step = 0; step < job.steps; step++) {
    const made: [Place, Block][] = [];
    for (let i = 0; i < job.requestsPerStep; i++) {
      const place = places[random() < 0.7 ? Number(random() < 0.5) : 2 + Number(random() < 0.4)];
      const requested = Math.ceil(2 ** (6 + random() * 17));
      const stack = stacks.length === 1 ? 0 : 2 + Math.floor(random() ** 2 * (stacks.length - 2));
      made.push([place, allocate(place, requested, stack, random() < 0.2 ? 1 : 0)]);
      if (random() < 0.4) free(...(made.pop() as [Place, Block]), random() < 0.05);
    }
    allocate(places[0], job.leakBytes ?? MIB, stacks.length === 1 ? 0 : 1, 0);
    for (const [place, block] of made.reverse()) free(place, block, false);
    boundaries.push(event);
  }
  const events = event + 2;
  for (const block of blocks) {
    if (block.freed === 0) block.freed = events + 1;
    block.end = Math.min(events + 1, Math.max(block.end, block.freed));
  }
  for (const segment of segments) segment.end = events + 1;
  return {
    name: job.name ?? "job",
    events,
    streams: ["0", "7"],
    pools: ["default pool", "pool 1"],
    tags: ["", "activations"],
    ...(stacks.length > 1 ? { categories: CATEGORIES, modules: MODULES } : {}),
    stacks,
    blocks,
    segments,
    pace_us: 40,
    ooms: [{ event: Math.floor(events * 0.8), requested: 3 * 2 ** 30 }],
    annotations: Array.from({ length: Math.min(job.steps, 50) }, (_, i) => ({
      event: Math.floor((i * events) / Math.min(job.steps, 50)),
      name: `step ${i}`,
      stage: 2,
    })),
    steps: boundaries,
    growth: growthOf(job),
    bucket_events: Math.ceil((events + 1) / 8192),
  };
}

/** The planted leak, as it is found: the steps are looked at from the second on. */
function growthOf({ steps, leakBytes = MIB, hasStacks }: Job): Growth {
  const grown = Math.max(0, steps - 2);
  const found = {
    bytes: grown * leakBytes,
    bytes_per_step: leakBytes,
    grown_steps: grown,
    steps: grown,
    times_given_back: 0,
  };
  const site = hasStacks === false ? { size_max: leakBytes, stream: 0 } : { stack: 1 };
  return {
    steps,
    doubt: null,
    training: { optimizer: { bytes: 0, blocks: 0 }, gradients: { bytes: 0, blocks: 0 } },
    found_by: "period",
    annotation: null,
    warm_up_steps: 1,
    span_steps: 1,
    leaks: [{ ...found, confidence: 0.98, ...site }],
    spread: null,
  };
}

/** Returns stacks of which the second leaks; each block names one. */
function makeStacks(random: () => number): string[][] {
  const outer = ["train_step train.py:88", "main train.py:120", "<module> train.py:131"];
  const stacks = [[], ["append history.py:17", "keep_loss history.py:9", ...outer]];
  for (let layer = 0; layer < 12; layer++) {
    for (const [name, line] of [
      ["attention", 41],
      ["mlp", 77],
      ["norm", 12],
    ] as const) {
      const inner = [`${name} model/layers.py:${line + Math.floor(random() * 5)}`];
      if (random() < 0.5) inner.unshift(`linear torch/nn/functional.py:${100 + layer}`);
      stacks.push([
        ...inner,
        `block${layer} model/transformer.py:${20 + layer}`,
        "forward model/gpt.py:52",
        ...outer,
      ]);
    }
  }
  return stacks;
}

/** Mulberry32: numbers from 0 to 1, the same for the same seed. */
export function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}
