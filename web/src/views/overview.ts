// The overview of a trace: its name, its peaks, its out-of-memory errors, and notes on the numbers.

import type { Failure, Frames, Growth, TraceSummary } from "../data/summary.ts";
import { bytesOf, type Child, countOf, fill, h, ratioOf, shareOf } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";
import type { InstantBar } from "./instant.ts";

export class Overview implements View {
  readonly element = h("section", { id: "overview", class: "plain", "aria-label": "Overview" });
  readonly shows = ["trace"] as const;
  readonly isEarly = true;
  readonly #model: Model;
  readonly #bar: InstantBar;

  constructor(model: Model, bar: InstantBar) {
    this.#model = model;
    this.#bar = bar;
  }

  draw(): void {
    const { summary } = this.#model.trace;
    fill(
      this.element,
      h("h1", { title: summary.name }, this.#model.nameOf(this.#model.state.trace)),
      h("p", { class: "quiet" }, subtitle(summary)),
      h("dl", { class: "facts" }, ...this.#facts()),
      this.#failures(),
      ...notes(summary, this.#model.trace.segments.count === 0),
    );
  }

  #facts(): Child[] {
    const { summary, blockCount } = this.#model.trace;
    const { peak_live, peak_reserved, ooms, growth } = summary;
    const ratio = peak_reserved.bytes / peak_live.bytes;
    const at = this.#model.named(peak_live.event);
    const fact = (name: string, value: Node, more: Child, event?: number) =>
      h(
        "div",
        {},
        h("dt", {}, name),
        h("dd", {}, value),
        h("dd", { class: "more" }, event === undefined ? more : this.#goTo(event, more)),
      );
    const outOfMemory = () => {
      const name = "Out of memory";
      if (ooms.length > 0) return fact(name, countOf(ooms.length), "show the first", ooms[0].event);
      return summary.events === 0
        ? fact(name, h("span", {}, "not known"), "no events are recorded")
        : fact(name, h("span", {}, "never"), "no request failed");
    };
    const framesMoved = (frames: Frames) =>
      fact("Frames moved", countOf(frames.moved), movesText(frames, growth), frames.busiest?.event);
    return [
      fact("Peak live", bytesOf(peak_live.bytes), "show this instant", peak_live.event),
      fact("Peak reserved", bytesOf(peak_reserved.bytes), "show this instant", peak_reserved.event),
      fact("Reserved ratio", ratioOf(ratio), "of the two peaks"),
      at === null
        ? null
        : fact(
            "Gap at peak live",
            bytesOf(at.reserved - at.live),
            h("span", {}, shareOf(1 - at.live / at.reserved), " of reserved"),
          ),
      fact(
        "Blocks",
        countOf(blockCount + (summary.aggregated?.blocks ?? 0)),
        h("span", {}, countOf(summary.initial_blocks), " from before it began"),
      ),
      outOfMemory(),
      summary.frames === null ? null : framesMoved(summary.frames),
    ];
  }

  /** Returns a list of the first out-of-memory errors: each request, and the memory that was free for it. */
  #failures(): Child {
    const { summary } = this.#model.trace;
    const { ooms } = summary;
    if (ooms.length === 0) return null;
    const lines = ooms.flatMap((failure) => {
      const { largest_free } = failure;
      return largest_free === null ? [] : [this.#failure(failure, largest_free)];
    });
    const more = ooms.length - lines.length;
    return h(
      "ul",
      { class: "notes", "aria-label": "Requests that failed" },
      ...lines,
      more > 0 ? h("li", {}, `${format.counted(more, "more request")} failed later.`) : null,
    );
  }

  #failure({ event, requested, stream, device_free }: Failure, largestFree: number): HTMLElement {
    const { summary } = this.#model.trace;
    const at = this.#model.named(event);
    const free = [
      h("span", {}, "the device had ", bytesOf(device_free), " left"),
      at === null
        ? null
        : h("span", {}, bytesOf(at.reserved - at.live), " of the reserved memory were not live"),
      h("span", {}, "the largest free block of its stream and pool had ", bytesOf(largestFree)),
    ].filter((part) => part !== null);
    return h(
      "li",
      {},
      "Out of memory ",
      this.#goTo(event, `at event ${format.whole(event)}`),
      ": a request of ",
      bytesOf(requested),
      ` in stream ${summary.streams[stream]} failed. Then `,
      ...free.flatMap((part, i) => (i === 0 ? [part] : [", ", part])),
      ".",
    );
  }

  #goTo(event: number, text: Child): HTMLElement {
    const go = () => this.#bar.choose(event);
    return h("button", { type: "button", class: "link", click: go }, text);
  }
}

/** Returns how many frames there were, and at how many addresses they were used. */
function framesText({ peak, size, addresses }: Frames): string {
  const count = `up to ${format.counted(peak, "frame")} of ${format.bytes(size)}`;
  return `${count}, used at ${format.whole(addresses)} ${addresses === 1 ? "address" : "addresses"}`;
}

/** Returns in which steps frames moved to other addresses. */
function movesText({ moved, moving_steps, busiest }: Frames, { found_by, steps }: Growth): string {
  if (busiest === null) return moved === 0 ? "none" : "in no whole step";
  const step = found_by === "parts" ? "part" : "step";
  const most = `most in ${step} ${format.whole(busiest.number)}: ${format.whole(busiest.moved)}`;
  return `in ${format.whole(moving_steps)} of ${format.counted(steps, step)}, ${most}`;
}

function subtitle(summary: TraceSummary): string {
  const { frames } = summary;
  return [
    ...(summary.device === null
      ? ["pinned memory of the host, as cudaHostAlloc gave it"]
      : [`cuda:${summary.device}`, summary.strategy]),
    // The settings in force may differ from those that the job was given.
    ...(summary.settings === "" ? [] : [`PYTORCH_CUDA_ALLOC_CONF=${summary.settings}`]),
    format.counted(summary.events, "event"),
    summary.duration_us === null ? "no times recorded" : format.duration(summary.duration_us),
    format.counted(summary.streams.length, "stream"),
    ...(frames === null ? [] : [framesText(frames)]),
    summary.has_stacks ? "with stacks" : "no stacks recorded",
  ].join(" · ");
}

/** Returns notes on the limits of the numbers; empty if there are none. */
function notes(summary: TraceSummary, isWithoutSegments: boolean): Child[] {
  const { aggregated } = summary;
  const lines: string[] = [];
  if (aggregated !== null) {
    lines.push(
      `Aggregated: ${format.counted(aggregated.blocks, "block")} of up to ${format.bytes(aggregated.size_max)}, ` +
        `each live for at most ${format.counted(aggregated.events_max, "event")}, are in the curves and in the sums ` +
        "of every instant, to the byte, but are not listed or drawn one by one: their addresses are drawn as free.",
    );
  }
  if (summary.sizes === "estimated") {
    lines.push(
      "Sizes of blocks are estimated: they do not follow from the recording, so a block whose size is not in it " +
        "counts as its request rounded up to 512 bytes.",
    );
  }
  if (summary.peak_paused > 0) {
    lines.push(
      `Up to ${format.bytes(summary.peak_paused)} were paused at once. While memory is paused it is off the device, ` +
        "and neither reserved nor live here, but a curve of its own; its blocks stay listed, and drawn hatched, as " +
        "their addresses stay theirs. What other strategies would have needed is without any pause.",
    );
  }
  if (summary.events === 0) {
    lines.push(
      "The recording has no events: it shows what was held when it was made, and nothing of how that came to be. To " +
        "have events, call torch.cuda.memory._record_memory_history() first, or use lowtide record.",
    );
  }
  if (summary.initial_blocks > 0 && summary.events > 0) {
    lines.push(
      `The recording’s beginning is missing: ${format.counted(summary.initial_blocks, "block")} were there before ` +
        "its first event, for longer than is known, and what was there before that is in no peak.",
    );
  }
  if (summary.is_cut_off) {
    lines.push(
      "The recording’s end is missing, as where a job is killed: this is about what comes before it.",
    );
  }
  if (summary.missed_events > 0) {
    lines.push(
      "The recording’s end is missing: other threads went on while the snapshot was taken, and at least " +
        `${format.counted(summary.missed_events, "event")} came after its last. This is about what comes before them.`,
    );
  }
  if (summary.contradictions > 0) {
    lines.push(
      `The recording contradicts itself in ${format.counted(summary.contradictions, "event")}, which are left out: ` +
        "memory that went back with blocks in it, or blocks that overlap.",
    );
  }
  if (isWithoutSegments) lines.push("The recording has no segments, so nothing is known of reserved memory.");
  if (lines.length === 0) return [];
  return [
    h(
      "ul",
      { class: "notes", "aria-label": "About these numbers" },
      ...lines.map((line) => h("li", {}, line)),
    ),
  ];
}
