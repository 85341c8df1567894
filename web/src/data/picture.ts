// What an icicle shows: bytes for each node of a tree, at one instant, over a range, or as a difference.

import { Away } from "./away.ts";
import { liveBytes, rowsAt, type Trace } from "./trace.ts";
import { type Tree, totals } from "./tree.ts";

/** What is drawn: a tree, and for each node its bytes before and after; `before` is 0 where nothing is compared. */
export interface Picture {
  tree: Tree;
  title: string;
  isDifference: boolean;
  before: Float64Array;
  after: Float64Array;
  /** How wide a node is: the bytes, or of a difference all that grew and all that shrank below it. */
  width: Float64Array;
  childrenOf: (node: number) => number[];
}

/** Returns what is live at an instant: what is paused is not. */
export function weightsAt(trace: Trace, tree: Tree, instant: number): Float64Array {
  const { blocks } = trace;
  const own = new Float64Array(tree.parent.length);
  const away = new Away(trace, instant);
  for (const block of rowsAt(blocks, instant)) {
    const isLive = instant < blocks.freed[block] && !away.has(blocks.address[block]);
    if (isLive) own[tree.nodeOfBlock(block)] += liveBytes(blocks, block);
  }
  if (tree.folded !== null) own[tree.folded] += trace.folded?.at(instant)[0] ?? 0;
  return own;
}

/** Returns what was allocated after one instant and up to another, of the blocks that are listed. */
export function allocatedIn(trace: Trace, tree: Tree, from: number, to: number): Float64Array {
  const own = new Float64Array(tree.parent.length);
  const { count, start } = trace.blocks;
  for (let block = 0; block < count; block++) {
    if (start[block] > from && start[block] <= to)
      own[tree.nodeOfBlock(block)] += liveBytes(trace.blocks, block);
  }
  return own;
}

export function single(tree: Tree, own: Float64Array, title: string): Picture {
  const after = totals(tree, own);
  const before = new Float64Array(after.length);
  return { tree, title, isDifference: false, before, after, width: after, childrenOf: children(tree, after) };
}

export function difference(tree: Tree, first: Float64Array, second: Float64Array, title: string): Picture {
  // What grew and what shrank under one node must not hide each other: both have their width.
  const width = totals(
    tree,
    first.map((bytes, node) => Math.abs(second[node] - bytes)),
  );
  const [before, after] = [totals(tree, first), totals(tree, second)];
  return { tree, title, isDifference: true, before, after, width, childrenOf: children(tree, width) };
}

/** Returns a function to the children of a node that have any width, the widest first. */
function children(tree: Tree, width: Float64Array): (node: number) => number[] {
  const known = new Map<number, number[]>();
  for (let node = 1; node < width.length; node++) {
    if (width[node] === 0) continue;
    const siblings = known.get(tree.parent[node]);
    if (siblings === undefined) known.set(tree.parent[node], [node]);
    else siblings.push(node);
  }
  for (const siblings of known.values()) siblings.sort((a, b) => width[b] - width[a]);
  return (node) => known.get(node) ?? [];
}

/** Returns a node and all above it, the root first. */
export function pathNodes(tree: Tree, node: number): number[] {
  const path = [node];
  for (let at = node; at !== 0; ) {
    at = tree.parent[at];
    path.push(at);
  }
  return path.reverse();
}

export function pathOf(tree: Tree, node: number): string[] {
  return pathNodes(tree, node)
    .slice(1)
    .map((step) => tree.labels[tree.label[step]])
    .map(({ text, place }) => `${text}\n${place}`);
}

/** Returns the node at the end of a path of labels; the root if the picture has no such path. */
export function find(picture: Picture, path: string[]): number {
  let node = 0;
  for (const wanted of path) {
    const next = picture.childrenOf(node).find((child) => {
      const { text, place } = picture.tree.labels[picture.tree.label[child]];
      return `${text}\n${place}` === wanted;
    });
    if (next === undefined) return 0;
    node = next;
  }
  return node;
}
