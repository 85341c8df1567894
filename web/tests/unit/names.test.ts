import assert from "node:assert/strict";
import { test } from "node:test";
import { OPERATOR, PACKAGE, PROGRAM, PYTORCH } from "../../src/data/trace.ts";
import { shortNames, shown, shownOrder, titleOf } from "../../src/names.ts";

const RUNTIME = 4;

test("ranks come in the order of their numbers, other names as they were given", () => {
  assert.deepEqual(shownOrder(["g19", "g2", "g1", "g10"]), [2, 1, 3, 0]);
  assert.deepEqual(shownOrder(["a", "a"]), [0, 1]);
  assert.deepEqual(shownOrder(["before", "after"]), [0, 1]);
  assert.deepEqual(shownOrder(["rank1", "g10", "rank0", "g9"]), [2, 0, 3, 1]);
});

test("names leave out the directories that all have in common", () => {
  assert.deepEqual(shortNames(["runs/1/a.pickle"]), ["a.pickle"]);
  assert.deepEqual(shortNames(["runs/a.pickle", "runs/b.pickle"]), ["a.pickle", "b.pickle"]);
  assert.deepEqual(shortNames(["/x/1/rank0/t", "/x/1/rank1/t"]), ["rank0/t", "rank1/t"]);
  assert.deepEqual(shortNames(["t", "u/t"]), ["t", "u/t"]);
  assert.deepEqual(shortNames(["a", "a"]), ["a", "a"]);
});

test("a stack is known by the innermost frame that is the program's own, and by the package that it called", () => {
  const frame = (name: string, file: string, owner: number) => ({ function: name, file, line: 7, owner });
  const compiled = frame("c10::alloc", "??", RUNTIME);
  const linear = frame("linear", "/lib/site-packages/torch/nn/functional.py", PYTORCH);
  const addmm = frame("at::_ops::addmm::call(at::Tensor const&)", "??", OPERATOR);
  const empty = frame("at::_ops::empty_like::call(at::Tensor const&)", "??", OPERATOR);
  const backward = frame("torch::autograd::generated::AddmmBackward0::apply(x&&)", "??", OPERATOR);
  const layer = frame("forward", "/lib/site-packages/models/layer.py", PACKAGE);
  const model = frame("forward", "/lib/site-packages/models/model.py", PACKAGE);
  const solve = frame("solve", "/jobs/model/solver.cpp", PROGRAM);
  const main = frame("main", "/jobs/train.py", PROGRAM);
  const run = frame("run", "/usr/lib/python3.12/threading.py", RUNTIME);
  const cases: [ReturnType<typeof frame>[], string][] = [
    [[compiled, linear, main, run], "main (jobs/train.py:7) › linear (nn/functional.py:7)"],
    [
      [empty, compiled, addmm, compiled, linear, main],
      "main (jobs/train.py:7) › linear (nn/functional.py:7) › addmm",
    ],
    [[addmm, compiled, linear, layer, main], "main (jobs/train.py:7) › forward (models/layer.py:7) › addmm"],
    [[compiled, addmm, main], "main (jobs/train.py:7) › addmm"],
    [[compiled, main, addmm], "main (jobs/train.py:7)"],
    [[compiled, empty, backward, compiled], "AddmmBackward0"],
    [[compiled, solve, layer, main], "solve (model/solver.cpp:7)"],
    [[compiled, linear, layer, linear, model, main], "main (jobs/train.py:7) › forward (models/layer.py:7)"],
    [[linear, layer, run], "forward (models/layer.py:7)"],
    [[linear, run], "linear (nn/functional.py:7)"],
    [[], "no stack"],
  ];
  for (const [stack, title] of cases) assert.equal(titleOf(stack), title);
});

test("a long name is cut in its middle", () => {
  const name = `begins_${"x".repeat(2_000_000)}_ends`;
  assert.match(shown(name), /^begins_x+…x+_ends$/);
  assert.equal(shown(name).length, 120);
  assert.equal(shown("x".repeat(120)), "x".repeat(120));
});

test("a name turns the direction of nothing beside it", () => {
  // What is isolated comes back to where it began, whatever the name itself begins and ends.
  assert.equal(shown("a\u202eb"), "\u2068a\u202eb\u2069");
  assert.equal(shown("a\u2069\u202eb"), "\u2068a\u202eb\u2069");
  assert.equal(shown("שם"), "\u2068שם\u2069");
  assert.equal(shown("forward"), "forward");
  const frame = { function: "a\u202eb", file: "m.py", line: 7, owner: PROGRAM };
  assert.equal(titleOf([frame]), "\u2068a\u202eb\u2069 (m.py:7)");
});
