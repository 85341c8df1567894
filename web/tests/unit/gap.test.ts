import assert from "node:assert/strict";
import { test } from "node:test";
import { Curves } from "../../src/data/curves.ts";
import { gapAt } from "../../src/data/gap.ts";
import { CAUSES } from "../../src/data/summary.ts";
import { type Block, count, type Recording, type Segment, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const MIB = 2 ** 20;

/** A recording of ten events with these rows. */
function recording(segments: Partial<Segment>[], blocks: Partial<Block>[]): Recording {
  const made = simulate({ seed: 1, steps: 1, requestsPerStep: 1 });
  const always = { start: 0, end: 11, stream: 0, pool: 0 };
  return {
    ...made,
    events: 10,
    ooms: [],
    annotations: [],
    segments: segments.map((segment) => ({ ...always, address: 0, size: 20 * MIB, flags: 1, ...segment })),
    blocks: blocks.map((block) => ({
      ...always,
      freed: block.end ?? 11,
      address: 0,
      size: MIB,
      requested: MIB,
      stack: 0,
      tag: 0,
      ...block,
    })),
  };
}

/** The causes that are not 0, and live. */
function parts(segments: Partial<Segment>[], blocks: Partial<Block>[], instant = 5): Record<string, number> {
  const gap = gapAt(traceOf(recording(segments, blocks)), instant, 0);
  assert.equal(gap.difference, 0);
  const entries = Object.entries({ live: gap.live, ...gap.causes });
  return Object.fromEntries(entries.filter(([, bytes]) => bytes !== 0));
}

test("each cause takes its own", () => {
  assert.deepEqual(parts([{}], []), { cached_segments: 20 * MIB });
  assert.deepEqual(parts([{}], [{}]), { live: MIB, split_remainders: 19 * MIB });
  assert.deepEqual(parts([{}], [{ requested: MIB - 1000 }]), {
    live: MIB - 512,
    rounding: 512,
    split_remainders: 19 * MIB,
  });
  assert.deepEqual(parts([{}], [{ freed: 5 }]), { waiting_for_events: MIB, split_remainders: 19 * MIB });
  assert.deepEqual(parts([{ stream: 1 }], []), { other_streams: 20 * MIB });
  assert.deepEqual(parts([{ stream: 1, pool: 1 }], []), { private_pools: 20 * MIB });
});

test("what is free in private pools is told by pool", () => {
  const segments = [{}, { address: 20 * MIB, pool: 1 }, { address: 40 * MIB, pool: 1 }];
  const blocks = [{ address: 0 }, { address: 20 * MIB, pool: 1 }];
  const { causes, free_in_pools } = gapAt(traceOf(recording(segments, blocks)), 5, 0);
  assert.equal(causes.private_pools, 39 * MIB);
  assert.deepEqual([...free_in_pools], [[1, 39 * MIB]]);
});

test("what is paused is neither reserved nor live, and counts again when it is back", () => {
  const made = recording(
    [{}, { address: 20 * MIB, flags: 1 }],
    [{}, { address: 20 * MIB }, { address: 22 * MIB, end: 6 }],
  );
  const trace = traceOf({ ...made, pauses: [{ start: 3, end: 8, address: 20 * MIB, size: 20 * MIB }] });
  const at = (instant: number) => {
    const { live, reserved, paused, difference } = gapAt(trace, instant, 0);
    assert.equal(difference, 0);
    return [live, reserved, paused].map((bytes) => bytes / MIB);
  };
  assert.deepEqual(at(2), [3, 40, 0]);
  assert.deepEqual(at(3), [1, 20, 20]);
  assert.deepEqual(at(7), [1, 20, 20]);
  assert.deepEqual(at(8), [2, 40, 0]);
});

test("an instant is after so many events", () => {
  const block = { start: 3, freed: 5, end: 7 };
  const at = (instant: number) => parts([{}], [block], instant);
  assert.deepEqual(at(2), { cached_segments: 20 * MIB });
  assert.deepEqual(at(3), { live: MIB, split_remainders: 19 * MIB });
  assert.deepEqual(at(4), { live: MIB, split_remainders: 19 * MIB });
  assert.deepEqual(at(6), { waiting_for_events: MIB, split_remainders: 19 * MIB });
  assert.deepEqual(at(7), { cached_segments: 20 * MIB });
});

test("an expandable segment's whole free units are cached, the rest is partly used", () => {
  // Three units of 20 MiB as two ranges; a block lies across the first two units.
  const ranges = [{ flags: 3 }, { flags: 3, address: 20 * MIB, size: 40 * MIB }];
  assert.deepEqual(parts(ranges, [{ address: 19 * MIB, size: 2 * MIB, requested: 2 * MIB }]), {
    live: 2 * MIB,
    partly_used_pages: 38 * MIB,
    cached_segments: 20 * MIB,
  });
  // The same of small blocks, whose units are of 2 MiB.
  assert.deepEqual(parts([{ flags: 2 }], [{}]), {
    live: MIB,
    partly_used_pages: MIB,
    cached_segments: 18 * MIB,
  });
});

test("a block of less than 512 bytes is live by its size", () => {
  assert.equal(parts([{}], [{ size: 256, requested: 10 }]).live, 256);
});

test("a block outside all segments shows", () => {
  const gap = gapAt(traceOf(recording([], [{}])), 5, 0);
  assert.equal(gap.difference, -MIB);
});

test("random jobs: the causes are those of an independent count, and add up", () => {
  const seen = new Set<string>();
  for (const seed of [1, 2, 3]) {
    const made = simulate({ seed, steps: 4, requestsPerStep: 60 });
    const trace = traceOf(made);
    const curves = new Curves(trace);
    for (let instant = 0; instant <= made.events; instant += 7) {
      const { live, reserved, requested, paused, causes, difference } = gapAt(trace, instant, 0);
      assert.deepEqual(
        { live, reserved, requested, paused, causes },
        count(made, instant),
        `seed ${seed}, ${instant}`,
      );
      assert.equal(difference, 0);
      for (const cause of CAUSES) if (causes[cause] > 0) seen.add(cause);
      assert.equal(curves.exact("live")[instant], live);
      assert.equal(curves.exact("reserved")[instant], reserved);
    }
  }
  assert.equal(seen.size, CAUSES.length, "every cause occurs");
});

test("random jobs whose segments are paused: the same", () => {
  const made = simulate({ seed: 5, steps: 4, requestsPerStep: 60 });
  const plain = made.segments.filter(({ flags }) => flags === 1);
  const pauses = plain.map(({ start, end, address, size }, i) => ({
    start: Math.min(end, start + 30),
    end: Math.min(end, start + 90 + 20 * i),
    address,
    size,
  }));
  const away = { ...made, pauses };
  const trace = traceOf(away);
  const seen = new Set<number>();
  for (let instant = 0; instant <= made.events; instant += 3) {
    const { live, reserved, requested, paused, causes, difference } = gapAt(trace, instant, 0);
    const counted = count(away, instant);
    assert.deepEqual({ live, reserved, requested, paused, causes }, counted, `instant ${instant}`);
    assert.equal(difference, 0);
    seen.add(paused);
  }
  assert.ok(seen.size > 2, "some are, and some are not");
});

test("random jobs with blocks that are not listed: live and every cause to the byte, at every instant", () => {
  const made = { ...simulate({ seed: 7, steps: 3, requestsPerStep: 60 }), folded_below: 64 * 1024 };
  const trace = traceOf(made);
  const curves = new Curves(trace);
  const small = made.blocks.filter(({ requested }) => requested < made.folded_below);
  assert.equal(trace.blocks.count, made.blocks.length - small.length);
  let most = 0;
  for (let instant = 0; instant <= made.events; instant++) {
    const { live, folded, reserved, causes, difference } = gapAt(trace, instant, 0);
    const counted = count(made, instant);
    assert.deepEqual(
      { live, reserved, causes },
      { live: counted.live, reserved: counted.reserved, causes: counted.causes },
    );
    assert.equal(difference, 0);
    assert.equal(
      folded,
      live - count({ ...made, blocks: made.blocks.filter((block) => !small.includes(block)) }, instant).live,
    );
    assert.equal(curves.exact("live")[instant], live);
    most = Math.max(most, folded);
  }
  assert.ok(small.length > 10 && most > 0);
});
