// Measures how a page behaves: `node tools/run.mjs tools/measure.ts PAGE.html`. Prints when it shows itself, how
// long a key takes until the next frame, and how many frames a second there are while it is panned and zoomed.

import { performance } from "node:perf_hooks";
import type { Page } from "playwright-core";
import { Session } from "../tests/support/browser.ts";

const KEYS = [
  ["pan, zoomed in", "PageDown"],
  ["one instant on", "ArrowRight"],
] as const;

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

const [path] = process.argv.slice(2);
const session = await Session.start();
const start = performance.now();
const page = await session.openFile(path);
console.log(`${((performance.now() - start) / 1000).toFixed(2)} s until everything is shown`);
await page.locator(".plot").focus();
for (let i = 0; i < 6; i++) await page.keyboard.press("+");
for (const [what, key] of KEYS) console.log(`${(await costOf(page, key, 30)).toFixed(0)} ms a key: ${what}`);
console.log(`${(await framesWhileMoving(page)).toFixed(0)} frames a second while panned and zoomed`);
await session.stop();
