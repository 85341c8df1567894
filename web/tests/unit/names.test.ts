import assert from "node:assert/strict";
import { test } from "node:test";
import { shortNames, titleOf } from "../../src/names.ts";

test("names leave out the directories that all have in common", () => {
  assert.deepEqual(shortNames(["runs/1/a.pickle"]), ["a.pickle"]);
  assert.deepEqual(shortNames(["runs/a.pickle", "runs/b.pickle"]), ["a.pickle", "b.pickle"]);
  assert.deepEqual(shortNames(["/x/1/rank0/t", "/x/1/rank1/t"]), ["rank0/t", "rank1/t"]);
  assert.deepEqual(shortNames(["t", "u/t"]), ["t", "u/t"]);
  assert.deepEqual(shortNames(["a", "a"]), ["a", "a"]);
});

test("a stack is known by the innermost frame that is not PyTorch's", () => {
  const frame = (name: string, file: string) => ({ function: name, file, line: 7 });
  const stack = [
    frame("linear", "/lib/site-packages/torch/nn/functional.py"),
    frame("operator()", "aten/src/Linear.cpp"),
    frame("forward", "/jobs/model/gpt.py"),
  ];
  assert.equal(titleOf(stack), "forward (model/gpt.py:7)");
  assert.equal(titleOf(stack.slice(0, 1)), "linear (nn/functional.py:7)");
  assert.equal(titleOf([]), "no stack");
});
