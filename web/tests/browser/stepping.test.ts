// From instant to instant: what is kept of the one before must not be seen of it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { Session, settled } from "../support/browser.ts";
import type { Recording } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const recording = simulate({ name: "job", seed: 7, steps: 12, requestsPerStep: 120 });
const [earliest] = recording.segments;
const paused: Recording = {
  ...recording,
  pauses: [{ ...earliest, start: 400, end: 420, region: "weights" }],
};
const TABLES = ["holders", "blocks", "segments", "lifetimes"] as const;

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

/** Everything that the page says of the instant, in words and in numbers. */
async function said(page: Page): Promise<string[]> {
  await settled(page);
  return page.evaluate(() => {
    const chosen = [".readout", "#gap", "#address", "#stacks", "#tables", "#events"];
    const wholes = chosen.map((selector) => document.querySelector(selector) as HTMLElement);
    const texts = wholes.map((element) => element.innerText);
    const labels = wholes.flatMap((element) =>
      Array.from(element.querySelectorAll("[aria-label]"), (named) => named.getAttribute("aria-label")),
    );
    const copied = wholes.flatMap((element) =>
      Array.from(element.querySelectorAll<HTMLElement>("[data-copy]"), ({ dataset, title, className }) =>
        [dataset.copy, title, className].join(" "),
      ),
    );
    const stops = ["#tables", "#events"].map(
      (view) => document.querySelectorAll(`${view} td[tabindex='0'], ${view} td [tabindex='0']`).length,
    );
    return [...texts, ...labels, ...copied, `${stops} stops`].map(String);
  });
}

/** Opens the table of stacks, and waits until it is there. */
async function openTable(page: Page): Promise<void> {
  await page.locator("#stacks summary").first().click();
  await page.locator("#stacks caption").waitFor();
}

async function step(page: Page, key: string, times: number): Promise<void> {
  await page.locator(".plot").focus();
  for (let i = 0; i < times; i++) await page.keyboard.press(key);
}

for (const table of TABLES) {
  test(`an instant is the same however it is come to: ${table}`, async () => {
    const fragment = (instant: number) => `#at=0%3A${instant}&to=0%3A900&table=${table}`;
    const page = await session.open([paused], fragment(380));
    await openTable(page);
    for (const [key, times, instant] of [
      ["Shift+ArrowRight", 25, 405],
      ["Shift+ArrowRight", 30, 435],
      ["Shift+ArrowLeft", 20, 415],
    ] as const) {
      await step(page, key, times);
      const fresh = await session.open([paused], fragment(instant));
      await openTable(fresh);
      assert.deepEqual(await said(page), await said(fresh), `${times} times ${key}`);
      await fresh.close();
    }
    assert.deepEqual(session.complaints, []);
  });
}

test("the table of stacks stays open and says which instant it is of, while others pass and when they rest", async () => {
  const page = await session.open([recording], "#at=0%3A300");
  await openTable(page);
  await settled(page);
  await page.locator("#stacks").scrollIntoViewIfNeeded();
  const seen = await page.evaluate(async () => {
    const stacks = document.querySelector("#stacks") as HTMLElement;
    const text = (selector: string) => stacks.querySelector(selector)?.textContent ?? "";
    const seen: { title: string; caption: string; isBusy: boolean }[] = [];
    for (let i = 0; i < 20; i++) {
      const key = new KeyboardEvent("keydown", { key: "ArrowRight", shiftKey: true, bubbles: true });
      document.querySelector(".plot")?.dispatchEvent(key);
      await new Promise((done) => requestAnimationFrame(done));
      seen.push({ title: text(".verdict"), caption: text("caption"), isBusy: stacks.ariaBusy === "true" });
    }
    return seen;
  });
  for (const { title, caption, isBusy } of seen) {
    assert.match(caption, /^Live at event \d+$/);
    assert.ok(isBusy || title.startsWith(`${caption}: `), `${title} above ${caption}`);
  }
  await settled(page);
  assert.match(await page.locator("#stacks .verdict").innerText(), /^Live at event 320: /);
  assert.equal(await page.locator("#stacks caption").innerText(), "Live at event 320");
});

test("a stack that is open in the tables stays open from instant to instant", async () => {
  const page = await session.open([recording], "#at=0%3A300");
  const [stack] = await page.locator("#tables td summary").all();
  const name = await stack.innerText();
  await stack.click();
  await step(page, "Shift+ArrowRight", 5);
  await settled(page);
  assert.equal(await page.locator("#tables details[open] summary").innerText(), name);
});
