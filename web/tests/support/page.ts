// The page as `lowtide report` writes it: the checked-in template with a report's data in it.

import { readFileSync } from "node:fs";
import type { Summary } from "../../src/data/summary.ts";

/** Returns the page with this summary, and these columns packed. */
export function fillPage(template: string, summary: Summary, packed: string): string {
  const json = JSON.stringify(summary).replaceAll("<", "\\u003c");
  const put = (page: string, id: string, text: string) => {
    const parts = page.split(new RegExp(`(?<=<script type="[a-z/-]+" id="${id}">)(?=</script>)`));
    if (parts.length !== 2) throw new Error(`the template has ${parts.length - 1} places for ${id}`);
    return parts.join(text);
  };
  return put(put(template, "lowtide-summary", json), "lowtide-data", packed);
}

/** The template; the tests run in `web`. */
export function template(): string {
  return readFileSync("../crates/history/src/page/page.html", "utf8");
}
