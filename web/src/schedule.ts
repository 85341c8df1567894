// The drawing of views. Visible views are drawn in the next frames, the others when nothing has changed for a moment.
// So dragging through instants only costs the visible views.

import type { Key, Store } from "./state.ts";

export interface View {
  element: HTMLElement;
  /** The parts of the state that it shows. */
  shows: readonly Key[];
  /** Whether it can be drawn before the blocks are read. */
  readonly isEarly?: boolean;
  draw(): void;
  /** Draws the slow parts when instants stop changing. Until then, they name the earlier instant that they show. */
  drawRest?(): void;
}

/** How long nothing must change before views out of sight are drawn, and how long each of them then waits at most. */
const IDLE_MS = 100;
/** The time for drawing in one frame. The remaining views wait for the next frame. */
const FRAME_MS = 16;

export class Schedule {
  readonly #due = new Set<View>();
  /** The views whose `drawRest` has not been called yet. */
  readonly #unfinished = new Set<View>();
  readonly #visible = new Set<Element>();
  readonly #views: View[];
  #isWhole = false;
  #isFrameAsked = false;
  #isIdleAsked = false;
  /** The time of the last change. */
  #changedAt = 0;

  constructor(views: View[], store: Store) {
    this.#views = views;
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.#visible.add(target);
        else this.#visible.delete(target);
      }
      this.#ask();
    });
    for (const view of views) observer.observe(view.element);
    store.listen((changed) => this.#mark(views.filter(({ shows }) => shows.some((key) => changed.has(key)))));
    window.addEventListener("resize", () => this.all());
  }

  /** Marks all views to be drawn again. */
  all(): void {
    this.#mark(this.#views);
  }

  /** Draws the views that need no blocks at once, for the first picture. */
  drawEarly(): void {
    for (const view of this.#views) if (view.isEarly) this.#draw(view);
  }

  /** Allows all views to be drawn, because the blocks have been read. */
  allowAll(): void {
    this.#isWhole = true;
    this.#ask();
  }

  #canDraw(view: View): boolean {
    return this.#isWhole || view.isEarly === true;
  }

  #mark(views: View[]): void {
    for (const view of views) {
      this.#due.add(view);
      view.element.setAttribute("aria-busy", "true");
    }
    this.#changedAt = performance.now();
    this.#ask();
  }

  #ask(): void {
    if (this.#isFrameAsked || this.#due.size === 0) return;
    this.#isFrameAsked = true;
    requestAnimationFrame(() => {
      this.#isFrameAsked = false;
      const start = performance.now();
      for (const view of this.#due) {
        if (!this.#visible.has(view.element) || !this.#canDraw(view)) continue;
        if (performance.now() - start > FRAME_MS) {
          // A view that was drawn goes to the end of the queue when it changes again, so each has its turn.
          this.#ask();
          break;
        }
        this.#draw(view);
      }
      this.#drawWhenIdle();
    });
  }

  #drawWhenIdle(): void {
    const isWanted = this.#unfinished.size > 0 || this.#nextDue() !== undefined;
    if (this.#isIdleAsked || !isWanted) return;
    this.#isIdleAsked = true;
    const draw = () => {
      this.#isIdleAsked = false;
      if (this.#isStill()) this.#drawNext();
      this.#drawWhenIdle();
    };
    // A busy browser may be idle only after a long time. Some browsers do not have `requestIdleCallback`.
    if (!this.#isStill() || window.requestIdleCallback === undefined) setTimeout(draw, IDLE_MS);
    else window.requestIdleCallback(draw, { timeout: IDLE_MS });
  }

  /** Returns whether nothing has changed for a moment. */
  #isStill(): boolean {
    return performance.now() - this.#changedAt >= IDLE_MS;
  }

  #nextDue(): View | undefined {
    return [...this.#due].find((view) => this.#canDraw(view));
  }

  #drawNext(): void {
    const due = this.#nextDue();
    const [unfinished] = this.#unfinished;
    if (due !== undefined) this.#draw(due);
    else if (unfinished !== undefined) {
      unfinished.drawRest?.();
      this.#finish(unfinished);
    }
  }

  #draw(view: View): void {
    this.#due.delete(view);
    view.draw();
    if (view.drawRest === undefined) this.#finish(view);
    else this.#unfinished.add(view);
  }

  #finish(view: View): void {
    this.#unfinished.delete(view);
    view.element.removeAttribute("aria-busy");
  }
}
