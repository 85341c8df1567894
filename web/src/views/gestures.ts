// Pointer, wheel and keys on the chart, and the actions that they cause.

export interface Gestures {
  readonly view: [number, number];
  /** The area of the curves, inside the axes. */
  readonly over: HTMLElement | null;
  /** Returns the instant at a distance from the left edge of `over`. */
  instantAt(x: number): number;
  choose(instant: number): void;
  /** Chooses the instant that is drawn at a distance from the left edge of `over`. */
  chooseAt(x: number): void;
  chooseRange(from: number, to: number): void;
  chooseSecond(): void;
  move(by: number): void;
  show(from: number, to: number): void;
  zoom(factor: number, around?: number): void;
  pan(by: number): void;
  /** Shows the values at a distance from the left edge of `over`, beside the pointer. */
  hover(x: number, pointerX: number, pointerY: number): void;
  leave(): void;
  /** Shows the range that a drag has covered so far. */
  select(left: number, width: number): void;
}

/** A pointer that moved by fewer pixels than this has clicked. */
const CLICK_PIXELS = 4;

export function installGestures(place: HTMLElement, chart: Gestures): void {
  installPointer(place, chart);
  installWheel(place, chart);
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(chart, event.key, event.shiftKey)) event.preventDefault();
  });
}

function installPointer(place: HTMLElement, chart: Gestures): void {
  let start: number | null = null;
  const x = (event: PointerEvent) => {
    const box = chart.over?.getBoundingClientRect();
    return box === undefined ? 0 : Math.max(0, Math.min(box.width, event.clientX - box.left));
  };
  place.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart.over?.contains(event.target as Node)) return;
    start = x(event);
    place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    if (start === null) {
      if (chart.over?.contains(event.target as Node)) chart.hover(x(event), event.clientX, event.clientY);
      else chart.leave();
      return;
    }
    chart.leave();
    const now = x(event);
    chart.select(Math.min(start, now), Math.abs(now - start));
  });
  place.addEventListener("pointerleave", () => chart.leave());
  const finish = (event: PointerEvent, isCancelled: boolean) => {
    if (start === null) return;
    const [from, to] = [Math.min(start, x(event)), Math.max(start, x(event))];
    start = null;
    chart.select(0, 0);
    if (isCancelled) return;
    if (to - from < CLICK_PIXELS) chart.chooseAt(from);
    else if (event.shiftKey) chart.chooseRange(chart.instantAt(from), chart.instantAt(to));
    else chart.show(chart.instantAt(from), chart.instantAt(to));
  };
  place.addEventListener("pointerup", (event) => finish(event, false));
  place.addEventListener("pointercancel", (event) => finish(event, true));
}

/**
 * Makes the wheel zoom and pan the chart if the chart has the focus or Ctrl is pressed. Otherwise the wheel scrolls the
 * page, so that scrolling does not stop at the chart.
 */
function installWheel(place: HTMLElement, chart: Gestures): void {
  place.addEventListener(
    "wheel",
    (event) => {
      const box = chart.over?.getBoundingClientRect();
      if (box === undefined || !(event.ctrlKey || place.contains(document.activeElement))) return;
      event.preventDefault();
      const [from, to] = chart.view;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        chart.pan(((event.deltaX || event.deltaY) / box.width) * (to - from));
      } else {
        chart.zoom(2 ** (event.deltaY / 240), chart.instantAt(event.clientX - box.left));
      }
    },
    { passive: false },
  );
}

/** Performs the action of a key. Returns whether the key has one. */
function press(chart: Gestures, key: string, isFine: boolean): boolean {
  const [from, to] = chart.view;
  const step = isFine ? 1 : Math.max(1, Math.round((to - from) / 200));
  const actions: Record<string, () => void> = {
    ArrowLeft: () => chart.move(-step),
    ArrowRight: () => chart.move(step),
    ArrowUp: () => chart.zoom(0.5),
    ArrowDown: () => chart.zoom(2),
    "+": () => chart.zoom(0.5),
    "=": () => chart.zoom(0.5),
    "-": () => chart.zoom(2),
    "0": () => chart.show(Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY),
    PageUp: () => chart.pan((from - to) / 2),
    PageDown: () => chart.pan((to - from) / 2),
    Home: () => chart.choose(0),
    End: () => chart.choose(Number.MAX_SAFE_INTEGER),
    s: () => chart.chooseSecond(),
    S: () => chart.chooseSecond(),
  };
  const action = actions[key];
  action?.();
  return action !== undefined;
}
