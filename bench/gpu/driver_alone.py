"""What NVIDIA's driver alone takes for what a pause and a resume ask of it, without torch and without an allocator.

    python driver_alone.py [--rounds N]

The first lines are of 32 GiB in handles of 1 GiB that leave, as most of `bench/gpu/saver.py` does; the others of 8 GiB
that are copied to page-locked memory, leave, and come back: all of them after the last copy, or each after its own.
Before a round all of the memory is written, and the ends of each GiB that was copied are compared after it.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GIB = 1 << 30
PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


DRIVER = ctypes.CDLL("libcuda.so.1")
DEVICE = Location(ON_DEVICE, 0)


def call(name: str, *arguments: object) -> None:
    """Calls the driver."""
    status = getattr(DRIVER, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: {status}")


def size_of(count: int) -> ctypes.c_size_t:
    """Returns the size of some handles."""
    return ctypes.c_size_t(count * GIB)


def milliseconds(action: Callable[[], None]) -> float:
    """Returns how long something takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


@dataclass
class Memory:
    """Handles of 1 GiB behind one range of addresses."""

    count: int
    start: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)
    handles: list[ctypes.c_uint64] = field(default_factory=list)

    def __post_init__(self) -> None:
        nothing = ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(self.start), size_of(self.count), ctypes.c_size_t(0), nothing, nothing)

    def at(self, number: int) -> ctypes.c_uint64:
        """Returns where a handle is mapped."""
        return ctypes.c_uint64(self.start.value + number * GIB)

    def come(self) -> None:
        """Creates and maps all of it."""
        properties = Properties(PINNED, 0, DEVICE, None, 0)
        self.handles = [ctypes.c_uint64() for _ in range(self.count)]
        nothing = ctypes.c_uint64(0)
        for number, handle in enumerate(self.handles):
            call("cuMemCreate", ctypes.byref(handle), size_of(1), ctypes.byref(properties), nothing)
            call("cuMemMap", self.at(number), size_of(1), ctypes.c_size_t(0), handle, nothing)
        access = Access(DEVICE, READ_AND_WRITE)
        call("cuMemSetAccess", self.start, size_of(self.count), ctypes.byref(access), ctypes.c_size_t(1))

    def write(self, value: int) -> None:
        """Writes all of it."""
        call("cuMemsetD32_v2", self.start, ctypes.c_uint(value), ctypes.c_size_t(self.count * GIB // 4))
        call("cuCtxSynchronize")

    def unmap(self, first: int, count: int) -> None:
        """Unmaps some of it."""
        call("cuMemUnmap", self.at(first), size_of(count))

    def release(self, first: int, count: int) -> None:
        """Gives some of it back."""
        for handle in self.handles[first : first + count]:
            call("cuMemRelease", handle)


def report(name: str, times: list[float]) -> None:
    """Prints the times of all rounds, and their median."""
    rounds = " ".join(f"{each:.1f}" for each in times)
    print(f"{name:46} median {statistics.median(times):6.1f} ms: {rounds}", flush=True)


def leave(rounds: int) -> None:
    """Times how 32 GiB leave."""
    memory = Memory(32)
    unmapped, released = [], []
    for number in range(rounds):
        memory.come()
        memory.write(number)
        time.sleep(0.5)
        unmapped.append(milliseconds(lambda: memory.unmap(0, memory.count)))
        released.append(milliseconds(lambda: memory.release(0, memory.count)))
        time.sleep(0.5)
    report("32 GiB: one cuMemUnmap", unmapped)
    report("32 GiB: 32 times cuMemRelease", released)
    report("32 GiB: both", [sum(pair) for pair in zip(unmapped, released, strict=True)])


@dataclass
class Copies:
    """Memory, and as much of the host's, page-locked."""

    memory: Memory
    host: ctypes.c_void_p
    stream: ctypes.c_void_p

    def copied(self, name: str, number: int) -> None:
        """Copies 1 GiB to the host, or from there."""
        host = ctypes.c_void_p((self.host.value or 0) + number * GIB)
        device = self.memory.at(number)
        ends = (host, device) if name == "cuMemcpyDtoHAsync_v2" else (device, host)
        call(name, *ends, size_of(1), self.stream)

    def pause_at_its_end(self) -> None:
        """Copies all of it, and gives it back then."""
        for number in range(self.memory.count):
            self.copied("cuMemcpyDtoHAsync_v2", number)
        call("cuStreamSynchronize", self.stream)
        self.memory.unmap(0, self.memory.count)
        self.memory.release(0, self.memory.count)

    def pause_each(self) -> None:
        """Gives back each handle as soon as it is copied."""
        for number in range(self.memory.count):
            self.copied("cuMemcpyDtoHAsync_v2", number)
            call("cuStreamSynchronize", self.stream)
            self.memory.unmap(number, 1)
            self.memory.release(number, 1)

    def resume(self) -> None:
        """Brings all of it back."""
        self.memory.come()
        for number in range(self.memory.count):
            self.copied("cuMemcpyHtoDAsync_v2", number)
        call("cuStreamSynchronize", self.stream)

    def check(self, value: int) -> None:
        """Compares the ends of each GiB with what was written."""
        word = ctypes.c_uint()
        for number in range(self.memory.count):
            for offset in (0, GIB - 4):
                address = ctypes.c_uint64(self.memory.at(number).value + offset)
                call("cuMemcpyDtoH_v2", ctypes.byref(word), address, ctypes.c_size_t(4))
                assert word.value == value, (number, offset)


def come_back(rounds: int) -> None:
    """Times how 8 GiB leave and come back, with their contents."""
    host, stream = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuMemHostAlloc", ctypes.byref(host), size_of(8), ctypes.c_uint(0))
    call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
    copies = Copies(Memory(8), host, stream)
    ways = {"at its end": copies.pause_at_its_end, "each once copied": copies.pause_each}
    for rest in (0.0, 0.5):
        times: dict[str, list[float]] = {}
        for number in range(2 * rounds):
            name, pause = list(ways.items())[number % 2]
            if number == 0:
                copies.memory.come()
            copies.memory.write(number + 1)
            time.sleep(0.5)
            paused = milliseconds(pause)
            time.sleep(rest)
            resumed = milliseconds(copies.resume)
            copies.check(number + 1)
            times.setdefault(f"8 GiB leave, {name}", []).append(paused)
            times.setdefault(f"8 GiB come back {rest} s later, {name}", []).append(resumed)
        for name, each in times.items():
            report(name, each)
        copies.memory.unmap(0, 8)
        copies.memory.release(0, 8)
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="of each case (default: 16)")
    rounds = parser.parse_args().rounds
    context = ctypes.c_void_p()
    call("cuInit", ctypes.c_uint(0))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    leave(rounds)
    come_back(rounds)


if __name__ == "__main__":
    main()
