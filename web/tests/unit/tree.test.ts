import assert from "node:assert/strict";
import { test } from "node:test";
import { merged, type Tree, totals, treeOf } from "../../src/data/tree.ts";
import { traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const job = { seed: 6, steps: 3, requestsPerStep: 40 };

function pathOf(tree: Tree, node: number): string[] {
  const path: string[] = [];
  for (let at = node; at !== 0; at = tree.parent[at]) {
    const { text, place } = tree.labels[tree.label[at]];
    path.push(place === "" ? text : `${text} ${place}`);
  }
  return path;
}

test("a block's node is its stack, innermost frame at the end", () => {
  const made = simulate(job);
  const tree = treeOf(traceOf(made), true);
  made.blocks.forEach((block, i) => {
    const expected = block.stack === 0 ? ["no stack recorded"] : made.stacks[block.stack];
    assert.deepEqual(pathOf(tree, tree.nodeOfBlock(i)), expected);
  });
});

test("without frames of libraries it has the program's, and the innermost that it called", () => {
  const main = ["step train.py:9", "main train.py:2"];
  const inner = ["linear torch/nn/functional.py:7", "forward torch/nn/modules/linear.py:5"];
  const stacks = [[], [...inner, ...main], ["_call_impl torch/nn/modules/module.py:3"]];
  const made = { ...simulate(job), stacks };
  const blocks = made.blocks.slice(0, 3).map((block, stack) => ({ ...block, stack }));
  const tree = treeOf(traceOf({ ...made, blocks }), false);
  const paths = blocks.map((_, block) => pathOf(tree, tree.nodeOfBlock(block)));
  assert.deepEqual(paths, [["no stack recorded"], [inner[0], ...main], [stacks[2][0]]]);
});

test("without stacks it is the stream, the class and the size", () => {
  const made = simulate({ ...job, hasStacks: false });
  const tree = treeOf(traceOf(made), true);
  const leak = made.blocks.findIndex(({ requested }) => requested === 2 ** 20);
  assert.deepEqual(pathOf(tree, tree.nodeOfBlock(leak)), [
    "1 MiB 1,048,576 bytes",
    "1 MiB to 2 MiB",
    "stream 0",
  ]);
});

test("the root has all", () => {
  const made = simulate(job);
  const tree = treeOf(traceOf(made), true);
  const own = new Float64Array(tree.parent.length);
  made.blocks.forEach(({ requested }, i) => {
    own[tree.nodeOfBlock(i)] += requested;
  });
  assert.equal(
    totals(tree, own)[0],
    made.blocks.reduce((sum, { requested }) => sum + requested, 0),
  );
});

test("two trees become one, in which the same stacks are the same nodes", () => {
  const first = simulate(job);
  const second = { ...first, stacks: [...first.stacks.slice(0, -1), ["elsewhere other.py:1"]] };
  const [a, b] = [treeOf(traceOf(first), true), treeOf(traceOf(second), true)];
  const { tree, nodeOfFirst, nodeOfSecond } = merged(a, b);
  for (let node = 0; node < b.parent.length; node++) {
    assert.deepEqual(pathOf(tree, nodeOfSecond[node]), pathOf(b, node));
  }
  assert.equal(nodeOfFirst[a.nodeOfBlock(0)], nodeOfSecond[b.nodeOfBlock(0)]);
  assert.ok(tree.parent.every((parent, node) => node === 0 || parent < node));
});
