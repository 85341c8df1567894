// The names of call sites: as a filter, and for people.

import * as format from "../format.ts";
import type { Site, TraceSummary } from "./summary.ts";

/** The largest request in the smallest size class. */
const SMALLEST_CLASS_BYTES = 512;

/** Returns the filter that selects exactly the blocks of a call site. */
export function filterOf(site: Site, { streams }: TraceSummary): string {
  if ("stack" in site) return `stack:${site.stack}`;
  return `stack:0 size:${leastOf(site.size_max)}-${site.size_max} stream:${streams[site.stream].toLowerCase()}`;
}

/** Returns a call site without a stack in words. */
export function sizesText({ size_max, stream }: Extract<Site, { size_max: number }>, summary: TraceSummary) {
  const [least, most] = [leastOf(size_max), size_max].map(format.whole);
  return `requests of ${least} to ${most} bytes in stream ${summary.streams[stream]}`;
}

/** Returns the smallest request of a size class. There are eight classes between two powers of two. */
function leastOf(size_max: number): number {
  if (size_max <= SMALLEST_CLASS_BYTES) return 0;
  return size_max - 2 ** Math.max(0, Math.floor(Math.log2(size_max - 1)) - 3) + 1;
}
