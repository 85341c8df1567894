import assert from "node:assert/strict";
import { test } from "node:test";
import { allocatedIn, difference, find, pathOf, single, weightsAt } from "../../src/data/picture.ts";
import { treeOf } from "../../src/data/tree.ts";
import { count, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 8, steps: 5, requestsPerStep: 60 });
const trace = traceOf(made);
const tree = treeOf(trace, true);

test("at an instant the root has what is live", () => {
  for (const instant of [0, 17, 400, made.events]) {
    assert.equal(single(tree, weightsAt(trace, tree, instant), "").after[0], count(made, instant).live);
  }
});

test("what is paused is not live", () => {
  const [{ address, size }] = made.segments;
  const away = { ...made, pauses: [{ start: 100, end: 200, address, size }] };
  const paused = traceOf(away);
  const liveAt = (instant: number) => single(tree, weightsAt(paused, tree, instant), "").after[0];
  const moments = [99, 100, 150, 199, 200];
  assert.deepEqual(
    moments.map(liveAt),
    moments.map((instant) => count(away, instant).live),
  );
  assert.notEqual(liveAt(150), count(made, 150).live);
});

test("over a range the root has what was allocated in it", () => {
  const expected = made.blocks
    .filter(({ start }) => start > 100 && start <= 300)
    .reduce((sum, { requested }) => sum + Math.ceil(requested / 512) * 512, 0);
  assert.equal(single(tree, allocatedIn(trace, tree, 100, 300), "").after[0], expected);
});

test("in a difference what grew does not hide what shrank", () => {
  const [from, to] = [150, made.events];
  const picture = difference(tree, weightsAt(trace, tree, from), weightsAt(trace, tree, to), "");
  assert.equal(picture.after[0] - picture.before[0], count(made, to).live - count(made, from).live);
  const bytes = new Map<number, [number, number]>();
  for (const { start, freed, requested, stack } of made.blocks) {
    const sums = bytes.get(stack) ?? [0, 0];
    [from, to].forEach((instant, i) => {
      if (start <= instant && instant < freed) sums[i] += Math.ceil(requested / 512) * 512;
    });
    bytes.set(stack, sums);
  }
  const moved = [...bytes.values()].reduce((sum, [before, after]) => sum + Math.abs(after - before), 0);
  assert.ok(moved > Math.abs(picture.after[0] - picture.before[0]));
  assert.equal(picture.width[0], moved);
});

test("a node is found again by its path, and the root where there is none", () => {
  const picture = single(tree, weightsAt(trace, tree, made.events), "");
  const leak = tree.nodeOfBlock(made.blocks.findIndex(({ stack }) => stack === 1));
  assert.equal(find(picture, pathOf(tree, leak)), leak);
  assert.equal(find(picture, ["elsewhere\nother.py:1"]), 0);
});
