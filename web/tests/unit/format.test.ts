import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../../src/format.ts";

test("bytes", () => {
  const texts = [0, 512, 1023, 1024, 1536, 20 * 2 ** 20, 1.531 * 2 ** 30, -(2 ** 20)].map((value) =>
    format.bytes(value),
  );
  assert.deepEqual(texts, ["0 B", "512 B", "1023 B", "1 KiB", "1.500 KiB", "20 MiB", "1.531 GiB", "−1 MiB"]);
  const nearly = [999.9, 999.96, 1000.04, 1023.9].map((mib) => format.bytes(mib * 2 ** 20));
  assert.deepEqual(nearly, ["999.9 MiB", "1000 MiB", "1000 MiB", "1024 MiB"]);
  assert.equal(format.change(2 ** 20), "+1 MiB");
  assert.equal(format.change(0), "0 B");
});

test("times", () => {
  const texts = [0, 999, 1500, 3.214e6, 125e6, 7500e6].map(format.duration);
  assert.deepEqual(texts, ["0 µs", "999 µs", "1.50 ms", "3.214 s", "2 min 5 s", "2 h 5 min"]);
});

test("other numbers", () => {
  assert.equal(format.whole(1234567), "1,234,567");
  assert.equal(format.percent(0.4567), "45.7 %");
  assert.deepEqual([0, 1e-9, 0.0005].map(format.percent), ["0.0 %", "< 0.1 %", "0.1 %"]);
  assert.equal(format.sizeClass(20), "1 MiB to 2 MiB");
  assert.equal(format.counted(1, "block"), "1 block");
  assert.equal(format.counted(1200, "block"), "1,200 blocks");
});

test("shares and confidences have words", () => {
  const shares = [0, 1e-9, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 0.999, 1].map(format.share);
  assert.deepEqual(shares, [
    "none",
    "almost none",
    "a small part",
    "about a tenth",
    "about a fifth",
    "about a quarter",
    "about a third",
    "about half",
    "most",
    "almost all",
    "all",
  ]);
  const confidences = [0, 0.5, 0.7, 0.9, 0.98, 1].map(format.confidence);
  assert.deepEqual(confidences, [
    "unlikely",
    "as likely as not",
    "likely",
    "very likely",
    "almost certain",
    "almost certain",
  ]);
});

test("a name in the data is read as words", () => {
  assert.equal(format.words("optimizer_state"), "optimizer state");
  assert.equal(format.words("unknown"), "unknown");
});
