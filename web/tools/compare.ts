// Times the page beside PyTorch's own viewer: `npm run compare -- --viewer MEMORYVIZ_JS --d3 DIRECTORY --lowtide
// PROGRAM SNAPSHOT…`, for uncompressed snapshots. The viewer is torch/utils/viz/MemoryViz.js of PyTorch's sources;
// it loads d3 from a CDN, which is answered from DIRECTORY, where `npm install d3@5` has put it.
//
// The viewer reads the snapshot in the browser, as after a drop. For the page, `lowtide report` reads it first.

import { spawnSync } from "node:child_process";
import { createReadStream, mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { buildSync } from "esbuild";
import type { Page } from "playwright-core";
import { Session } from "../tests/support/browser.ts";

const ROUNDS = 3;
const TIMEOUT_MS = 300_000;

const { values, positionals } = parseArgs({
  options: { viewer: { type: "string" }, d3: { type: "string" }, lowtide: { type: "string" } },
  allowPositionals: true,
});
const { viewer, d3, lowtide } = values;
if (viewer === undefined || d3 === undefined || lowtide === undefined || positionals.length === 0) {
  throw new Error("needed: --viewer MEMORYVIZ_JS --d3 DIRECTORY --lowtide PROGRAM SNAPSHOT…");
}

const VIEWER_PAGE = `<!doctype html><body><script type="module">
import { add_remote_files } from "/MemoryViz.js";
add_remote_files([{ name: "snapshot", url: "/snapshot" }]);
</script>`;

/** Everything that the viewer imports is in d3 itself; one copy of it serves all names. */
const d3Bundle = buildSync({
  stdin: { contents: 'export * from "d3";', resolveDir: d3 },
  bundle: true,
  format: "esm",
  write: false,
}).outputFiles[0].text;

const seconds = (since: number) => (performance.now() - since) / 1000;

/** Returns seconds until the viewer shows a picture, or why it does not. */
async function timeViewer(session: Session, snapshot: string): Promise<number | string> {
  const server = createServer(({ url }, response) => {
    if (url === "/snapshot") {
      response.setHeader("Content-Length", statSync(snapshot).size);
      createReadStream(snapshot).pipe(response);
      return;
    }
    const isScript = url === "/MemoryViz.js";
    response.setHeader("Content-Type", isScript ? "text/javascript" : "text/html");
    response.end(isScript ? readFileSync(viewer as string) : VIEWER_PAGE);
  }).listen(0, "127.0.0.1");
  const page = await session.newPage();
  try {
    await page.route("https://cdn.skypack.dev/**", (route) =>
      route.fulfill({
        contentType: "text/javascript",
        headers: { "Access-Control-Allow-Origin": "*" },
        body: d3Bundle,
      }),
    );
    const failed = failureOf(page);
    const start = performance.now();
    await page.goto(`http://127.0.0.1:${(server.address() as AddressInfo).port}/`);
    const shown = isPainted(page, "svg polygon").then(() => seconds(start));
    return await Promise.race([shown, failed]);
  } catch (error) {
    return lineOf(error);
  } finally {
    await page.context().close();
    server.closeAllConnections();
    server.close();
  }
}

/** Returns seconds that the report takes, until its page shows the chart, and until it shows everything. */
async function timePage(session: Session, snapshot: string, directory: string): Promise<number[]> {
  const path = join(directory, "page.html");
  const beforeReport = performance.now();
  const { status, stderr } = spawnSync(lowtide as string, ["report", snapshot, "-o", path]);
  if (status !== 0) throw new Error(String(stderr));
  const report = seconds(beforeReport);
  const page = await session.newPage();
  const start = performance.now();
  await page.goto(pathToFileURL(path).href);
  await isPainted(page, "#timeline:not([aria-busy]) canvas");
  const chart = seconds(start);
  await page.waitForFunction(() => document.querySelector("main") && !document.querySelector("[aria-busy]"));
  const all = seconds(start);
  await page.context().close();
  return [report, chart, all];
}

/** Waits until an element is there, and the browser has drawn it. */
async function isPainted(page: Page, selector: string): Promise<void> {
  await page.waitForFunction((wanted) => document.querySelector(wanted), selector, { timeout: TIMEOUT_MS });
  await page.evaluate(
    () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(null)))),
  );
}

function failureOf(page: Page): Promise<string> {
  return new Promise((fail) => {
    page.on("crash", () => fail("the tab runs out of memory"));
    page.on("pageerror", (error) => fail(lineOf(error)));
  });
}

function lineOf(error: unknown): string {
  return (error instanceof Error ? error.message : String(error)).split("\n")[0];
}

const text = (value: number | string) => (typeof value === "number" ? `${value.toFixed(2)} s` : value);
const directory = mkdtempSync(join(tmpdir(), "lowtide-compare-"));
for (let round = 0; round < ROUNDS; round++) {
  for (const snapshot of positionals) {
    // A browser of its own for each, so that neither finds the other's memory.
    const [first, second] = [await Session.start(), await Session.start()];
    const theirs = await timeViewer(first, snapshot);
    await first.stop();
    const [report, chart, all] = await timePage(second, snapshot, directory);
    await second.stop();
    console.log(
      `${basename(snapshot)}: PyTorch's viewer ${text(theirs)}; lowtide report ${text(report)}, ` +
        `chart ${text(chart)}, everything ${text(all)}`,
    );
  }
}
rmSync(directory, { recursive: true });
