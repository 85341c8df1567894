// The description of one block. It is the same wherever a block is shown.

import type { Trace } from "../data/trace.ts";
import { bytesOf, type Child, copyable, h } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";

/** Returns the age of a block in events and, if times are recorded, in time. */
export function ageText(trace: Trace, block: number, instant: number): string {
  return spanText(trace, trace.blocks.start[block], instant, trace.blocks.start[block] === 0);
}

export function spanText(trace: Trace, start: number, end: number, isLonger: boolean): string {
  const [from, to] = [trace.timeAt(start), trace.timeAt(end)];
  const time = from === null || to === null ? "" : `, ${format.duration(to - from)}`;
  return `${isLonger ? "over " : ""}${format.counted(end - start, "event")}${time}`;
}

/** Returns the tag of the region that a pause belongs to. */
export function regionOf({ summary, pauses }: Trace, pause: number): string {
  return shown(summary.regions[pauses.region[pause]]) || "without a tag";
}

/** Returns the frames of a stack, innermost first, as a list. */
export function stackList(trace: Trace, stack: number, label = "Stack"): HTMLElement {
  const frames = Array.from(trace.stackFrames(stack), (number) => {
    const frame = trace.frame(number);
    return h("li", {}, h("b", {}, frame.function), h("span", {}, ` ${frame.file}:${frame.line}`));
  });
  if (frames.length === 0) return h("p", { class: "quiet" }, "No stack was recorded for this block.");
  // Elements that scroll must be able to have the focus, so that keys can scroll them.
  return h("ol", { class: "frames", tabindex: 0, "aria-label": label }, ...frames);
}

/** Returns the title of a stack. A click shows all its frames. */
export function stackCell(model: Model, stack: number): Child {
  const { trace } = model;
  if (trace.stackFrames(stack).length === 0) return "no stack";
  const details = h("details", { class: "frames-of" }, h("summary", {}, model.stackTitle(stack)));
  // The list is created when it is opened, because a table has hundreds of rows.
  details.addEventListener("toggle", () => details.append(stackList(trace, stack)), { once: true });
  return details;
}

/** Returns an entry of a list of details. */
export function item(name: string, value: Child): HTMLElement {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

/** Returns all details of a block at an instant. */
export function blockDetails(model: Model, block: number, instant: number): Child[] {
  const { trace } = model;
  const { blocks, summary } = trace;
  const eventOf = (word: string, event: number) =>
    copyable(`${word} event ${format.whole(event)}`, String(event));
  const address = format.address(blocks.address[block]);
  const freed = blocks.freed[block];
  const pause = model.pauseAt(blocks.address[block]);
  return [
    h(
      "dl",
      { class: "details" },
      item("Requested", bytesOf(blocks.requested[block])),
      item("Size", bytesOf(blocks.size[block])),
      item("Address", copyable(address, address)),
      item("State", model.stateAt(block, instant)),
      pause === null ? null : item("Paused", eventOf("since", trace.pauses.start[pause])),
      pause === null ? null : item("Region", regionOf(trace, pause)),
      item("Age", ageText(trace, block, instant)),
      item("Freed", freed > trace.end ? "never" : eventOf("at", freed)),
      item("Stream", summary.streams[blocks.stream[block]]),
      item("Pool", summary.pools[blocks.pool[block]]),
      item("Tag", summary.tags[blocks.tag[block]] || "none"),
    ),
    summary.has_stacks ? stackList(trace, blocks.stack[block]) : null,
  ];
}
