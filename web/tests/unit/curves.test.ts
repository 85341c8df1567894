import assert from "node:assert/strict";
import { test } from "node:test";
import { Curves, everyFitting, spaced, stepAt, stepsWithin } from "../../src/data/curves.ts";
import { count, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = { ...simulate({ seed: 4, steps: 6, requestsPerStep: 50 }), bucket_events: 16 };
const trace = traceOf(made);
const curves = new Curves(trace);

test("steps cover what is asked for, in whole buckets where they are wide", () => {
  assert.deepEqual(curves.steps(10, 20, 100), { first: 10, width: 1, count: 11 });
  const all = curves.steps(0, made.events, 10);
  assert.equal(all.width % 16, 0);
  assert.equal(all.first, 0);
  assert.ok(all.first + all.width * all.count > made.events);
  assert.ok(all.first + all.width * (all.count - 1) <= made.events);
});

test("at every width a step has the least and the most of its instants", () => {
  const exact = curves.exact("reserved");
  for (const wanted of [1, 7, 40, 200, 10_000]) {
    const steps = curves.steps(33, made.events - 5, wanted);
    const { min, max } = curves.envelope("reserved", steps);
    for (let i = 0; i < steps.count; i++) {
      const from = steps.first + i * steps.width;
      const values = exact.slice(from, from + steps.width);
      assert.equal(min[i], Math.min(...values), `step ${i} of ${steps.count}`);
      assert.equal(max[i], Math.max(...values), `step ${i} of ${steps.count}`);
    }
  }
});

test("what is paused is a curve of its own, and in no other", () => {
  const { start, address, size } = made.segments[0];
  // Twice the same segment, once up to the end, and two at once.
  const pauses = [
    { start: start + 100, end: start + 150, address, size },
    { start: start + 170, end: start + 171, address, size },
    ...made.segments
      .slice(1, 3)
      .map((segment) => ({
        start: segment.start + 20,
        end: segment.end,
        address: segment.address,
        size: segment.size,
      }))
      .filter((pause) => pause.start < pause.end),
    { start: start + 200, end: made.segments[0].end, address, size },
  ];
  assert.ok(pauses.length > 3);
  const away = { ...made, pauses };
  const withPause = new Curves(traceOf(away));
  assert.deepEqual(withPause.names.slice(0, 3), ["live", "reserved", "paused"]);
  assert.ok(!curves.names.includes("paused"));
  const steps = withPause.steps(0, made.events, 10_000);
  assert.equal(steps.width, 1);
  for (const name of ["live", "reserved"] as const) {
    assert.ok(withPause.isExact(name));
    const { min, max } = withPause.envelope(name, steps);
    for (let instant = 0; instant <= made.events; instant++) {
      const value = count(away, instant)[name];
      assert.deepEqual([min[instant], max[instant]], [value, value], `${name} at ${instant}`);
    }
  }
  // What was paused is read off the buckets.
  assert.ok(!withPause.isExact("paused"));
  const { min, max } = withPause.envelope("paused", steps);
  for (const instant of [start + 99, start + 100, start + 120, start + 149, start + 150]) {
    const value = count(away, instant).paused;
    assert.ok(min[instant] <= value && value <= max[instant], `paused at ${instant}`);
  }
});

test("where blocks are not listed, live is exact all the same, and with pauses too", () => {
  const folded = { ...made, folded_below: 64 * 1024 };
  const pauses = made.segments.slice(0, 2).map(({ start, end, address, size }) => {
    return { start: start + 1, end: Math.min(end, start + 60), address, size };
  });
  for (const recording of [folded, { ...folded, pauses }]) {
    const live = new Curves(traceOf(recording)).exact("live");
    for (let instant = 0; instant <= made.events; instant++) {
      assert.equal(live[instant], count(recording, instant).live, `at ${instant}`);
    }
  }
});

test("times lie between the recorded ones in proportion", () => {
  assert.equal(trace.timeAt(0), 0);
  assert.equal(trace.timeAt(made.events), made.events * 40);
  assert.equal(trace.timeAt(10), 400);
  assert.equal(traceOf({ ...made, pace_us: 0 }).timeAt(10), null);
});

test("the steps of a view are those that begin in it, and keep their numbers", () => {
  const boundaries = Uint32Array.of(5, 10, 20, 30);
  const within = (from: number, to: number) => {
    const { first, marks } = stepsWithin(boundaries, from, to);
    return [first, ...marks];
  };
  assert.deepEqual(within(0, 100), [0, 5, 10, 20, 30]);
  assert.deepEqual(within(10, 20), [1, 10, 20]);
  assert.deepEqual(within(11, 19), [2]);
  assert.deepEqual(within(31, 40), [4]);
});

test("steps are counted from 1, and end where the last one does", () => {
  const boundaries = Uint32Array.of(5, 10, 20);
  const steps = [0, 4, 5, 9, 10, 19, 20, 21].map((instant) => stepAt(boundaries, instant));
  assert.deepEqual(steps, [null, null, 1, 1, 2, 2, null, null]);
  assert.equal(stepAt(new Uint32Array(0), 7), null);
});

test("what does not fit is marked every tenth or hundredth time", () => {
  assert.equal(everyFitting(5, 4), 1);
  assert.equal(everyFitting(4, 4), 1);
  assert.equal(everyFitting(3.9, 4), 10);
  assert.equal(everyFitting(0.05, 4), 100);
  assert.equal(everyFitting(0.01, 64), 10_000);
});

test("a mark has room if no earlier one is near, on either side", () => {
  const kept = (...xs: number[]) =>
    spaced(
      xs.map((x) => ({ x })),
      4,
    ).map(({ x }) => x);
  assert.deepEqual(kept(0, 3.9, 4, 7.9, 8), [0, 4, 8]);
  assert.deepEqual(kept(10, 6.1, 6, 13, 14), [10, 6, 14]);
  assert.deepEqual(kept(5, 5), [5]);
});
