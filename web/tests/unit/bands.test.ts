import assert from "node:assert/strict";
import { test } from "node:test";
import { type Palette, paletteOf } from "../../src/coloring.ts";
import { Bands } from "../../src/data/bands.ts";
import { Curves } from "../../src/data/curves.ts";
import { GROUPING_NAMES, GROUPINGS, mostHeld, offeredGroupings } from "../../src/data/groupings.ts";
import type { Trace } from "../../src/data/trace.ts";
import { initialState, Model } from "../../src/model.ts";
import { Store } from "../../src/state.ts";
import { container, opened } from "../support/encode.ts";
import { program } from "../support/program.ts";
import { type Block, count, dataOf, type Recording, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = { ...simulate({ seed: 4, steps: 6, requestsPerStep: 50 }), bucket_events: 16 };

function modelOf(recording: Recording): Model {
  const { summary, columns } = dataOf([recording]);
  return new Model(summary, opened(container(columns)), new Store(initialState(summary.traces)));
}

function bandsOf(trace: Trace, palette: Palette): Bands {
  return new Bands(trace, new Curves(trace).exact("live"), palette);
}

/** Returns the live bytes of some of a recording's blocks at an instant, counted without the code of the page. */
function liveOf(recording: Recording, instant: number, isOne: (block: Block) => boolean): number {
  return count({ ...recording, blocks: recording.blocks.filter(isOne) }, instant).live;
}

test("at every instant the bands have what their blocks hold, and add up to what is live", () => {
  const { recording } = program(11, 400, 300_000);
  const pauses = recording.pauses ?? [];
  assert.ok(pauses.length > 5);
  const listed = (block: Block) => block.requested >= 300_000;
  for (const [some, hidden] of [
    [made, false],
    [recording, true],
  ] as const) {
    const trace = traceOf(some);
    const of = (block: number) => trace.blocks.stack[block] % 3;
    const bands = bandsOf(trace, { names: ["a", "b", "c"], colors: [], single: 3, of });
    assert.equal(bands.names.length, hidden ? 4 : 3);
    for (let instant = 0; instant <= some.events; instant++) {
      const expected = [0, 1, 2].map((band) =>
        liveOf(some, instant, (block) => block.stack % 3 === band && (!hidden || listed(block))),
      );
      if (hidden) expected.push(liveOf(some, instant, (block) => !listed(block)));
      const bytes = bands.at(instant);
      assert.deepEqual(bytes, expected, `at ${instant}`);
      assert.equal(
        bytes.reduce((sum, more) => sum + more),
        count(some, instant).live,
      );
    }
  }
});

test("at every width a step has the bands of its instant with the most live bytes", () => {
  const { recording } = program(12, 900, 200_000);
  for (const some of [made, { ...recording, bucket_events: 16 }]) {
    const trace = traceOf(some);
    const curves = new Curves(trace);
    const bands = bandsOf(trace, {
      names: ["a", "b", "c"],
      colors: [],
      single: 3,
      of: (block) => trace.blocks.stack[block] % 3,
    });
    const live = curves.exact("live");
    for (const [from, to, wanted] of [
      [0, some.events, 7],
      [0, some.events, 40],
      [33, some.events - 5, 200],
      [100, 160, 30],
      [100, 120, 10_000],
    ]) {
      const steps = curves.steps(from, to, wanted);
      const { instants, bytes } = bands.stack(steps);
      const { max } = curves.envelope("live", steps);
      assert.equal(instants.length, steps.count);
      instants.forEach((instant, step) => {
        const begin = steps.first + step * steps.width;
        assert.ok(begin <= instant && instant < begin + steps.width);
        assert.equal(live[instant], max[step], `step ${step} of ${steps.count}`);
        const here = bytes.map((values) => values[step]);
        assert.deepEqual(here, bands.at(instant), `step ${step} of ${steps.count}`);
      });
    }
  }
});

test("the steadiest band is at the bottom, and what collects the rest at the top", () => {
  const block = made.blocks[0];
  const at = (start: number, freed: number, stack: number) => {
    return { ...block, start, freed, end: freed, requested: 512, size: 512, stack };
  };
  // Group 3 holds nothing; 0 comes and goes, 1 stays, and 2 is the rest.
  const blocks = [at(1, 301, 1), at(2, 301, 2), at(40, 60, 0)];
  const trace = traceOf({ ...made, events: 300, segments: [], blocks });
  const of = (row: number) => trace.blocks.stack[row];
  const bands = bandsOf(trace, { names: ["a", "b", "rest", "none"], colors: [], single: 2, of });
  assert.deepEqual(bands.order, [1, 0, 2]);
});

test("the groups that hold most at one instant have a colour each, however short", () => {
  const model = modelOf({ ...made, stacks: made.stacks.map((_, i) => (i === 0 ? [] : [`f train.py:${i}`])) });
  const groups = GROUPINGS.site.groupsOf(model);
  const expected = new Map(groups.names.map((name) => [name, 0]));
  for (let instant = 0; instant <= made.events; instant++) {
    for (const name of groups.names) {
      const stack = name === "no stack" ? 0 : Number(/:(\d+)\)$/.exec(name)?.[1]);
      const bytes = liveOf(made, instant, (block) => block.stack === stack);
      expected.set(name, Math.max(bytes, expected.get(name) ?? 0));
    }
  }
  const most = mostHeld(model.trace, groups);
  assert.deepEqual([...most], [...expected.values()]);
  const palette = paletteOf(model, "site", 0);
  const largest = [...expected].sort(([, a], [, b]) => b - a).slice(0, 10);
  assert.deepEqual(palette.names.slice(0, 10).sort(), largest.map(([name]) => name).sort());
  assert.equal(palette.names[10], `everything else (${groups.names.length - 10})`);
  assert.equal(palette.single, 10);
  // All blocks of one group have one colour.
  for (let block = 0; block < made.blocks.length; block++) {
    const name = groups.names[groups.of(block)];
    const place = palette.names.indexOf(name);
    assert.equal(palette.of(block), place < 0 ? 10 : place);
  }
});

test("a grouping is offered if it divides the blocks, and the choice of another is none", () => {
  const model = modelOf(made);
  assert.deepEqual(offeredGroupings(model.trace.summary), GROUPING_NAMES);
  const plain = modelOf({
    ...simulate({ seed: 4, steps: 2, requestsPerStep: 5, hasStacks: false }),
    tags: [""],
  });
  assert.deepEqual(offeredGroupings(plain.trace.summary), ["stream", "pool", "size"]);
  plain.store.set({ bands: "category", coloring: "category" });
  assert.equal(plain.bandsBy, "none");
  const names = () => plain.bands?.names ?? [];
  assert.deepEqual(names(), []);
  assert.equal(plain.coloring, "size");
  plain.store.set({ bands: "pool" });
  assert.deepEqual(names(), ["default pool", "pool 1"]);
});

test("by every grouping the bands add up", () => {
  const model = modelOf(made);
  for (const grouping of GROUPING_NAMES) {
    model.store.set({ bands: grouping });
    const { bands } = model;
    for (let instant = 0; instant <= made.events; instant += 37) {
      const sum = bands?.at(instant).reduce((sum, more) => sum + more, 0);
      assert.equal(sum, count(made, instant).live, `${grouping} at ${instant}`);
    }
  }
  model.store.set({ bands: "category" });
  assert.equal(model.bands?.names[1], "optimizer state");
});
