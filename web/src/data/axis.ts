// The horizontal axis of the chart: by event or, if times are recorded, by time.

import type { Trace } from "./trace.ts";

export interface Axis {
  /** Returns the value at an instant. It is greater for a later instant. */
  valueAt(instant: number): number;
  /** Returns the instant at a value, with a fraction. */
  instantAt(value: number): number;
}

export const BY_EVENT: Axis = { valueAt: (instant) => instant, instantAt: (value) => value };

/** What each event adds to the time in microseconds, so that events of one time have values of their own. */
const EVENT_US = 1e-4;
/** How exact an instant is, in events. */
const PRECISION = 1e-4;

/** Returns the axis by the times of a trace, in microseconds. Logarithmic time in the number of events. */
export function byTime(trace: Trace): Axis {
  const valueAt = (instant: number) => (trace.timeAt(instant) ?? 0) + instant * EVENT_US;
  const instantAt = (value: number) => {
    let [low, high] = [0, trace.end];
    while (high - low > PRECISION) {
      const middle = (low + high) / 2;
      if (valueAt(middle) <= value) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  };
  return { valueAt, instantAt };
}
