// Pictures of every view for the documents: `node tools/run.mjs tools/screenshots.ts PAGES`, where PAGES is a
// directory with the reports that `cargo xtask screenshots` makes. Writes docs/report/*.png.

import { mkdirSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { Session, settled } from "../tests/support/browser.ts";

interface Shot {
  name: string;
  /** A report's name. */
  page: string;
  fragment: string;
  /** What is in the picture: a section, or the window's first screen. */
  section: string | null;
  theme: "light" | "dark";
  width: number;
  prepare?: (page: Page) => Promise<void>;
}

const usual = { page: "gpt2_train", fragment: "", theme: "light", width: 1280 } as const;
/** In the fifth step of the job, and a step later. */
const steps = "#at=0%3A8000&to=0%3A14000";

const SHOTS: Shot[] = [
  { ...usual, name: "overview", section: null },
  { ...usual, name: "overview-dark", section: null, theme: "dark" },
  { ...usual, name: "overview-narrow", section: null, width: 700 },
  { ...usual, name: "timeline", section: "#timeline", page: "llama_varlen", fragment: "#view=150000-156000" },
  { ...usual, name: "bands", section: "#timeline", fragment: "#bands=category" },
  { ...usual, name: "gap", section: "#gap", page: "llama_varlen" },
  {
    ...usual,
    name: "address",
    section: "#address",
    prepare: async (page) => {
      await page.locator("#address .canvas-scroll").focus();
      for (let i = 0; i < 7; i++) await page.keyboard.press("ArrowDown");
      for (let i = 0; i < 9; i++) await page.keyboard.press("ArrowRight");
    },
  },
  { ...usual, name: "stacks", section: "#stacks" },
  { ...usual, name: "stacks-dark", section: "#stacks", theme: "dark" },
  { ...usual, name: "difference", section: "#stacks", fragment: `${steps}&stacks=difference` },
  {
    ...usual,
    name: "growth",
    section: "#growth",
    page: "leaking",
    prepare: (page) => page.locator("#growth summary").click(),
  },
  { ...usual, name: "tables", section: "#tables", fragment: "#table=lifetimes" },
  { ...usual, name: "segments", section: "#tables", fragment: "#table=segments" },
  { ...usual, name: "events", section: "#events" },
  { ...usual, name: "strategies", section: "#strategies" },
  { ...usual, name: "traces", section: "#traces", page: "two_jobs" },
];

const [pages] = process.argv.slice(2);
const out = join("..", "docs", "report");
mkdirSync(out, { recursive: true });
const session = await Session.start();
for (const { name, page: file, fragment, section, theme, width, prepare } of SHOTS) {
  // So high that the bar at the window's top lies over no section.
  const height = section === null ? 900 : 4500;
  const options = { colorScheme: theme, viewport: { width, height }, reducedMotion: "reduce" } as const;
  const page = await session.openFile(join(pages, `${file}.html`), fragment, options);
  await prepare?.(page);
  await settled(page);
  const path = join(out, `${name}.png`);
  if (section === null) await page.screenshot({ path });
  else await page.locator(section).screenshot({ path });
  await page.context().close();
}
await session.stop();
