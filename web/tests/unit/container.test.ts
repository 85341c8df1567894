import assert from "node:assert/strict";
import { test } from "node:test";
import { unpack } from "../../src/data/container.ts";
import { container, opened, pack } from "../support/encode.ts";

test("columns come back as they were", async () => {
  const small = [0, 5, 3, 2 ** 32 - 1, 0, 7];
  const large = [0, 2 ** 53 - 1, 1, 2 ** 32, 2 ** 32 - 1, 0x7f12_3456_7890];
  const { container: read, rest } = await unpack(
    pack({ "0/a": { kind: "u32", values: small }, "0/b": { kind: "u64", values: large } }),
  );
  await rest();
  assert.deepEqual([...read.u32("0/a")], small);
  assert.deepEqual([...read.u64("0/b")], large);
});

test("the bytes are those of the format's description", () => {
  // A directory of its own length, then the planes: differences 1 and -1, lowest bytes first.
  const bytes = container({ x: { kind: "u32", values: [1, 0] } });
  assert.deepEqual([...bytes.subarray(-8)], [1, 255, 0, 255, 0, 255, 0, 255]);
  assert.deepEqual([...opened(bytes).u32("x")], [1, 0]);
});

test("a column that is not there is empty, one of another kind is refused", () => {
  const read = opened(container({ x: { kind: "u32", values: [1] } }));
  assert.equal(read.u32("y").length, 0);
  assert.equal(read.has("y"), false);
  assert.throws(() => read.u64("x"), /column x is u32/);
});

test("data that are cut off are refused", () => {
  const bytes = container({ x: { kind: "u64", values: [1, 2, 3] } });
  assert.throws(() => opened(bytes.subarray(0, -1)), /column x/);
});

test("curves are there before the blocks that come after them", async () => {
  const values = Array.from({ length: 300_000 }, (_, i) => (i * 7919) % 4096);
  const { container: read, rest } = await unpack(
    pack({
      "0/curves/live/max": { kind: "u64", values: [1, 2, 3] },
      "1/segments/start": { kind: "u32", values: [4] },
      "0/blocks/start": { kind: "u32", values },
    }),
  );
  assert.deepEqual([...read.u64("0/curves/live/max")], [1, 2, 3]);
  assert.deepEqual([...read.u32("1/segments/start")], [4]);
  assert.equal(read.isWhole, false);
  assert.equal(read.count("0/blocks/start"), values.length);
  assert.throws(() => read.u32("0/blocks/start"), /is not there yet/);
  await rest();
  assert.equal(read.isWhole, true);
  assert.deepEqual([...read.u32("0/blocks/start")], values);
});

test("blocks that come before curves are read with them", async () => {
  const columns = {
    "0/blocks/start": { kind: "u32", values: [1] },
    "0/curves/live/max": { kind: "u64", values: [2] },
  } as const;
  const { container: read } = await unpack(pack(columns));
  assert.equal(read.isWhole, true);
  assert.deepEqual([...read.u32("0/blocks/start")], [1]);
});
