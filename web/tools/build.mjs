// Bundles the page into the one file that `lowtide report` fills: `node tools/build.mjs [--check]`.
//
// With --check nothing is written, and the checked-in file has to be what would be.

import { readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const here = new URL("../", import.meta.url);
const target = new URL("../crates/history/src/page/page.html", here);

/** @param {string} path */
const read = (path) => readFile(new URL(path, here), "utf8");

/** Returns the page: a template, the style sheet and the script, in one. */
async function bundle() {
  const { outputFiles } = await build({
    absWorkingDir: new URL(".", here).pathname,
    entryPoints: ["src/main.ts"],
    outdir: "out",
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: ["es2022", "chrome105", "firefox115", "safari16"],
    charset: "utf8",
    legalComments: "none",
  });
  /** @param {string} extension */
  const output = (extension) => outputFiles.find(({ path }) => path.endsWith(extension))?.text.trim() ?? "";
  // The script stands in a page, whose reader would end it at this text.
  const script = output(".js").replaceAll("</script", "<\\/script");
  const licence = await read("node_modules/uplot/LICENSE");
  const notice = `<!--\nThis page contains uPlot, https://github.com/leeoniya/uPlot, under this licence:\n\n${licence.trim()}\n-->`;
  const template = await read("src/page.html");
  return template
    .replace("<!-- NOTICE -->", () => notice)
    .replace("/* STYLE */", () => output(".css"))
    .replace("/* SCRIPT */", () => script);
}

const page = await bundle();
if (process.argv.includes("--check")) {
  const checkedIn = await readFile(target, "utf8").catch(() => "");
  if (checkedIn !== page) {
    console.error("crates/history/src/page/page.html is not what web/src makes; run `cargo xtask web`");
    process.exitCode = 1;
  }
} else {
  await writeFile(target, page);
}
