// What traces and stacks are called, where there is little room.

import type { Frame } from "./data/trace.ts";

/** Returns the traces' names without the directories that all have in common. */
export function shortNames(paths: string[]): string[] {
  const parts = paths.map((path) => path.split("/"));
  const shortest = Math.min(...parts.map(({ length }) => length));
  let common = 0;
  while (common < shortest - 1 && parts.every((part) => part[common] === parts[0][common])) common++;
  return parts.map((part) => part.slice(common).join("/"));
}

/** Files whose frames say how something was allocated, and not what for. */
const MACHINERY = /(^|\/)(torch|c10|aten)\/|\.(cpp|cc|h|c)$|\.so|^\?\?|<built-in>|<frozen/;

/** Returns how a person knows a stack, innermost frame first: by the innermost that is not PyTorch's own. */
export function titleOf(frames: readonly Frame[]): string {
  const frame = frames.find(({ file }) => file !== "" && !MACHINERY.test(file)) ?? frames[0];
  if (frame === undefined) return "no stack";
  return `${frame.function} (${frame.file.split("/").slice(-2).join("/")}:${frame.line})`;
}
