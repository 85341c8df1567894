// The page in a real browser. What it shows is compared with a count that shares no code with it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { CAUSES } from "../../src/data/summary.ts";
import { Session, settled } from "../support/browser.ts";
import { pack } from "../support/encode.ts";
import { fillPage, template } from "../support/page.ts";
import { count, dataOf, type Recording, type Segment } from "../support/recording.ts";
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
  await page.getByRole("button", { name: "All of the recording" }).click();
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

test("the labels of the chart's time are whole", async () => {
  const page = await session.open([{ ...first, pace_us: 31_500 }], "#view=0-2000");
  // The last label stands under the chart's right edge. One that is cut has ink in the picture's last columns.
  const [inked, all] = await page.locator("#timeline canvas").evaluate((canvas) => {
    const { width, height } = canvas as HTMLCanvasElement;
    const pixels = (canvas as HTMLCanvasElement)
      .getContext("2d")
      ?.getImageData(width - 60, height - 40, 60, 40);
    const columns = new Array<boolean>(60).fill(false);
    pixels?.data.forEach((value, i) => {
      if (i % 4 === 3 && value > 0) columns[59 - ((i >> 2) % 60)] = true;
    });
    return [columns.indexOf(true), columns.filter(Boolean).length];
  });
  assert.ok(inked > 0 && all > 20, `ink in column ${inked} from the right, in ${all} columns`);
  assertQuiet();
});

test("by time, a point of the chart is the event of that time", async () => {
  const half = Math.floor(first.events / 2);
  const times = [
    [0, 0],
    [half, 9e6],
    [first.events, 10e6],
  ].map(([event, time_us]) => ({ event, time_us }));
  const page = await session.open([{ ...first, times }, second], "#curves=live,others/live");
  const others = page.getByRole("list", { name: "Other traces" });
  assert.equal(await others.count(), 1);
  await page.getByRole("group", { name: "Horizontal axis" }).getByText("By time").click();
  await settled(page);
  assert.equal(await others.count(), 0);
  const over = page.locator("#timeline .u-over");
  const { width } = (await over.boundingBox()) ?? { width: 0 };
  for (const [share, expected] of [
    [0.45, half / 2],
    [0.95, (first.events + half) / 2],
  ]) {
    await over.click({ position: { x: share * width, y: 60 } });
    const instant = await shownInstant(page);
    assert.ok(Math.abs(instant - expected) <= 1 + (5 * first.events) / width, `${instant}, not ${expected}`);
    const mark = await page.locator("#timeline .mark:not(.second)").boundingBox();
    const left = (await over.boundingBox())?.x ?? 0;
    assert.ok(Math.abs((mark?.x ?? 0) - left - share * width) < 3);
    await assertSums(page, first);
  }
  // The half of the events that take a tenth of the time fills the chart when it is zoomed.
  const { x, y } = (await over.boundingBox()) ?? { x: 0, y: 0 };
  await page.mouse.move(x + 0.9 * width, y + 60);
  await page.mouse.down();
  await page.mouse.move(x + width, y + 60);
  await page.mouse.up();
  const [from, to] = await shownView(page, 0.6 * first.events);
  assert.ok(Math.abs(from - half) <= 5 && to === first.events, `${from} to ${to}`);
  const untimed = await session.open([{ ...first, pace_us: 0 }], "#axis=time");
  assert.ok(await untimed.getByRole("group", { name: "Horizontal axis" }).isHidden());
  await assertSums(untimed, first);
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
    .locator(":is(#stacks, #tables) [aria-pressed=true][data-value]")
    .evaluateAll((buttons) => buttons.map((button) => button.getAttribute("data-value")));
  assert.deepEqual(pressed, ["difference", "sizes"]);
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
  const about = page.locator("#tables > .quiet");
  assert.match(
    await about.innerText(),
    new RegExp(`The filter leaves ${job.steps} blocks: 12 MiB of requests\\.`),
  );
  assert.equal(await about.locator("data").getAttribute("value"), String(job.steps * MIB));
  await page.locator("#filter").fill('-keep_loss "history.py:9"');
  await settled(page);
  assert.match(await about.innerText(), /The filter leaves 0 blocks: 0 B of requests\./);

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

test("a state that is asked for is that of the instant, also of what was freed before or comes later", async () => {
  const [from, to] = [300, 330];
  const blocks = first.blocks.map((block, i) => {
    // Two wait for events: one at the first instant, one at the second, which is held at the first.
    if (i === 0) return { ...block, start: 290, freed: 295, end: 310 };
    return i === 1 ? { ...block, start: 290, freed: 325, end: 335 } : block;
  });
  const there = (instant: number) => blocks.filter(({ start, end }) => start <= instant && instant < end);
  const allocated = there(from).filter(({ freed }) => from < freed);
  const waiting = there(from).filter(({ freed }) => freed <= from);
  assert.ok(waiting.length > 0);
  const recording = { ...first, blocks };
  const page = await session.open([recording], `#at=0%3A${from}&table=lifetimes`);
  const left = async (filter: string): Promise<string> => {
    await page.locator("#filter").fill(filter);
    await settled(page);
    return page.locator("#tables > .quiet").innerText();
  };
  assert.match(await left("state:waiting"), new RegExp(`leaves ${waiting.length} block`));
  assert.match(await left("state:allocated"), new RegExp(`leaves ${allocated.length} blocks`));
  assert.match(await left("state:freed"), /The filter’s “state:freed” is not understood/);
  await page.getByRole("button", { name: "Most frequent sizes" }).click();
  const sizes = new Set(allocated.map(({ requested }) => requested));
  assert.match(await left("state:allocated"), new RegExp(`leaves ${sizes.size} sizes`));

  // What holds memory at the second instant is allocated then, whatever it is at the first.
  const both = await session.open([recording], `#at=0%3A${to}&to=0%3A${from}&table=holders`);
  const changes = async () => (await rowsOf(both, "#tables")).map((row) => row[1]).sort();
  const all = await changes();
  await both.locator("#filter").fill("state:allocated");
  assert.deepEqual(await changes(), all);
  assertQuiet();
});

test("a leak is what grew most between two instants", async () => {
  const from = Math.floor(first.events / 3);
  const page = await session.open([first], `#at=0%3A${from}&to=0%3A${first.events}&stacks=difference`);
  const change = count(first, first.events).live - count(first, from).live;
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), change);
  const leaked = first.blocks.filter(({ start, stack }) => start > from && stack === 1).length * MIB;
  await page.locator("#stacks summary").first().click();
  await page.locator("#stacks caption").waitFor();
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

test("a leak is shown in the last step, as before it there may be none of it", async () => {
  const page = await session.open([first], "#at=0%3A0");
  const certain = page.locator("#growth tbody td:nth-child(4) data");
  assert.equal(await certain.innerText(), "almost certain");
  assert.match((await certain.getAttribute("title")) ?? "", /^confidence 0\.98 of 1/);
  await page.locator("#growth").getByRole("button", { name: "show only this" }).click();
  await settled(page);
  assert.equal(await shownInstant(page), first.steps[11]);
  const left = page.locator("#tables > .quiet data");
  assert.equal(await left.getAttribute("value"), String(11 * MIB));
  assertQuiet();
});

test("growth that many call sites share is said, with those that grew most", async () => {
  const [leak] = first.growth.leaks;
  const most = [{ ...leak, confidence: 0.25, grown_steps: 1, times_given_back: 2 }];
  const spread = { ...leak, is_steady: true, sites: 51, most };
  const check = async (growth: Partial<typeof first.growth>, expected: RegExp, rows: number) => {
    const page = await session.open([{ ...first, growth: { ...first.growth, ...growth } }]);
    assert.match(await page.locator("#growth .verdict").innerText(), expected);
    const told = await rowsOf(page, "#growth");
    assert.equal(told.length, rows);
    assert.deepEqual(told[rows - 1].slice(2, 4), ["1 of 10 steps; given back 2 times", "0.25"]);
    await page.close();
    assertQuiet();
  };
  const by =
    "by 1 MiB a step from step 2 to step 12 \\(almost certain to go on\\), in 51 call sites, of which those that";
  const steady = `^All that is live grows steadily, though no call site does: ${by} grew most are listed\\.$`;
  await check({ leaks: [], spread }, new RegExp(steady), 1);
  const more =
    "^1 call site grows from step to step, by 1 MiB a step\\. All else grows steadily, too, though no other";
  await check({ spread }, new RegExp(more), 2);
  const unsteady = "^Nothing that looks like a leak\\. All that is live grew, but not steadily: by 1 MiB";
  await check({ leaks: [], spread: { ...spread, is_steady: false } }, new RegExp(unsteady), 1);
});

test("where nothing grows, that is said", async () => {
  const page = await session.open([
    { ...first, growth: { ...first.growth, found_by: "parts", leaks: [], spread: null } },
  ]);
  const text = await page.locator("#growth").innerText();
  assert.match(text, /Nothing that looks like a leak\.\s+Steps were not found; 12 equal parts/);
  assert.equal(await page.locator("#growth table").isVisible(), false);
  assertQuiet();
});

test("where too little is recorded, it is said that leaks are not known", async () => {
  const doubt = "it is not known what grows: 5 events are too few";
  const training = { optimizer: { bytes: 1 << 21, blocks: 4 }, gradients: { bytes: 0, blocks: 0 } };
  const growth = { ...first.growth, found_by: "parts" as const, doubt, training, leaks: [] };
  const page = await session.open([{ ...first, growth }]);
  const text = await page.locator("#growth").innerText();
  assert.match(
    text,
    /It is not known what grows: 5 events are too few\. Training keeps 2 MiB of optimizer state in 4 blocks: no leak/,
  );
  assertQuiet();
});

test("what is missing of a recording is said, its beginning and its end by themselves", async () => {
  const notes = (page: Page) => page.getByRole("list", { name: "About these numbers" });
  const whole = await session.open([first]);
  assert.equal(await notes(whole).count(), 0);
  const killed = await session.open([{ ...first, is_cut_off: true }]);
  const end = await notes(killed).innerText();
  assert.match(end, /end is missing/);
  assert.doesNotMatch(end, /beginning/);
  const missed = await session.open([{ ...first, missed_events: 3 }]);
  const after = await notes(missed).innerText();
  assert.match(after, /end is missing: .*at least 3 events/);
  assert.doesNotMatch(after, /killed|beginning/);
  const blocks = first.blocks.map((block, i) => (i < 7 ? { ...block, start: 0 } : block));
  const late = await session.open([{ ...first, blocks }]);
  const beginning = await notes(late).innerText();
  assert.match(beginning, /beginning is missing: 7 blocks were there before its first event/);
  assert.doesNotMatch(beginning, /end is missing/);
  assertQuiet();
});

test("what replays leave out is said beside them", async () => {
  const strategies = [
    { label: "buddy", peak_reserved_bytes: 80 * MIB, ratio: 1.1, driver_time_us: 9, completed: true },
  ];
  const replay_notes = ["the job ran out of memory at 3 requests; a replay serves them"];
  const page = await session.open([{ ...first, strategies, replay_notes }], "#curves=live,reserved");
  const text = await page.locator("#strategies .notes").innerText();
  assert.equal(text, "The job ran out of memory at 3 requests; a replay serves them.");
  assertQuiet();
});

test("frames of tide are counted, and the step that moved most is a click away", async () => {
  const frames = {
    size: 2 * MIB,
    peak: 6131,
    addresses: 7002,
    moved: 3016,
    moving_steps: 1,
    busiest: { number: 2, event: first.steps[1], moved: 3016 },
  };
  const page = await session.open([{ ...first, frames }]);
  const facts = page.locator("#overview .facts");
  const text = (await facts.innerText()).replace(/\s+/g, " ");
  const step = first.growth.found_by === "parts" ? "part" : "step";
  const moves = `Frames moved 3,016 in 1 of ${first.growth.steps} ${step}s, most in ${step} 2: 3,016`;
  assert.match(text, new RegExp(moves));
  assert.match(
    await page.locator("#overview > p").innerText(),
    / · up to 6,131 frames of 2 MiB, used at 7,002 addresses · /,
  );
  await facts.getByRole("button", { name: /most in/ }).click();
  assert.equal(await shownInstant(page), first.steps[1]);
  const without = await session.open([first]);
  assert.doesNotMatch(await without.locator("#overview").innerText(), /frames/i);
  assertQuiet();
});

/** A recording whose frames moved three times: twice in the second step, and in the fourth. */
function withMoves(): Recording {
  const [, second, third, fourth] = first.steps;
  const moves = [
    { event: second + 20, frames: 5 },
    { event: second + 21, frames: 7 },
    { event: fourth + 30, frames: 24 },
  ];
  const busiest = { number: 4, event: fourth, moved: 24 };
  const frames = { size: 2 * MIB, peak: 100, addresses: 120, moved: 36, moving_steps: 2, busiest };
  assert.ok(second + 21 < third);
  return { ...first, frames, moves };
}

test("a bar below the chart says how many frames moved and when, and a click leads there", async () => {
  const recording = withMoves();
  const [early, late] = [recording.moves?.[0].event ?? 0, recording.moves?.[2].event ?? 0];
  for (const colorScheme of ["light", "dark"] as const) {
    const page = await session.open([recording], "", { colorScheme });
    assert.match(
      await page.locator(".level").innerText(),
      / Each bar: the frames that moved in \d+ events\.$/,
    );
    const lane = page.getByRole("slider", { name: "Frames moved" });
    await lane.scrollIntoViewIfNeeded();
    const bars = lane.locator(".bars i");
    const boxes = await bars.evaluateAll((all) => all.map((bar) => bar.getBoundingClientRect().toJSON()));
    assert.equal(boxes.length, 2);
    assert.ok(boxes[0].height < boxes[1].height && boxes.every(({ width }) => width >= 3));
    const over = await page.locator(".u-over").boundingBox();
    assert.ok(over !== null && boxes.every(({ top }) => top >= over.y + over.height));

    const tip = page.locator(".tooltip");
    // A pointer that is a little beside a bar means it, too.
    await page.mouse.move(boxes[0].x - 3, boxes[0].y);
    const at = (instant: number) => instant.toLocaleString("en-US");
    const when = `Events ${at(early)} to ${at(early + 1)}, step 2`;
    assert.equal(await tip.innerText(), `12 frames moved: 24 MiB\n${when}`);
    await page.mouse.move(boxes[1].x + 2, boxes[1].y);
    assert.equal(await tip.innerText(), `24 frames moved: 48 MiB\nEvent ${at(late)}, step 4`);
    await page.mouse.move((boxes[0].x + boxes[1].x) / 2, boxes[0].y);
    assert.equal(await tip.isVisible(), false);

    await page.mouse.click(boxes[0].x - 3, boxes[0].y);
    assert.equal(await shownInstant(page), early);
    await page.mouse.click(boxes[1].x + 2, boxes[1].y);
    assert.equal(await shownInstant(page), late);
    await page.context().close();
  }
  assertQuiet();
});

test("the keyboard goes from bar to bar, out of the view too, and each is said in words", async () => {
  const recording = withMoves();
  const [early, , late] = (recording.moves ?? []).map(({ event }) => event);
  const page = await session.open([recording], `#at=0%3A5&view=0-${early + 200}`);
  const lane = page.getByRole("slider", { name: "Frames moved" });
  const said = () => lane.getAttribute("aria-valuetext");
  await lane.focus();
  assert.equal(await said(), "No frames moved at event 5");
  for (const [key, instant, text] of [
    ["ArrowRight", early, /^5 frames moved: 10 MiB\. Event [\d,]+, step 2$/],
    ["ArrowRight", early + 1, /^7 frames moved: 14 MiB\./],
    ["ArrowRight", late, /^24 frames moved: 48 MiB\. Event [\d,]+, step 4$/],
    ["ArrowRight", late, /^24 frames/],
    ["ArrowLeft", early + 1, /^7 frames/],
    ["End", late, /^24 frames/],
    ["Home", early, /^5 frames/],
  ] as const) {
    await page.keyboard.press(key);
    assert.equal(await shownInstant(page), instant, key);
    assert.match((await said()) ?? "", text);
    assert.equal(await lane.getAttribute("aria-valuenow"), String(instant));
  }
  // All other keys are the chart's.
  await page.keyboard.press("0");
  await page.waitForFunction(() => !location.hash.includes("view="));
  assertQuiet();
});

test("without moves there is no lane, and the trace that has some brings it", async () => {
  const page = await session.open([first, withMoves()]);
  const lane = page.getByRole("slider", { name: "Frames moved" });
  const height = async () => (await page.locator(".plot").boundingBox())?.height ?? 0;
  assert.equal(await lane.count(), 0);
  assert.doesNotMatch(await page.locator(".level").innerText(), /Each bar/);
  const without = await height();
  await page.locator("#trace").selectOption({ index: 1 });
  await settled(page);
  assert.equal(await lane.count(), 1);
  assert.equal(await height(), without + ((await lane.boundingBox())?.height ?? 0));
  assertQuiet();
});

/** Has a page keep what its pictures write: the text, and where it begins and ends, in pixels. */
async function keepTexts(
  page: Page,
): Promise<() => Promise<{ text: string; from: number; to: number; y: number }[]>> {
  await page.addInitScript(() => {
    const { fillText } = CanvasRenderingContext2D.prototype;
    const texts: unknown[] = [];
    Object.assign(window, { texts });
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      texts.push({ text, from: x, to: x + this.measureText(text).width, y });
      fillText.call(this, text, x, y);
    };
  });
  await page.reload();
  await settled(page);
  return () => page.evaluate(() => (window as unknown as { texts: never[] }).texts);
}

test("a failure is told in words, and its mark has them at the right edge, too", async () => {
  const failure = { requested: 3 * MIB, stream: 1, device_free: 2 * MIB, largest_free: MIB };
  for (const event of [Math.floor(first.events / 2), first.events]) {
    const page = await session.open([{ ...first, ooms: [{ event, ...failure }] }]);
    const text = await page.getByRole("list", { name: "Requests that failed" }).innerText();
    const at = event.toLocaleString("en-US");
    assert.match(
      text,
      new RegExp(
        `^Out of memory at event ${at}: a request of 3 MiB in stream 7 failed. Then the device had 2 MiB left`,
      ),
    );
    assert.match(text, /, the largest free block of its stream and pool had 1 MiB\.$/);
    const texts = await (await keepTexts(page))();
    const label = texts.find(({ text }) => text === "out of memory: 3 MiB");
    const width = await page
      .locator("#timeline canvas")
      .evaluate((canvas: HTMLCanvasElement) => canvas.width);
    assert.ok(label !== undefined && label.from > 0 && label.to <= width, JSON.stringify(label));
    session.complaints.splice(0);
  }
});

test("marks of steps, of the program and of failures have names that do not overlap", async () => {
  const steps = Array.from({ length: 20 }, (_, i) => Math.round((first.events * i ** 2) / 19 ** 2));
  const annotations = steps.map((event, i) => ({ event, name: `mark ${i}`, stage: i % 2 }));
  const failures = [3, 4, first.events - 2, first.events].map((event) => ({ event, requested: 3 * MIB }));
  for (const width of [390, 1440]) {
    const viewport = { width, height: 900 };
    const page = await session.open([{ ...first, steps, annotations, ooms: failures }], "", { viewport });
    const texts = await (await keepTexts(page))();
    const named = texts.filter(({ text }) => /^(step|mark|out of memory)/.test(text));
    const distinct = [...new Map(named.map((text) => [`${text.text} ${text.from}`, text])).values()];
    for (const word of ["step", "out of memory"]) {
      assert.ok(
        distinct.some(({ text }) => text.startsWith(word)),
        `${word} at ${width} pixels`,
      );
    }
    distinct.sort((a, b) => a.y - b.y || a.from - b.from);
    distinct.forEach(({ from, y, text }, i) => {
      const before = distinct[i - 1];
      assert.ok(before?.y !== y || before.to < from, `${before?.text} and ${text} at ${width} pixels`);
    });
    await page.context().close();
  }
  assertQuiet();
});

test("failures are told one by one as far as it is known what was free for them", async () => {
  const failure = { requested: 3 * MIB, device_free: 2 * MIB };
  const ooms = [300, 301, 302, 303].map((event, i) => ({
    ...failure,
    event,
    largest_free: i < 2 ? MIB : null,
  }));
  const page = await session.open([{ ...first, ooms }]);
  const lines = page.getByRole("list", { name: "Requests that failed" }).getByRole("listitem");
  const texts = await lines.allInnerTexts();
  assert.equal(texts.length, 3);
  assert.match(texts[1], /at event 301: .* had 1 MiB\.$/);
  assert.equal(texts[2], "2 more requests failed later.");
  assertQuiet();
});

test("a failure at the end is a failure, seen from the stream whose request failed", async () => {
  const last = { ...first, ooms: [{ event: first.events, requested: 3 * MIB }] };
  const { summary, columns } = dataOf([last]);
  const [trace] = summary.traces;
  const failure = trace.instants.findIndex(({ label }) => label === "Out of memory");
  trace.instants[failure].stream = 1;
  // What comes first of an instant is not always the failure.
  trace.instants.unshift({ ...trace.instants[failure], label: "Peak live", stream: 0 });
  const page = await session.openText(fillPage(template(), summary, pack(columns)));
  assert.equal(await shownInstant(page), first.events);
  assert.match(await page.locator("#gap .adds-up").innerText(), /Seen from stream 7\./);
  const chosen = await page.locator(".instant option:checked").innerText();
  assert.match(chosen, /^Out of memory/);
  assertQuiet();
});

test("a narrow window has no more than its width, with what allocators are called, too", async () => {
  const { summary, columns } = dataOf([first, second]);
  const label = "caching:expandable_segments:True,max_split_size_mb:64";
  const strategy = { label, peak_reserved_bytes: MIB, ratio: 1.123, driver_time_us: 9, completed: true };
  for (const i of [0, 1]) {
    summary.traces[i].strategies = [strategy];
    columns[`${i}/curves/${label}/reserved/max`] = columns[`${i}/curves/reserved/max`];
  }
  const text = fillPage(template(), summary, pack(columns));
  for (const width of [380, 320]) {
    const page = await session.openText(text, "#stacks=traces", { viewport: { width, height: 800 } });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
  }
  assertQuiet();
});

test("pictures follow the width of their place without a change of the window's", async () => {
  const page = await session.open([first]);
  await settled(page);
  const widths = () =>
    page
      .locator("#address .canvas-scroll, #stacks .canvas-scroll")
      .evaluateAll((places) =>
        places.map((place) => place.clientWidth - (place.querySelector("canvas")?.offsetWidth ?? 0)),
      );
  const around = await widths();
  await page.addStyleTag({ content: "body { padding-right: 120px }" });
  // As long as a picture is wider than its place, it scrolls sideways.
  await page.waitForFunction(() =>
    [...document.querySelectorAll(".canvas-scroll")].every((place) => place.scrollWidth <= place.clientWidth),
  );
  assert.deepEqual(await widths(), around);
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

test("of several traces the table says which grows, and a line is named where the pointer is", async () => {
  const still = { ...first.growth, leaks: [] };
  const names = ["g19", "g2", "g1"];
  const ranks = names.map((name) => ({ ...first, name, growth: name === "g2" ? first.growth : still }));
  ranks[1] = { ...second, name: "g2" };
  const page = await session.open(ranks, "#curves=live,others/live");
  const rows = await rowsOf(page, "#traces");
  assert.deepEqual(
    rows.map(([name, , , , , grows, confidence]) => [name, grows, confidence]),
    [
      ["g1", "nothing", "–"],
      ["g2", String(4 * MIB), "0.98"],
      ["g19", "nothing", "–"],
    ],
  );
  const options = await page.locator("#trace option").allInnerTexts();
  assert.deepEqual(options, ["g1", "g2", "g19"]);
  const box = await page.locator(".u-over").boundingBox();
  assert.ok(box !== null);
  const x = box.x + box.width - 30;
  const named = async () => (await page.locator(".tooltip").innerText()).includes("g2, live");
  let isNamed = false;
  for (let y = box.y; y < box.y + box.height && !isNamed; y += 8) {
    await page.mouse.move(x, y);
    isNamed = await named();
  }
  assert.ok(isNamed);
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

/** A segment as the table has it: size, live, free, blocks, address, age in events. */
function segmentRow(recording: Recording, segment: Segment, instant: number): number[] {
  const end = segment.address + segment.size;
  const [start, made] = [segment.start, segment.made ?? segment.start];
  assert.ok(start <= instant && instant < segment.end);
  const within = (from: number, to: number) =>
    Math.max(0, Math.min(end, to) - Math.max(segment.address, from));
  const blocks = recording.blocks.filter(
    (block) =>
      block.start <= instant && instant < block.end && within(block.address, block.address + block.size) > 0,
  );
  const sum = (bytes: number[]) => bytes.reduce((total, each) => total + each, 0);
  const live = blocks
    .filter(({ freed }) => instant < freed)
    .map(({ address, size, requested }) =>
      within(address, address + Math.min(size, Math.ceil(requested / 512) * 512)),
    );
  const used = sum(blocks.map(({ address, size }) => within(address, address + size)));
  return [segment.size, sum(live), segment.size - used, blocks.length, segment.address, instant - made];
}

test("a segment has its size, what lies in it, its age and who took it", async () => {
  const [earliest, ...others] = first.segments;
  // What is left of a longer one is as old as that was.
  const left = { ...others[0], made: others[0].start - 5 };
  const recording = { ...first, segments: [earliest, left, ...others.slice(1)] };
  const instant = first.ooms[0].event;
  const page = await session.open([recording], "#table=segments");
  const shown = (await rowsOf(page, "#tables")).map((row) => [
    ...row.slice(0, 4).map(Number),
    Number.parseInt(row[4], 16),
    Number(/([\d,]+) events?/.exec(row[5])?.[1].replaceAll(",", "")),
  ]);
  const there = recording.segments.filter(({ start, end }) => start <= instant && instant < end);
  const expected = there.map((segment) => segmentRow(recording, segment, instant));
  // The freest come first.
  expected.sort((a, b) => b[2] - a[2]);
  const byAddress = (a: number[], b: number[]) => a[4] - b[4];
  const found = expected.filter((row) => shown.some((other) => other[4] === row[4]));
  assert.deepEqual(shown.sort(byAddress), found.sort(byAddress));
  assert.deepEqual(
    shown.map((row) => row[2]).sort(),
    expected
      .slice(0, shown.length)
      .map((row) => row[2])
      .sort(),
  );
  const more = await page.locator("#tables .more-rows").innerText();
  assert.match(more, new RegExp(`\\b${there.length} segments`));

  await page.locator("#filter").fill("keep_loss");
  await settled(page);
  const holds = ({ address, size }: Segment) =>
    first.blocks.some(
      (block) =>
        block.stack === 1 &&
        block.start <= instant &&
        block.address >= address &&
        block.address < address + size,
    );
  assert.equal((await rowsOf(page, "#tables")).length, there.filter(holds).length);
  assertQuiet();
});

test("what is free says whose segment it is in, and a click keeps that", async () => {
  const page = await session.open([first], "#table=segments");
  const box = await page.locator("#address .canvas-scroll").boundingBox();
  assert.ok(box !== null);
  const tip = page.locator(".tooltip");
  let text = "";
  for (let y = 32; y < box.height && !text.startsWith("free"); y += 24) {
    await page.locator("#address .canvas-scroll").hover({ position: { x: box.width - 12, y } });
    text = (await tip.isVisible()) ? await tip.innerText() : "";
  }
  assert.match(
    text,
    /^free\n.* at 0x[0-9a-f]+\nin a segment of .*: .* live, .* free\nstream .*there for .*\ntaken by .*/,
  );
  await page.mouse.down();
  await page.mouse.up();
  const kept = await page.locator("#address .picked").innerText();
  assert.match(
    kept,
    /^Segment\nSize\n[\s\S]*Live in it\n[\s\S]*Age\n.* events, [\s\S]*Stream\n[\s\S]*Pool\n/,
  );
  assert.match(kept, /Live by tag\n[\s\S]*train\.py:131/);
  // A block is kept with its segment.
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#address .picked").innerText(), /^Requested\n[\s\S]*\nSegment\nSize\n/);
  assertQuiet();
});

test("what is free in a region is told below private pools, which the page names otherwise, too", async () => {
  const pool_regions = first.pools.map((_, pool) => (pool === 1 ? "kv cache" : ""));
  const page = await session.open([{ ...first, pool_regions }]);
  const instant = await shownInstant(page);
  const shown = await shownSums(page);
  assert.ok(shown["Private pools"] > 0);
  assert.equal(shown["of it region kv cache"], shown["Private pools"]);
  assert.equal(shown["Private pools"], count(first, instant).causes.private_pools);
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
  const toggle = (page: Page) => page.locator(".curves").getByRole("button", { name: "Paused" });
  assert.equal(await toggle(page).getAttribute("aria-pressed"), "true");
  assert.match(
    await page.getByRole("list", { name: "About these numbers" }).innerText(),
    /were paused at once/,
  );
  const without = await session.open([first]);
  assert.equal(await toggle(without).count(), 0);
  assertQuiet();
});

/** The brightness of each pixel of the map of memory. */
async function shownMap(page: Page): Promise<Uint8Array> {
  await settled(page);
  // Numbers by themselves would take seconds on their way from the browser.
  const text = await page.locator("#address canvas").evaluate((canvas: HTMLCanvasElement) => {
    const data = canvas.getContext("2d")?.getImageData(0, 0, canvas.width, canvas.height).data ?? [];
    let text = "";
    for (let i = 0; i < data.length; i += 4) {
      text += String.fromCharCode(0.3 * data[i] + 0.6 * data[i + 1] + 0.1 * data[i + 2]);
    }
    return text;
  });
  return Uint8Array.from(text, (pixel) => pixel.charCodeAt(0));
}

test("what is paused at the instant is drawn otherwise, by more than a colour, and said to be paused", async () => {
  const small = simulate({ ...job, steps: 3 });
  const at = small.events - 60;
  const segments = small.segments.filter(({ start }) => start <= at);
  const pauses = segments.map(({ address, size }) => ({
    start: at,
    end: small.events - 20,
    address,
    size,
    region: "kv_cache",
  }));
  const away: Recording = { ...small, pauses };
  for (const colorScheme of ["light", "dark"] as const) {
    const page = await session.open([away], `#at=0%3A${at}&table=blocks&color=size`, { colorScheme });
    const without = await session.open([{ ...away, pauses: [] }], `#at=0%3A${at}&color=size`, {
      colorScheme,
    });
    const [hatched, plain] = [await shownMap(page), await shownMap(without)];
    const differing = hatched.filter((pixel, i) => Math.abs(pixel - plain[i]) > 24).length;
    assert.ok(differing > 0.1 * plain.length, `${colorScheme}: ${differing} of ${plain.length} pixels`);
  }

  const page = await session.open([away], `#at=0%3A${at}&table=blocks`);
  const map = page.locator("#address .canvas-scroll");
  assert.match(
    (await map.getAttribute("aria-label")) ?? "",
    /: (\d+) segments, \1 of them paused, \d+ blocks/,
  );
  const bytes = segments.reduce((sum, { size }) => sum + size, 0);
  const legend = page.locator("#address .legend li", { hasText: "paused" });
  assert.equal(await legend.innerText(), `paused ${bytes / MIB} MiB`);
  await map.scrollIntoViewIfNeeded();
  await map.hover({ position: { x: 60, y: 36 } });
  assert.match(await page.locator(".tooltip").innerText(), /paused[\s\S]*paused with region kv_cache/);
  await map.focus();
  await page.keyboard.press("ArrowRight");
  assert.match(
    await page.locator("#address .picked").innerText(),
    new RegExp(
      `State\\s+(allocated|waiting for events), paused\\s+Paused\\s+since event ${at.toLocaleString("en-US")}\\s+Region\\s+kv_cache`,
    ),
  );
  const states = async () => {
    await settled(page);
    return page
      .locator("#tables tbody tr")
      .evaluateAll((rows) =>
        rows.map((row) => row.textContent ?? "").filter((row) => row.includes(", paused")),
      );
  };
  assert.ok((await states()).length > 0);

  // A moment earlier nothing is.
  await page.getByRole("button", { name: "One event back" }).click();
  assert.equal((await states()).length, 0);
  assert.doesNotMatch((await map.getAttribute("aria-label")) ?? "", /paused/);
  assert.equal(await legend.count(), 0);
  assert.doesNotMatch(await page.locator("#address .picked").innerText(), /paused/i);
  assertQuiet();
});

test("what is paused is no one's live memory, and its holders' in a column of its own", async () => {
  const at = first.events;
  const leaked = first.blocks.find(({ stack }) => stack === 1)?.address ?? 0;
  const segment = first.segments.find(({ address, size }) => address <= leaked && leaked < address + size);
  assert.ok(segment !== undefined);
  const { address, size } = segment;
  const away: Recording = { ...first, pauses: [{ start: 1, end: at + 1, address, size }] };
  const page = await session.open([away], `#at=0%3A${at}`);
  const { live } = count(away, at);
  assert.equal(Number(await page.locator("#stacks .verdict data").getAttribute("value")), live);
  const headings = await page.locator("#tables th").allInnerTexts();
  const column = (name: string) => headings.findIndex((heading) => heading.startsWith(name));
  const rows = await rowsOf(page, "#tables");
  const sum = (name: string) => rows.reduce((sum, row) => sum + Number(row[column(name)]), 0);
  assert.equal(sum("Live"), live);
  assert.equal(sum("Live") + sum("Paused"), count(first, at).live);
  assert.ok(sum("Paused") > 0);
  const without = await session.open([first]);
  assert.equal(await without.locator("#tables th", { hasText: "Paused" }).count(), 0);
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

test("shares, ratios and counts are copied as bytes are", async () => {
  const page = await session.open([first, second], `#to=0%3A${first.events}&stacks=instant`);
  const { live, reserved } = count(first, first.ooms[0].event);
  const values = (selector: string) =>
    page.locator(`${selector} data`).evaluateAll((all) => all.map((each) => each.getAttribute("value")));
  const [peakLive, peakReserved] = await values("#overview").then((all) => all.map(Number));
  assert.equal(Number((await values("#overview"))[2]), peakReserved / peakLive);
  assert.ok(reserved >= live);
  const facts = page.locator("#overview .more data");
  assert.equal(await facts.count(), 2);
  const shownShare = Number.parseFloat((await facts.first().getAttribute("title")) ?? "");
  assert.ok(Math.abs(100 * Number(await facts.first().getAttribute("value")) - shownShare) < 0.06);
  assert.equal((await values("#growth tbody"))[2], "10 of 10 steps");
  const shares = await page.locator("#gap .cause td:nth-child(4) data").evaluateAll((all) => {
    return all.map((each) => Number(each.getAttribute("value")));
  });
  assert.equal(shares.length, CAUSES.length);
  assert.ok(Math.abs(shares.reduce((total, share) => total + share, 0) - 1) < 1e-9);
  const heads = await page.locator("thead th").allTextContents();
  assert.ok(heads.length > 0 && heads.every((text) => text.trim() !== ""));
  assert.equal(Number((await values("#traces tbody"))[2]), peakReserved / peakLive);
  await page.locator("#stacks .canvas-scroll").focus();
  await page.keyboard.press("ArrowDown");
  const [, bytes, share] = await values("#stacks .path");
  assert.equal(Number(share), Number(bytes) / live);
  // The sizes in the legend are those of all blocks.
  const sizes = (await values("#address .legend")).map(Number);
  const there = first.blocks.filter(({ start, end }) => {
    return start <= first.ooms[0].event && first.ooms[0].event < end;
  });
  const sum = (numbers: number[]) => numbers.reduce((total, each) => total + each, 0);
  assert.equal(sum(sizes), sum(there.map(({ size }) => size)));
  assertQuiet();
});

test("what scrolls takes the focus, and a button is named as it is labelled", async () => {
  const page = await session.open([first]);
  await page.locator("#tables summary").first().click();
  await page.locator("#stacks summary").first().click();
  await page.locator("#stacks td summary").first().click();
  for (const list of [page.locator("#tables ol.frames"), page.locator("#stacks ol.frames").first()]) {
    await list.focus();
    assert.ok(await list.evaluate((element) => document.activeElement === element));
    assert.ok(await list.getAttribute("aria-label"));
  }
  const named = await page
    .locator("button[aria-label]")
    .evaluateAll((buttons) =>
      buttons.map((button) => [button.textContent, button.getAttribute("aria-label")]),
    );
  for (const [text, label] of named) {
    const hasWords = /[a-z]/i.test(text ?? "");
    assert.ok(
      !hasWords || label?.toLowerCase().includes((text ?? "").toLowerCase()),
      `“${text}” is called “${label}”`,
    );
  }
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

test("frames of libraries are hidden until somebody asks for them", async () => {
  const main = ["step train.py:9", "main train.py:2"];
  const inner = ["linear torch/nn/functional.py:7", "forward torch/nn/modules/linear.py:5"];
  const blocks = first.blocks.map((block) => ({ ...block, stack: 1 }));
  const page = await session.open([{ ...first, stacks: [[], [...inner, ...main]], blocks }]);
  const box = page.getByRole("checkbox", { name: "Hide library frames" });
  const names = async () => {
    await settled(page);
    await page.locator("#stacks .canvas-scroll").focus();
    await page.keyboard.press("Escape");
    const found: string[] = [];
    for (let depth = 0; depth < 5; depth++) {
      await page.keyboard.press("ArrowDown");
      found.push(await page.locator("#stacks .path b").innerText());
    }
    return found;
  };
  assert.ok(await box.isChecked());
  assert.deepEqual(await names(), ["main", "step", "linear", "linear", "linear"]);
  await box.focus();
  await page.keyboard.press("Space");
  assert.deepEqual(await names(), ["main", "step", "forward", "linear", "linear"]);
  await page.waitForURL(/frames=all/);
  const unstacked = await session.open([simulate({ ...job, hasStacks: false })]);
  assert.ok(await unstacked.getByRole("checkbox", { name: "Hide library frames" }).isHidden());
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

test("what is aggregated says so, and every instant is exact", async () => {
  const folded = { ...first, folded_below: 64 * 1024, bucket_events: 16 };
  const hidden = first.blocks.filter(({ requested }) => requested < 64 * 1024);
  const page = await session.open([folded]);
  const said = `${hidden.length.toLocaleString("en-US")} block`;
  assert.ok(
    (await page.getByRole("list", { name: "About these numbers" }).innerText()).includes(
      `Aggregated: ${said}`,
    ),
  );
  assert.match(
    await page.locator("#tables > p").innerText(),
    /aggregated blocks not listed, with .* live at/,
  );
  for (let steps = 0; steps < 5; steps++) {
    const { "of it aggregated": part, ...shown } = await shownSums(page);
    const counted = count(first, await shownInstant(page));
    const listed = { ...first, blocks: first.blocks.filter((block) => !hidden.includes(block)) };
    assert.equal(shown.Live, counted.live);
    assert.equal(part, counted.live - count(listed, await shownInstant(page)).live);
    assert.equal(shown.Sum, shown.Reserved);
    await page.getByRole("button", { name: "One event on" }).click();
  }
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
  assert.match(await page.locator("#overview .notes").innerText(), /no events: it shows what was held/);
  assert.match(await page.locator("#overview .facts").innerText(), /Out of memory\s+not known/);
  assert.doesNotMatch(await page.locator("#timeline").innerText(), /Events 0 to 1/);
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

/** Opens what is closed, and returns by how many pixels the page, or anything in it, is wider than the window. */
async function overhang(page: Page): Promise<number> {
  await page.locator("main details").evaluateAll((all) => {
    for (const details of all) (details as HTMLDetailsElement).open = true;
  });
  await page.locator("#tables .frames b").first().waitFor();
  await settled(page);
  return page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
}

test("names of any length fit the window, and all of a name is there", async () => {
  const long = `begins_${"very_long_".repeat(500)}ends`;
  const stacks = first.stacks.map((stack) => stack.map((frame, i) => (i === 0 ? `${long}${frame}` : frame)));
  const tags = ["", `tag_${long}`];
  for (const width of [1280, 380]) {
    const options = { viewport: { width, height: 900 } };
    for (const by of ["site", "tag"]) {
      const fragment = `#color=${by}&bands=${by}`;
      const page = await session.open([{ ...first, stacks, tags }], fragment, options);
      assert.ok((await overhang(page)) <= 0, `${width} pixels, by ${by}`);
      assert.ok((await page.locator("#tables .frames b").first().innerText()).startsWith(long));
      await page.locator("#address .canvas-scroll").focus();
      await page.keyboard.press("ArrowRight");
      await page.locator("#stacks .canvas-scroll").focus();
      for (let i = 0; i < 9; i++) await page.keyboard.press("ArrowDown");
      assert.ok((await overhang(page)) <= 0, `${width} pixels, with a block and a box`);
      const name = page.locator("#stacks .path b data");
      assert.ok((await name.getAttribute("value"))?.startsWith("begins_"));
      assert.ok((await name.innerText()).length < 200);
      await page.context().close();
    }
  }
  assertQuiet();
});

test("a name that turns the direction leaves its line where it is", async () => {
  const turned = first.stacks.map((stack) => stack.map((frame, i) => (i === 0 ? `a\u202e${frame}` : frame)));
  const page = await session.open([{ ...first, stacks: turned }]);
  const summary = page.locator("#tables .frames-of summary").first();
  // The bracket that ends the line stands at its end.
  const distance = await summary.evaluate((element) => {
    const text = element.firstChild as Text;
    const range = document.createRange();
    range.selectNodeContents(text);
    const all = range.getBoundingClientRect();
    range.setStart(text, text.data.length - 1);
    return all.right - range.getBoundingClientRect().right;
  });
  assert.ok(Math.abs(distance) < 1, `the last bracket is ${distance} pixels from the end`);
  assertQuiet();
});

test("the chart is there before the blocks are read, and everything when they are", async () => {
  const long = simulate({ ...job, name: "long", steps: 400, requestsPerStep: 300 });
  const { summary, columns } = dataOf([long]);
  const packed = pack(columns);
  const text = fillPage(template(), summary, packed);
  // Notes, when the chart has been drawn, which views have not.
  const watch = `<script>
    const isBusy = (id) => document.getElementById(id)?.getAttribute("aria-busy") !== null;
    const noted = new MutationObserver(() => {
      if (document.getElementById("timeline") === null || isBusy("timeline")) return;
      noted.disconnect();
      window.waiting = ["overview", "gap", "address", "stacks", "tables"].filter(isBusy);
      window.curves = document.querySelectorAll("#timeline canvas").length;
    });
    noted.observe(document, { subtree: true, childList: true, attributeFilter: ["aria-busy"] });
  </script>`;
  // Blocks that never come: the chart has been there when that is found out.
  const cut = fillPage(template(), summary, packed.slice(0, 4 * Math.floor(packed.length / 5)));
  for (const [page, isWhole] of [
    [text, true],
    [cut, false],
  ] as const) {
    const shown = await session.openText(page.replace("<body>", () => `<body>${watch}`));
    const [waiting, curves] = await shown.evaluate<unknown[]>("[window.waiting, window.curves]");
    assert.deepEqual(waiting, ["gap", "address", "stacks", "tables"]);
    assert.equal(curves, 1);
    if (isWhole) await assertSums(shown, long);
    else assert.match(await shown.locator("#page .failed").innerText(), /cannot be shown/);
  }
  // Zoomed in, the chart needs the blocks.
  const zoomed = await session.openText(text, "#view=5000-5400");
  assert.match(await zoomed.locator(".level").innerText(), /Every event by itself/);
  // So it does for bands.
  const divided = await session.openText(text, "#bands=category");
  assert.ok(await divided.locator(".bands").isVisible());
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
