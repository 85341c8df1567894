// The description of one segment. It is the same wherever a segment is shown.

import { type Content, contentOf, kindOf } from "../data/segments.ts";
import type { Trace } from "../data/trace.ts";
import { bytesOf, type Child, copyable, countOf, h } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
import { item, spanText, stackList } from "./block.ts";

/** Returns the age of a segment. The remaining part of a longer segment is as old as that. */
export function segmentAge(trace: Trace, segment: number, instant: number): string {
  const made = trace.segments.made[segment];
  return spanText(trace, made, instant, made === 0);
}

/** Returns which requests a segment serves, and whether it is paused. */
export function requestsText(model: Model, segment: number): string {
  const isPaused = model.pauseAt(model.trace.segments.address[segment]) !== null;
  return kindOf(model.trace, segment) + (isPaused ? "; paused" : "");
}

/** Returns a short description of a segment, line by line. */
export function segmentLines(model: Model, segment: number): string[] {
  const { trace, instant } = model;
  const { segments, summary } = trace;
  const { live, free } = contentOf(trace, segment, instant, model.placedAt(instant));
  const isKnown = trace.stackFrames(segments.stack[segment]).length > 0;
  return [
    `in a segment of ${format.bytes(segments.size[segment])}: ${format.bytes(live)} live, ` +
      `${format.bytes(free)} ${model.freeName}`,
    `stream ${summary.streams[segments.stream[segment]]}, ${summary.pools[segments.pool[segment]]}, ` +
      `there for ${segmentAge(trace, segment, instant)}`,
    ...(isKnown ? [`taken by ${model.stackTitle(segments.stack[segment])}`] : []),
  ];
}

/** Returns all details of a segment at the chosen instant. */
export function segmentDetails(model: Model, segment: number): Child[] {
  const { trace, instant } = model;
  const { segments, summary } = trace;
  const content = contentOf(trace, segment, instant, model.placedAt(instant));
  const size = segments.size[segment];
  const address = format.address(segments.address[segment]);
  const made = segments.made[segment];
  return [
    h("h3", {}, "Segment"),
    h(
      "dl",
      { class: "details" },
      item("Size", bytesOf(size)),
      item("Live in it", bytesOf(content.live)),
      item(`${format.capital(model.freeName)} in it`, bytesOf(content.free)),
      item("Blocks", countOf(content.blocks)),
      item("Address", copyable(address, address)),
      item("Requests", requestsText(model, segment)),
      item("Age", segmentAge(trace, segment, instant)),
      item(
        "Taken",
        made === 0 ? "before the first event" : copyable(`at event ${format.whole(made)}`, String(made)),
      ),
      item("Stream", summary.streams[segments.stream[segment]]),
      item("Pool", summary.pools[segments.pool[segment]]),
      summary.tags.length > 1 ? item("Live by tag", tagsText(summary.tags, content)) : null,
    ),
    trace.stackFrames(segments.stack[segment]).length === 0
      ? null
      : stackList(trace, segments.stack[segment], "Where the segment was taken"),
  ];
}

function tagsText(names: string[], { tags }: Content): string {
  const sorted = [...tags].sort(([, a], [, b]) => b - a);
  const texts = sorted.map(([tag, bytes]) => `${shown(names[tag]) || "no tag"} ${format.bytes(bytes)}`);
  return texts.length === 0 ? "none" : texts.join(", ");
}
