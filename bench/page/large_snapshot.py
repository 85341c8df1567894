"""Makes a large snapshot of PyTorch's format, and counts what a report on it must show.

    python3 bench/page/large_snapshot.py OUT.pickle REPEAT

A recorded job's events (traces/gpt2_train.stacks.pickle.zst, read with the program zstd) REPEAT times one after the
other, with everything given back in between: 420 times are 1 GB, of which a third of the stacks are not shared. Prints
how many events and allocations there are, and the most that was live and reserved, counted event by event.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parent.parent.parent / "traces/gpt2_train.stacks.pickle.zst"
# What PyTorch rounds a block up to.
ROUNDING = 512
Events = list[dict[str, Any]]


def main() -> None:
    """Writes the snapshot and prints the count."""
    if len(sys.argv) != 3:
        sys.exit("usage: large_snapshot.py OUT.pickle REPEAT")
    out, repeat = Path(sys.argv[1]), int(sys.argv[2])
    unpacked = subprocess.run(["zstd", "-dc", RECORDED], capture_output=True, check=True).stdout
    snapshot = pickle.loads(unpacked)
    events = repeated(snapshot["device_traces"][0], repeat)
    snapshot["device_traces"][0] = events
    snapshot["external_annotations"] = []
    with out.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    print(counted(events))


def repeated(events: Events, repeat: int) -> Events:
    """Returns a job's events so many times; the last time keeps what the job kept, as its segments show."""
    end = given_back(events)
    span = end[-1]["time_us"] - events[0]["time_us"] + 1000
    rounds = [(number, events if number == repeat - 1 else events + end) for number in range(repeat)]
    return [
        {**event, "time_us": event["time_us"] + number * span, "frames": frames_of(event, number)}
        for number, notes in rounds
        for event in notes
    ]


def frames_of(event: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Returns an event's stack, in every third round as one of its own."""
    frames: list[dict[str, Any]] = event["frames"]
    return frames if number % 3 else [dict(frame) for frame in frames[:6]]


def given_back(events: Events) -> Events:
    """Returns the events by which all goes that a job has at its end."""
    blocks: dict[int, dict[str, Any]] = {}
    segments: dict[int, dict[str, Any]] = {}
    for event in events:
        match event["action"]:
            case "alloc":
                blocks[event["addr"]] = event
            case "free_completed":
                blocks.pop(event["addr"], None)
            case "segment_alloc":
                segments[event["addr"]] = event
            case "segment_free":
                segments.pop(event["addr"], None)
    freed = [(block, action) for block in blocks.values() for action in ("free_requested", "free_completed")]
    gone = freed + [(segment, "segment_free") for segment in segments.values()]
    last = events[-1]["time_us"]
    return [{**event, "action": action, "time_us": last + index} for index, (event, action) in enumerate(gone)]


def counted(events: Events) -> dict[str, int]:
    """Returns what there was, by a count of its own."""
    blocks: dict[int, int] = {}
    live = reserved = peak_live = peak_reserved = allocations = 0
    for event in events:
        size = event["size"]
        match event["action"]:
            case "alloc":
                blocks[event["addr"]] = -(-max(size, 1) // ROUNDING) * ROUNDING
                live += blocks[event["addr"]]
                allocations += 1
            case "free_completed":
                live -= blocks.pop(event["addr"])
            case "segment_alloc":
                reserved += size
            case "segment_free":
                reserved -= size
        peak_live, peak_reserved = max(peak_live, live), max(peak_reserved, reserved)
    return {
        "events": len(events),
        "allocations": allocations,
        "peak_live_bytes": peak_live,
        "peak_reserved_bytes": peak_reserved,
        "end_live_bytes": live,
    }


if __name__ == "__main__":
    main()
