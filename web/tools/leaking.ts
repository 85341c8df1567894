// Writes a recording of a job that leaks, which no sample does: `node tools/run.mjs tools/leaking.ts OUT.pickle`. For
// the pictures of what `lowtide` finds in it.

import { writeFileSync } from "node:fs";
import { leakingJob } from "../tests/support/snapshot.ts";

const LEAK_BYTES = 3 * 2 ** 20;

const [out] = process.argv.slice(2);
writeFileSync(out, leakingJob(LEAK_BYTES, true));
