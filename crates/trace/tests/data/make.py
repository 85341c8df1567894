"""Makes the pickles in this folder: `python3 make.py`. numpy is needed, and no torch.

They have the shapes that torch.cuda.memory._dump_snapshot of different versions writes, small enough
to check by hand.
"""

import bz2
import lzma
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque

import numpy

MIB = 1 << 20
A, B = 0x7F0000000000, 0x7F0000200000

FRAMES = [
    {"name": "forward", "filename": "model.py", "line": 12},
    {"name": "<module>", "filename": "train.py", "line": 3},
]
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,roundup_power2_divisions:4",
    "max_split_size": 64 * MIB,
    "garbage_collection_threshold": 0.5,
    "expandable_segments": False,
    "roundup_power2_divisions": {"1": 4, "2": 4, "32768": 0},
}


def event(action, addr, size, time, frames=None, **more):
    entry = {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time}
    entry.update({"compile_context": "N/A", "user_metadata": ""}, **more)
    if frames is not None:
        entry["frames"] = frames
    return entry


def block(address, size, requested, state="inactive", frames=()):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": list(frames)}


def segment(address, size, blocks, device=0, pool=(0, 0), **more):
    active = [b for b in blocks if b["state"] != "inactive"]
    allocated = [b for b in blocks if b["state"] == "active_allocated"]
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": sum(b["size"] for b in allocated),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": 0,
        "segment_type": "small" if size == 2 * MIB else "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
        **more,
    }


def events(frames):
    """One segment; three blocks; one freed; an out-of-memory; an annotation; something unknown."""
    return [
        event("segment_alloc", A, 2 * MIB, 100, frames),
        event("alloc", A, 1000, 101, frames),
        event("alloc", A + 1024, 512, 102, frames and frames[1:]),
        event("annotate", A + 1024, 512, 103, frames, category="weights"),
        event("free_requested", A, 1000, 104, frames),
        event("free_completed", A, 1000, 105, frames),
        {"action": "oom", "device_free": 4096, "size": 1 << 30, "stream": 0, "time_us": 106},
        event("from_the_future", A, 1, 107),
        event("alloc", A, 600, 108, frames),
    ]


def one_segment(device=0):
    rest = 2 * MIB - 1536
    return segment(
        A,
        2 * MIB,
        [
            block(A, 1024, 600, "active_allocated", FRAMES),
            block(A + 1024, 512, 512, "active_allocated", FRAMES[1:]),
            block(A + 1536, rest, 0),
        ],
        device=device,
    )


def snapshot(segments, traces):
    marks = [
        {"stage": "START", "name": "step", "device": 0, "time_us": 100},
        {"stage": "END", "name": "step", "device": 0, "time_us": 109},
    ]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": SETTINGS,
        "external_annotations": marks,
        "host_segments": [],
        "host_traces": [],
    }


def torch_2_1():
    """No addresses of blocks, no pools, no settings; the holders of a block in its `history`."""
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [{"addr": A, "real_size": 600, "frames": FRAMES}]},
        {"size": 512, "requested_size": 500, "state": "active_awaiting_free", "frames": []},
        {"size": 2 * MIB - 1536, "state": "inactive"},
    ]
    old = {"device": 0, "address": A, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "blocks": blocks}
    trace = [
        {"action": "segment_alloc", "addr": A, "size": 2 * MIB, "stream": 0},
        {"action": "alloc", "addr": A, "size": 600, "stream": 0},
        {"action": "alloc", "addr": A + 1024, "size": 500, "stream": 0},
        {"action": "free_requested", "addr": A + 1024, "size": 500, "stream": 0},
    ]
    return {"segments": [old], "device_traces": [trace]}


def lost_beginning():
    """The ring kept the last events: what they free was allocated before, and one block stays."""
    trace = [
        event("free_completed", A + 1024, 300, 200),
        event("alloc", A + 1024, 400, 201),
        event("free_requested", B, 700, 202),
        event("free_completed", B, 700, 203),
        event("segment_free", B, 20 * MIB, 204),
    ]
    rest = 2 * MIB - 1536
    blocks = [
        block(A, 1024, 600, "active_allocated", FRAMES),
        block(A + 1024, 512, 400, "active_allocated"),
        block(A + 1536, rest, 0),
    ]
    return snapshot([segment(A, 2 * MIB, blocks)], [trace])


def pools():
    """A segment for pool (0, 1) went, and another for pool (7, 0) came to the same address."""
    trace = [
        event("segment_alloc", A, 2 * MIB, 300),
        event("alloc", A, 512, 301),
        event("free_requested", A, 512, 302),
        event("free_completed", A, 512, 303),
        event("segment_free", A, 2 * MIB, 304),
        event("segment_alloc", A, 2 * MIB, 305),
        event("alloc", A, 512, 306),
        event("alloc", A + 512, 512, 307, pool_id=(7, 0)),
    ]
    blocks = [
        block(A, 512, 512, "active_allocated"),
        block(A + 512, 512, 512, "active_allocated"),
        block(A + 1024, 2 * MIB - 1024, 0),
    ]
    return snapshot([segment(A, 2 * MIB, blocks, pool=(7, 0))], [trace])


def containers(value):
    """The same in other containers: of dicts a third each, and queues for lists."""
    if isinstance(value, dict):
        kind = [OrderedDict, lambda items: defaultdict(list, items), lambda items: Counter(dict(items))][len(value) % 3]
        return kind((key, containers(item)) for key, item in value.items())
    if isinstance(value, list):
        return deque((containers(item) for item in value), maxlen=10_000)
    return value


def numbers(value):
    """The same with the numbers and texts of numpy."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(numbers(item) for item in value)
    if isinstance(value, bool):
        return numpy.bool_(value)
    if isinstance(value, int):
        return numpy.int64(value) if value % 2 else numpy.uint64(value) if value >= 0 else numpy.int32(value)
    if isinstance(value, float):
        return numpy.float64(value)
    return numpy.str_(value) if value in ("alloc", "inactive", "small") else value


class Code:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


def write(name, value, protocol):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".pickle"), "wb") as file:
        pickle.dump(value, file, protocol)


for number in range(6):
    write(f"protocol{number}", snapshot([one_segment()], [events(FRAMES)]), number)
write("no_stacks", snapshot([one_segment()], [events(None)]), 4)
write("devices", snapshot([one_segment(), one_segment(device=2)], [events(FRAMES), [], events(None)]), 4)
write("segments_only", [one_segment()], 4)
write("segments_dict", {"segments": [one_segment()], "device_traces": [[]]}, 4)
write("torch21", torch_2_1(), 4)
write("lost_beginning", lost_beginning(), 4)
write("pools", pools(), 5)
write("code2", snapshot([Code()], []), 2)
write("code4", snapshot([Code()], []), 4)
for packed, pack in [("xz", lzma.compress), ("bz2", bz2.compress)]:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "protocol4.pickle." + packed), "wb") as file:
        file.write(pack(pickle.dumps(snapshot([one_segment()], [events(FRAMES)]), 4)))
one, other = [snapshot([one_segment()], [events(frames)]) for frames in (FRAMES, None)]
third = snapshot([one_segment(device=2)], [[], [], events(None)])
write("gathered_list", [one, None, other], 4)
write("gathered_tuple", (one, other), 4)
write("gathered_dict", {0: one, 1: other}, 4)
write("gathered_names", {"rank0": one, "rank1": third, "started": "today"}, 4)
write("gathered_twice", [one, one], 4)
write("wrapped", {"snapshot": one, "arguments": {"batch": 8}}, 4)
for number in (2, 4):
    write(f"containers{number}", containers(one), number)
    write(f"numbers{number}", numbers(one), number)
mark = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 110}
write("marks", snapshot([one_segment()], [events(FRAMES) + [dict(mark)], [dict(mark)], [event("annotate", A, 1, 1)]]), 4)
write("not_a_snapshot", {"weights": [1.0, 2.0]}, 4)
# As where a thread frees a segment of pinned memory, and another has it again before the first one says so.
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch2.15.pickle"), "rb") as file:
    raced = pickle.load(file)
raced["host_traces"].insert(1, dict(raced["host_traces"][0]))
write("torch2.15.raced", raced, 4)
