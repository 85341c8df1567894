import assert from "node:assert/strict";
import { test } from "node:test";
import { Filter, firstRows, grouped } from "../../src/data/rows.ts";
import { rowsAt, upperBound } from "../../src/data/trace.ts";
import { traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 5, steps: 8, requestsPerStep: 100 });
const trace = traceOf(made);
const all = Uint32Array.from(trace.blocks.start.keys());

test("the first rows are those of a whole sort", () => {
  const { requested, stream } = trace.blocks;
  for (const [key, isDescending, limit] of [
    [(row: number) => requested[row], true, 10],
    [(row: number) => requested[row], false, 25],
    [(row: number) => stream[row], false, 3],
    [(row: number) => stream[row], true, 5000],
    [() => 0, true, 40],
  ] as const) {
    const sign = isDescending ? -1 : 1;
    const expected = [...all].sort((a, b) => sign * (key(a) - key(b)) || a - b).slice(0, limit);
    assert.deepEqual([...firstRows(all, key, isDescending, limit)], expected);
  }
});

test("the first rows are found where a sample of the rows misleads", () => {
  const rows = Uint32Array.from({ length: 20_000 }, (_, i) => i);
  const found = firstRows(rows, (row) => (row % 4 === 0 ? row : 1e9), false, 10);
  assert.deepEqual([...found], [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]);
});

test("groups add up to what they were made of", () => {
  const groups = grouped(trace, all, (block) => trace.blocks.stack[block]);
  assert.equal(
    groups.reduce((sum, { blocks }) => sum + blocks, 0),
    made.blocks.length,
  );
  const leak = groups.find(({ key }) => key === 1);
  assert.deepEqual([leak?.blocks, leak?.live], [8, 8 * 2 ** 20]);
});

test("rows at an instant are those that have begun and not ended", () => {
  const expected = made.blocks.filter(({ start, end }) => start <= 300 && 300 < end).length;
  assert.equal(rowsAt(trace.blocks, 300).length, expected);
  assert.equal(upperBound(Uint32Array.of(1, 3, 3, 5), 3), 3);
});

test("every word of a filter has to be found: in a frame, a tag, a stream or a pool", () => {
  const texts = () => made.stacks.map((stack) => stack.join("\n"));
  const found = (text: string) => new Filter(trace, text, texts).of(all);
  const expected = (keep: (block: (typeof made.blocks)[0]) => boolean) => made.blocks.filter(keep).length;
  const isIn = (stack: number, word: string) => made.stacks[stack].some((frame) => frame.includes(word));
  assert.equal(found("").length, made.blocks.length);
  assert.equal(
    found("ATTENTION").length,
    expected(({ stack }) => isIn(stack, "attention")),
  );
  assert.equal(
    found("stream:7").length,
    expected(({ stream }) => stream === 1),
  );
  assert.equal(
    found("attention stream:7").length,
    expected(({ stack, stream }) => stream === 1 && isIn(stack, "attention")),
  );
  assert.equal(
    found("activations").length,
    expected(({ tag }) => tag === 1),
  );
  assert.equal(found("nowhere").length, 0);
});
