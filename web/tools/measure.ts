// Measures how a page behaves: `node tools/run.mjs tools/measure.ts PAGE.html`. Prints when it shows itself, how
// long a key takes until the next frame, how many frames a second there are while it is panned and zoomed, and how
// often each view shows another instant while an arrow key is held, with the time that the page's thread works for it.
// With the choice of each grouping, it prints when the chart shows its bands, and the frames while it is moved then.

import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";
import type { Page } from "playwright-core";
import { Session, settled } from "../tests/support/browser.ts";

const KEYS = [
  ["pan, zoomed in", "PageDown"],
  ["one instant on", "ArrowRight"],
] as const;

/** The views that show an instant, by their sections. */
const VIEWS = ["gap", "address", "stacks", "tables", "events"];
/** How far the chart is zoomed in, by how often `+` is pressed: an arrow key goes on by a 200th of what it shows. */
const ZOOMS = [
  ["all of the recording shown", 0],
  ["some of it", 8],
  ["single events", 30],
] as const;
const SECONDS = 3;

/** Returns milliseconds from a key to the next frame, in the middle of so many. */
function costOf(page: Page, key: string, times: number): Promise<number> {
  return page.evaluate(
    async ([pressed, count]) => {
      const plot = document.querySelector<HTMLElement>(".plot");
      const frame = () => new Promise((done) => requestAnimationFrame(done));
      const costs: number[] = [];
      for (let i = 0; i < Number(count); i++) {
        await frame();
        const start = performance.now();
        plot?.dispatchEvent(new KeyboardEvent("keydown", { key: String(pressed), bubbles: true }));
        await frame();
        await new Promise((done) => setTimeout(done));
        costs.push(performance.now() - start);
      }
      return costs.sort((a, b) => a - b)[costs.length >> 1];
    },
    [key, times] as const,
  );
}

/** Returns frames a second while the wheel pans and zooms for three seconds. */
function framesWhileMoving(page: Page): Promise<number> {
  return page.evaluate(async () => {
    const over = document.querySelector<HTMLElement>(".u-over");
    const box = over?.getBoundingClientRect();
    const turn = (deltaX: number, deltaY: number) => {
      const place = { clientX: (box?.left ?? 0) + 400, clientY: (box?.top ?? 0) + 50 };
      over?.dispatchEvent(
        new WheelEvent("wheel", { deltaX, deltaY, ...place, bubbles: true, cancelable: true }),
      );
    };
    const start = performance.now();
    let frames = 0;
    for (; performance.now() - start < 3000; frames++) {
      turn(frames % 60 < 30 ? 30 : -30, 0);
      if (frames % 5 === 0) turn(0, frames % 80 < 40 ? -60 : 60);
      await new Promise((done) => requestAnimationFrame(done));
    }
    return frames / 3;
  });
}

/** Holds an arrow key, and returns how many frames showed another instant in a view, and in how many seconds. */
function stepThrough(page: Page, view: string): Promise<[number, number]> {
  return page.evaluate(
    async ([id, seconds]) => {
      const plot = document.querySelector<HTMLElement>(".plot");
      const section = document.getElementById(String(id)) as HTMLElement;
      const frame = () => new Promise((done) => requestAnimationFrame(done));
      window.scrollBy(0, section.getBoundingClientRect().top - 80);
      await new Promise((done) => setTimeout(done, 500));
      let isShown = false;
      const changes = new MutationObserver((records) => {
        isShown ||= records.some(({ attributeName }) => attributeName !== "aria-busy");
      });
      changes.observe(section, { subtree: true, childList: true, characterData: true, attributes: true });
      const start = performance.now();
      let shown = 0;
      for (let frames = 0; performance.now() - start < Number(seconds) * 1000; frames++) {
        const key = frames % 120 < 60 ? "ArrowRight" : "ArrowLeft";
        plot?.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        isShown = false;
        // What was asked for before the frame is drawn in it.
        await frame();
        if (isShown) shown++;
      }
      changes.disconnect();
      return [shown, (performance.now() - start) / 1000] as [number, number];
    },
    [view, SECONDS] as const,
  );
}

/** Prints for each view how many frames a second show another instant, and what each costs the page's thread. */
async function measureStepping(page: Page): Promise<void> {
  const client = await page.context().newCDPSession(page);
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  const threadSeconds = async () => {
    const { metrics } = await client.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "ThreadTime")?.value ?? Number.NaN;
  };
  for (const view of VIEWS) {
    for (const [how, zoom] of ZOOMS) {
      await page.locator(".plot").focus();
      await page.keyboard.press("0");
      for (let i = 0; i < zoom; i++) await page.keyboard.press("+");
      await settled(page);
      const before = await threadSeconds();
      const [shown, seconds] = await stepThrough(page, view);
      const cost = (((await threadSeconds()) - before) * 1000) / shown;
      console.log(
        `${(shown / seconds).toFixed(0)} frames a second, ${cost.toFixed(0)} ms of work each: ${view}, ${how}`,
      );
    }
  }
}

/** Returns seconds from the choice of a grouping until the chart shows its bands. */
function choiceOf(page: Page, grouping: string): Promise<number> {
  return page.evaluate(async (chosen) => {
    const start = performance.now();
    document.querySelector<HTMLElement>(`#timeline [data-value=${chosen}]`)?.click();
    while (document.querySelector("#timeline[aria-busy]")) await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done));
    return (performance.now() - start) / 1000;
  }, grouping);
}

/** Prints for each grouping when the chart shows its bands, and the frames while it is moved. */
async function measureBands(page: Page): Promise<void> {
  const choices = page.locator("#timeline .stack-by button:visible");
  const groupings = await choices.evaluateAll((buttons) =>
    buttons.map((button) => button.dataset.value ?? ""),
  );
  for (const grouping of groupings.filter((name) => name !== "none")) {
    await page.locator(".plot").focus();
    await page.keyboard.press("0");
    await settled(page);
    const seconds = await choiceOf(page, grouping);
    await page.locator(".plot").focus();
    for (let i = 0; i < 6; i++) await page.keyboard.press("+");
    const frames = await framesWhileMoving(page);
    console.log(
      `${seconds.toFixed(2)} s until bands by ${grouping}, ${frames.toFixed(0)} frames a second with them`,
    );
  }
}

const [path] = process.argv.slice(2);
const session = await Session.start();
const page = await session.newPage();
const start = performance.now();
const since = () => `${((performance.now() - start) / 1000).toFixed(2)} s until`;
await page.goto(pathToFileURL(path).href);
await page.waitForFunction(() => document.querySelector("#timeline:not([aria-busy]) canvas"));
console.log(`${since()} the chart is shown`);
await settled(page);
console.log(`${since()} everything is shown`);
await measureStepping(page);
await page.locator(".plot").focus();
await page.keyboard.press("0");
for (let i = 0; i < 6; i++) await page.keyboard.press("+");
for (const [what, key] of KEYS) console.log(`${(await costOf(page, key, 30)).toFixed(0)} ms a key: ${what}`);
console.log(`${(await framesWhileMoving(page)).toFixed(0)} frames a second while panned and zoomed`);
await measureBands(page);
await session.stop();
