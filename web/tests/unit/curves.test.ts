import assert from "node:assert/strict";
import { test } from "node:test";
import { Curves, everyFitting, stepsWithin } from "../../src/data/curves.ts";
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
  const pauses = [{ start: start + 100, end: start + 150, address, size }];
  const away = { ...made, pauses };
  const withPause = new Curves(traceOf(away));
  assert.deepEqual(withPause.names.slice(0, 3), ["live", "reserved", "paused"]);
  assert.ok(!curves.names.includes("paused"));
  // Live and reserved are read off the buckets, which know what was away.
  const steps = withPause.steps(0, made.events, 10_000);
  for (const name of ["live", "reserved", "paused"] as const) {
    assert.ok(!withPause.isExact(name));
    const { min, max } = withPause.envelope(name, steps);
    for (const instant of [start + 99, start + 100, start + 120, start + 149, start + 150]) {
      const value = count(away, instant)[name];
      assert.ok(min[instant] <= value && value <= max[instant], `${name} at ${instant}`);
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

test("what does not fit is marked every tenth or hundredth time", () => {
  assert.equal(everyFitting(5, 4), 1);
  assert.equal(everyFitting(4, 4), 1);
  assert.equal(everyFitting(3.9, 4), 10);
  assert.equal(everyFitting(0.05, 4), 100);
  assert.equal(everyFitting(0.01, 64), 10_000);
});
