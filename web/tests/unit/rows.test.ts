import assert from "node:assert/strict";
import { test } from "node:test";
import { rowsByAddress } from "../../src/data/gap.ts";
import { Filter, firstRows, grouped } from "../../src/data/rows.ts";
import { upperBound } from "../../src/data/search.ts";
import { filterOf } from "../../src/data/site.ts";
import { rowsAt } from "../../src/data/trace.ts";
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
  const addresses = Float64Array.of(10, 20, 30);
  assert.deepEqual(
    [5, 10, 25, 99].map((address) => upperBound(addresses, address)),
    [0, 1, 2, 3],
  );
});

test("rows at any instant, forwards, backwards and anywhere, are those of a look at all", () => {
  // More rows than lie between two checkpoints, some of them long.
  const random = (bound: number, i: number) => ((i * 2_654_435_761) % 2 ** 32) % bound;
  const start = Uint32Array.from({ length: 30_000 }, (_, i) => Math.floor(i / 3));
  const end = start.map((from, i) => from + 1 + random(i % 50 === 0 ? 20_000 : 40, i));
  const rows = { start, end };
  const instants = [0, 1, 2, 2730, 2731, 2732, 9999, 10_000, 30_000, 5461, 5462, 5460, 7];
  for (let i = 0; i < 200; i++) instants.push(random(11_000, i));
  for (const instant of instants) {
    const expected: number[] = [];
    start.forEach((from, row) => {
      if (from <= instant && instant < end[row]) expected.push(row);
    });
    assert.deepEqual([...rowsAt(rows, instant)], expected, `at ${instant}`);
  }
});

test("blocks by address, one instant after the other, are those of a whole sort", () => {
  const { address } = trace.blocks;
  const instants = [300, 301, 302, 300, 0, made.events, 150, 151, 153, 160, 3];
  for (let instant = 0; instant <= made.events; instant += 5) instants.push(instant);
  for (const instant of instants) {
    const expected = [...rowsAt(trace.blocks, instant)].sort((a, b) => address[a] - address[b]);
    assert.deepEqual([...rowsByAddress(trace.blocks, instant)], expected, `at ${instant}`);
  }
});

test("every word of a filter has to be found: in a frame, a tag, a stream or a pool", () => {
  const texts = () => made.stacks.map((stack) => stack.join("\n"));
  const found = (text: string) => new Filter(trace, text, texts).of(all, 0);
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

test("a word may be excluded, and quotes keep words together", () => {
  const texts = () => made.stacks.map((stack) => stack.join("\n"));
  const filter = (text: string) => new Filter(trace, text, texts);
  const expected = (keep: (block: (typeof made.blocks)[0]) => boolean) => made.blocks.filter(keep).length;
  const isIn = (stack: number, word: string) => made.stacks[stack].some((frame) => frame.includes(word));
  const cases: [string, (block: (typeof made.blocks)[0]) => boolean][] = [
    ["-attention", ({ stack }) => !isIn(stack, "attention")],
    ["block3 -stream:7", ({ stack, stream }) => isIn(stack, "block3") && stream === 0],
    ['"block3 model/transformer.py"', ({ stack }) => isIn(stack, "block3 model/transformer.py")],
    ['"block3 model', ({ stack }) => isIn(stack, "block3 model")],
    ['-"block3 model/transformer.py" block', ({ stack }) => isIn(stack, "block") && !isIn(stack, "block3 ")],
    ["-stack:1", ({ stack }) => stack !== 1],
  ];
  for (const [text, keep] of cases) {
    assert.equal(filter(text).of(all, 0).length, expected(keep), text);
    assert.ok(filter(text).isExact, text);
  }
  // Quotes and signs on their own ask for nothing.
  for (const text of ['""', '-""', '"']) assert.ok(filter(text).isEmpty, text);
  assert.equal(filter('"block3 attention"').of(all, 0).length, 0);
  assert.ok(!filter("attention").isExact);
});

test("a filter by numbers takes exactly these", () => {
  const { stack, requested, stream } = trace.blocks;
  const find = (text: string) => [...new Filter(trace, text, () => []).of(all, 0)];
  const expected = (keep: (block: number) => boolean) => [...all].filter(keep);
  assert.deepEqual(
    find("stack:1"),
    expected((block) => stack[block] === 1),
  );
  assert.deepEqual(
    find("size:1921-2048 stream:7"),
    expected((block) => requested[block] >= 1921 && requested[block] <= 2048 && stream[block] === 1),
  );
  assert.deepEqual(
    find(`size:${requested[5]}`),
    expected((block) => requested[block] === requested[5]),
  );
});

test("an address and a state can be asked for", () => {
  const { address, size } = trace.blocks;
  const states = ["", "allocated", "waiting for events, paused", "waiting for events"];
  const stateAt = (block: number, instant: number) => states[block % 4 === 0 ? instant : 1];
  const filter = (text: string) => new Filter(trace, text, () => [], stateAt);
  const find = (text: string, instant = 0) => [...filter(text).of(all, instant)];
  const fourths = [...all].filter((block) => block % 4 === 0);
  const others = [...all].filter((block) => block % 4 !== 0);
  const inside = address[5] + size[5] - 1;
  const expected = [...all].filter(
    (block) => address[block] <= inside && inside < address[block] + size[block],
  );
  assert.ok(expected.includes(5));
  assert.deepEqual(find(`address:0x${inside.toString(16)}`), expected);
  assert.deepEqual(find(`0x${inside.toString(16)}`), expected);
  // The state is that of the instant, and what is not there has none.
  assert.deepEqual(find("state:allocated", 0), others);
  assert.deepEqual(find("state:allocated", 1), [...all]);
  assert.deepEqual(find("state:waiting", 0), []);
  for (const word of ["state:waiting", "state:wait", "state:paused"])
    assert.deepEqual(find(word, 2), fourths);
  assert.deepEqual(find("state:paused", 3), []);
  assert.deepEqual(find("-state:waiting", 3), others);
});

test("what a filter does not understand is named", () => {
  const unknown = (text: string) => new Filter(trace, text, () => ["c10::run core.py:7", "lambda:3"]).unknown;
  assert.deepEqual(unknown("foo:bar size:abc -color:red train"), ["foo:bar", "size:abc", "color:red"]);
  assert.deepEqual(
    unknown('core.py:7 c10::run stream:9 size:1-2 lambda:3 state:alloc "foo:bar" address:0x7f0000'),
    [],
  );
  assert.deepEqual(unknown("address:12"), ["address:12"]);
  assert.deepEqual(unknown("state:x -state:freed"), ["state:x", "state:freed"]);
});

test("a stream's whole name means that stream alone", () => {
  const alike = { ...made, streams: ["7", "70"] };
  const found = new Filter(traceOf(alike), "stream:7", () => []).of(all, 0);
  assert.equal(found.length, made.blocks.filter(({ stream }) => stream === 0).length);
});

test("the filter of a place lets its blocks pass, and no others", () => {
  const summary = { ...trace.summary, streams: ["0", "0x7F"] };
  assert.equal(filterOf({ stack: 17 }, summary), "stack:17");
  assert.equal(filterOf({ size_max: 2048, stream: 1 }, summary), "stack:0 size:1921-2048 stream:0x7f");
  assert.equal(filterOf({ size_max: 512, stream: 0 }, summary), "stack:0 size:0-512 stream:0");
  assert.equal(filterOf({ size_max: 2304, stream: 0 }, summary), "stack:0 size:2049-2304 stream:0");
  const bare = traceOf(
    simulate({ seed: 5, steps: 8, requestsPerStep: 10, hasStacks: false, leakBytes: 1000 }),
  );
  const filter = new Filter(bare, filterOf({ size_max: 1024, stream: 0 }, bare.summary), () => []);
  const passing = filter.of(Uint32Array.from(bare.blocks.start.keys()), 0);
  assert.ok(passing.length >= 8);
  for (const block of passing) {
    assert.ok(bare.blocks.requested[block] > 960 && bare.blocks.requested[block] <= 1024);
    assert.equal(bare.blocks.stream[block], 0);
  }
});
