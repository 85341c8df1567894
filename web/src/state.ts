// The choices of the user. The address's fragment holds all of them, so that a link or a reload shows the same picture.

import { GROUPING_NAMES, type GroupingName } from "./data/groupings.ts";

export const AXES = ["events", "time"] as const;
export const BANDS = ["none", ...GROUPING_NAMES] as const;
export const COLORINGS = [...GROUPING_NAMES, "age"] as const;
export const STACK_VIEWS = ["instant", "peak", "range", "difference", "traces"] as const;
export const FRAMES = ["own", "all"] as const;
export const TABLES = ["holders", "sizes", "lifetimes", "blocks", "segments"] as const;

export type AxisName = (typeof AXES)[number];
/** What live bytes are divided by into bands. */
export type BandsBy = "none" | GroupingName;
export type Coloring = GroupingName | "age";
export type StackView = (typeof STACK_VIEWS)[number];
export type Frames = (typeof FRAMES)[number];
export type TableName = (typeof TABLES)[number];

export interface State {
  /** The trace that is shown. */
  trace: number;
  /** The trace that it is compared with. */
  other: number;
  /** The chosen instant of each trace. */
  instants: number[];
  /** The second instant of each trace, if one is chosen. */
  seconds: (number | null)[];
  /** The range of instants in the chart; `null` for the whole trace. */
  view: [number, number] | null;
  /** What the chart's horizontal axis counts. */
  axis: AxisName;
  /** The names of the curves that are drawn. */
  curves: string[];
  /** What the live bytes in the chart are divided by. */
  bands: BandsBy;
  coloring: Coloring;
  stackView: StackView;
  /** Whether the graph of stacks has all frames, or those of libraries are hidden. */
  frames: Frames;
  table: TableName;
  filter: string;
}

export type Key = keyof State;

/** Returns the state as a fragment, without values that are the initial ones. */
export function toFragment(state: State, initial: State): string {
  const fields = new URLSearchParams();
  const put = (name: string, value: string, usual: string) => {
    if (value !== usual) fields.set(name, value);
  };
  const perTrace = (values: (number | null)[], usual: (number | null)[]) =>
    values.flatMap((value, i) => (value === usual[i] || value === null ? [] : [`${i}:${value}`])).join(",");
  put("trace", String(state.trace), String(initial.trace));
  put("other", String(state.other), String(initial.other));
  put("at", perTrace(state.instants, initial.instants), "");
  put("to", perTrace(state.seconds, initial.seconds), "");
  put("view", state.view?.join("-") ?? "", "");
  put("axis", state.axis, initial.axis);
  put("curves", state.curves.join(","), initial.curves.join(","));
  put("bands", state.bands, initial.bands);
  put("color", state.coloring, initial.coloring);
  put("stacks", state.stackView, initial.stackView);
  put("frames", state.frames, initial.frames);
  put("table", state.table, initial.table);
  put("filter", state.filter, "");
  return fields.toString();
}

/**
 * Returns the state that a fragment describes. Invalid values are replaced by the initial ones, except that unknown
 * curves are kept. Instants out of range are clamped.
 */
export function fromFragment(fragment: string, initial: State, ends: number[]): State {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const oneOf = <T extends string>(name: string, values: readonly T[], usual: T): T =>
    values.find((value) => value === fields.get(name)) ?? usual;
  const trace = (name: string, usual: number) => {
    const index = Number.parseInt(fields.get(name) ?? "", 10);
    return index in ends ? index : usual;
  };
  const perTrace = <T extends number | null>(name: string, usual: T[]): (T | number)[] => {
    const values: (T | number)[] = [...usual];
    for (const item of (fields.get(name) ?? "").split(",")) {
      const [index, instant] = item.split(":").map(Number);
      if (index in ends && Number.isInteger(instant)) values[index] = within(instant, ends[index]);
    }
    return values;
  };
  const chosen = trace("trace", initial.trace);
  const curves = fields.get("curves");
  return {
    trace: chosen,
    other: trace("other", initial.other),
    instants: perTrace("at", initial.instants),
    seconds: perTrace("to", initial.seconds),
    view: viewOf(fields.get("view"), ends[chosen]),
    axis: oneOf("axis", AXES, initial.axis),
    curves: curves === null ? initial.curves : curves.split(",").filter(Boolean),
    bands: oneOf("bands", BANDS, initial.bands),
    coloring: oneOf("color", COLORINGS, initial.coloring),
    stackView: oneOf("stacks", STACK_VIEWS, initial.stackView),
    frames: oneOf("frames", FRAMES, initial.frames),
    table: oneOf("table", TABLES, initial.table),
    filter: fields.get("filter") ?? "",
  };
}

function viewOf(text: string | null, end: number): [number, number] | null {
  const [from, to] = (text ?? "").split("-").map(Number);
  if (!(from < to)) return null;
  return [within(from, end), within(to, end)];
}

/** Returns the instant of a trace that is nearest to a number. */
export function within(instant: number, end: number): number {
  return Math.max(0, Math.min(end, Math.round(instant)));
}

/** The current state. It notifies its listeners of changes. */
export class Store {
  #state: State;
  readonly #listeners: ((changed: ReadonlySet<Key>) => void)[] = [];

  constructor(state: State) {
    this.#state = state;
  }

  get state(): Readonly<State> {
    return this.#state;
  }

  set(changes: Partial<State>): void {
    const changed = new Set<Key>();
    for (const key of Object.keys(changes) as Key[]) {
      if (JSON.stringify(changes[key]) !== JSON.stringify(this.#state[key])) changed.add(key);
    }
    if (changed.size === 0) return;
    this.#state = { ...this.#state, ...changes };
    for (const listener of this.#listeners) listener(changed);
  }

  listen(listener: (changed: ReadonlySet<Key>) => void): void {
    this.#listeners.push(listener);
  }
}
