import assert from "node:assert/strict";
import { test } from "node:test";
import type { Run } from "../../src/data/gap.ts";
import { fittingScale, layOut } from "../../src/data/layout.ts";

const run = (address: number, size: number, stream = 0): Run => ({
  address,
  end: address + size,
  stream,
  pool: 0,
  flags: 1,
});

test("every byte of every segment lies on one line, to scale", () => {
  const runs = [run(0, 1000), run(2000, 30), run(3000, 4500), run(9000, 10, 1), run(9100, 2000, 1)];
  const { lines, height } = layOut(runs, ({ stream }) => `stream ${stream}`, 300, 10);
  const covered = runs.map(({ address }) => address);
  for (const { y, pieces } of lines) {
    assert.ok(y < height);
    for (const piece of pieces) {
      assert.equal(piece.from, covered[piece.run], "pieces follow on each other");
      covered[piece.run] = piece.to;
      assert.ok(piece.x >= 0 && piece.x + piece.width <= 300.5);
      assert.ok(piece.width >= 1);
    }
  }
  assert.deepEqual(
    covered,
    runs.map(({ end }) => end),
  );
  assert.deepEqual(
    lines.map(({ heading }) => heading).filter((heading) => heading !== null),
    ["stream 0", "stream 1"],
  );
});

test("the fitting scale fits", () => {
  const runs = Array.from({ length: 50 }, (_, i) => run(i * 1e9, 20 * 2 ** 20));
  const scale = fittingScale(runs, 1, 1000, 400);
  assert.ok(layOut(runs, () => "all", 1000, scale).height <= 500);
});
