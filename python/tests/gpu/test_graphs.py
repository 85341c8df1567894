"""CUDA graphs: pools of their own, memory of several streams, checkpoints, and programs that PyTorch compiles."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_helpers import MIB, bytes_of, on_a_card, on_caching, on_lowtide, on_tide, segment_of, settings  # noqa: E402

REUSES = ("graph_capture_record_stream_reuse:True", "graph_capture_record_stream_reuse:False")


@on_a_card
def test_a_graph_has_a_pool_of_its_own_and_replays_what_it_captured() -> None:
    static = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = static * 2
        result = between + 1
    assert tuple(segment_of(result.data_ptr())["segment_pool_id"]) == tuple(graph.pool())
    assert tuple(segment_of(static.data_ptr())["segment_pool_id"]) == (0, 0)
    # What was free in the pool is not for others.
    others = [torch.full((MIB,), 5.0, device="cuda") for _ in range(8)]
    for value in (1.0, 2.0, 3.0):
        static.fill_(value)
        graph.replay()
        assert bool((result == 2 * value + 1).all())
    assert all(bool((other == 5.0).all()) for other in others)


def test_the_pool_of_a_graph_goes_back_with_it() -> None:
    static = torch.zeros(8 * MIB, device="cuda")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static + 1
    assert torch.cuda.memory_reserved() > reserved
    del graph, result
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


@on_a_card
def test_graphs_share_a_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    static = torch.ones(MIB, device="cuda")
    graphs, results = [], []
    for factor in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results.append(static * factor)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    assert [float(result[0]) for result in results] == [2.0, 3.0]
    assert {tuple(segment_of(r.data_ptr())["segment_pool_id"]) for r in results} == {tuple(pool)}


@on_a_card
def test_memory_recorded_in_a_capture_is_not_reused_in_it() -> None:
    static = torch.ones(MIB, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        first = static * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = first.sum()
        first.record_stream(side)
        del first
        second = static * 3
        torch.cuda.current_stream().wait_stream(side)
        result = total + second.sum()
    graph.replay()
    assert float(result) == 5.0 * MIB


@on_caching
@on_a_card
def test_a_capture_uses_memory_again_once_its_streams_are_joined() -> None:
    static = torch.zeros(MIB, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with settings(*REUSES), torch.cuda.graph(graph):
        first = static * 2
        address = first.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = first.sum()
        first.record_stream(side)
        del first
        second = static * 3
        torch.cuda.current_stream().wait_stream(side)
        result = total + second.sum()
        third = static * 4
        result += third.sum()
    assert second.data_ptr() != address
    assert third.data_ptr() == address
    for value in (1.0, 2.0):
        static.fill_(value)
        graph.replay()
        assert float(result) == 9.0 * value * MIB


@on_caching
@on_a_card
def test_a_capture_uses_nothing_again_that_one_of_its_streams_may_read() -> None:
    static = torch.ones(MIB, device="cuda")
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
    with settings(*REUSES), torch.cuda.graph(graph):
        first = static * 2
        address, totals = first.data_ptr(), []
        for side in streams:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                totals.append(first.sum())
            first.record_stream(side)
        del first
        torch.cuda.current_stream().wait_stream(streams[0])
        second = static * 3
        assert second.data_ptr() != address
        torch.cuda.current_stream().wait_stream(streams[1])
        third = static * 4
        assert third.data_ptr() == address
        result = totals[0] + totals[1] + second.sum() + third.sum()
    graph.replay()
    assert float(result) == 11.0 * MIB


@on_a_card
def test_capture_fails_without_harm() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        torch.ones(1, device="cuda").item()
    del graph
    gc.collect()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    held = torch.ones(MIB, device="cuda")
    held.record_stream(side)
    del held
    torch.cuda.empty_cache()
    assert float(torch.ones(10, device="cuda").sum()) == 10.0


@on_a_card
@on_lowtide
@pytest.mark.parametrize("mistake", [lambda: torch.ones(MIB, device="cuda").sum().item(), torch.cuda.synchronize])
def test_after_a_capture_that_failed_memory_is_waited_for_again(mistake: Callable[[], Any]) -> None:
    active = torch.cuda.memory_stats()["active.all.current"]
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mistake()
    gc.collect()
    torch.cuda.synchronize()
    held = bytes_of(4 * MIB)
    held.record_stream(torch.cuda.Stream())
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active.all.current"] == active
    static, graph = torch.ones(MIB, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static * 2
    graph.replay()
    assert float(result.sum()) == 2.0 * MIB


def test_checkpoints_put_a_pool_back() -> None:
    static = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = static * 2, static * 3
    pool = graph.pool()
    live = {first.data_ptr(), second.data_ptr()}
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, live)
    state = torch._C._cuda_getCheckpointState(0, pool)
    addresses = [first.data_ptr(), second.data_ptr()]
    del first, second
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, set())
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, live)
    for address in addresses:
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, set())


def test_compiled_with_graphs_it_computes_the_same() -> None:
    pytest.importorskip("triton")

    def step(x: Any, weight: Any) -> Any:
        return torch.nn.functional.gelu(x @ weight).sum(dim=-1)

    weight = torch.randn(64, 64, device="cuda")
    compiled = torch.compile(step, mode="reduce-overhead")
    for _ in range(6):
        x = torch.randn(32, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x, weight).clone(), step(x, weight), rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


def test_compiled_training_with_graphs_computes_the_same() -> None:
    pytest.importorskip("triton")
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
        step = torch.compile(model, mode="reduce-overhead") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            loss = step(torch.ones(16, 64, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    torch._dynamo.reset()


@on_tide
@on_a_card
def test_compiled_training_of_one_shape_keeps_its_graphs_and_addresses() -> None:
    pytest.importorskip("triton")
    program = Path(__file__).resolve().parents[3] / "bench" / "gpu" / "reduce_overhead.py"
    command = [sys.executable, "-m", "lowtide", "run", str(program), "--one-shape"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    # It fails if a graph is recorded or an address changes after the third step.
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
