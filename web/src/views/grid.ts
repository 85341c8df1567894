// A table that is sorted by its headings. The arrow keys move through its cells. It says how many rows it does not
// show.

import { firstRows } from "../data/rows.ts";
import { type Child, fill, h } from "../dom.ts";
import * as format from "../format.ts";

export interface Column {
  title: string;
  /** Returns the number that rows are sorted by. */
  key: (row: number) => number;
  cell: (row: number) => Child;
  /** Returns a value that identifies the contents of a cell. The default is `key`. */
  content?: (row: number) => number | string;
  isText?: boolean;
}

export interface Sorting {
  column: number;
  isDescending: boolean;
  /** Returns the group of a row. Groups stay in ascending order however rows are sorted, so all rows have to be shown. */
  groupOf?: (row: number) => number;
}

/** A drawn row, and the values that identify the contents of its cells. */
interface DrawnRow {
  element: HTMLTableRowElement;
  contents: (number | string)[];
}

const ROWS_FIRST = 25;
const ROWS_MORE = 200;

export class Grid {
  readonly element = h("div", { class: "grid" });
  readonly #caption: string;
  readonly #noun: string;
  readonly #columns: Column[];
  readonly #table: HTMLTableElement;
  readonly #body = h("tbody");
  readonly #more = h("p", { class: "more-rows", role: "status" });
  #sorting: Sorting;
  #limit: number;
  #rows: Uint32Array = new Uint32Array(0);
  readonly #identityOf: ((row: number) => number) | null;
  /** Returns whether a row is marked as chosen. */
  #isChosen: (row: number) => boolean = () => false;
  /** The rows that are drawn, by identity. */
  #drawn = new Map<number, DrawnRow>();
  /** The only cell that Tab reaches. */
  #stop: HTMLElement | undefined;

  /**
   * `identityOf` returns the same number for a row about the same thing, so that its unchanged cells are kept. Without
   * it, all rows are drawn again. `limit` is the number of rows shown at first.
   */
  constructor(
    caption: string,
    noun: string,
    columns: Column[],
    sorting: Sorting,
    identityOf: ((row: number) => number) | null = null,
    limit = ROWS_FIRST,
  ) {
    this.#limit = limit;
    this.#identityOf = identityOf;
    this.#caption = caption;
    this.#noun = noun;
    this.#columns = columns;
    this.#sorting = sorting;
    this.#table = h("table", {
      role: "grid",
      "aria-label": caption,
      keydown: (event: KeyboardEvent) => this.#press(event),
    });
    this.element.append(h("div", { class: "scroll" }, this.#table), this.#more);
    this.#drawHead();
  }

  /** Shows these rows, up to the limit. `isChosen` returns whether a row is marked as chosen. */
  show(rows: Uint32Array, isChosen: (row: number) => boolean = () => false): void {
    this.#rows = rows;
    this.#isChosen = isChosen;
    this.#draw();
  }

  #drawHead(): void {
    const cells = this.#columns.map(({ title, isText }, i) => {
      const isSorted = i === this.#sorting.column;
      const order = isSorted ? (this.#sorting.isDescending ? "descending" : "ascending") : "none";
      const sign = isSorted ? (this.#sorting.isDescending ? " ↓" : " ↑") : "";
      const button = h(
        "button",
        { type: "button", click: () => this.#sortBy(i) },
        title,
        h("span", { "aria-hidden": "true" }, sign),
      );
      return h("th", { scope: "col", "aria-sort": order, class: isText === true ? "text" : "" }, button);
    });
    fill(this.#table, h("thead", {}, h("tr", {}, ...cells)), this.#body);
  }

  #sortBy(column: number): void {
    const { column: before, isDescending } = this.#sorting;
    this.#sorting = {
      ...this.#sorting,
      column,
      isDescending: column === before ? !isDescending : this.#columns[column].isText !== true,
    };
    this.#drawHead();
    this.#draw();
    this.#table.querySelectorAll<HTMLElement>("th button")[column].focus();
  }

  #draw(): void {
    const { column, isDescending, groupOf } = this.#sorting;
    const shown = firstRows(this.#rows, this.#columns[column].key, isDescending, this.#limit);
    if (groupOf !== undefined) shown.sort((a, b) => groupOf(a) - groupOf(b));
    const [x, y] = this.#focused();
    const before = this.#body.rows[y] as HTMLTableRowElement | undefined;
    this.#drawRows(shown);
    // Tab reaches one cell of the table; the arrow keys continue from there. The focus stays on its row while that is
    // shown.
    const place = Math.max(0, y < 0 ? shown.findIndex(this.#isChosen) : y);
    const row = before?.isConnected === true ? before : this.#body.rows[place];
    const cell = row?.cells[Math.max(0, x)];
    if (cell !== this.#stop) this.#stopAt(cell);
    if (y >= 0) cell?.focus();
    this.#drawMore(this.#rows.length - shown.length);
  }

  /** Draws rows in their order. Rows that are already drawn are kept, and so are their unchanged cells. */
  #drawRows(rows: Uint32Array): void {
    const identities = Array.from(rows, (row) => this.#identityOf?.(row) ?? row);
    // Old rows are removed first, so that the other rows need not be moved.
    this.#removeAllBut(this.#identityOf === null ? [] : identities);
    let next = this.#body.firstElementChild;
    rows.forEach((row, i) => {
      const drawn = this.#drawn.get(identities[i]) ?? { element: h("tr"), contents: [] };
      this.#drawn.set(identities[i], drawn);
      this.#drawCells(drawn, row);
      if (this.#isChosen(row)) drawn.element.setAttribute("aria-current", "true");
      else drawn.element.removeAttribute("aria-current");
      if (drawn.element === next) next = next.nextElementSibling;
      else this.#body.insertBefore(drawn.element, next);
    });
  }

  #removeAllBut(identities: readonly number[]): void {
    const kept = new Set(identities);
    for (const [identity, { element }] of this.#drawn) {
      if (kept.has(identity)) continue;
      element.remove();
      this.#drawn.delete(identity);
    }
  }

  #drawCells({ element, contents }: DrawnRow, row: number): void {
    this.#columns.forEach(({ key, content = key, cell, isText }, i) => {
      const wanted = content(row);
      if (contents[i] === wanted) return;
      contents[i] = wanted;
      const place =
        element.cells[i] ?? element.appendChild(h("td", { tabindex: -1, class: isText ? "text" : "" }));
      fill(place, cell(row));
      for (const inside of place.querySelectorAll("[data-copy], button"))
        inside.setAttribute("tabindex", "-1");
    });
  }

  #stopAt(cell: HTMLElement | undefined): void {
    this.#stop?.setAttribute("tabindex", "-1");
    cell?.setAttribute("tabindex", "0");
    this.#stop = cell;
  }

  /** Returns the position of the cell that has the focus; -1 if none has. */
  #focused(): [number, number] {
    const cell = document.activeElement?.closest("td") ?? null;
    const row = cell?.parentElement;
    if (cell === null || !(row instanceof HTMLTableRowElement) || !this.#body.contains(row)) return [-1, -1];
    return [cell.cellIndex, row.sectionRowIndex];
  }

  #drawMore(rest: number): void {
    const total = format.counted(this.#rows.length, this.#noun);
    if (rest === 0) {
      fill(this.#more, this.#rows.length === 0 ? `${this.#caption}: none` : `${total}, all shown`);
      return;
    }
    const show = () => {
      this.#limit += ROWS_MORE;
      this.#draw();
    };
    fill(
      this.#more,
      `${format.whole(rest)} more of ${total}. `,
      h("button", { type: "button", click: show }, `Show ${format.whole(Math.min(rest, ROWS_MORE))} more`),
    );
  }

  /** Moves the focus from cell to cell with the arrow keys, Home and End. Enter clicks the button of a cell. */
  #press(event: KeyboardEvent): void {
    const cell = event.target instanceof HTMLElement ? event.target.closest("td") : null;
    const row = cell?.parentElement;
    if (cell === null || !(row instanceof HTMLTableRowElement) || event.target !== cell) return;
    const body = row.parentElement as HTMLTableSectionElement;
    const [x, y] = [cell.cellIndex, row.sectionRowIndex];
    const targets: Record<string, [number, number] | undefined> = {
      ArrowLeft: [x - 1, y],
      ArrowRight: [x + 1, y],
      ArrowUp: [x, y - 1],
      ArrowDown: [x, y + 1],
      Home: [0, y],
      End: [row.cells.length - 1, y],
    };
    const target = targets[event.key];
    if (event.key === "Enter") cell.querySelector<HTMLElement>(":scope > button")?.click();
    if (target === undefined) return;
    event.preventDefault();
    const next = body.rows[target[1]]?.cells[target[0]];
    if (next === undefined) return;
    this.#stopAt(next);
    next.focus();
  }
}
