// The data of the icicle graph: the bytes of each node of a tree at one instant, over a range, or as a difference.

import { Away } from "./away.ts";
import { liveBytes, rowsAt, type Trace } from "./trace.ts";
import { type Tree, totals } from "./tree.ts";

/** A tree with the bytes of each node before and after. `before` is 0 if nothing is compared. */
export interface Picture {
  tree: Tree;
  title: string;
  isDifference: boolean;
  before: Float64Array;
  after: Float64Array;
  /** The width of each node in bytes. In a difference, it is the sum of all increases and decreases of the node and below. */
  width: Float64Array;
  childrenOf: (node: number) => number[];
}

/** Returns the live bytes of each node at an instant, without those of its children. Paused blocks are not live. */
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

/** Returns the bytes that listed blocks allocated in each node after one instant and up to another. */
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
  // Increases and decreases below a node must not cancel out, so both add to its width.
  const width = totals(
    tree,
    first.map((bytes, node) => Math.abs(second[node] - bytes)),
  );
  const [before, after] = [totals(tree, first), totals(tree, second)];
  return { tree, title, isDifference: true, before, after, width, childrenOf: children(tree, width) };
}

/** Returns a function that returns the children of a node, without those of width 0, the widest first. */
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

/** The nodes of each tree except the root, grouped by parent, and the start of each group. */
const families = new WeakMap<Tree, { nodes: Uint32Array; first: Uint32Array }>();

/** Returns all children of a node, in order. */
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

/** Returns the nodes from the root to a node. */
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

/** Returns the node at the end of a path of labels; the root if there is no such path. */
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
