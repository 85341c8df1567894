// A bar in a table: live bytes within reserved bytes, both as a share of the most reserved bytes.

import { h } from "../dom.ts";

export function meter(live: number, reserved: number): HTMLElement {
  return h(
    "div",
    { class: "meter", "aria-hidden": "true" },
    h("i", { style: `width: ${reserved * 100}%; background: var(--reserved-soft)` }),
    h("i", { style: `width: ${live * 100}%; background: var(--live)` }),
  );
}
