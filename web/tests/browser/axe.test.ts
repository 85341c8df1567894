// axe (https://github.com/dequelabs/axe-core) finds no barrier for people with disabilities on the page.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import axe from "axe-core";
import type { Page } from "playwright-core";
import { Session, settled } from "../support/browser.ts";
import { simulate } from "../support/simulate.ts";

const job = simulate({ seed: 7, steps: 12, requestsPerStep: 120 });
const MIB = 2 ** 20;
const strategies = [
  { label: "direct", peak_reserved_bytes: MIB, ratio: 1, driver_time_us: 9, completed: true },
  { label: "buddy", peak_reserved_bytes: 3 * MIB, ratio: 1.5, driver_time_us: 9, completed: false },
];
/** Everything that a page may show: several traces, replays, moves of frames, pauses, growth that is no leak. */
const all = {
  ...job,
  strategies,
  replay_notes: ["the job had pauses, which replays leave out"],
  is_cut_off: true,
  ooms: [{ event: 700, requested: 3 * MIB, device_free: MIB, largest_free: MIB }],
  frames: { size: 2 * MIB, peak: 9, addresses: 12, moved: 5, moving_steps: 1, busiest: null },
  moves: [{ event: 400, frames: 5 }],
  pauses: [{ ...job.segments[0], start: 300, end: 800 }],
  growth: {
    ...job.growth,
    spread: { ...job.growth.leaks[0], is_steady: true, sites: 3, most: job.growth.leaks },
  },
};
const FRAGMENTS = [
  "#table=segments&filter=leak%20color:red",
  "#bands=site&axis=time&table=blocks&stacks=difference&to=0%3A900&color=category",
];

let session: Session;

before(async () => {
  session = await Session.start();
});

after(() => session.stop());

/** Returns what axe finds, each with the elements that have it. */
function violationsOf(page: Page): Promise<string[]> {
  return page.evaluate(async () => {
    const { violations } = await (window as unknown as { axe: typeof axe }).axe.run();
    return violations.map(
      ({ id, nodes }) => `${id}: ${nodes.map(({ html, any }) => `${html} ${any[0]?.message}`).join("\n")}`,
    );
  });
}

for (const colorScheme of ["light", "dark"] as const) {
  for (const width of [390, 768, 1440, 2560]) {
    test(`axe finds nothing at ${width} pixels, ${colorScheme}`, async () => {
      for (const fragment of FRAGMENTS) {
        const viewport = { width, height: 900 };
        const page = await session.open([all, { ...job, name: "other" }], fragment, {
          colorScheme,
          viewport,
        });
        await page.evaluate(axe.source);
        await page.evaluate(() => {
          for (const details of document.querySelectorAll("details")) details.open = true;
        });
        await page.locator("#timeline details table").waitFor();
        await settled(page);
        assert.deepEqual(await violationsOf(page), [], fragment);
        await page.context().close();
      }
      assert.deepEqual(session.complaints, []);
    });
  }
}
