// Writes a page of a made-up job: `node tools/run.mjs tools/generate.ts OUT.html [BLOCKS]`. For looking, and for
// measuring how a page of 1.5 million blocks behaves.

import { writeFileSync } from "node:fs";
import { pack } from "../tests/support/encode.ts";
import { fillPage, template } from "../tests/support/page.ts";
import { dataOf } from "../tests/support/recording.ts";
import { simulate } from "../tests/support/simulate.ts";

const [out, blocks = "50000"] = process.argv.slice(2);
const requestsPerStep = 1500;
const steps = Math.ceil(Number(blocks) / (requestsPerStep + 1));
const before = simulate({ name: "before", seed: 1, steps, requestsPerStep });
const recordings =
  Number(blocks) > 200_000
    ? [before]
    : [before, simulate({ name: "after", seed: 1, steps, requestsPerStep, leakBytes: 4 * 2 ** 20 })];
const { summary, columns } = dataOf(recordings);
const page = fillPage(template(), summary, pack(columns));
writeFileSync(out, page);
console.log(`${out}: ${before.blocks.length} blocks, ${(page.length / 2 ** 20).toFixed(1)} MiB`);
