import assert from "node:assert/strict";
import { test } from "node:test";
import { Away } from "../../src/data/away.ts";
import { grouped } from "../../src/data/rows.ts";
import { count, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 3, steps: 4, requestsPerStep: 60 });
const pauses = [
  { start: 5, end: 9, address: 100, size: 50 },
  { start: 6, end: 8, address: 10, size: 20 },
  { start: 8, end: 11, address: 30, size: 10 },
  { start: 9, end: 12, address: 100, size: 50 },
];
const trace = traceOf({ ...made, pauses });

test("a pause holds from its first instant to before its last", () => {
  const bytes = [4, 5, 6, 7, 8, 9, 11, 12].map((instant) => new Away(trace, instant).bytes);
  assert.deepEqual(bytes, [0, 50, 70, 70, 60, 60, 50, 0]);
  assert.equal(new Away(trace, 8).pauseAt(100), 0);
  assert.equal(new Away(trace, 9).pauseAt(100), 3);
});

test("an address is paused from a segment's first byte to its last", () => {
  const away = new Away(trace, 7);
  const addresses = [0, 9, 10, 29, 30, 99, 100, 149, 150];
  assert.deepEqual(
    addresses.map((address) => away.pauseAt(address)),
    [null, null, 1, 1, null, null, 0, 0, null],
  );
  assert.equal(away.has(120), true);
  assert.equal(new Away(trace, 4).has(120), false);
});

test("of a stretch the paused parts are told, with their pauses", () => {
  const away = new Away(trace, 7);
  assert.deepEqual(away.within(0, 200), [
    { from: 10, to: 30, pause: 1 },
    { from: 100, to: 150, pause: 0 },
  ]);
  assert.deepEqual(away.within(15, 120), [
    { from: 15, to: 30, pause: 1 },
    { from: 100, to: 120, pause: 0 },
  ]);
  assert.deepEqual(away.within(30, 100), []);
  assert.deepEqual(away.within(150, 200), []);
});

test("holders have what is paused apart from what is live", () => {
  const instant = made.events - 10;
  const [{ address, size }] = made.segments;
  const away = { ...made, pauses: [{ start: instant, end: made.events + 1, address, size }] };
  const holding = traceOf(away);
  const { blocks } = holding;
  const held = Uint32Array.from(blocks.start.keys()).filter(
    (block) => blocks.start[block] <= instant && instant < blocks.freed[block],
  );
  const isPaused = new Away(holding, instant);
  const groups = grouped(
    holding,
    held,
    (block) => blocks.stack[block],
    (block) => isPaused.has(blocks.address[block]),
  );
  const sum = (of: "live" | "paused") => groups.reduce((sum, group) => sum + group[of], 0);
  assert.equal(sum("live"), count(away, instant).live);
  assert.ok(sum("paused") > 0);
  assert.equal(sum("live") + sum("paused"), count(made, instant).live);
});
