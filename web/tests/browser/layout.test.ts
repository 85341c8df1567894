// How the page lies in windows of different widths.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Session } from "../support/browser.ts";
import { simulate } from "../support/simulate.ts";

const job = simulate({ seed: 7, steps: 12, requestsPerStep: 120 });

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
