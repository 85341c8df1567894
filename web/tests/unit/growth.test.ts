import assert from "node:assert/strict";
import { test } from "node:test";
import type { Growth } from "../../src/data/summary.ts";
import { stepsText } from "../../src/views/growth.ts";

test("how the steps were found is said in one sentence, of one or of many", () => {
  const growth: Growth = {
    steps: 1,
    found_by: "parts",
    annotation: null,
    doubt: null,
    training: { optimizer: { bytes: 0, blocks: 0 }, gradients: { bytes: 0, blocks: 0 } },
    warm_up_steps: 1,
    span_steps: 1,
    leaks: [],
    spread: null,
  };
  assert.equal(
    stepsText(growth),
    "Steps were not found; 1 equal part of the recording stands for them; the first is left out.",
  );
  assert.equal(
    stepsText({ ...growth, steps: 8, warm_up_steps: 2 }),
    "Steps were not found; 8 equal parts of the recording stand for them; the first 2 are left out.",
  );
  assert.equal(
    stepsText({ ...growth, steps: 40, found_by: "period", warm_up_steps: 10, span_steps: 4 }),
    "40 steps, found by the period of the allocations; the first 10 are left out, and 4 are looked at as one.",
  );
});
