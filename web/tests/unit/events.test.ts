import assert from "node:assert/strict";
import { test } from "node:test";
import { Events, type Happening, isUnlisted } from "../../src/data/events.ts";
import { type Program, program } from "../support/program.ts";
import { type Recording, traceOf } from "../support/recording.ts";
import { simulate } from "../support/simulate.ts";

const KIB = 1024;
const WHATS = [
  ...["allocated", "asked", "freed", "reserved", "mapped", "returned"],
  ...["unmapped", "paused", "resumed", "failed", "unknown"],
];

function eventsOf(recording: Recording): Events {
  return new Events(traceOf(recording));
}

function told({ event, what, bytes, address }: Happening): string {
  return `${event} ${what} ${bytes} ${address}`;
}

/** What a page has to tell of a program, by a look at its actions. */
function expected({ actions }: Program, from: number, to: number): string[] {
  const lines = actions.map(({ what, bytes, address }, i) => `${i + 1} ${what} ${bytes} ${address}`);
  return [...(from <= 0 ? ["0 before null null"] : []), ...lines.slice(Math.max(0, from - 1), to)];
}

test("each event is told for what it did", () => {
  const seen = new Set<string>();
  for (const seed of [1, 2, 3, 4]) {
    const made = program(seed, 700);
    const events = eventsOf(made.recording);
    const happened = events.within(0, 700);
    assert.deepEqual(happened.map(told), expected(made, 0, 700));
    for (const { what } of happened) seen.add(what);
    for (const instant of [0, 1, 2, 63, 64, 65, 128, 350, 699, 700]) {
      const [from, to] = [instant - 12, instant + 12];
      assert.deepEqual(events.within(from, to).map(told), expected(made, from, to), `around ${instant}`);
    }
  }
  assert.deepEqual([...seen].sort(), ["before", ...WHATS].sort());
});

test("of blocks that are not listed it is told what happened to them, and how many bytes that were", () => {
  for (const seed of [5, 6, 7]) {
    const made = program(seed, 500, 700 * KIB);
    const happened = eventsOf(made.recording).within(0, 500);
    assert.deepEqual(happened.map(told), expected(made, 0, 500));
    const hidden = made.actions.filter(
      ({ what, address }) => address === null && what !== "unknown" && what !== "failed",
    );
    assert.ok(hidden.length > 50);
    assert.equal(happened.filter(isUnlisted).length, hidden.length);
  }
});

test("what happened is of the rows that it names", () => {
  const { recording } = program(8, 600);
  const trace = traceOf(recording);
  const { blocks, segments } = trace;
  for (const { event, what, rows, address } of new Events(trace).within(1, 600)) {
    const [row] = rows;
    if (what === "allocated") assert.equal(blocks.start[row], event);
    if (what === "freed") assert.equal(blocks.end[row], event);
    if (what === "reserved" || what === "mapped") assert.equal(segments.address[row], address);
    if (what === "unmapped") assert.equal(segments.end[row], event);
  }
});

test("where events do several things at once, as many are told as a count of all rows finds", () => {
  const made = simulate({ seed: 5, steps: 8, requestsPerStep: 100 });
  const { blocks, segments, ooms, annotations, events: end } = made;
  const happened = eventsOf(made).within(0, end);
  const count = (wanted: string) => happened.filter(({ what }) => what === wanted).length;
  const within = (instants: number[]) => instants.filter((instant) => instant > 0 && instant <= end).length;
  assert.equal(count("allocated"), within(blocks.map(({ start }) => start)));
  assert.equal(count("freed"), within(blocks.map((block) => block.end)));
  assert.equal(
    count("asked"),
    within(blocks.filter((block) => block.freed < block.end).map(({ freed }) => freed)),
  );
  assert.equal(count("reserved") + count("mapped"), within(segments.map(({ start }) => start)));
  assert.equal(count("failed"), ooms.length);
  assert.equal(count("marked"), new Set(annotations.map(({ event }) => event)).size);
  assert.equal(new Set(happened.map(({ event }) => event)).size, end + 1);
  const order = happened.map(({ event }) => event);
  assert.deepEqual(
    order,
    [...order].sort((a, b) => a - b),
  );
});

test("marks stand behind the event that they follow, those before the first event too", () => {
  const made = program(9, 20).recording;
  const mark = (event: number, name: string) => ({ event, name, stage: 0 });
  const annotations = [mark(0, "a"), mark(4, "b"), mark(4, "c"), mark(20, "d")];
  const marks = eventsOf({ ...made, annotations })
    .within(0, 20)
    .filter(({ what }) => what === "marked");
  assert.deepEqual(
    marks.map(({ event, rows }) => [event, ...rows]),
    [
      [0, 0],
      [4, 1, 2],
      [20, 3],
    ],
  );
});

test("a recording without events has what was there before them", () => {
  const made = { ...program(1, 0).recording, annotations: [] };
  assert.deepEqual(eventsOf(made).within(-12, 12).map(told), ["0 before null null"]);
});
