import assert from "node:assert/strict";
import { test } from "node:test";
import { fromFragment, type State, toFragment } from "../../src/state.ts";

const initial: State = {
  trace: 0,
  other: 1,
  instants: [10, 20],
  seconds: [null, null],
  view: null,
  axis: "events",
  curves: ["live", "reserved"],
  bands: "none",
  coloring: "size",
  stackView: "instant",
  frames: "own",
  table: "holders",
  filter: "",
};
const ends = [100, 200];

test("a state comes back from its fragment", () => {
  const state: State = {
    trace: 1,
    other: 0,
    instants: [10, 150],
    seconds: [5, null],
    view: [3, 90],
    axis: "time",
    curves: ["live", "caching:expandable_segments:True/reserved"],
    bands: "site",
    coloring: "tag",
    stackView: "difference",
    frames: "all",
    table: "sizes",
    filter: "stream:0 a&b=c",
  };
  assert.deepEqual(fromFragment(`#${toFragment(state, initial)}`, initial, ends), state);
});

test("what is as at first is not written", () => {
  assert.equal(toFragment(initial, initial), "");
  assert.deepEqual(fromFragment("", initial, ends), initial);
});

test("nonsense is taken as at first, and instants are kept within the trace", () => {
  const state = fromFragment(
    "#trace=9&at=0:1e9,7:3,x&to=1:-4&view=9-3&color=red&bands=age&table=",
    initial,
    ends,
  );
  assert.deepEqual(state, { ...initial, instants: [100, 20], seconds: [null, 0] });
});
