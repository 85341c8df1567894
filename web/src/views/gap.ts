// The gap between reserved and live bytes at the chosen instant: which cause has how much of it, and that it
// adds up.

import { CAUSES, type Cause } from "../data/summary.ts";
import { bytesOf, type Child, changeOf, fill, h, percentOf, section } from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import type { View } from "../schedule.ts";

export const CAUSE_TEXTS: Record<Cause, { title: string; meaning: string }> = {
  rounding: {
    title: "Rounding",
    meaning:
      "What blocks have beyond their requests: sizes rounded up, and remainders too small to split off.",
  },
  waiting_for_events: {
    title: "Waiting for events",
    meaning: "Blocks that were freed while another stream might still use them.",
  },
  private_pools: {
    title: "Private pools",
    meaning: "Free memory of pools of their own, such as those of CUDA graphs.",
  },
  other_streams: {
    title: "Other streams",
    meaning: "Free memory that only requests of other streams can have.",
  },
  cached_segments: {
    title: "Cached segments",
    meaning: "Wholly free segments or mapped units, which could go back to the device.",
  },
  partly_used_pages: {
    title: "Partly used pages",
    meaning: "Free parts of an expandable segment's mapped units that blocks keep mapped.",
  },
  split_remainders: {
    title: "Split remainders",
    meaning: "Free parts of segments that other blocks keep: fragmentation.",
  },
};

export class GapView implements View {
  readonly element: HTMLElement;
  readonly shows = ["trace", "instants", "seconds"] as const;
  readonly #model: Model;
  readonly #verdict = h("p", { class: "verdict" });
  readonly #bar = h("div", { class: "stack", role: "img" });
  readonly #table = h("div", { class: "scroll" });

  constructor(model: Model) {
    this.#model = model;
    this.element = section("gap", "Reserved but not live", [], this.#verdict, this.#bar, this.#table);
  }

  draw(): void {
    const { instant, second } = this.#model;
    const gap = this.#model.gapAt(instant);
    const size = gap.reserved - gap.live;
    const largest = CAUSES.reduce((most, cause) => (gap.causes[cause] > gap.causes[most] ? cause : most));
    fill(
      this.#verdict,
      `At event ${format.whole(instant)}, `,
      bytesOf(size),
      " of the ",
      bytesOf(gap.reserved),
      " reserved are not live",
      ...(size > 0
        ? [
            "; the largest part, ",
            percentOf(gap.causes[largest] / size),
            `, is ${CAUSE_TEXTS[largest].title.toLowerCase()}.`,
          ]
        : ["."]),
    );
    this.#drawBar(gap);
    const before = second === null ? null : this.#model.gapAt(second);
    this.#drawTable(gap, before, before === null ? null : second);
  }

  #drawBar(gap: Sums): void {
    const part = (name: string, bytes: number, variable: string, opacity = 1) =>
      bytes === 0
        ? null
        : h("i", {
            style: `flex-grow: ${bytes}; background: var(${variable}); opacity: ${opacity}`,
            title: `${name}: ${format.bytes(bytes)}`,
          });
    fill(
      this.#bar,
      part("Live", gap.live - gap.folded, "--live"),
      part("Live, in aggregated blocks", gap.folded, "--live", 0.6),
      ...CAUSES.map((cause, i) => part(CAUSE_TEXTS[cause].title, gap.causes[cause], `--cause-${i}`)),
    );
    const parts = CAUSES.map((cause) => `${CAUSE_TEXTS[cause].title} ${format.bytes(gap.causes[cause])}`);
    this.#bar.setAttribute(
      "aria-label",
      `Of ${format.bytes(gap.reserved)} reserved: live ${format.bytes(gap.live)}, ${parts.join(", ")}`,
    );
  }

  #drawTable(gap: Sums, before: Sums | null, second: number | null): void {
    const { aggregated } = this.#model.trace.summary;
    const size = gap.reserved - gap.live;
    const row = (kind: string, key: Child, title: string, meaning: string, value: (sums: Sums) => number) => {
      const bytes = value(gap);
      return h(
        "tr",
        { class: bytes === 0 ? `${kind} none` : kind },
        h("th", { scope: "row" }, key, title),
        h("td", { class: "text" }, meaning),
        h("td", { "data-cell": title }, bytesOf(bytes), exact(bytes)),
        h("td", {}, kind === "cause" && size > 0 ? percentOf(bytes / size) : ""),
        before === null ? null : h("td", {}, changeOf(value(before) - bytes)),
      );
    };
    const key = (variable: string) => h("i", { class: "key", style: `background: var(${variable})` });
    const head = ["Part", "What it is", `Bytes at ${format.whole(this.#model.instant)}`, "Of the gap"];
    if (second !== null) head.push(`Change at ${format.whole(second)}`);
    const causes = CAUSES.map((cause, i) =>
      row(
        "cause",
        key(`--cause-${i}`),
        CAUSE_TEXTS[cause].title,
        CAUSE_TEXTS[cause].meaning,
        (sums) => sums.causes[cause],
      ),
    );
    const total = (sums: Sums) => CAUSES.reduce((sum, cause) => sum + sums.causes[cause], sums.live);
    fill(
      this.#table,
      h(
        "table",
        { class: "sums" },
        h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
        h(
          "tbody",
          {},
          row(
            "live",
            key("--live"),
            "Live",
            "Requests of allocated blocks, each rounded up to 512 bytes.",
            (sums) => sums.live,
          ),
          aggregated === null
            ? null
            : row(
                "part",
                null,
                "of it aggregated",
                `${format.counted(aggregated.blocks, "block")} that are shown together: those of them that are live.`,
                (sums) => sums.folded,
              ),
          ...causes,
          row("sum", null, "Sum", "Live and all causes.", total),
          row("sum", key("--reserved"), "Reserved", "The sizes of all segments.", (sums) => sums.reserved),
        ),
      ),
      h("p", { class: gap.difference === 0 ? "adds-up" : "adds-up bad" }, this.#check(gap)),
    );
  }

  #check(gap: Sums): string {
    const { streams } = this.#model.trace.summary;
    const stream = this.#model.streamAt(this.#model.instant);
    const seen = streams.length > 1 ? ` Seen from stream ${streams[stream]}.` : "";
    if (gap.difference !== 0) {
      return (
        `The sum and reserved differ by ${format.whole(gap.difference)} bytes: ` +
        "the recording has blocks outside its segments." +
        seen
      );
    }
    return "The sum is reserved, to the byte." + seen;
  }
}

interface Sums {
  live: number;
  folded: number;
  reserved: number;
  causes: Record<Cause, number>;
  difference: number;
}

/** The number itself beside its short form, where there is room. */
function exact(bytes: number): HTMLElement {
  return h("span", { class: "exact" }, format.whole(bytes));
}
