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
  const isAllThere = away.bytes === 0;
  for (const block of rowsAt(blocks, instant)) {
    const isLive = instant < blocks.freed[block] && (isAllThere || !away.has(blocks.address[block]));
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
  return (node) => {
    let siblings = known.get(node);
    if (siblings === undefined) {
      siblings = [];
      for (const child of childrenOf(tree, node)) if (width[child] > 0) siblings.push(child);
      siblings.sort((a, b) => width[b] - width[a]);
      known.set(node, siblings);
    }
    return siblings;
  };
}

/** By trees: all nodes but the root, those of a parent together and in order, and where each parent's begin. */
const families = new WeakMap<Tree, { nodes: Uint32Array; first: Uint32Array }>();

/** Returns the children of a node, whatever their width, in order. */
function childrenOf(tree: Tree, node: number): Uint32Array {
  let family = families.get(tree);
  if (family === undefined) {
    const { parent } = tree;
    const first = new Uint32Array(parent.length + 1);
    for (let child = 1; child < parent.length; child++) first[parent[child] + 1]++;
    for (let i = 1; i < first.length; i++) first[i] += first[i - 1];
    const next = first.slice();
    const nodes = new Uint32Array(parent.length - 1);
    for (let child = 1; child < parent.length; child++) nodes[next[parent[child]]++] = child;
    family = { nodes, first };
    families.set(tree, family);
  }
  return family.nodes.subarray(family.first[node], family.first[node + 1]);
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
