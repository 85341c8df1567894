// Runs TypeScript on any node from 18 on: `node tools/run.mjs FILE.ts [ARGUMENTS]`, or with `--test`, every file of
// tests that is named. Bundled by esbuild first, because node runs TypeScript by itself only from 23 on.

import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { basename, join } from "node:path";
import { buildSync } from "esbuild";

const isTest = process.argv[2] === "--test";
const words = process.argv.slice(isTest ? 3 : 2);
const entryPoints = isTest ? words : words.slice(0, 1);
const directory = mkdtempSync(join("node_modules", ".run-"));
try {
  buildSync({
    entryPoints,
    outdir: directory,
    outExtension: { ".js": ".mjs" },
    outbase: ".",
    entryNames: "[name]",
    bundle: true,
    platform: "node",
    format: "esm",
    target: "node18",
    sourcemap: "inline",
    packages: "external",
  });
  const built = entryPoints.map((path) => join(directory, basename(path).replace(/\.ts$/, ".mjs")));
  const flags = isTest ? ["--enable-source-maps", "--test"] : ["--enable-source-maps"];
  const { status } = spawnSync(process.execPath, [...flags, ...built, ...(isTest ? [] : words.slice(1))], {
    stdio: "inherit",
  });
  process.exitCode = status ?? 1;
} finally {
  rmSync(directory, { recursive: true, force: true });
}
