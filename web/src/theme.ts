// The light and dark themes, and the colours of canvases, which the style sheet defines.
//
// A script in the page's head sets `data-theme` to the system's theme before anything is drawn.

import { h } from "./dom.ts";

const root = document.documentElement;
const known = new Map<string, string>();
const listeners: (() => void)[] = [];

/** The number of colours for categories: `--c0` and on for lines, `--box-0` under text. */
export const CATEGORY_COLORS = 7;

/** Returns a colour of the style sheet by its name, for instance `--ink`. */
export function color(name: string): string {
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(root).getPropertyValue(name).trim();
    known.set(name, value);
  }
  return value;
}

export function onThemeChange(listener: () => void): void {
  listeners.push(listener);
}

/** Returns the button that switches the theme. Until it is clicked, the page follows the system's theme. */
export function themeButton(): HTMLElement {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = h("button", { type: "button", class: "theme" });
  let isChosen = false;
  const show = (theme: string) => {
    root.dataset.theme = theme;
    const other = theme === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to ${other} colours`);
    known.clear();
    for (const listener of listeners) listener();
  };
  button.addEventListener("click", () => {
    isChosen = true;
    show(root.dataset.theme === "dark" ? "light" : "dark");
  });
  system.addEventListener("change", () => {
    if (!isChosen) show(system.matches ? "dark" : "light");
  });
  show(root.dataset.theme ?? "light");
  return button;
}
