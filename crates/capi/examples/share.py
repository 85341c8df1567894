"""Two processes share device memory through liblowtide.so, plain and expandable: contents, offsets, counts,
an exporter that ends first, and what each call costs.

    python crates/capi/examples/share.py target/release/liblowtide.so [DEVICE]

Needs a card and its driver, or a stand-in that LD_LIBRARY_PATH leads to as libcuda.so.1. Prints a line for
each kind of memory; fails at the first thing that is not as it should be.
"""

import ctypes
import json
import os
import subprocess
import sys
import time

SIZES = [64 << 10, 9 << 10, 30 << 20, 1400 << 20]
PART = 4096


class Driver:
    """The calls of NVIDIA's driver that a program makes for itself."""

    def __init__(self, device):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name} failed with error {code}"

    def write(self, address, content):
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))

    def read(self, address):
        content = ctypes.create_string_buffer(PART)
        self("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(PART))
        return content.raw


class Lowtide:
    """The functions of lowtide.h; a status that is not OK is an error."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.lowtide_last_error.restype = ctypes.c_char_p
        self.library.lowtide_release_bytes.argtypes = [ctypes.c_void_p]

    def __call__(self, name, *arguments):
        start = time.perf_counter()
        status = getattr(self.library, name)(*arguments)
        self.microseconds = (time.perf_counter() - start) * 1e6
        assert status == 0, f"{name}: {self.library.lowtide_last_error().decode()}"

    def allocate(self, size, device):
        memory = ctypes.c_void_p()
        self("lowtide_allocate", ctypes.c_size_t(size), device, None, ctypes.byref(memory))
        return memory.value

    def share(self, memory):
        data, length, offset = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_uint64()
        out = [ctypes.byref(field) for field in (data, length, offset)]
        self("lowtide_share", ctypes.c_void_p(memory), *out)
        content = ctypes.string_at(data.value, length.value)
        self.library.lowtide_release_bytes(data)
        return content.hex(), offset.value

    def attach(self, content, device):
        memory = ctypes.c_void_p()
        content = bytes.fromhex(content)
        length = ctypes.c_size_t(len(content))
        self("lowtide_attach", device, content, length, ctypes.byref(memory))
        return memory.value

    def detach(self, memory):
        self("lowtide_detach", ctypes.c_void_p(memory))


def pattern(seed):
    return bytes((seed + index) % 251 for index in range(PART))


def export(lowtide, device):
    """Says what it shares, then looks for what the importer wrote, then ends when it is told."""
    driver = Driver(device)
    blocks, said = [], []
    for seed, size in enumerate(SIZES):
        memory = lowtide.allocate(size, device)
        driver.write(memory, pattern(seed))
        driver.write(memory + size - PART, pattern(seed + 50))
        content, offset = lowtide.share(memory)
        blocks.append(memory)
        said.append((content, offset, lowtide.microseconds))
    assert said[0][0] == said[1][0], "two blocks of one segment have different bytes"
    assert said[0][1] != said[1][1], "two blocks of one segment have one offset"
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
    for seed, memory in enumerate(blocks):
        assert driver.read(memory) == pattern(seed + 100), "the importer wrote elsewhere"
    print("seen", flush=True)
    sys.stdin.readline()


def direct(path, device, kind):
    """Starts an exporter, and is the importer."""
    environment = dict(os.environ, LOWTIDE_CONF=f"expandable_segments:{kind == 'expandable'}")
    command = [sys.executable, __file__, path, str(device), "export"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    exporter = subprocess.Popen(command, env=environment, **pipes)
    lowtide = Lowtide(path)
    shared = json.loads(exporter.stdout.readline())
    starts, costs = [], []
    for seed, (content, offset, share_cost) in enumerate(shared):
        start = lowtide.attach(content, device)
        attach_cost = lowtide.microseconds
        driver = Driver(device)
        assert lowtide.attach(content, device) == start, "the same bytes, another address"
        lowtide.detach(start)
        address = start + offset
        assert driver.read(address) == pattern(seed), "other contents"
        assert driver.read(address + SIZES[seed] - PART) == pattern(seed + 50), "another end"
        driver.write(address, pattern(seed + 100))
        starts.append(start)
        costs.append(f"{SIZES[seed] >> 10} KiB {share_cost:.0f} + {attach_cost:.0f}")
    assert starts[0] == starts[1], "one segment, two addresses"
    exporter.stdin.write("\n")
    exporter.stdin.flush()
    assert exporter.stdout.readline() == "seen\n"
    exporter.communicate("\n")
    assert exporter.returncode == 0
    if kind == "expandable":
        # The exporter has ended; its pages have not.
        assert driver.read(starts[2] + shared[2][1]) == pattern(102), "the pages went with it"
    for start in starts:
        lowtide.detach(start)
    print(f"ok {kind}: share + attach in us: {', '.join(costs)}; detach {lowtide.microseconds:.0f}")


def main():
    path, device = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if sys.argv[3:] == ["export"]:
        return export(Lowtide(path), device)
    for kind in ["plain", "expandable"]:
        direct(path, device, kind)


main()
