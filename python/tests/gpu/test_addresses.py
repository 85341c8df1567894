"""Memory at an address of the program's choice."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_helpers import IS_TIDE, MIB, bytes_of, on_caching, on_tide, segment_of, version  # noqa: E402

pytestmark = pytest.mark.skipif(version() < (2, 13), reason="newer")

# What a request of 8 MiB reserves: PyTorch a segment of 20 MiB, tide no more than the request.
RESERVED = 8 * MIB if IS_TIDE else 20 * MIB


def at_address(address: int, size: int) -> Any:
    """Returns storage of so many bytes that is to be at an address."""
    storage = bytes_of(0).untyped_storage()
    storage._resize_with_addr_(size, address)
    return storage


def blocks_around(address: int) -> list[tuple[int, int, str]]:
    segment = segment_of(address)
    return [(b["address"] - segment["address"], b["size"], b["state"]) for b in segment["blocks"]]


def test_memory_is_taken_at_an_address_and_counted_as_pytorch_does() -> None:
    start = bytes_of(8 * MIB).data_ptr()
    before = torch.cuda.memory_stats()
    storage = at_address(start + 4 * MIB, 2 * MIB)
    after = torch.cuda.memory_stats()
    assert storage.data_ptr() == start + 4 * MIB
    assert blocks_around(start) == [
        (0, 4 * MIB, "inactive"),
        (4 * MIB, 2 * MIB, "active_allocated"),
        (6 * MIB, RESERVED - 6 * MIB, "inactive"),
    ]
    assert after["num_device_alloc"] == before["num_device_alloc"]
    # What lies before is taken for the moment.
    grown = {key: after[key] - before[key] for key in after if ".large_pool." in key and ".peak" not in key}
    expected = {
        "allocation.large_pool.allocated": 2,
        "allocation.large_pool.freed": 1,
        "allocated_bytes.large_pool.allocated": 6 * MIB,
        "allocated_bytes.large_pool.freed": 4 * MIB,
        "requested_bytes.large_pool.allocated": 6 * MIB,
        # PyTorch does not count free blocks of expandable segments, and tide counts none of its own.
        "inactive_split.large_pool.current": 0 if IS_TIDE else 2,
        "inactive_split_bytes.large_pool.current": 0 if IS_TIDE else RESERVED - 2 * MIB,
        "inactive_split_bytes.large_pool.allocated": 0 if IS_TIDE else RESERVED,
        "segment.large_pool.allocated": 0,
    }
    assert {key: grown[key] for key in expected} == expected


@on_caching
def test_the_rest_of_a_block_comes_with_memory_at_an_address_as_with_any() -> None:
    start = bytes_of(30 * MIB).data_ptr()
    storages = [at_address(start + 2 * MIB, 27 * MIB)]
    assert blocks_around(start) == [(0, 2 * MIB, "inactive"), (2 * MIB, 28 * MIB, "active_allocated")]
    # However little lies before.
    storages.append(at_address(start + 512, MIB + 512))
    assert blocks_around(start)[:2] == [(0, 512, "inactive"), (512, 2 * MIB - 512, "active_allocated")]


@on_tide
def test_tide_takes_what_is_asked_for_and_no_rest() -> None:
    start = bytes_of(30 * MIB).data_ptr()
    large = at_address(start + 2 * MIB, 27 * MIB)
    small = at_address(start + 512, MIB + 512)
    assert blocks_around(start) == [
        (0, 512, "inactive"),
        (512, MIB + 512, "active_allocated"),
        (MIB + 1024, MIB - 1024, "inactive"),
        (2 * MIB, 27 * MIB, "active_allocated"),
        (29 * MIB, MIB, "inactive"),
    ]
    assert (large.data_ptr(), small.data_ptr()) == (start + 2 * MIB, start + 512)


@on_tide
def test_tide_refuses_addresses_without_memory() -> None:
    start = bytes_of(20 * MIB).data_ptr()
    held = at_address(start, 2 * MIB)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The addresses are free, and the driver is not asked for memory there.
    for offset in (2 * MIB, 8 * MIB):
        with pytest.raises(RuntimeError, match="exact address"):
            at_address(start + offset, 2 * MIB)
    del held
    assert at_address(start, 2 * MIB).data_ptr() == start


def test_memory_at_an_address_that_is_not_free_is_refused() -> None:
    start = bytes_of(8 * MIB).data_ptr()
    held = at_address(start + 4 * MIB, 2 * MIB)
    before = torch.cuda.memory_stats(), blocks_around(start)

    def refuse(address: int, size: int, why: str = "Could not allocate CUDA storage at exact address 0x") -> None:
        with pytest.raises(RuntimeError, match=why):
            at_address(address, size)

    refuse(held.data_ptr(), 2 * MIB)
    refuse(held.data_ptr() + 512, 512)
    refuse(start, 5 * MIB)
    refuse(start + RESERVED - MIB, 2 * MIB)
    refuse(start + 7 * MIB, 512)
    refuse(4096, 2 * MIB)
    refuse(start + 6 * MIB, 1 << 61)
    refuse(start + 6 * MIB + 8, MIB, r"addr must be aligned to kMinBlockSize \(512 bytes\), got 0x")
    with torch.cuda.stream(torch.cuda.Stream()):
        refuse(start + 6 * MIB, 2 * MIB)
    assert (torch.cuda.memory_stats(), blocks_around(start)) == before


def test_memory_at_an_address_is_of_the_pool_that_is_in_use() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        start = bytes_of(8 * MIB).data_ptr()
        inside = at_address(start + 2 * MIB, 2 * MIB)
    assert tuple(segment_of(inside.data_ptr())["segment_pool_id"]) == tuple(pool.id)
    with pytest.raises(RuntimeError, match="exact address"):
        at_address(start + 4 * MIB, 2 * MIB)
    del inside


def test_history_says_what_was_taken_at_an_address() -> None:
    start = bytes_of(8 * MIB).data_ptr()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    storage = at_address(start + 4 * MIB, 2 * MIB)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    seen = [(e["action"], e["addr"] - start, e["size"]) for e in events if e["action"] != "snapshot"]
    assert seen == [
        ("alloc", 0, 4 * MIB),
        ("alloc", 4 * MIB, 2 * MIB),
        ("free_requested", 0, 4 * MIB),
        ("free_completed", 0, 4 * MIB),
    ]
    assert storage.nbytes() == 2 * MIB
