import assert from "node:assert/strict";
import { test } from "node:test";
import { initialState, Model } from "../../src/model.ts";
import { Store } from "../../src/state.ts";
import { container, opened } from "../support/encode.ts";
import { dataOf, type Recording } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const made = simulate({ seed: 5, steps: 8, requestsPerStep: 100 });

function modelOf(recording: Recording): Model {
  const { summary, columns } = dataOf([recording]);
  return new Model(summary, opened(container(columns)), new Store(initialState(summary.traces)));
}

test("of all blocks the filter leaves those that are in a state at the instant", () => {
  const model = modelOf(made);
  const { blocks } = model.trace;
  const all = Uint32Array.from(blocks.start.keys());
  const expected = (instant: number, isIn: (block: number) => boolean) =>
    [...all].filter((block) => blocks.start[block] <= instant && instant < blocks.end[block] && isIn(block));
  const pending = made.blocks.find(({ freed, end }) => freed > 0 && freed < end)?.freed ?? 0;
  for (const instant of [0, 150, pending, made.events]) {
    model.store.set({ filter: "state:waiting" });
    const waiting = expected(instant, (block) => blocks.freed[block] <= instant);
    assert.deepEqual([...model.filter.of(all, instant)], waiting, `waiting at ${instant}`);
    assert.ok(instant !== pending || waiting.length > 0);
    model.store.set({ filter: "state:allocated" });
    const allocated = expected(instant, (block) => instant < blocks.freed[block]);
    assert.deepEqual([...model.filter.of(all, instant)], allocated, `allocated at ${instant}`);
  }
});

test("the filter is made once, whatever instants pass", () => {
  const model = modelOf(made);
  model.store.set({ filter: "attention state:allocated" });
  const { filter } = model;
  for (const instant of [7, 8, 9]) {
    model.store.set({ instants: [instant] });
    assert.equal(model.filter, filter);
  }
});
