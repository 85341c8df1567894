// The table of other strategies: its order, its cost in driver time, and its bars.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import type { Strategy } from "../../src/data/summary.ts";
import { Session } from "../support/browser.ts";
import { simulate } from "../support/simulate.ts";

const GIB = 2 ** 30;
const job = simulate({ seed: 7, steps: 3, requestsPerStep: 60 });

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

function strategy(label: string, peak: number, driver_time_us: number, completed = true): Strategy {
  return { label, peak_reserved_bytes: peak, ratio: 1, driver_time_us, completed };
}

const strategies = [
  strategy("direct", 60 * 2 ** 20, 9e6),
  strategy("slab", 8 * 2 ** 20, 1, false),
  strategy("pool", 240 * GIB, 2500),
  strategy("tide", 61 * 2 ** 20, 5000),
];

/** Returns the cells of a column of the table, from top to bottom. */
function column(page: Page, number: number): Promise<string[]> {
  return page.locator(`#strategies tbody td:nth-child(${number})`).allInnerTexts();
}

test("direct heads no order of the table or the legend, and what does not fit ends it", async () => {
  const page = await session.open([{ ...job, strategies }]);
  const headings = page.locator("#strategies thead button");
  for (let i = 0; i < (await headings.count()); i++) {
    for (const click of ["once", "twice"]) {
      await headings.nth(i).click();
      const labels = await column(page, 1);
      assert.deepEqual(labels.slice(2), ["direct", "slab"], `column ${i}, clicked ${click}`);
    }
  }
  const replayed = page.getByRole("list", { name: "Replayed" }).getByRole("button");
  const names = (await replayed.allInnerTexts()).map((text) => text.split(" ")[0]);
  assert.deepEqual(names, ["tide", "pool", "direct", "slab"]);
  assert.deepEqual(session.complaints, []);
});

test("driver time is a share of the job's time, or a time if the recording has none", async () => {
  const page = await session.open([{ ...job, pace_us: 1e6 / job.events, strategies }]);
  assert.deepEqual(await column(page, 5), ["0.5 % of the job", "0.3 % of the job", "900.0 % of the job", ""]);
  const untimed = await session.open([{ ...job, pace_us: 0, strategies }]);
  assert.deepEqual(await column(untimed, 5), ["5.00 ms", "2.50 ms", "9.000 s", ""]);
  assert.deepEqual(session.complaints, []);
});

test("a huge peak is cut, and leaves the other bars their length", async () => {
  const page = await session.open([{ ...job, strategies }]);
  const bars = page.locator("#strategies .meter");
  const shown = await bars.evaluateAll((all) =>
    all.map((bar) => {
      const [reserved] = [...bar.children].map((part) => part.getBoundingClientRect().width);
      return [bar.classList.contains("cut"), reserved / bar.getBoundingClientRect().width > 0.2];
    }),
  );
  assert.deepEqual(shown, [
    [false, true],
    [true, true],
    [false, true],
  ]);
  assert.deepEqual(session.complaints, []);
});
