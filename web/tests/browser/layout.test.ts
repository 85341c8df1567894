// How the page lies in windows of different widths.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Session, settled } from "../support/browser.ts";
import { simulate } from "../support/simulate.ts";

const job = simulate({ seed: 7, steps: 12, requestsPerStep: 120 });
const label = "caching:expandable_segments:True";
const strategy = { label, peak_reserved_bytes: 2 ** 30, ratio: 1.5, driver_time_us: 9, completed: true };

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

test("who holds memory stands before what grew", async () => {
  const page = await session.open([job]);
  const titles = await page.locator("main > section:visible h2").allInnerTexts();
  assert.deepEqual(titles, [
    "Memory over time",
    "Who holds it",
    "What grew",
    "Reserved but not live",
    "Address space",
    "Tables",
    "What happened",
  ]);
  assert.deepEqual(session.complaints, []);
});

test("a narrow page has no thin column, and is not much taller than a wide one", async () => {
  const page = await session.open([{ ...job, strategies: [strategy] }], "", {
    viewport: { width: 1440, height: 900 },
  });
  const height = () => page.evaluate(() => document.documentElement.scrollHeight);
  const wide = await height();
  for (const width of [390, 768, 1023]) {
    await page.setViewportSize({ width, height: 900 });
    await settled(page);
    const thin = await page.locator("th, td").evaluateAll((cells) =>
      cells.flatMap((cell) => {
        const { width } = cell.getBoundingClientRect();
        return width > 0 && width < 60 ? [`${cell.textContent}: ${width}`] : [];
      }),
    );
    assert.deepEqual(thin, [], `${width} pixels`);
    assert.ok((await height()) <= 1.3 * wide, `${await height()} pixels at ${width}, ${wide} at 1440`);
  }
  assert.deepEqual(session.complaints, []);
});

test("two traces leave no hole in a wide window", async () => {
  const viewport = { width: 1920, height: 900 };
  const page = await session.open(
    [
      { ...job, strategies: [strategy] },
      { ...job, name: "other" },
    ],
    "",
    {
      viewport,
    },
  );
  const right = await page.locator("main > section:visible").evaluateAll((sections) => {
    const rows = new Map<number, number>();
    for (const section of sections) {
      const { top, right } = section.getBoundingClientRect();
      rows.set(top, Math.max(right, rows.get(top) ?? 0));
    }
    return [...rows.values()];
  });
  assert.deepEqual(
    right,
    right.map(() => viewport.width - 24),
  );
  assert.deepEqual(session.complaints, []);
});

test("a wide window is used from side to side, and has views beside each other", async () => {
  const page = await session.open([job]);
  for (const width of [1440, 1920, 2560]) {
    await page.setViewportSize({ width, height: 900 });
    await settled(page);
    const places = await page
      .locator("main > section:visible")
      .evaluateAll((sections) =>
        sections
          .map((section) => section.getBoundingClientRect())
          .map(({ left, right, top }) => ({ left, right, top })),
      );
    assert.equal(Math.min(...places.map(({ left }) => left)), 24);
    assert.equal(Math.max(...places.map(({ right }) => right)), width - 24);
    const beside = places.filter(({ top }, i) => top === places[i - 1]?.top).length;
    assert.equal(beside, width < 1600 ? 0 : 2, `${width} pixels`);
  }
  assert.deepEqual(session.complaints, []);
});
