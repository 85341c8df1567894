import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

/** What WCAG asks of texts of a usual size. */
const CONTRAST_MIN = 4.5;
const TEXTS = ["ink", "ink-2", "ink-3", "accent", "bad", "grown", "shrunk"];
/** The grid's colour is that of what the pointer is over. */
const GROUNDS = ["surface", "plane", "grid"];

function luminance(color: string): number {
  const [red, green, blue] = [1, 3, 5].map((place) => {
    const share = Number.parseInt(color.slice(place, place + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

test("texts can be read on every ground, light and dark", () => {
  const sheet = readFileSync("src/style.css", "utf8");
  const themes = [...sheet.matchAll(/^:root[^{]*\{([^}]*)\}/gm)].map(
    ([, body]) =>
      new Map([...body.matchAll(/--([\w-]+): (#[0-9a-f]{6});/g)].map(([, name, value]) => [name, value])),
  );
  assert.equal(themes.length, 2);
  for (const theme of themes) {
    for (const text of TEXTS) {
      for (const ground of GROUNDS) {
        const [one, other] = [text, ground].map((name) => luminance(theme.get(name) ?? ""));
        const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        assert.ok(contrast >= CONTRAST_MIN, `${text} on ${ground}: ${contrast.toFixed(2)}`);
      }
    }
  }
});
