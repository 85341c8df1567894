import assert from "node:assert/strict";
import { test } from "node:test";
import { Container, unpack } from "../../src/data/container.ts";
import { container, pack } from "../support/encode.ts";

test("columns come back as they were", async () => {
  const small = [0, 5, 3, 2 ** 32 - 1, 0, 7];
  const large = [0, 2 ** 53 - 1, 1, 2 ** 32, 2 ** 32 - 1, 0x7f12_3456_7890];
  const read = await unpack(
    pack({ "0/a": { kind: "u32", values: small }, "0/b": { kind: "u64", values: large } }),
  );
  assert.deepEqual([...read.u32("0/a")], small);
  assert.deepEqual([...read.u64("0/b")], large);
});

test("the bytes are those of the format's description", () => {
  // A directory of its own length, then the planes: differences 1 and -1, lowest bytes first.
  const bytes = container({ x: { kind: "u32", values: [1, 0] } });
  assert.deepEqual([...bytes.subarray(-8)], [1, 255, 0, 255, 0, 255, 0, 255]);
  assert.deepEqual([...new Container(bytes).u32("x")], [1, 0]);
});

test("a column that is not there is empty, one of another kind is refused", () => {
  const read = new Container(container({ x: { kind: "u32", values: [1] } }));
  assert.equal(read.u32("y").length, 0);
  assert.equal(read.has("y"), false);
  assert.throws(() => read.u64("x"), /column x is u32/);
});

test("data that are cut off are refused", () => {
  const bytes = container({ x: { kind: "u64", values: [1, 2, 3] } });
  assert.throws(() => new Container(bytes.subarray(0, -1)), /column x/);
});
