// What the page says grew is what `lowtide leaks --json` says of the same recording. LOWTIDE names the program;
// `cargo xtask test` builds it and sets that.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Session, settled } from "../support/browser.ts";
import { leakingJob } from "../support/snapshot.ts";

const program = process.env.LOWTIDE ?? "";
const skip = program === "" && "LOWTIDE names no program";
const directory = mkdtempSync(join(tmpdir(), "lowtide-leaks-"));
let session: Session;

before(async () => {
  session = await Session.start();
});

after(async () => {
  await session.stop();
  rmSync(directory, { recursive: true });
});

interface Leaks {
  steps: { count: number; found_by: string };
  leaks: {
    bytes: number;
    bytes_per_step: number;
    grown_steps: number;
    steps: number;
    confidence: number;
    size_min_bytes?: number;
    size_max_bytes?: number;
    stack?: { function: string; file: string; line: number }[];
  }[];
}

const jobs = [
  { title: "with stacks", leakBytes: 3_000_000, hasStacks: true, requests: 100 },
  { title: "without stacks", leakBytes: 3_000_000, hasStacks: false, requests: 100 },
  { title: "among thousands of requests a step", leakBytes: 2 ** 20, hasStacks: true, requests: 5000 },
];

for (const [index, { title, leakBytes, hasStacks, requests }] of jobs.entries()) {
  test(`a planted leak ${title}`, { skip }, async () => {
    const snapshot = join(directory, `${index}.pickle`);
    const report = join(directory, `${index}.html`);
    writeFileSync(snapshot, leakingJob(leakBytes, hasStacks, requests));
    const told = JSON.parse(
      execFileSync(program, ["leaks", "--json", snapshot], { encoding: "utf8" }),
    ) as Leaks;
    execFileSync(program, ["report", snapshot, "-o", report]);
    const page = await session.openFile(report);
    // A table that is made anew, when the blocks are there, has its stacks closed.
    await settled(page);
    const section = page.locator("#growth");

    assert.equal(told.leaks.length, 1);
    const [leak] = told.leaks;
    assert.ok(
      (await section.innerText()).includes(`${told.steps.count} steps, found by the ${told.steps.found_by}`),
    );
    const cells = section.locator("tbody td");
    const numbers = await cells
      .locator("data")
      .evaluateAll((all) => all.map((each) => each.getAttribute("value")));
    const seen = `${leak.grown_steps} of ${leak.steps} steps`;
    assert.deepEqual(numbers, [
      ...[leak.bytes_per_step, leak.bytes].map(String),
      seen,
      String(leak.confidence),
    ]);
    if (leak.stack === undefined) {
      // The page has the sizes that are folded into one, and the command those that were asked for.
      const place = await cells.nth(4).innerText();
      const [, least, most] = /^requests of ([\d,]+) to ([\d,]+) bytes in stream 0$/.exec(place) ?? [];
      const bytes = (text: string) => Number(text.replaceAll(",", ""));
      assert.deepEqual([leak.size_min_bytes, leak.size_max_bytes], [leakBytes, leakBytes]);
      assert.ok(bytes(least) <= leakBytes && leakBytes <= bytes(most), place);
    } else {
      // Innermost is a library's frame, which alone is not what the leak is known by.
      const title = section.locator("summary");
      assert.equal(await title.innerText(), "keep_history (train.py:77) › append (history/log.py:3)");
      await title.click();
      // The list is made when the event of that comes.
      await section.locator(".frames li").first().waitFor();
      const frames = leak.stack.map((frame) => `${frame.function} ${frame.file}:${frame.line}`);
      assert.deepEqual(await section.locator(".frames li").allInnerTexts(), frames);
    }

    // What the click leaves over is the planted blocks and nothing else.
    await section.getByRole("button", { name: "show only this" }).click();
    await page.getByRole("button", { name: "Most frequent sizes" }).click();
    await settled(page);
    const sizes = await page
      .locator("#tables tbody tr")
      .evaluateAll((rows) =>
        rows.map((row) => [...row.querySelectorAll("data")].slice(0, 2).map((each) => Number(each.value))),
      );
    assert.deepEqual(sizes, [[leakBytes, 20]]);
    assert.deepEqual(session.complaints.splice(0), []);
  });
}
