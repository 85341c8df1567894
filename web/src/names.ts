// What traces and stacks are called, where there is little room.

import { type Annotation, type Frame, PACKAGE, PROGRAM } from "./data/trace.ts";

/** Of longer names the beginning and the end are shown: C++ has names of thousands of characters. */
const LENGTH_MAX = 120;
const LENGTH_OF_END = 40;
/** Letters that are written from right to left, and characters that turn the direction. */
const TURNS = /[\u0590-\u08ff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]/;

/** Returns a name short enough for a line, and such that it turns the direction of nothing beside it. */
export function shown(name: string): string {
  const isLong = name.length > LENGTH_MAX;
  const text = isLong
    ? `${name.slice(0, LENGTH_MAX - LENGTH_OF_END - 1)}…${name.slice(-LENGTH_OF_END)}`
    : name;
  // An isolate ends all that begins in it, but for the name's own isolates, which might end it early.
  return TURNS.test(text) ? `\u2068${text.replaceAll(/[\u2066-\u2069]/g, "")}\u2069` : text;
}

/** Returns a mark of the program's in words: what ends says so. */
export function markText({ name, stage }: Annotation): string {
  return stage === 1 ? `${shown(name)} ends` : shown(name);
}

/** Returns the traces' names without the directories that all have in common. */
export function shortNames(paths: string[]): string[] {
  const parts = paths.map((path) => path.split("/"));
  const shortest = Math.min(...parts.map(({ length }) => length));
  let common = 0;
  while (common < shortest - 1 && parts.every((part) => part[common] === parts[0][common])) common++;
  return parts.map((part) => part.slice(common).join("/"));
}

/**
 * Returns the places of names in the order in which they are shown: as they were given, but those which differ in
 * numbers only, as ranks do, one behind the other by their numbers. A shell gives `rank10` before `rank2`.
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
 * Returns how a person knows a stack, innermost frame first: by the innermost that is the program's own and, as much
 * may come of one line of a program, by the innermost of a package that this called.
 */
export function titleOf(frames: readonly Frame[]): string {
  const own = frames.findIndex(({ owner }) => owner === PROGRAM);
  const called = own < 0 ? frames : frames.slice(0, own);
  const inPackage = called.find(({ owner }) => owner === PACKAGE);
  const told = [frames[own], inPackage].filter((frame) => frame !== undefined);
  return (told.length > 0 ? told : frames.slice(0, 1)).map(placeOf).join(" › ") || "no stack";
}

function placeOf({ function: name, file, line }: Frame): string {
  return `${shown(name)} (${shown(file.split("/").slice(-2).join("/"))}:${line})`;
}
