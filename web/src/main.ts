// The page of `lowtide report`. It reads the data in the file and shows one instant of it in all views.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { type Container, unpack } from "./data/container.ts";
import type { Summary } from "./data/summary.ts";
import { fill, h, installCopying, Tooltip } from "./dom.ts";
import { initialState, Model } from "./model.ts";
import { shownOrder } from "./names.ts";
import { Schedule } from "./schedule.ts";
import { fromFragment, Store, toFragment } from "./state.ts";
import { themeButton } from "./theme.ts";
import { AddressView } from "./views/address.ts";
import { EventsView } from "./views/events.ts";
import { GapView } from "./views/gap.ts";
import { GrowthView } from "./views/growth.ts";
import { Icicle } from "./views/icicle.ts";
import { InstantBar } from "./views/instant.ts";
import { Overview } from "./views/overview.ts";
import { Strategies } from "./views/strategies.ts";
import { Tables } from "./views/tables.ts";
import { Timeline } from "./views/timeline.ts";
import { Traces } from "./views/traces.ts";

const place = document.getElementById("page") ?? document.body;

/** Shows the report, or an error in one line. */
async function start(): Promise<void> {
  try {
    const summary = JSON.parse(textOf("lowtide-summary")) as Summary;
    const { container, rest } = await unpack(textOf("lowtide-data"));
    const schedule = show(modelOf(summary, container));
    if (!container.isWhole) {
      schedule.drawEarly();
      await painted();
      await rest();
    }
    schedule.allowAll();
  } catch (error) {
    const line = error instanceof Error ? error.message : String(error);
    fill(place, h("p", { class: "failed", role: "alert" }, `This report cannot be shown: ${line}`));
  }
}

function textOf(id: string): string {
  const element = document.getElementById(id);
  const text = element?.textContent ?? "";
  // The texts are large and not needed again.
  element?.remove();
  if (text === "") throw new Error("the file carries no data; `lowtide report` writes files that do");
  return text;
}

/** Waits until the page has been painted. */
function painted(): Promise<void> {
  // A hidden page has no frames.
  return new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 100);
  });
}

function modelOf(summary: Summary, container: Container): Model {
  const initial = initialState(summary.traces);
  const ends = summary.traces.map(({ events }) => events);
  const store = new Store(fromFragment(location.hash, initial, ends));
  let written = location.hash;
  let timer = 0;
  store.listen(() => {
    clearTimeout(timer);
    // Browsers limit how often a page may change its address.
    timer = window.setTimeout(() => {
      written = `#${toFragment(store.state, initial)}`;
      history.replaceState(null, "", written);
    }, 200);
  });
  window.addEventListener("hashchange", () => {
    if (location.hash !== written) store.set(fromFragment(location.hash, initial, ends));
  });
  return new Model(summary, container, store);
}

/** Adds the views to the page and returns their schedule. */
function show(model: Model): Schedule {
  const spoken = h("p", { class: "spoken", role: "status" });
  const tooltip = new Tooltip();
  const bar = new InstantBar(model);
  const views = [
    bar,
    new Overview(model, bar),
    new Timeline(model, bar, tooltip),
    new Icicle(model, tooltip),
    new Traces(model),
    new GrowthView(model),
    new Strategies(model),
    new GapView(model),
    new AddressView(model, tooltip),
    new Tables(model),
    new EventsView(model, bar),
  ];
  const [, ...below] = views;
  const names = model.summary.traces.map((_, i) => model.nameOf(i));
  document.title = `${names.join(", ")} · lowtide report`;
  fill(
    place,
    h("button", { type: "button", class: "skip", click: skip }, "Skip to the chart"),
    h(
      "header",
      { class: "top" },
      h("div", { class: "brand" }, h("b", {}, "lowtide"), " report"),
      ...traceChoice(model),
      themeButton(),
    ),
    bar.element,
    h("main", {}, ...below.map(({ element }) => element)),
    footer(model),
    spoken,
  );
  installCopying(place, spoken);
  const schedule = new Schedule(views, model.store);
  schedule.all();
  return schedule;
}

/** Moves the focus to the chart. A link would replace the address's fragment, which holds the state. */
function skip(): void {
  place.querySelector<HTMLElement>(".plot")?.focus();
}

function traceChoice(model: Model): HTMLElement[] {
  const { traces } = model.summary;
  if (traces.length < 2) return [];
  const select = h("select", {
    id: "trace",
    change: () => model.chooseTrace(Number(select.value)),
  });
  const order = shownOrder(traces.map((_, i) => model.nameOf(i)));
  const drawOptions = () =>
    fill(
      select,
      ...order.map((i) => {
        const option = h("option", { value: i }, model.nameOf(i));
        option.selected = i === model.state.trace;
        return option;
      }),
    );
  drawOptions();
  model.store.listen((changed) => {
    if (changed.has("trace")) drawOptions();
  });
  return [h("label", { class: "trace-choice" }, "Trace ", select)];
}

function footer(model: Model): HTMLElement {
  return h(
    "footer",
    {},
    h(
      "p",
      {},
      h("b", {}, "Live"),
      ": requests of allocated blocks, each rounded up to 512 bytes. ",
      h("b", {}, "Reserved"),
      ": what the allocator holds from the device. ",
      h("b", {}, "Instant"),
      " k: what there is after k events. Every number is copied, to the byte, by a click.",
    ),
    h("p", {}, `Written by lowtide ${model.summary.version}. The chart is drawn by uPlot (MIT licence).`),
  );
}

void start();
