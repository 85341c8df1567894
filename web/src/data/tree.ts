// The allocations as a tree: call stacks, outermost frame first. In a recording without stacks, the levels are stream,
// size class and size.
//
// The tree of a trace is built once. Only the bytes of its nodes differ between instants. A parent's number is less
// than its children's, so one backward pass sums up all nodes.

import * as format from "../format.ts";
import { framesWithoutLibraries, operatorName } from "../names.ts";
import type { TraceSummary } from "./summary.ts";
import { type Frame, OPERATOR, type Trace } from "./trace.ts";

export interface Tree {
  /** The parent of each node. The root, node 0, is its own parent. */
  parent: Uint32Array;
  /** The label of each node: an index into `labels`. */
  label: Uint32Array;
  labels: Label[];
  /** Returns the node of a block. */
  nodeOfBlock: (block: number) => number;
  /** The node of all aggregated blocks; `null` if there are none. */
  folded: number | null;
}

export interface Label {
  text: string;
  /** The file and line of a frame, or another detail; may be empty. */
  place: string;
}

/** A tree under construction. A node is identified by its parent and label. */
class Builder {
  readonly labels: Label[] = [{ text: "all", place: "" }];
  readonly #parent: number[] = [0];
  readonly #label: number[] = [0];
  readonly #children = new Map<number, number>();
  readonly #labelNumbers = new Map<string, number>();

  labelOf(text: string, place: string): number {
    const key = `${text}\n${place}`;
    let number = this.#labelNumbers.get(key);
    if (number === undefined) {
      number = this.labels.push({ text, place }) - 1;
      this.#labelNumbers.set(key, number);
    }
    return number;
  }

  child(parent: number, label: number): number {
    const key = parent * 2 ** 24 + label;
    let node = this.#children.get(key);
    if (node === undefined) {
      node = this.#parent.push(parent) - 1;
      this.#label.push(label);
      this.#children.set(key, node);
    }
    return node;
  }

  finish(nodeOfBlock: (block: number) => number, aggregated: TraceSummary["aggregated"] = null): Tree {
    return {
      // The label has no count, so that merging two traces makes one node of it.
      folded: aggregated && this.child(0, this.labelOf("aggregated blocks", "not told apart")),
      parent: Uint32Array.from(this.#parent),
      label: Uint32Array.from(this.#label),
      labels: this.labels,
      nodeOfBlock,
    };
  }
}

/** Returns the tree of a trace. `hasLibraries` is whether it has the frames of libraries. */
export function treeOf(trace: Trace, hasLibraries: boolean): Tree {
  return trace.summary.has_stacks ? treeOfStacks(trace, hasLibraries) : treeOfSizes(trace);
}

function treeOfStacks(trace: Trace, hasLibraries: boolean): Tree {
  const builder = new Builder();
  const all = Array.from({ length: trace.frameCount }, (_, i) => trace.frame(i));
  const labels = new Map<Frame, number>();
  for (const frame of all) {
    const { function: name, file, line, owner } = frame;
    // Among the program's frames, an operator is known by its name. Its signature would only take room.
    const isShort = owner === OPERATOR && !hasLibraries;
    const label = isShort
      ? builder.labelOf(operatorName(name), "")
      : builder.labelOf(name, `${file}:${line}`);
    labels.set(frame, label);
  }
  const without = builder.labelOf("no stack recorded", "");
  const nodeOfStack = new Uint32Array(Math.max(1, trace.stackCount));
  for (let stack = 0; stack < nodeOfStack.length; stack++) {
    const recorded = Array.from(trace.stackFrames(stack), (number) => all[number]);
    const frames = hasLibraries ? recorded : framesWithoutLibraries(recorded);
    let node = frames.length === 0 ? builder.child(0, without) : 0;
    for (const frame of [...frames].reverse()) node = builder.child(node, labels.get(frame) ?? 0);
    nodeOfStack[stack] = node;
  }
  const { stack } = trace.blocks;
  return builder.finish((block) => nodeOfStack[stack[block]], trace.summary.aggregated);
}

function treeOfSizes(trace: Trace): Tree {
  const builder = new Builder();
  const { count, stream, requested } = trace.blocks;
  const nodes = new Uint32Array(count);
  const known = trace.summary.streams.map(() => new Map<number, number>());
  for (let block = 0; block < count; block++) {
    const size = requested[block];
    let node = known[stream[block]].get(size);
    if (node === undefined) {
      const exponent = size === 0 ? 0 : Math.floor(Math.log2(size));
      node = builder.child(0, builder.labelOf(`stream ${trace.summary.streams[stream[block]]}`, ""));
      node = builder.child(node, builder.labelOf(format.sizeClass(exponent), ""));
      node = builder.child(node, builder.labelOf(format.bytes(size), `${format.whole(size)} bytes`));
      known[stream[block]].set(size, node);
    }
    nodes[block] = node;
  }
  return builder.finish((block) => nodes[block], trace.summary.aggregated);
}

/** Returns a tree with the nodes of both, and for each node of both trees its number in the new one. */
export function merged(
  first: Tree,
  second: Tree,
): { tree: Tree; nodeOfFirst: Uint32Array; nodeOfSecond: Uint32Array } {
  const builder = new Builder();
  const copy = (tree: Tree): Uint32Array => {
    const labels = tree.labels.map(({ text, place }, i) => (i === 0 ? 0 : builder.labelOf(text, place)));
    const nodes = new Uint32Array(tree.parent.length);
    for (let node = 1; node < nodes.length; node++) {
      nodes[node] = builder.child(nodes[tree.parent[node]], labels[tree.label[node]]);
    }
    return nodes;
  };
  const nodeOfFirst = copy(first);
  const nodeOfSecond = copy(second);
  const tree = builder.finish((block) => nodeOfFirst[first.nodeOfBlock(block)]);
  return { tree, nodeOfFirst, nodeOfSecond };
}

/** Returns for each node the sum over itself and its descendants. */
export function totals(tree: Tree, own: Float64Array): Float64Array {
  const total = own.slice();
  for (let node = total.length - 1; node > 0; node--) total[tree.parent[node]] += total[node];
  return total;
}
