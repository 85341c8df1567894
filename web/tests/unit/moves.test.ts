import assert from "node:assert/strict";
import { test } from "node:test";
import { type Bar, barNear, barsOf } from "../../src/data/moves.ts";
import { traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 3, steps: 4, requestsPerStep: 60 });
const moves = [
  { event: 3, frames: 5 },
  { event: 9, frames: 1 },
  { event: 10, frames: 2 },
  { event: 19, frames: 4 },
  { event: 40, frames: 7 },
];
const trace = traceOf({ ...made, moves });

test("a bar has the moves of as many instants as it is wide", () => {
  assert.deepEqual(barsOf(trace.moves, 10), [
    { start: 0, width: 10, first: 3, last: 9, frames: 6 },
    { start: 10, width: 10, first: 10, last: 19, frames: 6 },
    { start: 40, width: 10, first: 40, last: 40, frames: 7 },
  ]);
  assert.deepEqual(
    barsOf(trace.moves, 1).map(({ start, frames }) => ({ event: start, frames })),
    moves,
  );
  assert.deepEqual(barsOf(traceOf(made).moves, 10), []);
});

test("the nearest bar is found, up to a distance", () => {
  const bars = barsOf(trace.moves, 10);
  const near = (instant: number, reach: number): Bar | null => barNear(bars, instant, reach);
  assert.equal(near(9, 0), bars[0]);
  assert.equal(near(10, 5), bars[1]);
  assert.equal(near(49, 0), bars[2]);
  assert.equal(near(50, 0), null);
  assert.equal(near(50, 1), bars[2]);
  assert.equal(near(24, 5), bars[1]);
  assert.equal(near(25, 5), null);
  assert.equal(near(36, 30), bars[2]);
});
