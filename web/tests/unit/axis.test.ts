import assert from "node:assert/strict";
import { test } from "node:test";
import { BY_EVENT, byTime } from "../../src/data/axis.ts";
import { seconds } from "../../src/format.ts";
import { traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 4, steps: 6, requestsPerStep: 50 });
const end = made.events;

test("by time an instant lies where its time is, and a value leads back to it", () => {
  // Half of the events come in the last hundredth of the time, and ten at one time.
  const half = Math.floor(end / 2);
  const times = [
    [0, 0],
    [half, 9.9e6],
    [end - 10, 10e6],
    [end, 10e6],
  ].map(([event, time_us]) => ({ event, time_us }));
  const axis = byTime(traceOf({ ...made, times }));
  assert.ok(Math.abs(axis.valueAt(half) - 9.9e6) < 1);
  let before = -1;
  for (let instant = 0; instant <= end; instant++) {
    const value = axis.valueAt(instant);
    assert.ok(value > before, `instant ${instant}`);
    assert.ok(Math.abs(axis.instantAt(value) - instant) < 0.01, `instant ${instant}`);
    before = value;
  }
  assert.ok(Math.abs(axis.instantAt(-5)) < 0.01);
  assert.ok(Math.abs(axis.instantAt(99e6) - end) < 0.01);
});

test("by event a value is its instant", () => {
  assert.equal(BY_EVENT.valueAt(7), 7);
  assert.equal(BY_EVENT.instantAt(7.5), 7.5);
});

test("times on the axis have the digits that tell them apart", () => {
  assert.deepEqual(
    [1e6, 5e5, 2e5, 20, 1].map((increment) => seconds(1.5e6, increment)),
    ["2 s", "1.5 s", "1.5 s", "1.50000 s", "1.500000 s"],
  );
});
