// The bands of the chart. What they show is compared with a count of the recording, and with `lowtide summary`, which
// LOWTIDE names.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import type { Page } from "playwright-core";
import { Session, settled } from "../support/browser.ts";
import { type Block, count, type Recording } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const program = process.env.LOWTIDE ?? "";
const skip = program === "" && "LOWTIDE names no program";
const directory = mkdtempSync(join(tmpdir(), "lowtide-bands-"));
const job = simulate({ seed: 7, steps: 12, requestsPerStep: 120 });
const categories = job.categories ?? [];
const live = Array.from({ length: job.events + 1 }, (_, instant) => count(job, instant).live);
let session: Session;

before(async () => {
  session = await Session.start();
});

after(async () => {
  await session.stop();
  rmSync(directory, { recursive: true });
});

function assertQuiet(): void {
  assert.deepEqual(session.complaints.splice(0), []);
}

/** Returns the bytes of each row of the legend: at the chosen instant, and at the peak. */
async function legendOf(page: Page): Promise<Map<string, number[]>> {
  await settled(page);
  const rows = await page
    .locator(".bands tbody tr")
    .evaluateAll((rows) =>
      rows.map((row) => [
        row.querySelector("th")?.textContent ?? "",
        ...[...row.querySelectorAll("data")].map(({ value }) => value),
      ]),
    );
  return new Map(rows.map(([name, ...bytes]) => [name, bytes.map(Number)]));
}

function liveOf(recording: Recording, instant: number, isOne: (block: Block) => boolean): number {
  return count({ ...recording, blocks: recording.blocks.filter(isOne) }, instant).live;
}

/** Fails unless the legend has the bytes of each category at an instant, and their sum. */
async function assertCategories(page: Page, recording: Recording, instant: number): Promise<void> {
  const legend = await legendOf(page);
  assert.equal(legend.size, categories.length + 1);
  categories.forEach((name, category) => {
    const bytes = liveOf(recording, instant, (block) => block.category === category);
    assert.equal(legend.get(name.replace("_", " "))?.[0], bytes, name);
  });
  assert.equal(legend.get("Live")?.[0], count(recording, instant).live);
  const shown = page.locator("#gap td[data-cell=Live] data");
  assert.equal(legend.get("Live")?.[0], Number(await shown.getAttribute("value")));
}

async function shownInstant(page: Page): Promise<number> {
  await settled(page);
  return Number(await page.locator("#instant").inputValue());
}

test("the keyboard divides live bytes, and the legend has them at the instant and at the peak", async () => {
  const page = await session.open([job], "#at=0%3A500");
  assert.equal(await page.locator(".bands").isVisible(), false);
  const choice = page.getByRole("group", { name: "Stack live bytes by" });
  await choice.getByText("None").focus();
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await assertCategories(page, job, 500);
  await page.waitForURL(/bands=category/);
  const peak = live.indexOf(Math.max(...live));
  const legend = await legendOf(page);
  categories.forEach((name, category) => {
    const bytes = liveOf(job, peak, (block) => block.category === category);
    assert.equal(legend.get(name.replace("_", " "))?.[1], bytes, `${name} at the peak`);
  });
  assert.equal(legend.get("Live")?.[1], live[peak]);
  await page.locator(".plot").focus();
  await page.keyboard.press("Shift+ArrowRight");
  await assertCategories(page, job, 501);
  await choice.getByText("None").click();
  await settled(page);
  assert.equal(await page.locator(".bands").isVisible(), false);
  assertQuiet();
});

test("by event and by time, a click chooses the most live bytes of a point, which its bands show", async () => {
  for (const axis of ["events", "time"]) {
    const page = await session.open([job], `#bands=category&axis=${axis}`);
    const text = await page.locator("#timeline-level").innerText();
    const width = Number(/Each point is (\d+) events/.exec(text)?.[1]);
    assert.ok(width > 1);
    for (const x of [40, 400, 777]) {
      await page.locator(".u-over").click({ position: { x, y: 60 } });
      const instant = await shownInstant(page);
      const first = Math.floor(instant / width) * width;
      assert.equal(live[instant], Math.max(...live.slice(first, first + width)));
      await assertCategories(page, job, instant);
    }
  }
  assertQuiet();
});

test("the band under the pointer is named, and has the colour of its name", async () => {
  const peak = live.indexOf(Math.max(...live));
  for (const colorScheme of ["light", "dark"] as const) {
    const fragment = `#bands=category&curves=live&view=${peak - 60}-${peak + 60}`;
    const page = await session.open([job], fragment, { colorScheme });
    await page.locator(".plot").scrollIntoViewIfNeeded();
    const over = await page.locator(".u-over").boundingBox();
    assert.ok(over !== null);
    const x = Math.round(over.x + 0.52 * over.width);
    // The runs of pixels of one colour in a column of the chart, with the name that the legend gives it.
    const runs = await page.locator("#timeline canvas").evaluate((canvas: HTMLCanvasElement, x) => {
      const { left, top } = canvas.getBoundingClientRect();
      const data = canvas.getContext("2d")?.getImageData(x - left, 0, 1, canvas.height).data ?? [];
      const rows = [...document.querySelectorAll(".bands .name")].map((name) => [
        getComputedStyle(name.querySelector(".key") as Element).backgroundColor,
        name.textContent ?? "",
      ]);
      const names = new Map(rows as [string, string][]);
      const runs: { name: string; from: number; to: number }[] = [];
      for (let y = 0; y < canvas.height; y++) {
        const [red, green, blue] = data.slice(4 * y);
        const name = names.get(`rgb(${red}, ${green}, ${blue})`);
        if (name === undefined) continue;
        const last = runs.at(-1);
        if (last?.name === name && last.to === top + y) last.to++;
        else runs.push({ name, from: top + y, to: top + y + 1 });
      }
      return runs;
    }, x);
    const wide = runs.filter(({ from, to }) => to - from >= 4);
    const named = wide.map(({ name }) => name);
    const legend = [...(await legendOf(page)).keys()];
    assert.deepEqual(named, legend.slice(0, -1), "all in the order of the legend");
    for (const { name, from, to } of wide) {
      await page.mouse.move(x, (from + to) / 2);
      const pointed = await page.locator(".tooltip .pointed span").innerText();
      assert.equal(pointed, name);
    }
    await page.context().close();
  }
  assertQuiet();
});

test("by call site there are ten bands and the rest, also of a trace that is chosen later", async () => {
  const stacks = job.stacks.map((_, i) => (i === 0 ? [] : [`f train.py:${i}`]));
  const plain = simulate({ seed: 7, steps: 12, requestsPerStep: 120, hasStacks: false, name: "plain" });
  const page = await session.open([{ ...job, stacks }, plain], "#at=0%3A900&bands=site");
  const legend = await legendOf(page);
  const names = [...legend.keys()];
  assert.equal(names.length, 12);
  assert.match(names[0], /^everything else \(\d+\)$/);
  assert.equal(names[11], "Live");
  const sum = [...legend.values()].reduce((sum, [bytes]) => sum + bytes, 0);
  assert.equal(sum, 2 * count(job, 900).live);
  for (const [name, [bytes]] of legend) {
    const line = Number(/^f \(train\.py:(\d+)\)$/.exec(name)?.[1]);
    if (line > 0)
      assert.equal(
        bytes,
        liveOf(job, 900, ({ stack }) => stack === line),
        name,
      );
  }
  await page.locator("#trace").selectOption("plain");
  await settled(page);
  assert.equal(await page.locator(".bands").isVisible(), false);
  const choice = page.getByRole("group", { name: "Stack live bytes by" });
  assert.equal(await choice.getByText("Call site").isVisible(), false);
  await choice.getByText("Stream").click();
  assert.deepEqual([...(await legendOf(page)).keys()].sort(), ["Live", "stream 0", "stream 7"]);
  assertQuiet();
});

test("blocks that are not listed are a band, so that all add up", async () => {
  const folded = { ...job, folded_below: 64 * 1024 };
  const page = await session.open([folded], "#at=0%3A900&bands=category");
  const legend = await legendOf(page);
  const hidden = liveOf(job, 900, ({ requested }) => requested < 64 * 1024);
  assert.ok(hidden > 0);
  assert.equal(legend.get("aggregated blocks")?.[0], hidden);
  assert.equal(legend.get("Live")?.[0], count(job, 900).live);
  assertQuiet();
});

test("the chart with its bands fits every window", async () => {
  const page = await session.open([job], "#bands=site");
  for (const width of [390, 768, 1440, 2560]) {
    await page.setViewportSize({ width, height: 900 });
    await settled(page);
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
    const [plot, legend, canvas] = await Promise.all(
      [".plot", ".bands", "#timeline canvas"].map((selector) => page.locator(selector).boundingBox()),
    );
    assert.ok(plot !== null && legend !== null && canvas !== null);
    assert.ok(Math.abs(canvas.width - plot.width) <= 1, `${canvas.width} in ${plot.width}`);
    const isBeside = legend.x >= plot.x + plot.width;
    assert.equal(isBeside, width >= 1600);
    assert.ok(isBeside || legend.y >= plot.y + plot.height);
  }
  assertQuiet();
});

interface Summary {
  peak_live: { live_bytes: number };
  categories: Record<string, { bytes: number }>;
  sites: { site: string; bytes: number }[];
  modules: { path: string; bytes: number }[];
}

test("the bands of modules are what the summary says, and need no stacks", { skip }, async () => {
  const path = join("..", "crates/history/tests/data/plain.said.pickle.gz");
  const report = join(directory, "report.html");
  const [summary] = JSON.parse(execFileSync(program, ["summary", "--json", path], { encoding: "utf8" })) as [
    Summary,
  ];
  execFileSync(program, ["report", path, "-o", report]);
  const page = await session.openFile(report, "#bands=module");
  const byModule = await legendOf(page);
  assert.equal(byModule.get("Live")?.[1], summary.peak_live.live_bytes);
  assert.ok(summary.modules.length > 5);
  for (const { path, bytes } of summary.modules) {
    assert.equal(byModule.get(path || "no module")?.[1], bytes, path);
  }
  await page.getByRole("group", { name: "Stack live bytes by" }).getByText("Category").click();
  const byCategory = await legendOf(page);
  assert.equal(byCategory.get("activations")?.[1], summary.categories.activations.bytes);
  assertQuiet();
});

for (const recording of ["crates/cli/tests/data/leak.debian", "crates/history/tests/data/checkpoint.all"]) {
  test(`the bands at the peak of ${recording} are what the summary says`, { skip }, async () => {
    const path = join("..", `${recording}.pickle.gz`);
    const report = join(directory, "report.html");
    const [summary] = JSON.parse(
      execFileSync(program, ["summary", "--json", path], { encoding: "utf8" }),
    ) as [Summary];
    execFileSync(program, ["report", path, "-o", report]);
    const page = await session.openFile(report, "#bands=category");
    const byCategory = await legendOf(page);
    assert.equal(byCategory.get("Live")?.[1], summary.peak_live.live_bytes);
    for (const [name, { bytes }] of Object.entries(summary.categories)) {
      assert.equal(byCategory.get(name.replace("_", " "))?.[1] ?? 0, bytes, name);
    }
    await page.getByRole("group", { name: "Stack live bytes by" }).getByText("Call site").click();
    const bySite = await legendOf(page);
    assert.equal(bySite.get("Live")?.[1], summary.peak_live.live_bytes);
    const told = new Map<string, number>();
    for (const { site, bytes } of summary.sites) told.set(site, bytes + (told.get(site) ?? 0));
    const [largest] = [...told].filter(([site]) => /^\w+ \(\w/.test(site)).sort(([, a], [, b]) => b - a);
    assert.equal(bySite.get(largest[0])?.[1], largest[1], largest[0]);
    assertQuiet();
  });
}
