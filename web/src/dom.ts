// Elements and other helpers of all views. Texts of a recording are added to the page as text nodes only.

import * as format from "./format.ts";

type Attributes = Record<string, string | number | boolean | ((event: never) => void) | null>;
export type Child = Node | string | null;

/** Returns a new element. An attribute whose value is a function becomes a listener of the event with its name. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Replaces the children of an element. */
export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren(...children.filter((child) => child !== null));
}

/** Returns an element that shows bytes in a readable unit. A click copies the exact number. */
export function bytesOf(value: number, text = format.bytes(value)): HTMLElement {
  return copyable(text, String(value), bytesTitle(value));
}

/** Returns an element that shows a change of bytes with its sign. A click copies the exact number. */
export function changeOf(value: number): HTMLElement {
  const element = bytesOf(value, format.change(value));
  element.classList.add(changeClass(value));
  return element;
}

function bytesTitle(value: number): string {
  return `${format.whole(value)} bytes`;
}

function changeClass(value: number): string {
  return value > 0 ? "grown" : value < 0 ? "shrunk" : "same";
}

export function countOf(value: number): HTMLElement {
  return copyable(format.whole(value), String(value));
}

/** Returns an element that shows a share in percent. A click copies all digits. */
export function percentOf(share: number): HTMLElement {
  return copyable(format.percent(share), String(share));
}

/** Returns an element that shows a share in words. Its tooltip has the share in percent. */
export function shareOf(share: number): HTMLElement {
  return copyable(format.share(share), String(share), format.percent(share));
}

/** Returns an element that shows a confidence in words. Its tooltip has the number. */
export function confidenceOf(confidence: number): HTMLElement {
  return copyable(
    format.confidence(confidence),
    String(confidence),
    `confidence ${confidence.toFixed(2)} of 1`,
  );
}

export function ratioOf(value: number): HTMLElement {
  return copyable(format.ratio(value), String(value));
}

/** An element that shows one number after another, so that an instant needs no new elements. */
export interface Figure {
  element: HTMLElement;
  show(value: number): void;
}

/** Returns a figure that shows bytes, like `bytesOf`. */
export function bytesFigure(): Figure {
  return figure((element, value) => write(element, format.bytes(value), String(value), bytesTitle(value)));
}

/** Returns a figure that shows a change of bytes, like `changeOf`. */
export function changeFigure(): Figure {
  return figure((element, value) => {
    write(element, format.change(value), String(value), bytesTitle(value));
    element.className = changeClass(value);
  });
}

/** Returns a figure that shows a share, like `percentOf`. */
export function percentFigure(): Figure {
  return figure((element, value) => write(element, format.percent(value), String(value)));
}

/** Returns a figure that shows a share in words, like `shareOf`. */
export function shareFigure(): Figure {
  return figure((element, value) =>
    write(element, format.share(value), String(value), format.percent(value)),
  );
}

function figure(show: (element: HTMLElement, value: number) => void): Figure {
  const element = copyable("", "");
  let shown: number | null = null;
  return {
    element,
    show(value) {
      if (value === shown) return;
      shown = value;
      show(element, value);
    },
  };
}

/** Returns a text that can have the focus. A click or Enter copies `copied`. */
export function copyable(text: string, copied: string, title?: string): HTMLElement {
  const element = h("data", { tabindex: 0, role: "button" });
  write(element, text, copied, title);
  return element;
}

function write(element: HTMLElement, text: string, copied: string, title?: string): void {
  element.textContent = text;
  element.setAttribute("value", copied);
  element.setAttribute("data-copy", copied);
  element.title = title === undefined ? "copy" : `${title} · click to copy`;
}

/** Makes a click or Enter copy the `data-copy` of an element. `spoken` announces it to screen readers. */
export function installCopying(root: HTMLElement, spoken: HTMLElement): void {
  const copy = async (target: EventTarget | null): Promise<boolean> => {
    const element = target instanceof Element ? target.closest<HTMLElement>("[data-copy]") : null;
    const text = element?.dataset.copy;
    if (element === null || text === undefined) return false;
    await putInClipboard(text);
    spoken.textContent = `Copied ${text}`;
    element.classList.add("copied");
    setTimeout(() => element.classList.remove("copied"), 900);
    return true;
  };
  root.addEventListener("click", (event) => {
    // A click that ends the selection of a text does not copy.
    if (document.getSelection()?.isCollapsed !== false) void copy(event.target);
  });
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.target instanceof Element)) return;
    const target = event.target.matches("[data-copy]")
      ? event.target
      : event.target.querySelector("td > [data-copy]");
    void copy(target);
  });
}

async function putInClipboard(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers may refuse the clipboard to a local file. `execCommand` works there.
    const area = h("textarea", { "aria-hidden": "true", style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Returns a row of buttons, one of which is chosen. */
export function choice<T extends string>(
  label: string,
  options: readonly (readonly [T, string])[],
  choose: (value: T) => void,
): { element: HTMLElement; show(chosen: T, available?: readonly T[]): void } {
  const buttons = options.map(([value, text]) =>
    h(
      "button",
      { type: "button", "aria-pressed": "false", "data-value": value, click: () => choose(value) },
      text,
    ),
  );
  return {
    element: h("div", { class: "choice", role: "group", "aria-label": label }, ...buttons),
    show(chosen, available) {
      options.forEach(([value], i) => {
        buttons[i].setAttribute("aria-pressed", String(value === chosen));
        buttons[i].hidden = available !== undefined && !available.includes(value);
      });
    },
  };
}

/** Returns a section of the page with its heading. */
export function section(id: string, title: string, tools: Child[], ...children: Child[]): HTMLElement {
  return h(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), ...tools),
    ...children,
  );
}

/**
 * The size of an element, measured only when it may have changed. Measuring right after drawing would make the browser
 * lay out the whole page. `redraw` is called if the width changes later, for instance because a scroll bar appears.
 */
export class Room {
  readonly #element: HTMLElement;
  #size: [number, number] | null = null;

  constructor(element: HTMLElement, redraw: () => void) {
    this.#element = element;
    new ResizeObserver(() => {
      const before = this.#size?.[0];
      // Drawing may change the height. Within this callback, the observer could not be notified of that.
      if (this.#measure()[0] !== before && before !== undefined) requestAnimationFrame(redraw);
    }).observe(element);
    // Views are drawn for the new size before the observer is notified.
    window.addEventListener("resize", () => {
      this.#size = null;
    });
  }

  /** The width without borders and scroll bar. */
  get width(): number {
    return (this.#size ?? this.#measure())[0];
  }

  get height(): number {
    return (this.#size ?? this.#measure())[1];
  }

  #measure(): [number, number] {
    this.#size = [this.#element.clientWidth, this.#element.clientHeight];
    return this.#size;
  }
}

const CANVAS_FONT = "12px system-ui, sans-serif";

/** Resizes a canvas, for the pixel ratio of the screen, and clears it. Returns its context. */
export function fitCanvas(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("this browser draws no canvas");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  // Setting the font, even to the same value, makes the browser compute the page's styles first.
  if (context.font !== CANVAS_FONT) context.font = CANVAS_FONT;
  context.clearRect(0, 0, width, height);
  return context;
}

/** A box with details beside the pointer. */
export class Tooltip {
  readonly #element = h("div", { class: "tooltip", "aria-hidden": "true", hidden: true });

  constructor() {
    document.body.append(this.#element);
  }

  show(x: number, y: number, ...children: Child[]): void {
    fill(this.#element, ...children);
    this.#element.hidden = false;
    const { width, height } = this.#element.getBoundingClientRect();
    const left = x + 16 + width > window.innerWidth - 8 ? x - 16 - width : x + 16;
    const top = Math.max(8, Math.min(y + 12, window.innerHeight - height - 8));
    this.#element.style.transform = `translate(${Math.max(8, left)}px, ${top}px)`;
  }

  hide(): void {
    this.#element.hidden = true;
  }
}
