// The contents of a segment at an instant.

import { upperBound } from "./search.ts";
import { EXPANDABLE, LARGE, liveBytes, type Trace } from "./trace.ts";

/** The blocks that exist at an instant, by address, and their addresses. */
export interface Placed {
  blocks: Uint32Array;
  addresses: Float64Array;
}

/** Returns blocks that are sorted by address, with their addresses. */
export function placedOf(blocks: Uint32Array, trace: Trace): Placed {
  return { blocks, addresses: Float64Array.from(blocks, (block) => trace.blocks.address[block]) };
}

export interface Content {
  live: number;
  /** The bytes outside of blocks. A block that waits for events is neither live nor free. */
  free: number;
  blocks: number;
  /** The live bytes of each tag, by the number of the tag. */
  tags: Map<number, number>;
}

/**
 * Returns the contents of a segment. A block may extend over several parts of an expandable segment; only its bytes in
 * this part count. Linear in the segment's blocks.
 */
export function contentOf(trace: Trace, segment: number, instant: number, placed: Placed): Content {
  const { blocks, segments } = trace;
  const from = segments.address[segment];
  const to = from + segments.size[segment];
  const content = { live: 0, free: to - from, blocks: 0, tags: new Map<number, number>() };
  const within = (start: number, bytes: number) =>
    Math.max(0, Math.min(to, start + bytes) - Math.max(from, start));
  for (let i = Math.max(0, upperBound(placed.addresses, from) - 1); placed.addresses[i] < to; i++) {
    const block = placed.blocks[i];
    const covered = within(blocks.address[block], blocks.size[block]);
    if (covered === 0) continue;
    content.blocks++;
    content.free -= covered;
    if (instant >= blocks.freed[block]) continue;
    const live = within(blocks.address[block], liveBytes(blocks, block));
    const tag = blocks.tag[block];
    content.live += live;
    content.tags.set(tag, (content.tags.get(tag) ?? 0) + live);
  }
  return content;
}

/** Returns the segment that contains an address at an instant; `null` if none does. */
export function segmentAt({ segments }: Trace, address: number, instant: number): number | null {
  for (let i = 0; i < segments.count; i++) {
    const isThere = segments.start[i] <= instant && instant < segments.end[i];
    const offset = address - segments.address[i];
    if (isThere && offset >= 0 && offset < segments.size[i]) return i;
  }
  return null;
}

/** Returns in words which requests a segment serves, and whether it belongs to an expandable segment. */
export function kindOf({ segments }: Trace, segment: number): string {
  const flags = segments.flags[segment];
  const requests = (flags & LARGE) === 0 ? "small" : "large";
  return (flags & EXPANDABLE) === 0 ? requests : `${requests}, expandable`;
}
