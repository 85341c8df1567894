// The fragmentation at the chosen instant: the bytes of each cause, and a check that they add up to reserved minus live
// bytes.

import { CAUSES, type Cause } from "../data/summary.ts";
import {
  bytesFigure,
  type Child,
  changeFigure,
  fill,
  h,
  percentFigure,
  section,
  shareFigure,
} from "../dom.ts";
import * as format from "../format.ts";
import type { Model } from "../model.ts";
import { shown } from "../names.ts";
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
    meaning: "Free memory of pools of their own: those of regions, and such as those of CUDA graphs.",
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
  readonly #gap = bytesFigure();
  readonly #reserved = bytesFigure();
  readonly #share = shareFigure();
  readonly #check = h("p");
  /** The elements are created once for a trace and then show one instant after another. */
  #parts: Part[] = [];
  #heads: HTMLElement[] = [];
  #rows: Row[] = [];
  #made = "";

  constructor(model: Model) {
    this.#model = model;
    this.element = section("gap", "Reserved but not live", [], this.#verdict, this.#bar, this.#table);
  }

  draw(): void {
    const { instant, second, state } = this.#model;
    const gap = this.#model.gapAt(instant);
    const made = `${state.trace} ${second !== null}`;
    if (made !== this.#made) {
      this.#made = made;
      this.#makeBar();
      this.#makeTable(second !== null);
    }
    this.#showVerdict(gap);
    this.#showBar(gap);
    this.#heads[2].textContent = `Bytes at ${format.whole(instant)}`;
    if (second !== null) this.#heads[4].textContent = `Change at ${format.whole(second)}`;
    const before = second === null ? null : this.#model.gapAt(second);
    for (const row of this.#rows) row.show(gap, before);
    this.#check.className = gap.difference === 0 ? "adds-up" : "adds-up bad";
    this.#check.textContent = this.#checkText(gap);
  }

  #showVerdict(gap: Sums): void {
    const size = gap.reserved - gap.live;
    const largest = CAUSES.reduce((most, cause) => (gap.causes[cause] > gap.causes[most] ? cause : most));
    this.#gap.show(size);
    this.#reserved.show(gap.reserved);
    this.#share.show(gap.causes[largest] / size);
    fill(
      this.#verdict,
      `At event ${format.whole(this.#model.instant)}, `,
      this.#gap.element,
      " of the ",
      this.#reserved.element,
      " reserved are not live",
      ...(size > 0
        ? ["; ", this.#share.element, ` of that is ${CAUSE_TEXTS[largest].title.toLowerCase()}.`]
        : ["."]),
    );
  }

  #makeBar(): void {
    const part = (title: string, color: string, value: Part["value"], opacity = 1): Part => ({
      element: h("i", { style: `background: var(${color}); opacity: ${opacity}` }),
      title,
      value,
    });
    this.#parts = [
      part("Live", "--live", ({ live, folded }) => live - folded),
      part("Live, in aggregated blocks", "--live", ({ folded }) => folded, 0.6),
      ...CAUSES.map((cause, i) =>
        part(CAUSE_TEXTS[cause].title, `--cause-${i}`, ({ causes }) => causes[cause]),
      ),
    ];
  }

  #showBar(gap: Sums): void {
    const shown = this.#parts.filter(({ element, title, value }) => {
      const bytes = value(gap);
      element.style.flexGrow = String(bytes);
      element.title = `${title}: ${format.bytes(bytes)}`;
      return bytes > 0;
    });
    fill(this.#bar, ...shown.map(({ element }) => element));
    const parts = CAUSES.map((cause) => `${CAUSE_TEXTS[cause].title} ${format.bytes(gap.causes[cause])}`);
    this.#bar.setAttribute(
      "aria-label",
      `Of ${format.bytes(gap.reserved)} reserved: live ${format.bytes(gap.live)}, ${parts.join(", ")}`,
    );
  }

  #makeTable(hasSecond: boolean): void {
    const { aggregated } = this.#model.trace.summary;
    const row = (kind: string, key: Child, title: string, meaning: string, value: (sums: Sums) => number) =>
      rowOf({ kind, key, title, meaning, value, hasSecond });
    const key = (variable: string) => h("i", { class: "key", style: `background: var(${variable})` });
    const folded =
      aggregated === null
        ? []
        : [
            row(
              "part",
              null,
              "of it aggregated",
              `${format.counted(aggregated.blocks, "block")} that are shown together: those of them that are live.`,
              (sums) => sums.folded,
            ),
          ];
    const causes = CAUSES.flatMap((cause, i) => {
      const { title, meaning } = CAUSE_TEXTS[cause];
      const whole = row("cause", key(`--cause-${i}`), title, meaning, (sums) => sums.causes[cause]);
      return [whole, ...(cause === "private_pools" ? this.#regionRows(row) : [])];
    });
    const total = (sums: Sums) => CAUSES.reduce((sum, cause) => sum + sums.causes[cause], sums.live);
    const live = "Requests of allocated blocks, each rounded up to 512 bytes.";
    this.#rows = [
      row("live", key("--live"), "Live", live, (sums) => sums.live),
      ...folded,
      ...causes,
      row("sum", null, "Sum", "Live and all causes.", total),
      row("sum", key("--reserved"), "Reserved", "The sizes of all segments.", (sums) => sums.reserved),
    ];
    const heads = ["Part", "What it is", "Bytes", "Of the gap", ...(hasSecond ? ["Change"] : [])];
    this.#heads = heads.map((text) => h("th", { scope: "col" }, text));
    const body = h("tbody", {}, ...this.#rows.map(({ element }) => element));
    const table = h("table", { class: "sums" }, h("thead", {}, h("tr", {}, ...this.#heads)), body);
    fill(this.#table, table, this.#check);
  }

  /** Returns a row for each region: its share of the free memory in private pools. */
  #regionRows(
    row: (kind: string, key: null, title: string, meaning: string, value: (sums: Sums) => number) => Row,
  ): Row[] {
    const { pool_regions, aggregated } = this.#model.trace.summary;
    // The pools of aggregated blocks are not known.
    if (aggregated !== null) return [];
    const regions = [...new Set(pool_regions)].filter((tag) => tag !== "");
    return regions.map((tag) => {
      const free = (sums: Sums) => {
        const pools = [...sums.free_in_pools].filter(([pool]) => pool_regions[pool] === tag);
        return pools.reduce((sum, [, bytes]) => sum + bytes, 0);
      };
      return row("part", null, `of it region ${shown(tag)}`, "Free memory of the region’s pools.", free);
    });
  }

  #checkText(gap: Sums): string {
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
  free_in_pools: Map<number, number>;
  difference: number;
}

/** A part of the bar. */
interface Part {
  element: HTMLElement;
  title: string;
  value: (sums: Sums) => number;
}

/** A row of the table. */
interface Row {
  element: HTMLElement;
  show(gap: Sums, before: Sums | null): void;
}

interface RowTexts {
  kind: string;
  key: Child;
  title: string;
  meaning: string;
  value: (sums: Sums) => number;
  hasSecond: boolean;
}

function rowOf({ kind, key, title, meaning, value, hasSecond }: RowTexts): Row {
  const bytes = bytesFigure();
  // The exact number beside its short form, if there is room.
  const exact = h("span", { class: "exact" });
  const share = percentFigure();
  const shareCell = h("td");
  const change = changeFigure();
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, key, title),
    h("td", { class: "text" }, meaning),
    h("td", { "data-cell": title }, bytes.element, exact),
    shareCell,
    hasSecond ? h("td", {}, change.element) : null,
  );
  return {
    element,
    show(gap, before) {
      const shown = value(gap);
      const size = gap.reserved - gap.live;
      const hasShare = kind === "cause" && size > 0;
      element.className = shown === 0 ? `${kind} none` : kind;
      bytes.show(shown);
      exact.textContent = format.whole(shown);
      if (hasShare) share.show(shown / size);
      if (hasShare !== (shareCell.firstChild !== null)) fill(shareCell, hasShare ? share.element : null);
      if (before !== null) change.show(value(before) - shown);
    },
  };
}
