"""Regions on a card: memory that leaves it and comes back, with what was in it."""

import gc
import os
import random
import re
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("LOWTIDE_TEST_NATIVE") == "1":
    pytest.skip("about lowtide itself", allow_module_level=True)

from gpu_helpers import on_a_card, run_ranks  # noqa: E402

import lowtide  # noqa: E402 — only where it is the allocator

MIB = 1 << 20
BACKUPS: tuple[lowtide._regions.Backup | None, ...] = (None, "host", "disk")


@pytest.fixture(autouse=True)
def regions(tmp_path: Path) -> Iterator[None]:
    """Every test begins and ends with nothing paused, and keeps its files to itself."""
    lowtide.set_backup_directory(tmp_path)
    yield
    lowtide.resume()
    lowtide.retain_backups(False)
    lowtide.release_backups()


def noise(size: int, seed: int = 0) -> Any:
    """Bytes on the card that no fresh memory has."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)


def used() -> int:
    """Bytes of the card that are in use, by whomever."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def figures(tag: str) -> dict[str, int]:
    prefix = f"region.{tag}."
    stats = lowtide.memory_stats()
    return {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}


# ---- contents ----


@on_a_card
@pytest.mark.parametrize("backup", BACKUPS)
def test_addresses_stay_and_contents_as_the_region_keeps_them(backup: "lowtide._regions.Backup | None") -> None:
    sizes = (1, 1000, 3 * MIB, 100 * MIB + 7)
    with lowtide.region("contents", backup):
        tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    expected = []
    for seed, tensor in enumerate(tensors):
        tensor.copy_(noise(tensor.numel(), seed))
        expected.append(tensor.cpu())
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(3):
        lowtide.pause("contents")
        # What is free on the card now is written by others.
        torch.full((200 * MIB,), 0x5A, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        lowtide.resume("contents")
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        if backup is not None:
            assert all(torch.equal(tensor.cpu(), content) for tensor, content in zip(tensors, expected, strict=True))
    for tensor in tensors:
        assert bool((tensor.fill_(3) == 3).all())


@on_a_card
def test_work_in_every_stream_is_waited_for() -> None:
    with lowtide.region("busy", "host"):
        tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(9)
    lowtide.pause("busy")
    lowtide.resume("busy")
    assert bool((tensor == 9).all())


@on_a_card
def test_autograd_in_a_region() -> None:
    def train(pauses: bool) -> list[Any]:
        torch.manual_seed(1)
        with lowtide.region("autograd", "host"):
            model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 1)).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            losses = []
            for _ in range(4):
                loss = model(torch.ones(64, 512, device="cuda")).square().mean()
                loss.backward()
                if pauses:
                    # Between a backward pass and the step: gradients are somewhere, and stay right.
                    lowtide.pause("autograd")
                    lowtide.resume("autograd")
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    assert train(pauses=True) == train(pauses=False)


@on_a_card
def test_a_thread_of_a_backward_pass_is_in_no_region() -> None:
    with lowtide.region("backward", "host"):
        weight = torch.ones(64 * MIB, device="cuda", requires_grad=True)
        loss = (weight * 2).sum()
        before = figures("backward")["live_bytes"]
        loss.backward()
    assert weight.grad is not None
    assert figures("backward")["live_bytes"] <= before
    lowtide.pause("backward")
    assert float(weight.grad[0]) == 2.0


# ---- which memory is whose ----


@on_a_card
def test_regions_nest_and_the_innermost_counts() -> None:
    size = 30 * MIB
    with lowtide.region("outer"):
        outer = torch.zeros(size, dtype=torch.uint8, device="cuda")
        with lowtide.region("inner", "host"):
            inner = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
            with lowtide.disable():
                outside = torch.full((size,), 2, dtype=torch.uint8, device="cuda")
        again = torch.zeros(size, dtype=torch.uint8, device="cuda")
    assert figures("outer")["live_bytes"] == 2 * size
    assert figures("inner")["live_bytes"] == size
    lowtide.pause()
    assert bool((outside == 2).all())
    lowtide.resume()
    assert bool((inner == 1).all())
    del outer, again


def test_each_thread_is_in_its_own_region() -> None:
    failures: list[str] = []
    tensors: dict[str, list[Any]] = {}
    barrier = threading.Barrier(4)

    def work(name: str, seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), lowtide.region(name, "host"):
            barrier.wait()
            tensors[name] = [noise(2 * MIB, seed + index) for index in range(10)]
            torch.cuda.current_stream().synchronize()

    names = [f"thread{index}" for index in range(4)]
    threads = [threading.Thread(target=work, args=(name, 100 * index)) for index, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        if figures(name)["live_bytes"] != 20 * MIB:
            failures.append(f"{name}: {figures(name)}")
    assert not failures
    contents = {name: [tensor.cpu() for tensor in of_name] for name, of_name in tensors.items()}
    pausing = [threading.Thread(target=lowtide.pause, args=(name,)) for name in names]
    for thread in pausing:
        thread.start()
    for thread in pausing:
        thread.join()
    for name in names:
        lowtide.resume(name)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors[name], contents[name], strict=True))


@on_a_card
def test_tags_are_paused_one_by_one() -> None:
    held = {}
    for tag in ("weights", "kv_cache", "optimizer"):
        with lowtide.region(tag, "host"):
            held[tag] = noise(64 * MIB)
    before = used()
    lowtide.pause("kv_cache")
    one = used()
    lowtide.pause("weights")
    two = used()
    assert before - one == one - two == 64 * MIB
    assert torch.equal(held["optimizer"].cpu(), noise(64 * MIB).cpu())
    lowtide.resume("kv_cache")
    assert torch.equal(held["kv_cache"], held["optimizer"])
    states = {seen["tag"]: seen["state"] for seen in lowtide.regions() if seen["tag"] in held}
    assert states == {"weights": "paused", "kv_cache": "mapped", "optimizer": "mapped"}


def test_what_is_freed_while_it_is_paused_does_not_come_back() -> None:
    with lowtide.region("freed", "host"):
        kept, freed = noise(64 * MIB, 1), noise(64 * MIB, 2)
    expected = kept.cpu()
    before = used()
    lowtide.pause("freed")
    del freed
    lowtide.resume("freed")
    assert before - used() == 64 * MIB
    assert torch.equal(kept.cpu(), expected)
    with lowtide.region("freed", "host"):
        more = noise(64 * MIB, 3)
    assert used() == before
    del more


def test_a_request_in_a_paused_region_is_refused_and_no_other_is() -> None:
    region = lowtide.region("refused")
    with region:
        held = torch.empty(MIB, device="cuda")
    lowtide.pause("refused")
    with region, pytest.raises(RuntimeError, match="is paused: resume it before allocating in it"):
        torch.empty(MIB, device="cuda")
    torch.empty(MIB, device="cuda")
    lowtide.resume("refused")
    with region:
        torch.empty(MIB, device="cuda")
    del held


@on_a_card
def test_pausing_and_resuming_twice_do_nothing() -> None:
    with lowtide.region("twice", "host"):
        held = noise(8 * MIB)
    for _ in range(2):
        lowtide.pause("twice")
    for _ in range(2):
        lowtide.resume("twice")
    assert torch.equal(held, noise(8 * MIB))
    assert figures("twice")["pauses"] == figures("twice")["resumes"] == 1


# ---- the card ----


@pytest.mark.parametrize("backup", BACKUPS)
def test_a_pause_gives_the_memory_to_others(backup: "lowtide._regions.Backup | None") -> None:
    torch.cuda.empty_cache()
    before = used()
    with lowtide.region("given", backup):
        held = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    # New memory comes in pieces that may be larger than what was asked for; what comes back is what is in use.
    assert 1.0 <= (used() - before) / (64 * 32 * MIB) < 1.13
    lowtide.pause("given")
    assert used() == pytest.approx(before, rel=0.01)
    lowtide.resume("given")
    assert used() - before == pytest.approx(64 * 32 * MIB, rel=0.01)
    del held
    torch.cuda.empty_cache()
    assert used() == pytest.approx(before, rel=0.01)


def test_nothing_grows_over_100_cycles() -> None:
    with lowtide.region("cycles", "host"):
        held = noise(64 * MIB)
    expected = held.cpu()

    def cycle() -> None:
        lowtide.pause("cycles")
        lowtide.resume("cycles")

    # For 0.4 s after another test has had 1 GiB leave or come back, lowtide has a page for a moment now and then.
    time.sleep(1.0)
    for _ in range(10):
        cycle()
    device, host = used(), resident_bytes()
    for _ in range(100):
        cycle()
    assert used() == device
    assert resident_bytes() <= host + 32 * MIB
    assert torch.equal(held.cpu(), expected)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_the_host_s_memory_goes_back() -> None:
    with lowtide.region("host", "host"):
        held = noise(512 * MIB)
    lowtide.pause("host")
    lowtide.resume("host")
    lowtide.release_backups()
    before = resident_bytes()
    lowtide.retain_backups()
    lowtide.pause("host")
    assert figures("host")["host_bytes"] >= 512 * MIB
    lowtide.resume("host")
    lowtide.release_backups()
    assert resident_bytes() <= before + 64 * MIB
    del held


def test_a_resume_without_memory_can_be_tried_again() -> None:
    with lowtide.region("short", "host"):
        held = noise(2048 * MIB)
    expected = held.cpu()
    lowtide.pause("short")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    # Held by the driver's own call, so that lowtide cannot make room.
    torch.cuda.caching_allocator_enable(False)
    try:
        others = torch.empty(free - 1024 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(lowtide.Error):
            lowtide.resume("short")
        assert figures("short")["mapped_bytes"] == 0
        del others
    finally:
        torch.cuda.caching_allocator_enable(True)
    lowtide.resume("short")
    assert torch.equal(held.cpu(), expected)


@on_a_card
def test_a_thousand_random_cycles_keep_every_content() -> None:
    """A thousand pauses and as many resumes, in three threads, each with tags of its own, on every device."""
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            random_cycles(thread, 334)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def random_cycles(thread: int, count: int) -> None:
    """So many pauses: tags, backups, sizes, devices and moments at random; contents are compared byte for byte."""
    choose = random.Random(4 + thread)
    tags = [f"r{thread}.{number}" for number in range(4)]
    kinds = [(tags[0], "host"), (tags[0], "disk"), (tags[1], "host"), (tags[2], "disk"), (tags[3], None)]
    held: list[tuple[str, str | None, Any, Any]] = []
    paused: set[str] = set()
    cycle = pauses = 0
    while pauses < count:
        cycle += 1
        tag, backup = choose.choice(kinds)
        if tag not in paused and len(held) < 40:
            device = f"cuda:{choose.randrange(torch.cuda.device_count())}"
            with lowtide.region(tag, backup):  # type: ignore[arg-type]
                tensor = torch.empty(choose.choice((512, 70_000, 3 * MIB, 9 * MIB)), dtype=torch.uint8, device=device)
            tensor.copy_(noise(tensor.numel(), 100_000 * thread + cycle))
            held.append((tag, backup, tensor, tensor.cpu()))
        tag = choose.choice(tags)
        if not any(seen["tag"] == tag for seen in lowtide.regions()):
            continue
        if tag in paused:
            lowtide.resume(tag)
            paused.discard(tag)
            for name, backup, tensor, content in held:
                if name == tag and backup is not None:
                    assert torch.equal(tensor.cpu(), content), f"thread {thread}, cycle {cycle}, {name}, {backup}"
        else:
            lowtide.pause(tag)
            paused.add(tag)
            pauses += 1
        if choose.random() < 0.4 and held:
            held.pop(choose.randrange(len(held)))
    for tag in paused:
        lowtide.resume(tag)
    for name, backup, tensor, content in held:
        assert backup is None or torch.equal(tensor.cpu(), content), f"thread {thread}, at the end, {name}, {backup}"


# ---- backups as tensors ----


def test_a_backup_is_a_tensor_without_a_copy() -> None:
    with lowtide.region("read", "host"):
        matrix = torch.randn(300, 500, device="cuda", dtype=torch.float16)
    column = matrix[10:, 7::3].t()
    expected, expected_column = matrix.cpu(), column.cpu()
    with pytest.raises(lowtide.Error, match="there is no copy"):
        lowtide.get_backup(matrix)
    lowtide.pause("read")
    backup = lowtide.get_backup(matrix)
    assert backup.device.type == "cpu"
    assert torch.equal(backup, expected)
    of_column = lowtide.get_backup(column)
    assert of_column.stride() == column.stride()
    assert torch.equal(of_column, expected_column)
    # It is the backup itself: what is written there comes back to the card.
    backup[0, 0] = 42.0
    lowtide.resume("read")
    assert float(matrix[0, 0]) == 42.0
    with pytest.raises(lowtide.Error, match="there is no copy"):
        lowtide.get_backup(torch.empty(MIB, device="cuda"))


def test_a_backup_is_of_views_and_of_memory_that_was_imported() -> None:
    with lowtide.region("views", "host"):
        real, pairs = torch.empty(3000, device="cuda"), torch.empty(100, dtype=torch.complex64, device="cuda")
    content = torch.arange(3000.0)
    real.copy_(content)
    pairs.copy_(torch.complex(content[:100], content[100:200]))
    # Its storage begins within the block.
    imported = torch.from_dlpack(torch.to_dlpack(real[512:600]))
    assert imported.untyped_storage().data_ptr() != real.data_ptr()
    views = [imported, real[512:600], pairs.conj(), pairs.conj().imag, pairs.imag]
    expected = [content[512:600], content[512:600], torch.complex(content[:100], -content[100:200])]
    expected += [-content[100:200], content[100:200]]
    lowtide.pause("views")
    backups = [lowtide.get_backup(view) for view in views]
    for backup, values in zip(backups, expected, strict=True):
        assert torch.equal(backup.resolve_conj().resolve_neg(), values)
    lowtide.resume("views")


# ---- graphs ----


@on_a_card
def test_a_graph_replays_after_its_memory_came_back() -> None:
    weight = torch.randn(1024, 1024, device="cuda")
    static = torch.zeros(64, 1024, device="cuda")
    warm_up(lambda: (static @ weight).relu() @ weight)
    graph = torch.cuda.CUDAGraph()
    with lowtide.cuda_graph(graph, tag="graphs"):
        result = (static @ weight).relu() @ weight
    expected = []
    for value in (1.0, 2.0):
        static.fill_(value)
        graph.replay()
        expected.append(result.clone())
    assert figures("graphs")["live_bytes"] > 0
    for _ in range(3):
        lowtide.pause("graphs")
        # The eager path has its workspaces elsewhere.
        torch.full((64 * MIB,), 7.0, device="cuda") @ torch.ones(64 * MIB, device="cuda")
        lowtide.resume("graphs")
        for value, before in zip((1.0, 2.0), expected, strict=True):
            static.fill_(value)
            graph.replay()
            assert torch.equal(result, before)


@on_a_card
def test_a_graph_keeps_what_it_uses_for_cublas_in_a_region() -> None:
    # Few and long rows: cuBLAS adds up their parts in its workspace.
    rows = torch.ones(16, 1 << 18, device="cuda")
    columns = torch.ones(1 << 18, 16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with lowtide.region("first"), torch.cuda.stream(stream):
        rows @ columns
    torch.cuda.synchronize()
    held = figures("first")["live_bytes"]
    assert held > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = rows @ columns
    for value in (1.0, 2.0):
        lowtide.pause("first")
        if value == 2.0:
            # Not in what is away.
            with torch.cuda.stream(stream):
                assert bool((rows @ columns > 0).all())
        noise = torch.full((256 * MIB // 4,), float("nan"), device="cuda")
        del noise
        lowtide.resume("first")
        assert figures("first")["live_bytes"] == held
        rows.fill_(value)
        result.zero_()
        graph.replay()
        assert bool((result == value * (1 << 18)).all())
        # PyTorch has it again, and makes no other.
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(stream):
            product = rows @ columns
        assert torch.cuda.memory_allocated() - before == product.nbytes
        del product
    del graph
    torch._C._cuda_clearCublasWorkspaces()
    assert figures("first")["live_bytes"] == 0


def warm_up(act: Any) -> None:
    """As PyTorch asks for before a capture: in a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            act()
    torch.cuda.current_stream().wait_stream(side)


@on_a_card
def test_graphs_of_one_region_share_a_pool_and_end_with_it() -> None:
    pool = torch.cuda.graph_pool_handle()
    static = torch.ones(MIB, device="cuda")
    graphs, results = [], []
    for factor in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with lowtide.cuda_graph(graph, pool, tag="shared", backup="host"):
            results.append(static * factor)
        graphs.append(graph)
        graph.replay()
    lowtide.pause("shared")
    lowtide.resume("shared")
    assert [float(result[0]) for result in results] == [2.0, 3.0]
    for graph in graphs:
        graph.replay()
    assert [float(result[-1]) for result in results] == [2.0, 3.0]
    with pytest.raises(lowtide.Error), lowtide.cuda_graph(torch.cuda.CUDAGraph(), pool, tag="another"):
        pass
    del graph, graphs, results, static
    gc.collect()
    torch.cuda.empty_cache()
    assert figures("shared")["mapped_bytes"] == 0


def pool_of(tensor: Any) -> Any:
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return segment["segment_pool_id"]
    raise AssertionError("the tensor is in no segment")


@on_a_card
def test_a_capture_in_a_region_has_the_graph_s_pool() -> None:
    static = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with lowtide.region("around"), torch.cuda.graph(graph):
        result = static * 2
    # What a first capture allocates for random numbers is the thread's own.
    assert figures("around").get("live_bytes", 0) < 4 * MIB
    assert tuple(pool_of(result)) == tuple(graph.pool())
    lowtide.pause()
    graph.replay()
    assert float(result[0]) == 2.0


# ---- reinforcement learning, small ----

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 128, 32, 8


def new_weights(seed: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        **{name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    return {
        name: torch.randn(shape, device="cuda", generator=generator) / shape[0] ** 0.5 for name, shape in shapes.items()
    }


def logits_of(weights: dict[str, Any], tokens: Any) -> Any:
    """The whole sequence at once, as training wants it. Nothing in it depends on the order of additions."""
    x = torch.nn.functional.one_hot(tokens, VOCABULARY).float() @ weights["embed"]
    query, key, value = (x @ weights[name] for name in ("query", "key", "value"))
    scores = query @ key.transpose(1, 2) / WIDTH**0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
    x = x + scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value @ weights["out"]
    return (x + (x @ weights["up"]).relu() @ weights["down"]) @ weights["head"]


class Generator:
    """Weights, a cache of keys and values, and a captured step, each in a region."""

    def __init__(self, weights: dict[str, Any]) -> None:
        with lowtide.region("rl_weights", "host"):
            self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        with lowtide.region("rl_cache"):
            self.cache = torch.zeros(2, BATCH, LENGTH, WIDTH, device="cuda")
        self.token = torch.zeros(BATCH, dtype=torch.long, device="cuda")
        self.position = torch.zeros(1, dtype=torch.long, device="cuda")
        warm_up(self.step)
        self.graph = torch.cuda.CUDAGraph()
        with lowtide.cuda_graph(self.graph, tag="rl_graph"):
            self.step()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        weights = self.weights
        x = torch.nn.functional.one_hot(self.token, VOCABULARY).float() @ weights["embed"]
        keys, values = self.cache
        keys.index_copy_(1, self.position, (x @ weights["key"]).unsqueeze(1))
        values.index_copy_(1, self.position, (x @ weights["value"]).unsqueeze(1))
        scores = (keys @ (x @ weights["query"]).unsqueeze(2)).squeeze(2) / WIDTH**0.5
        is_there = torch.arange(LENGTH, device="cuda") <= self.position
        seen = scores.masked_fill(~is_there, float("-inf")).softmax(-1)
        x = x + (seen.unsqueeze(1) @ values).squeeze(1) @ weights["out"]
        x = x + (x @ weights["up"]).relu() @ weights["down"]
        self.token.copy_((x @ weights["head"]).argmax(-1))

    def generate(self, weights: dict[str, Any], start: int) -> Any:
        for name, weight in weights.items():
            self.weights[name].copy_(weight.detach())
        self.cache.zero_()
        self.token.copy_((torch.arange(BATCH, device="cuda") + start) % VOCABULARY)
        tokens = [self.token.clone()]
        for position in range(LENGTH - 1):
            self.position.fill_(position)
            self.graph.replay()
            tokens.append(self.token.clone())
        return torch.stack(tokens, 1)


def reinforce(pauses: bool) -> list[float]:
    weights = {name: weight.requires_grad_() for name, weight in new_weights(3).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    generator = Generator(weights)
    losses = []
    for round_number in range(12):
        tokens = generator.generate(weights, round_number)
        if pauses:
            lowtide.pause()
            # Nobody may rely on what is not on the card.
            torch.full((32 * MIB,), float("nan"), device="cuda")
        reward = (tokens[:, 1:] % 7 == 3).float() - 0.1
        chosen = logits_of(weights, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        loss = -(chosen * reward).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if pauses:
            lowtide.resume()
    return losses


@on_a_card
def test_reinforcement_learning_is_the_same_with_pauses() -> None:
    with_pauses = reinforce(pauses=True)
    gc.collect()
    assert with_pauses == reinforce(pauses=False)
    assert len(set(with_pauses)) == len(with_pauses), "it does train"


# ---- several devices ----


@on_a_card
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_region_is_on_every_device() -> None:
    with lowtide.region("both", "host"):
        tensors = [torch.arange(8 * MIB, device=f"cuda:{device}") for device in (0, 1)]
    before = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    lowtide.pause("both")
    after = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    # A device's first backup makes streams, which take 2 MiB of it for good.
    assert all(b - a >= 62 * MIB for a, b in zip(before, after, strict=True))
    lowtide.resume("both")
    assert all(torch.equal(tensor.cpu(), torch.arange(8 * MIB)) for tensor in tensors)
    assert {seen["device"] for seen in lowtide.regions() if seen["tag"] == "both"} == {0, 1}


def test_running_out_names_the_region_of_what_is_held() -> None:
    with lowtide.region("weights"):
        held = torch.empty(640 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert 'Biggest holders: 1 x 640.00 MiB in region "weights"' in str(caught.value)
    del held


@on_a_card
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_nccl_registers_what_a_resume_brings_back(tmp_path: Path) -> None:
    done, logs = run_ranks("registered_ranks.py", "caching", tmp_path)
    buffers = re.findall(r"buffer (0x\w+) (\d+)", done.stdout)
    assert len(buffers) == 2
    for address, times in buffers:
        counts = [len(re.findall(rf"register comm \w+ buffer {address} ", log)) for log in logs]
        assert int(times) in counts, f"{address} was registered {counts} times, not {times}"
