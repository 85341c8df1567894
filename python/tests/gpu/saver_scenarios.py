"""Programs as users of torch_memory_saver write them: `python saver_scenarios.py NAME HOOK_MODE`.

They know nothing of lowtide. Each ends with an exception where it does not see what its user relies on.
"""

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
from torch_memory_saver import torch_memory_saver
from torch_memory_saver.testing_utils import get_and_print_gpu_memory

MIB, GIB = 1 << 20, 1 << 30


def filled(size: int, value: int, device: str = "cuda") -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=device)


def simple() -> None:
    outside = filled(10 * MIB, 3)
    with torch_memory_saver.region():
        inside = filled(2 * GIB, 4)
    address = inside.data_ptr()
    before = get_and_print_gpu_memory("before")
    torch_memory_saver.pause()
    paused = get_and_print_gpu_memory("paused")
    assert before - paused > 1.9 * GIB
    assert bool((outside == 3).all())
    torch_memory_saver.resume()
    assert get_and_print_gpu_memory("resumed") - paused > 1.9 * GIB
    assert inside.data_ptr() == address
    inside.fill_(5)
    assert int(inside[-1]) == 5
    torch.cuda.empty_cache()
    del inside
    torch.cuda.empty_cache()
    assert before - get_and_print_gpu_memory("at the end") > 1.9 * GIB


def cuda_graph() -> None:
    static = torch.zeros(8 * MIB, device="cuda")
    with torch_memory_saver.region(tag="kv"):
        cache = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, tag="graph"):
        between = [static + index for index in range(20)]
        result = torch.stack([tensor.sum() for tensor in between]).sum()
        cache[:100].fill_(9)
    expected = sum((2 + index) * 8 * MIB for index in range(20))
    static.fill_(2)
    graph.replay()
    assert float(result) == float(expected)
    before = get_and_print_gpu_memory("before")
    torch_memory_saver.pause("graph")
    torch_memory_saver.pause("kv")
    assert before - get_and_print_gpu_memory("paused") > 1.5 * GIB
    torch_memory_saver.resume("graph")
    torch_memory_saver.resume("kv")
    graph.replay()
    assert float(result) == float(expected)
    assert bool((cache[:100] == 9).all())


def cpu_backup() -> None:
    with torch_memory_saver.region(enable_cpu_backup=True):
        kept, matrix = filled(20_000_000, 10), torch.full((10, 20, 30), 1.5, device="cuda")
    with torch_memory_saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        mapped = filled(20_000_000, 11)
    with torch_memory_saver.region():
        dropped = filled(20_000_000, 20)
    assert torch_memory_saver.get_cpu_backup(matrix) is None
    for retain in (False, True, False):
        torch_memory_saver.retain_cpu_backup = retain
        assert torch_memory_saver.retain_cpu_backup is retain
        torch_memory_saver.pause()
        backup = torch_memory_saver.get_cpu_backup(matrix)
        assert backup is not None
        assert backup.shape == matrix.shape
        assert backup.flatten()[:3].tolist() == [1.5] * 3
        alias = torch_memory_saver.get_cpu_backup(matrix, zero_copy=True)
        assert alias is not None
        assert alias.data_ptr() != backup.data_ptr()
        others = filled(60_000_000, 30)
        del others
        torch.cuda.empty_cache()
        torch_memory_saver.resume()
        after = torch_memory_saver.get_cpu_backup(matrix)
        assert (after is not None and torch.equal(after, backup)) if retain else after is None
        assert bool((kept == 10).all())
        assert bool((mapped == 11).all())
        assert bool((matrix == 1.5).all())
    dropped.fill_(21)
    assert bool((dropped == 21).all())


def ended_pool() -> None:
    """A pool that is taken out and dropped has its region's memory and backup go, which was retained."""
    torch_memory_saver.retain_cpu_backup = True
    # What the driver loads for these stays.
    assert bool((filled(MIB, 7) == 7).all())
    free, _ = torch.cuda.mem_get_info()
    for is_away in (False, True):
        with torch_memory_saver.region(tag="ended", enable_cpu_backup=True):
            tensor = filled(64 * MIB, 7)
        torch_memory_saver.pause("ended")
        backup = torch_memory_saver.get_cpu_backup(tensor, zero_copy=True)
        assert backup is not None
        assert backup.is_pinned()
        if not is_away:
            torch_memory_saver.resume("ended")
            assert bool((tensor == 7).all())
        address = backup.data_ptr()
        pool = torch_memory_saver._impl._mem_pools.pop(("ended", True, False, "pinned", 0))
        assert is_pinned(address)
        del backup
        with torch_memory_saver._impl._with_region_config(
            tag="ended", enable_cpu_backup=True, cpu_backup_backend="pinned"
        ):
            del tensor, pool
            torch.cuda.empty_cache()
        assert not is_pinned(address)
    # The first backup makes streams, which stay.
    assert free - torch.cuda.mem_get_info()[0] <= 16 * MIB


def is_pinned(address: int) -> bool:
    return bool(torch.frombuffer((ctypes.c_uint8 * 1).from_address(address), dtype=torch.uint8).is_pinned())


def disk_backup() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "made", "if", "need", "be")
        torch_memory_saver.set_disk_backup_dir(path)
        with torch_memory_saver.region(enable_disk_backup=True):
            kept, noise = filled(300 * MIB, 10), torch.randn(10, 20, 30, device="cuda")
        expected = noise.clone()
        sizes = set()
        for _ in range(3):
            torch_memory_saver.pause()
            sizes.add(sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)))
            others = filled(300 * MIB, 30)
            del others
            torch.cuda.empty_cache()
            torch_memory_saver.resume()
            assert bool((kept == 10).all())
            assert torch.equal(noise, expected)
        assert len(sizes) == 1, f"the files grow: {sizes}"


def multi_device() -> None:
    if torch.cuda.device_count() < 2:
        return
    devices = (0, 1)
    tensors = []
    for device in devices:
        with torch.cuda.device(device), torch_memory_saver.region(tag="t", enable_cpu_backup=True):
            tensors.append(filled(GIB, 7 + device, f"cuda:{device}"))
    before = [get_and_print_gpu_memory("before", device) for device in devices]
    torch_memory_saver.pause("t")
    paused = [get_and_print_gpu_memory("paused", device) for device in devices]
    assert all(b - p > 0.9 * GIB for b, p in zip(before, paused, strict=True))
    torch_memory_saver.resume("t")
    for device, tensor in zip(devices, tensors, strict=True):
        assert bool((tensor == 7 + device).all())


def threads() -> None:
    def work(tag: str, value: int) -> None:
        with torch_memory_saver.region(tag=tag, enable_cpu_backup=True):
            tensors[tag] = filled(64 * MIB, value)

    tensors: dict[str, torch.Tensor] = {}
    workers = [threading.Thread(target=work, args=(f"t{value}", value)) for value in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch_memory_saver.pause("t1")
    assert bool((tensors["t2"] == 2).all())
    torch_memory_saver.resume("t1")
    assert bool((tensors["t1"] == 1).all())
    # A tag that was never used, as some programs have them.
    torch_memory_saver.pause("nothing")
    torch_memory_saver.resume("nothing")


def rl_example() -> None:
    """Weights and cache leave in turns, while another model trains in their place."""
    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    with torch_memory_saver.region(tag="kv_cache"):
        cache = torch.zeros(16, 8, 2048, device="cuda")
    static = torch.ones(8, 2048, device="cuda")

    def generate() -> None:
        x = static
        with torch.no_grad():
            for layer, keys in zip(model, cache, strict=False):
                x = layer(x).relu()
                keys.copy_(x)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        generate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, tag="cuda_graph"):
        generate()
    graph.replay()
    expected = cache.clone()
    trained = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(3):
        for tag in ("kv_cache", "weights", "cuda_graph"):
            torch_memory_saver.pause(tag)
        trained(static).square().mean().backward()
        optimizer.step()
        torch.cuda.empty_cache()
        for tag in ("cuda_graph", "weights", "kv_cache"):
            torch_memory_saver.resume(tag)
        cache.zero_()
        graph.replay()
        assert torch.equal(cache, expected)


def training_engine() -> None:
    """The whole process is in a region (TMS_INIT_ENABLE), and what must stay is allocated apart from it."""
    start = filled(MIB, 42)
    at_start = get_and_print_gpu_memory("at the start")
    weights = [filled(size, 42) for size in (GIB, MIB, 1024, 42)]

    def forward() -> None:
        ones = torch.ones(GIB, device="cuda")
        mean = sum(weight.float().mean() for weight in weights) / len(weights)
        assert float((ones * mean).mean()) == 42

    forward()
    after_forward = get_and_print_gpu_memory("after a forward pass")
    assert after_forward > at_start + 5 * GIB
    torch_memory_saver.pause()
    paused = get_and_print_gpu_memory("paused")
    assert paused < at_start + 200 * MIB
    with torch_memory_saver.disable():
        apart = filled(GIB, 53)
        assert float(apart.float().mean()) == 53
        assert get_and_print_gpu_memory("in disable()") > paused + 4 * GIB
        del apart
    after_disable = get_and_print_gpu_memory("after disable()")
    assert after_disable <= paused + 10 * MIB
    torch_memory_saver.resume()
    resumed = get_and_print_gpu_memory("resumed")
    assert abs((after_forward - paused) - (resumed - after_disable)) < 50 * MIB
    forward()
    assert abs(get_and_print_gpu_memory("after another") - resumed) <= MIB
    _, total = torch.cuda.mem_get_info()
    # What is cached is in the way of this, and goes.
    first, second = (filled(int(total * 0.3), 1) for _ in range(2))
    del first, second
    large = filled(int(total * 0.6), 1)
    assert float((start + 1).float().mean()) == 43
    # Gradients come from a thread of PyTorch's, which is in the region as all threads are.
    del large
    parameter = torch.ones(256 * MIB, device="cuda", requires_grad=True)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    with_gradient = get_and_print_gpu_memory("with a gradient")
    torch_memory_saver.pause()
    assert with_gradient - get_and_print_gpu_memory("paused again") > 2.9 * GIB
    torch_memory_saver.resume()
    assert bool((parameter.grad == 2).all())


def captured_training() -> None:
    """The whole process is in a region: plain captures, too, on streams that multiplied in it before."""
    weight = torch.eye(8192, device="cuda") * 3
    static = torch.ones(16, 8192, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            static @ weight
    torch.cuda.current_stream().wait_stream(side)
    pool = torch.cuda.graph_pool_handle()
    graphs, results, large = [], [], []
    # The second is in the stream that graphs have by default, in which nobody has multiplied.
    for stream in (side, None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            large.append(filled(GIB, 7))
            results.append((static @ weight) @ weight)
        graphs.append(graph)
    of_user = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(of_user):
        kept = filled(GIB, 8)

    def check(value: float) -> None:
        static.fill_(value)
        for graph, result, filled_by_graph in zip(graphs, results, large, strict=True):
            result.zero_()
            filled_by_graph.zero_()
            graph.replay()
            assert bool((result == 9 * value).all())
            assert bool((filled_by_graph == 7).all())

    check(1)
    for value in (2, 3):
        before = get_and_print_gpu_memory("before")
        torch_memory_saver.pause()
        assert before - get_and_print_gpu_memory("paused") > 3 * GIB
        with torch_memory_saver.disable():
            noise = torch.full((GIB,), float("nan"), device="cuda")
            apart = torch.ones(512, 512, device="cuda")
            assert bool((apart @ apart == 512).all())
            del noise, apart
        torch_memory_saver.resume()
        assert bool((kept == 8).all())
        check(value)


def nested_region() -> None:
    """Regions in the region that the whole process is in (TMS_INIT_ENABLE)."""
    torch_memory_saver._ensure_initialized()
    library = torch_memory_saver._impl._binary_wrapper.cdll

    def state() -> tuple[bool, bool, bytes]:
        interesting, is_kept = library.tms_get_interesting_region(), library.tms_get_enable_cpu_backup()
        return interesting, is_kept, library.tms_get_current_tag()

    assert state() == (True, True, b"default")
    kept = torch.full((10_000_000,), 42.0, device="cuda")
    with torch_memory_saver.region(tag="gradients"):
        assert state() == (True, False, b"gradients")
        dropped = torch.full((10_000_000,), 99.0, device="cuda")
    assert state() == (True, True, b"default")
    before = get_and_print_gpu_memory("before")
    torch_memory_saver.pause()
    assert get_and_print_gpu_memory("paused") < before - 60_000_000
    torch_memory_saver.resume()
    assert bool((kept == 42).all())
    dropped.fill_(0)
    assert float(dropped.sum()) == 0


def margin() -> None:
    """Regions leave some of the device free."""
    free, _ = torch.cuda.mem_get_info()
    torch_memory_saver.memory_margin_bytes = free - GIB
    with torch_memory_saver.region():
        try:
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("the margin was passed")
        held = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    # Only regions heed it.
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    torch_memory_saver.memory_margin_bytes = 0
    with torch_memory_saver.region():
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    del held


SCENARIOS: list[Callable[[], None]] = [
    *(simple, cuda_graph, cpu_backup, ended_pool, disk_backup, multi_device, threads, rl_example, margin),
    *(training_engine, captured_training, nested_region),
]

if __name__ == "__main__":
    torch_memory_saver.hook_mode = sys.argv[2]
    {scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()
    print("done", flush=True)
