// Where what grew comes from, as the filter and as people name it.

import * as format from "../format.ts";
import type { Site, TraceSummary } from "./summary.ts";

/** Requests up to this size are one class. */
const SMALLEST_CLASS_BYTES = 512;

/** Returns the filter by which exactly the blocks of a site pass. */
export function filterOf(site: Site, { streams }: TraceSummary): string {
  if ("stack" in site) return `stack:${site.stack}`;
  return `stack:0 size:${leastOf(site.size_max)}-${site.size_max} stream:${streams[site.stream].toLowerCase()}`;
}

/** Returns in words where the blocks of a site without a stack come from. */
export function sizesText({ size_max, stream }: Extract<Site, { size_max: number }>, summary: TraceSummary) {
  const [least, most] = [leastOf(size_max), size_max].map(format.whole);
  return `requests of ${least} to ${most} bytes in stream ${summary.streams[stream]}`;
}

/** Returns the smallest request of a class of sizes: eight classes lie between two powers of two. */
function leastOf(size_max: number): number {
  if (size_max <= SMALLEST_CLASS_BYTES) return 0;
  return size_max - 2 ** Math.max(0, Math.floor(Math.log2(size_max - 1)) - 3) + 1;
}
