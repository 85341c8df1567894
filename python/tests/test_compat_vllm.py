"""lowtide by the name of vLLM's allocator."""

from machine import MEMORY, THREADS, Machine


def test_memory_of_vllm_sleeps_and_wakes_up(machine: Machine) -> None:
    machine.write("vllm/__init__.py", "")
    machine.write("vllm/device_allocator/__init__.py", "")
    machine.write("vllm/device_allocator/cumem.py", "raise ImportError('the other was imported')")
    printed = machine.code(
        """
        import lowtide.compat
        lowtide.compat.install_as_vllm_cumem()
        """,
        MEMORY,
        THREADS,
        """
        import torch
        torch.cuda.empty_cache = lowtide.empty_cache
        from vllm.device_allocator.cumem import CuMemAllocator, cumem_available
        from vllm.device_allocator import cumem
        allocator = CuMemAllocator.get_instance()
        assert cumem_available and cumem.CuMemAllocator is CuMemAllocator
        print(allocator.get_current_usage())
        with allocator.use_memory_pool(tag="weights"):
            weights = allocate(30 * MIB)
            with allocator.use_memory_pool(tag="kv_cache"):
                cache = allocate(40 * MIB)
        with allocator.use_memory_pool():
            unnamed = allocate(512)
        print(allocator.get_current_usage())
        write(weights, b"kept")
        write(unnamed, b"kept")
        def saved():
            return {seen["tag"]: seen["last_saved_bytes"] // 512 for seen in lowtide.regions()}
        for kept in (("weights",), "kv_cache", None, ()):
            allocator.sleep(kept)
            print(saved(), {seen["state"] for seen in lowtide.regions()})
            allocator.wake_up(["weights"])
            print(sorted(seen["tag"] for seen in lowtide.regions() if seen["state"] == "paused"))
            allocator.wake_up()
        print(allocator.get_current_usage())
        for discarded in ("kv_cache", ("weights", "never used")):
            allocator.discard(discarded)
            print(saved(), sorted(seen["tag"] for seen in lowtide.regions() if seen["state"] == "paused"))
        allocator.wake_up()
        write(weights, b"kept")
        allocator.sleep("weights")
        allocator.discard("weights")
        allocator.wake_up()
        print(read(weights, 4))
        """,
    )
    all_blocks = (70 << 20) + 512
    weights, cache = (30 << 20) // 512, (40 << 20) // 512

    def saved(*sizes: int) -> str:
        return f"{dict(zip(('weights', 'kv_cache', 'default'), sizes, strict=True))} {{'paused'}}"

    awake = "['default', 'kv_cache']"
    assert printed.splitlines() == [
        "0",
        f"{all_blocks}",
        *(saved(weights, 0, 0), awake),
        *(saved(0, cache, 0), awake),
        *(saved(0, 0, 1), awake),
        *(saved(0, 0, 0), awake),
        f"{all_blocks}",
        f"{dict.fromkeys(('weights', 'kv_cache', 'default'), 0)} ['kv_cache']",
        f"{dict.fromkeys(('weights', 'kv_cache', 'default'), 0)} ['kv_cache', 'weights']",
        "b'kept'",
    ]


def test_a_tag_of_vllm_that_fails_keeps_no_other_awake(machine: Machine) -> None:
    printed = machine.code(
        MEMORY,
        """
        import torch
        from lowtide.compat.vllm import CuMemAllocator
        cleaned = []
        torch.cuda.empty_cache = lambda: cleaned.append(True)
        allocator = CuMemAllocator.get_instance()
        # The contents of "b" cannot be kept: there is no such directory.
        lowtide.set_backup_directory("nowhere")
        for tag in ("a", "c"):
            with allocator.use_memory_pool(tag):
                allocate(512)
        allocator._tags.add("b")
        with lowtide.region("b", "disk"):
            kept = allocate(512)

        def asleep():
            return [seen["tag"] for seen in lowtide.regions() if seen["state"] == "paused"]
        print(refusal(allocator.sleep, ("a", "b", "c"))[:25], asleep(), cleaned)
        os.mkdir("nowhere")
        allocator.sleep(("a", "b", "c"))
        print(asleep())
        """,
    )
    assert printed.splitlines() == [
        "BackupError region \"b\" on ['a', 'c'] [True]",
        "['a', 'c', 'b']",
    ]


def test_what_vllm_s_allocator_is_made_of_is_an_error_that_says_what_to_do(machine: Machine) -> None:
    printed = machine.code(
        """
        import lowtide.compat
        lowtide.compat.install_as_vllm_cumem()
        import sys, types
        for name in ("vllm", "vllm.device_allocator"):
            sys.modules[name] = types.ModuleType(name)
        try:
            from vllm.device_allocator.cumem import CuMemAllocator, libcudart, unmap_and_release
        except ImportError as error:
            print(error)
        import vllm.device_allocator.cumem as cumem
        print(hasattr(cumem, "never_heard_of"))
        """
    )
    assert printed.splitlines() == [
        "lowtide has no libcudart of vllm.device_allocator.cumem, with which others replace its sleep and wake_up: "
        "leave that patch out and name tags (discard, wake_up), or take vllm out of LOWTIDE_COMPAT",
        "False",
    ]
