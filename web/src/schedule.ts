// When views are drawn: those in sight with the next frames, the others when nothing has changed for a moment. So
// dragging through instants costs what is seen of it, and everything is right soon after.

import type { Key, Store } from "./state.ts";

export interface View {
  element: HTMLElement;
  /** What of the state it shows. */
  shows: readonly Key[];
  /** Whether it can be drawn before the blocks are read. */
  readonly isEarly?: boolean;
  draw(): void;
  /** Draws what takes long and is not looked at while instants pass: it says itself which instant it is of. */
  drawRest?(): void;
}

/** How long nothing changes before views out of sight are drawn, and how long each then waits at most. */
const IDLE_MS = 100;
/** How long drawing goes on in one frame; what is left then waits for the next. */
const FRAME_MS = 16;

export class Schedule {
  readonly #due = new Set<View>();
  /** Views whose rest has still to be drawn. */
  readonly #unfinished = new Set<View>();
  readonly #visible = new Set<Element>();
  readonly #views: View[];
  #isWhole = false;
  #isFrameAsked = false;
  #isIdleAsked = false;
  /** When something changed last. */
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

  /** Has everything drawn again. */
  all(): void {
    this.#mark(this.#views);
  }

  /** Draws at once what needs no blocks, for the first picture. */
  drawEarly(): void {
    for (const view of this.#views) if (view.isEarly) this.#draw(view);
  }

  /** Has every other view drawn, too: the blocks are there. */
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
          // Whoever was drawn goes to the end of the queue, so each has its turn.
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
    // On a busy machine a browser may find no time for long, and some browsers have no such call.
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
