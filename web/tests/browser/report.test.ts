// The page in a real browser. What it shows is compared with a count that shares no code with it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { CAUSES } from "../../src/data/summary.ts";
import { Session, settled } from "../support/browser.ts";
import { pack } from "../support/encode.ts";
import { fillPage, template } from "../support/page.ts";
import { count, dataOf, type Recording } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const MIB = 2 ** 20;
const job = { seed: 7, steps: 12, requestsPerStep: 120 };
const first = simulate({ ...job, name: "runs/before.pickle" });
const second = simulate({ ...job, name: "runs/after.pickle", leakBytes: 4 * MIB });

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

/** Fails if a page has complained since the last test. */
function assertQuiet(): void {
  assert.deepEqual(session.complaints.splice(0), []);
}

async function shownInstant(page: Page): Promise<number> {
  await settled(page);
  return Number(await page.locator("#instant").inputValue());
}

/** The instants between which the chart shows the trace, once these are at most so many. */
async function shownView(page: Page, span: number): Promise<number[]> {
  const view = await page.waitForFunction((most) => {
    const [from, to] = (/view=(\d+-\d+)/.exec(location.hash)?.[1] ?? "0-Infinity").split("-").map(Number);
    return to - from <= most ? [from, to] : null;
  }, span);
  return (await view.jsonValue()) as number[];
}

/** The bytes that the gap's table shows, to the byte, by their row's title. */
async function shownSums(page: Page): Promise<Record<string, number>> {
  await settled(page);
  return page
    .locator("#gap td[data-cell]")
    .evaluateAll((cells) =>
      Object.fromEntries(
        cells.map((cell) => [cell.getAttribute("data-cell"), Number(cell.querySelector("data")?.value)]),
      ),
    );
}

const TITLES = [
  "Rounding",
  "Waiting for events",
  "Private pools",
  "Other streams",
  "Cached segments",
  "Partly used pages",
  "Split remainders",
];

async function assertSums(page: Page, recording: Recording): Promise<void> {
  const instant = await shownInstant(page);
  const counted = count(recording, instant);
  const shown = await shownSums(page);
  assert.equal(shown.Live, counted.live);
  assert.equal(shown.Reserved, counted.reserved);
  assert.equal(shown.Sum, counted.reserved);
  assert.deepEqual(
    TITLES.map((title) => shown[title]),
    CAUSES.map((cause) => counted.causes[cause]),
  );
  assert.match(await page.locator(".adds-up").innerText(), /to the byte/);
}

/** A table's cells as texts. */
async function rowsOf(page: Page, selector: string): Promise<string[][]> {
  await settled(page);
  return page
    .locator(`${selector} tbody tr`)
    .evaluateAll((rows) =>
      rows.map((row) =>
        [...row.children].map((cell) => cell.querySelector("data")?.value ?? cell.textContent ?? ""),
      ),
    );
}

test("opens from a file, asks for nothing, and starts at the failure", async () => {
  const page = await session.open([first]);
  assert.equal(await shownInstant(page), first.ooms[0].event);
  assert.doesNotMatch(await page.locator("body").innerText(), /NaN|Infinity|undefined/);
  assert.match(await page.title(), /before\.pickle/);
  await assertSums(page, first);
  assertQuiet();
});

test("a click into the chart chooses an instant, everywhere", async () => {
  const page = await session.open([first]);
  const over = page.locator(".u-over");
  for (const x of [40, 400, 777]) {
    await over.click({ position: { x, y: 60 } });
    await assertSums(page, first);
    const instant = await shownInstant(page);
    const width = (await over.boundingBox())?.width ?? 0;
    assert.ok(Math.abs(instant - (x / width) * first.events) <= 1 + first.events / width);
    const { live } = count(first, instant);
    assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), live);
    const blocks = first.blocks.filter(({ start, end }) => start <= instant && instant < end).length;
    const label = await page.locator("#address .canvas-scroll").getAttribute("aria-label");
    assert.ok(label?.includes(`, ${blocks.toLocaleString("en-US")} block`), label ?? "");
  }
  assertQuiet();
});

test("a drag zooms, down to single events", async () => {
  const page = await session.open([first]);
  const box = await page.locator(".u-over").boundingBox();
  assert.ok(box !== null);
  const level = page.locator("#timeline-level");
  assert.match(await level.innerText(), /Each point is \d+ events/);
  await page.mouse.move(box.x + 300, box.y + 50);
  await page.mouse.down();
  await page.mouse.move(box.x + 420, box.y + 60);
  await page.mouse.up();
  await settled(page);
  assert.match(await level.innerText(), /Every event by itself/);
  const shown = await shownView(page, first.events / 4);
  [300, 420].forEach((x, i) => {
    assert.ok(Math.abs(shown[i] - (x / box.width) * first.events) < 3, `${shown[i]} for ${x}`);
  });
  await page.getByRole("button", { name: "Show the whole recording" }).click();
  await settled(page);
  assert.match(await level.innerText(), /Each point is/);
  // The wheel zooms around the pointer where the chart has the focus, and scrolls the page where it has not.
  await page.locator(".plot").focus();
  const now = await page.locator(".u-over").boundingBox();
  await page.mouse.move(box.x + 500, (now?.y ?? 0) + 50);
  for (let i = 0; i < 20; i++) await page.mouse.wheel(0, -120);
  const [from, to] = await shownView(page, 12);
  const pointed = (500 / box.width) * first.events;
  assert.ok(to - from <= 10 && from - 5 <= pointed && pointed <= to + 5, `${from} to ${to}, not ${pointed}`);
  assertQuiet();
});

test("the keyboard reaches everything that the pointer does", async () => {
  const page = await session.open([first]);
  const chart = page.locator(".plot");
  await chart.focus();
  const at = await shownInstant(page);
  await page.keyboard.press("Shift+ArrowLeft");
  await settled(page);
  assert.equal(await shownInstant(page), at - 1);
  await assertSums(page, first);
  await page.keyboard.press("s");
  await page.keyboard.press("End");
  await settled(page);
  assert.equal(await shownInstant(page), first.events);
  assert.equal(await page.locator("#second").inputValue(), String(at - 1));
  await page.keyboard.press("+");
  await settled(page);
  await page.waitForURL(/to=0(:|%3A)\d+.*view=/);

  await page.locator("#address .canvas-scroll").focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#address .picked").innerText(), /Requested[\s\S]*Address[\s\S]*0x7/);
  await page.locator("#stacks .canvas-scroll").focus();
  await page.keyboard.press("ArrowDown");
  assert.match(await page.locator("#stacks .path").innerText(), /<module> train\.py:131/);

  await page.locator("#gap td[data-cell=Reserved] data").focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(
    (text) => document.querySelector(".spoken")?.textContent === text,
    `Copied ${count(first, first.events).reserved}`,
  );
  await page.locator("#tables tbody td").first().focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  const value = await page.locator("#tables tbody tr:nth-child(2) data").first().getAttribute("value");
  await page.waitForFunction(
    (text) => document.querySelector(".spoken")?.textContent === text,
    `Copied ${value}`,
  );
  assertQuiet();
});

test("the address keeps the state", async () => {
  const page = await session.open(
    [first],
    "#at=0%3A500&to=0%3A900&stacks=difference&table=sizes&filter=stream%3A7",
  );
  assert.equal(await shownInstant(page), 500);
  await assertSums(page, first);
  assert.equal(await page.locator("#second").inputValue(), "900");
  const pressed = await page
    .locator("[aria-pressed=true][data-value]")
    .evaluateAll((buttons) => buttons.map((button) => button.getAttribute("data-value")));
  assert.deepEqual(pressed.slice(1), ["difference", "sizes"]);
  const rows = await rowsOf(page, "#tables");
  const sizes = new Map<number, number>();
  for (const { start, stream, requested } of first.blocks) {
    if (start > 500 && start <= 900 && stream === 1) sizes.set(requested, (sizes.get(requested) ?? 0) + 1);
  }
  assert.equal(Number(rows[0][1]), Math.max(...sizes.values()));
  assert.match(await page.locator("#tables .more-rows").innerText(), new RegExp(`\\b${sizes.size} sizes`));
  assertQuiet();
});

test("tables are filtered and sorted, and count what they leave out", async () => {
  const page = await session.open([first], `#at=0%3A${first.events}&table=lifetimes`);
  await page.locator("#filter").fill("keep_loss");
  await settled(page);
  const leaked = await rowsOf(page, "#tables");
  assert.equal(leaked.length, job.steps);
  assert.ok(leaked.every((row) => row[1] === String(MIB)));

  await page.locator("#filter").fill("");
  await page.getByRole("button", { name: "Request", exact: false }).first().click();
  await settled(page);
  const heading = page.locator("#tables th").nth(1);
  assert.equal(await heading.getAttribute("aria-sort"), "descending");
  const largest = first.blocks.map(({ requested }) => requested).sort((a, b) => b - a);
  const shown = (await rowsOf(page, "#tables")).map((row) => Number(row[1]));
  assert.deepEqual(shown, largest.slice(0, shown.length));
  const rest = (first.blocks.length - shown.length).toLocaleString("en-US");
  assert.ok((await page.locator("#tables .more-rows").innerText()).startsWith(`${rest} more of`));
  await page.locator("#tables .more-rows button").click();
  assert.ok((await rowsOf(page, "#tables")).length > shown.length);
  await page.getByRole("button", { name: "Request", exact: false }).first().click();
  assert.equal(await heading.getAttribute("aria-sort"), "ascending");
  assertQuiet();
});

test("a leak is what grew most between two instants", async () => {
  const from = Math.floor(first.events / 3);
  const page = await session.open([first], `#at=0%3A${from}&to=0%3A${first.events}&stacks=difference`);
  const change = count(first, first.events).live - count(first, from).live;
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), change);
  const leaked = first.blocks.filter(({ start, stack }) => start > from && stack === 1).length * MIB;
  const largest = (await rowsOf(page, "#stacks")).filter((row) => Number(row[0]) > 0);
  assert.equal(Number(largest[0][0]), leaked);
  assert.match(largest[0][3], /append history\.py:17/);
  assertQuiet();
});

test("what grows is named, and a click shows nothing else", async () => {
  const page = await session.open([first], `#at=0%3A${first.events}&table=blocks`);
  const section = page.locator("#growth");
  assert.match(
    await section.innerText(),
    /12 steps, found by the period of the allocations; the first is left out/,
  );
  const [row, ...others] = await rowsOf(page, "#growth");
  assert.deepEqual(others, []);
  assert.deepEqual(row.slice(0, 4), [String(MIB), String(10 * MIB), "10 of 10 steps", "0.98"]);
  await section.locator("summary").click();
  assert.match(
    await section.locator(".frames").innerText(),
    /append history\.py:17\s+keep_loss history\.py:9/,
  );

  await section.getByRole("button", { name: "show only this" }).click();
  await settled(page);
  const shown = await rowsOf(page, "#tables");
  assert.equal(shown.length, job.steps);
  assert.ok(shown.every((cells) => cells[0] === String(MIB)));
  await section.getByRole("button", { name: "show all" }).click();
  await settled(page);
  assert.equal(await page.locator("#filter").inputValue(), "");

  await section.getByRole("button", { name: "Compare the first step" }).click();
  await settled(page);
  assert.equal(await shownInstant(page), first.steps[1]);
  assert.equal(await page.locator("#second").inputValue(), String(first.steps[11]));
  // Between two steps nothing but the leak is held.
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), 10 * MIB);
  assertQuiet();
});

test("where nothing grows, that is said", async () => {
  const page = await session.open([{ ...first, growth: { ...first.growth, found_by: "parts", leaks: [] } }]);
  const text = await page.locator("#growth").innerText();
  assert.match(text, /Nothing that looks like a leak\.\s+Steps were not found; 12 equal parts/);
  assert.equal(await page.locator("#growth table").isVisible(), false);
  assertQuiet();
});

test("two traces are chosen from, and compared", async () => {
  const page = await session.open(
    [first, second],
    `#at=0%3A${first.events},1%3A${second.events}&stacks=traces`,
  );
  const change = count(second, second.events).live - count(first, first.events).live;
  assert.equal(change, 3 * MIB * job.steps);
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), change);
  await page.locator("#trace").selectOption("after.pickle");
  await settled(page);
  assert.equal(await page.locator("h1").innerText(), "after.pickle");
  await assertSums(page, second);
  assert.equal((await rowsOf(page, "#traces")).length, 2);
  // Now it is compared with the trace that was shown before.
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), -change);
  assertQuiet();
});

test("without stacks the bytes are told by stream and size", async () => {
  const page = await session.open([simulate({ ...job, hasStacks: false })]);
  await page.locator("#stacks .canvas-scroll").focus();
  await page.keyboard.press("ArrowDown");
  assert.match(await page.locator("#stacks .path").innerText(), /stream [07]/);
  assert.equal(await page.getByRole("button", { name: "Stack", exact: true }).isVisible(), false);
  assertQuiet();
});

test("what is paused is told beside what is reserved, and what that leaves out is said", async () => {
  const segment = first.segments.find(({ flags }) => flags === 1);
  assert.ok(segment !== undefined);
  const { address, size } = segment;
  const pause = { start: first.events - 100, end: first.events + 1, address, size };
  const away: Recording = { ...first, pauses: [pause] };
  const page = await session.open([away]);
  await page.locator("#instant").fill(String(first.events));
  await page.locator("#instant").press("Enter");
  await settled(page);
  const figure = async (name: string) => {
    const term = page.locator(".readout div", { has: page.getByText(name, { exact: true }) });
    return Number(await term.locator("data").getAttribute("value"));
  };
  const { live, reserved, paused } = count(away, first.events);
  assert.ok(paused > 0);
  assert.deepEqual(
    [await figure("Live"), await figure("Reserved"), await figure("Paused")],
    [live, reserved, paused],
  );
  await assertSums(page, away);
  assert.equal(await page.getByRole("button", { name: "Paused" }).getAttribute("aria-pressed"), "true");
  assert.match(await page.locator(".notes").innerText(), /were paused at once/);
  const without = await session.open([first]);
  assert.equal(await without.getByRole("button", { name: "Paused" }).count(), 0);
  assertQuiet();
});

test("the bar is one line on a usual screen, with what is paused", async () => {
  const [{ address, size }] = first.segments;
  const pause = { start: 1, end: first.events + 1, address, size };
  for (const width of [1280, 1440]) {
    const viewport = { width, height: 900 };
    const page = await session.open([{ ...first, pauses: [pause] }], "", { viewport });
    const parts = await page.locator(".instant > :not([hidden])").evaluateAll((parts) =>
      parts.map((part) => {
        const { top, bottom } = part.getBoundingClientRect();
        return { top, bottom };
      }),
    );
    assert.equal(parts.length, 3);
    const lowestTop = Math.max(...parts.map(({ top }) => top));
    const highestBottom = Math.min(...parts.map(({ bottom }) => bottom));
    assert.ok(lowestTop < highestBottom, `at ${width}: ${JSON.stringify(parts)}`);
  }
  assertQuiet();
});

test("a click copies a number to the byte", async () => {
  const page = await session.open([first]);
  const number = page.locator("#gap td[data-cell=Reserved] data");
  await number.click();
  const value = await number.getAttribute("value");
  await page.waitForFunction(
    (text) => document.querySelector(".spoken")?.textContent === text,
    `Copied ${value}`,
  );
  assertQuiet();
});

test("a click on a box of the icicle widens it, and comes back", async () => {
  const page = await session.open([first]);
  const graph = page.locator("#stacks .canvas-scroll");
  await graph.scrollIntoViewIfNeeded();
  const label = () => page.locator("#stacks .path b").innerText();
  assert.equal(await label(), "all");
  await graph.click({ position: { x: 200, y: 70 } });
  assert.equal(await label(), "train_step");
  await graph.press("Escape");
  assert.equal(await label(), "all");
  assertQuiet();
});

test("light and dark follow the system until somebody chooses", async () => {
  const background = (page: Page) => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await session.open([first], "", { colorScheme: "light" });
  const dark = await session.open([first], "", { colorScheme: "dark" });
  assert.notEqual(await background(light), await background(dark));
  await dark.getByRole("button", { name: "Switch to light colours" }).click();
  assert.equal(await background(dark), await background(light));
  await light.emulateMedia({ colorScheme: "dark" });
  await light.waitForFunction(() => document.documentElement.dataset.theme === "dark");
  assert.notEqual(await background(light), await background(dark));
  assertQuiet();
});

test("every control and picture has a name, and no id is given twice", async () => {
  const page = await session.open([first, second], "#to=0%3A5");
  const nameless = await page.evaluate(() =>
    [...document.querySelectorAll("button, input, select, [role=application], [role=img], section")]
      .filter((element) => {
        const labels = "labels" in element ? [...(element.labels as NodeListOf<Element>)] : [];
        const by = element.getAttribute("aria-labelledby");
        const text = [element.getAttribute("aria-label"), ...labels.map((label) => label.textContent)];
        if (by !== null) text.push(document.getElementById(by)?.textContent ?? null);
        if (element.tagName === "BUTTON") text.push(element.textContent);
        return text.every((each) => (each ?? "").trim() === "");
      })
      .map((element) => element.outerHTML.slice(0, 80)),
  );
  assert.deepEqual(nameless, []);
  const twice = await page.evaluate(() => {
    const ids = [...document.querySelectorAll("[id]")].map(({ id }) => id);
    return ids.filter((id, i) => ids.indexOf(id) !== i);
  });
  assert.deepEqual(twice, []);
  assertQuiet();
});

test("what is aggregated says so, and the named instants stay exact", async () => {
  const folded = { ...first, folded_below: 64 * 1024, bucket_events: 16 };
  const hidden = first.blocks.filter(({ requested }) => requested < 64 * 1024);
  const page = await session.open([folded]);
  const said = `${hidden.length.toLocaleString("en-US")} block`;
  assert.ok((await page.locator(".notes").innerText()).includes(`Aggregated: ${said}`));
  assert.match(await page.locator("#tables > p").innerText(), /aggregated blocks not listed/);
  await assertSums(page, folded);
  // One event further nothing is known of them but their bounds.
  await page.getByRole("button", { name: "One event on" }).click();
  const shown = await shownSums(page);
  const instant = await shownInstant(page);
  assert.equal(shown.Sum, shown.Reserved);
  const [least, most] = await page
    .locator(".adds-up")
    .innerText()
    .then((text) => /between ([\d.]+ \w+) and ([\d.]+ \w+) of live/.exec(text)?.slice(1) ?? []);
  assert.ok(least !== undefined && most !== undefined);
  assert.ok(shown.Live <= count(first, instant).live);
  assertQuiet();
});

test("a recording of nothing is shown as that", async () => {
  const nothing = {
    ...first,
    events: 0,
    blocks: [],
    segments: [],
    ooms: [],
    annotations: [],
    bucket_events: 1,
  };
  const page = await session.open([nothing]);
  assert.deepEqual(await shownSums(page), {
    ...Object.fromEntries(TITLES.map((title) => [title, 0])),
    Live: 0,
    Sum: 0,
    Reserved: 0,
  });
  assert.match(await page.locator("#tables").innerText(), /no blocks/);
  assert.doesNotMatch(await page.locator("body").innerText(), /NaN|Infinity|undefined/);
  assertQuiet();
});

test("texts of a recording stay texts", async () => {
  const evil = "</script><img src=x onerror=\"document.title='taken'\">";
  const stacks = [[], ...first.stacks.slice(1).map((stack) => [`${evil} a.py:1`, ...stack])];
  const page = await session.open([{ ...first, name: evil, tags: ["", evil], stacks }]);
  assert.ok((await page.locator("h1").innerText()).includes("onerror"));
  assert.ok((await page.locator("#tables").innerText()).includes(evil.slice(0, 9)));
  assert.notEqual(await page.title(), "taken");
  assert.equal(await page.locator("main img").count(), 0);
  assertQuiet();
});

test("a file without data, or with damaged data, says so", async () => {
  const empty = await session.openText(template());
  assert.match(await empty.locator("#page .failed").innerText(), /carries no data/);
  const { summary, columns } = dataOf([first]);
  const packed = pack(columns);
  const damaged = await session.openText(fillPage(template(), summary, packed.slice(0, packed.length / 2)));
  assert.match(await damaged.locator("#page .failed").innerText(), /^This report cannot be shown: ./);
  assertQuiet();
});
