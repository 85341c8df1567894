// The short names of traces, marks and stacks.

import { type Annotation, type Frame, OPERATOR, PACKAGE, PROGRAM, PYTORCH } from "./data/trace.ts";

/**
 * The maximum length of a name. Only the start and the end of longer names are shown: C++ has names of thousands of
 * characters.
 */
const LENGTH_MAX = 120;
const LENGTH_OF_END = 40;
/** Letters of right-to-left scripts, and characters that change the text direction. */
const TURNS = /[\u0590-\u08ff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]/;

/** Returns a name that fits on a line and does not change the text direction beside it. */
export function shown(name: string): string {
  const isLong = name.length > LENGTH_MAX;
  const text = isLong
    ? `${name.slice(0, LENGTH_MAX - LENGTH_OF_END - 1)}…${name.slice(-LENGTH_OF_END)}`
    : name;
  // An isolate ends everything that begins in it, except other isolates. These are removed, because they could end it
  // early.
  return TURNS.test(text) ? `\u2068${text.replaceAll(/[\u2066-\u2069]/g, "")}\u2069` : text;
}

/** Returns the text of a program's mark. A mark of an end says so. */
export function markText({ name, stage }: Annotation): string {
  return stage === 1 ? `${shown(name)} ends` : shown(name);
}

/** Returns the names of traces without the directories that all of them share. */
export function shortNames(paths: string[]): string[] {
  const parts = paths.map((path) => path.split("/"));
  const shortest = Math.min(...parts.map(({ length }) => length));
  let common = 0;
  while (common < shortest - 1 && parts.every((part) => part[common] === parts[0][common])) common++;
  return parts.map((part) => part.slice(common).join("/"));
}

/**
 * Returns the indices of names in the order in which they are shown. Names that differ only in numbers, such as ranks,
 * are grouped and sorted by number: a shell gives `rank10` before `rank2`. Other names keep their order.
 */
export function shownOrder(names: string[]): number[] {
  const alike = new Map<string, number[]>();
  names.forEach((name, place) => {
    const shape = name.replaceAll(/\d+/g, "0");
    alike.set(shape, [...(alike.get(shape) ?? []), place]);
  });
  const { compare } = new Intl.Collator("en", { numeric: true });
  return [...alike.values()].flatMap((places) => places.sort((a, b) => compare(names[a], names[b]) || a - b));
}

/**
 * Returns the frames of a stack that say what its memory is for, innermost first like `frames`: those of the program.
 * Because one line can make many allocations, it adds the innermost frame of a package, or else of PyTorch, that was
 * called from there, and the operator that this frame called. Returns the innermost frame if there is no such frame.
 */
export function framesWithoutLibraries(frames: readonly Frame[]): readonly Frame[] {
  const own = frames.findIndex(({ owner }) => owner === PROGRAM);
  const called = own < 0 ? frames : frames.slice(0, own);
  const innermost = (wanted: number) => called.find(({ owner }) => owner === wanted);
  const python = frames.findIndex(({ owner }) => owner <= PYTORCH);
  const compiled = python < 0 ? frames : frames.slice(0, python);
  const operator = compiled.findLast(({ owner }) => owner === OPERATOR);
  const inner = [operator, innermost(PACKAGE) ?? innermost(PYTORCH)].filter((frame) => frame !== undefined);
  const chosen = [...inner, ...frames.filter(({ owner }) => owner === PROGRAM)];
  return chosen.length > 0 ? chosen : frames.slice(0, 1);
}

/** Returns the title of a stack: the program's innermost frame, and what it called (`framesWithoutLibraries`). */
export function titleOf(frames: readonly Frame[]): string {
  const chosen = framesWithoutLibraries(frames);
  const own = chosen.findIndex(({ owner }) => owner === PROGRAM);
  const named = own < 0 ? chosen : chosen.slice(0, own + 1);
  return named.map(placeOf).reverse().join(" › ") || "no stack";
}

/** Returns the short name of an operator: `zeros_like` of `at::_ops::zeros_like::call(…)`. */
export function operatorName(name: string): string {
  // Also `torch::autograd::generated::AddmmBackward0::apply(…)`.
  return name.replace(/^.*?(?:_ops|generated)::/, "").replace(/::.*$/, "");
}

function placeOf({ function: name, file, line, owner }: Frame): string {
  if (owner === OPERATOR) return shown(operatorName(name));
  return `${shown(name)} (${shown(file.split("/").slice(-2).join("/"))}:${line})`;
}
