// A bar of two parts in a table: live within reserved, each as a share of the longest.

import { h } from "../dom.ts";

export function meter(live: number, reserved: number): HTMLElement {
  return h(
    "div",
    { class: "meter", "aria-hidden": "true" },
    h("i", { style: `width: ${reserved * 100}%; background: var(--reserved-soft)` }),
    h("i", { style: `width: ${live * 100}%; background: var(--live)` }),
  );
}
