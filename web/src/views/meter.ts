// A bar in a table: live bytes within reserved bytes, both as a share of the scale. A longer bar is cut, and marked.

import { h } from "../dom.ts";

export function meter(live: number, reserved: number): HTMLElement {
  return h(
    "div",
    { class: reserved > 1 ? "meter cut" : "meter", "aria-hidden": "true" },
    h("i", { style: `width: ${reserved * 100}%; background: var(--reserved-soft)` }),
    h("i", { style: `width: ${live * 100}%; background: var(--live)` }),
  );
}
