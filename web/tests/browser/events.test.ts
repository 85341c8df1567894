// The list of what happened, in a real browser, beside the actions that its recording was made of.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { Session, settled } from "../support/browser.ts";
import { type Action, type Program, program } from "../support/program.ts";
import type { Recording } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const EVENTS = 600;
const BESIDE = 12;
const made = program(3, EVENTS);
const folded = program(5, EVENTS, 700 * 1024);

/** How the list begins to say what happened. */
const TEXTS: Record<string, string> = {
  allocated: "allocated",
  asked: "asked to be freed",
  freed: "freed",
  reserved: "segment reserved",
  mapped: "pages mapped",
  returned: "segment given back",
  unmapped: "pages unmapped",
  paused: "paused: region kv",
  resumed: "resumed: region kv",
  failed: "request failed: the device had 0 B left",
  unknown: "not known",
};

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

function assertQuiet(): void {
  assert.deepEqual(session.complaints.splice(0), []);
}

interface Row {
  event: number;
  text: string;
  bytes: string;
  address: string;
  isChosen: boolean;
}

async function rowsOf(page: Page): Promise<Row[]> {
  await settled(page);
  return page.locator("#events tbody tr").evaluateAll((rows) =>
    rows.map((row) => {
      const [event, what, bytes, address] = Array.from((row as HTMLTableRowElement).cells);
      return {
        event: Number(event.querySelector("button")?.value),
        text: what.textContent ?? "",
        bytes: bytes.querySelector("data")?.value ?? "",
        address: address.querySelector("data")?.value ?? "",
        isChosen: row.getAttribute("aria-current") === "true",
      };
    }),
  );
}

/** What the list says of a block that is asked to be freed, and when that is done. */
function askedText({ blocks }: Recording, event: number): string {
  const end = blocks.find((block) => block.freed === event)?.end ?? 0;
  if (end === event + 1) return TEXTS.asked;
  return `${TEXTS.asked}, and waits ${end > EVENTS ? "to the end" : `until event ${end}`}`;
}

/** Fails if the list is not what the actions around the instant were. */
async function assertAround({ actions, recording }: Program, page: Page, instant: number): Promise<void> {
  const first = Math.max(1, instant - BESIDE);
  const wanted = actions.slice(first - 1, instant + BESIDE);
  const shown = (await rowsOf(page)).filter(({ event }) => event > 0);
  assert.equal(shown.length, wanted.length);
  shown.forEach(({ event, text, bytes, address, isChosen }, i) => {
    assert.equal(event, first + i);
    assert.equal(isChosen, event === instant);
    const action = wanted[i];
    assert.ok(text.startsWith(TEXTS[action.what]), `${text} for ${action.what}`);
    if (action.what === "asked" && action.address !== null) assert.equal(text, askedText(recording, event));
    assert.equal(bytes, action.bytes === null ? "" : String(action.bytes));
    assert.equal(address, action.address === null ? "" : `0x${action.address.toString(16)}`);
  });
}

async function shownInstant(page: Page): Promise<number> {
  await settled(page);
  return Number(await page.locator("#instant").inputValue());
}

test("the list is what happened around the instant, at the first and the last event too", async () => {
  for (const instant of [0, 1, 5, 300, EVENTS - 1, EVENTS]) {
    const page = await session.open([made.recording], `#at=0%3A${instant}`);
    await assertAround(made, page, instant);
    const rows = await rowsOf(page);
    assert.equal(
      rows.filter(({ text }) => text.startsWith("before the first event: 0 blocks")).length,
      +(instant < 13),
    );
    await page.close();
  }
  assertQuiet();
});

test("a click on an event's number chooses its instant, from where the arrows go on", async () => {
  const page = await session.open([made.recording], "#at=0%3A300");
  await page.locator("#events button[value='306']").click();
  assert.equal(await shownInstant(page), 306);
  await assertAround(made, page, 306);
  await page.keyboard.press("ArrowUp");
  assert.equal(await shownInstant(page), 305);
  // The number of what is chosen already is a place to go on from, too.
  await page.locator("#events button[value='305']").click();
  await page.keyboard.press("ArrowDown");
  assert.equal(await shownInstant(page), 306);
  assertQuiet();
});

/** The number of the event in whose row the focus is. */
function focused(page: Page): Promise<number> {
  return page.evaluate(() =>
    Number(document.activeElement?.closest("#events tr")?.querySelector("button")?.value),
  );
}

test("in the list arrows choose the instant before and after, and Enter that of its row", async () => {
  const page = await session.open([made.recording], "#at=0%3A300");
  const stops = await page
    .locator("#events tbody *")
    .evaluateAll((all) =>
      all.filter((one) => one instanceof HTMLElement && one.tabIndex === 0).map((one) => one.tagName),
    );
  assert.deepEqual(
    stops.filter((name) => name !== "SUMMARY"),
    ["TD"],
  );
  await page.locator("#events td[tabindex='0']").focus();
  assert.equal(await focused(page), 300);
  for (const [key, times, instant] of [
    ["ArrowDown", 20, 320],
    ["ArrowUp", 3, 317],
  ] as const) {
    for (let i = 0; i < times; i++) {
      await page.keyboard.press(key);
      await settled(page);
    }
    assert.equal(await shownInstant(page), instant);
    assert.equal(await focused(page), instant);
  }
  await assertAround(made, page, 317);
  // To the sides nothing is chosen; a number is copied, and another row's button chooses.
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  assert.equal(await shownInstant(page), 317);
  await page.locator("#events tr:has(button[value='310']) td").first().focus();
  await page.keyboard.press("Enter");
  assert.equal(await shownInstant(page), 310);
  assert.equal(await focused(page), 310);
  assertQuiet();
});

test("what is not listed one by one, and what is not known, is counted", async () => {
  const isUnlisted = ({ what, address }: Action) =>
    address === null && what !== "unknown" && what !== "failed";
  const counts: number[][] = [];
  for (let instant = 20; instant < EVENTS; instant += 60) {
    const page = await session.open([folded.recording], `#at=0%3A${instant}`);
    await assertAround(folded, page, instant);
    const around = folded.actions.slice(instant - BESIDE - 1, instant + BESIDE);
    const [unlisted, unknown] = [
      around.filter(isUnlisted).length,
      around.filter(({ what }) => what === "unknown").length,
    ];
    counts.push([unlisted, unknown]);
    const text = await page.locator("#events > .quiet").innerText();
    const said = [/(\d+) events? of aggregated blocks/, /What (\d+) events? did is left out/];
    assert.deepEqual(
      said.map((pattern) => Number(pattern.exec(text)?.[1] ?? 0)),
      [unlisted, unknown],
    );
    const marked = (await rowsOf(page)).filter(({ text }) => text.endsWith("; an aggregated block"));
    assert.equal(marked.length, unlisted);
    await page.close();
  }
  assert.ok(counts.some(([unlisted]) => unlisted > 0) && counts.some(([, unknown]) => unknown > 0));
  assertQuiet();
});

test("stacks open in the list, and scrolling one does not choose another instant", async () => {
  const recording = simulate({ seed: 7, steps: 4, requestsPerStep: 60 });
  const page = await session.open([recording], "#at=0%3A200");
  const stack = page.locator("#events td summary").first();
  await stack.click();
  const frames = page.locator("#events .frames");
  // A stack is filled in once it has opened, which is a moment later.
  await frames.locator("li").nth(1).waitFor();
  await frames.focus();
  await page.keyboard.press("ArrowDown");
  assert.equal(await shownInstant(page), 200);
  assertQuiet();
});

test("a recording without events has a list that says so", async () => {
  const page = await session.open([
    { ...made.recording, events: 0, blocks: [], segments: [], pauses: [], ooms: [] },
  ]);
  assert.match(await page.locator("#events > .quiet").innerText(), /^The recording has no events\.$/);
  assert.equal((await rowsOf(page)).length, 1);
  assertQuiet();
});

test("marks are told by name, and the filter leaves the list as it is", async () => {
  const annotations = [
    { event: 300, name: "forward", stage: 0 },
    { event: 300, name: "load", stage: 1 },
  ];
  const page = await session.open(
    [{ ...made.recording, annotations }],
    "#at=0%3A300&filter=nothing_has_this",
  );
  const rows = await rowsOf(page);
  assert.equal(rows.filter(({ text }) => text === "mark: “forward”, “load ends”").length, 1);
  assert.equal(rows.length, 2 * BESIDE + 2);
  assert.match(await page.locator("#events > .quiet").innerText(), /The filter leaves this list as it is\./);
  assertQuiet();
});
