"""Regions, by memory that was asked for through C: on the stand-in driver it can be read and written while mapped."""

import json
from pathlib import Path
from sysconfig import get_path

import pytest
from machine import MEMORY, Machine


def test_contents_come_back_as_the_region_keeps_them(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        lowtide.set_backup_directory(os.getcwd())
        blocks, contents = {}, {}
        for backup in (None, "host", "disk"):
            with lowtide.region("weights", backup):
                blocks[backup] = [allocate(size) for size in (512, 3 * MIB, 40 * MIB)]
            contents[backup] = [os.urandom(size) for size in (512, 3 * MIB, 40 * MIB)]
            for memory, content in zip(blocks[backup], contents[backup]):
                write(memory, content)
        for _ in range(3):
            lowtide.pause("weights")
            states = {seen["backup"]: seen["state"] for seen in lowtide.regions()}
            lowtide.resume("weights")
            for backup in ("host", "disk"):
                for memory, content in zip(blocks[backup], contents[backup]):
                    assert read(memory, len(content)) == content, backup
            for memory, content in zip(blocks[None], contents[None]):
                # They may be written, and what they hold is anybody's guess.
                write(memory, content)
        print(states)
        """,
    )
    assert printed == "{None: 'paused', 'host': 'paused', 'disk': 'paused'}\n"


def test_regions_nest_and_can_be_left(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        with lowtide.region("a"):
            allocate(1000)
            with lowtide.region("b", "host"), lowtide.region("b", "host"):
                allocate(2000)
                with lowtide.disable():
                    allocate(4000)
            allocate(8000)
        allocate(16000)
        print(live())
        print(lowtide.memory_stats(0)["allocated_bytes.all.current"])
        """,
    )
    assert printed == "{('a', None): 9216, ('b', 'host'): 2048}\n31744\n"


def test_a_function_can_be_in_a_region_and_a_region_used_again(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        region = lowtide.region("cache")

        @region
        def make(depth):
            allocate(512)
            if depth:
                make(depth - 1)
            return depth

        print(make(2))
        with region:
            allocate(512)
        allocate(512)
        print(live())
        """,
    )
    assert printed == "2\n{('cache', None): 2048}\n"


def test_regions_are_left_in_any_order(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        def steps(tag, size):
            with lowtide.region(tag):
                yield
                allocate(size)
                yield

        first, second = steps("a", 512), steps("b", 1024)
        next(first), next(second)
        first.close()
        next(second)
        print(live())
        third = steps("c", 512)
        next(third)
        thread = threading.Thread(target=lambda: print(refusal(third.close)))
        thread.start()
        thread.join()
        """,
    )
    assert printed == "{('b', None): 1024}\nError a region is left by the thread that entered it\n"


def test_a_child_that_was_forked_inside_leaves_in_peace(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        with lowtide.region("a"):
            allocate(512)
            child = os.fork()
        if child == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert printed == "7\n"


def test_each_thread_is_in_regions_of_its_own(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        inside, outside = threading.Barrier(3), threading.Barrier(3)

        def work(name, size):
            with lowtide.region(name):
                inside.wait()
                allocate(size)
                outside.wait()

        threads = [threading.Thread(target=work, args=work_of) for work_of in (("a", 512), ("b", 1024))]
        for thread in threads:
            thread.start()
        inside.wait()
        allocate(2048)
        outside.wait()
        for thread in threads:
            thread.join()
        print(sorted(live().items()))
        """,
    )
    assert printed == "[(('a', None), 512), (('b', None), 1024)]\n"


def test_what_is_paused_is_not_handed_out_and_can_be_freed(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        region = lowtide.region("kv", "host")
        with region:
            kept, freed = allocate(30 * MIB), allocate(30 * MIB)
        write(kept, b"kept")
        lowtide.pause("kv")
        with region:
            print(refusal(allocate, 512))
        allocate(512)
        free(freed)
        lowtide.pause("kv")
        lowtide.resume()
        lowtide.resume("kv")
        (seen,) = lowtide.regions()
        print(read(kept, 4), seen["mapped_bytes"] // MIB, seen["pauses"], seen["resumes"])
        with region:
            allocate(30 * MIB)
        """,
    )
    assert printed == ("PausedError region \"kv\" is paused: resume it before allocating in it\nb'kept' 30 1 1\n")


def test_a_tag_that_no_region_has_is_an_error(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        with lowtide.region("weights"):
            allocate(512)
        for act in (lowtide.pause, lowtide.resume):
            print(refusal(act, "weihgts"))
        lowtide.pause("weights")
        lowtide.resume("weights")
        """,
    )
    for line in printed.splitlines():
        assert line.startswith("Error ")
        assert "weihgts" in line
        assert '"weights"' in line
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("lowtide.region('a', 'ram')", 'a backup is None, "host" or "disk", not \'ram\''),
        ("lowtide.region('')", "a tag has characters, none of them zero: not ''"),
        ("lowtide.region(None)", "a tag is a text: not None"),
        ("lowtide.region(7)", "a tag is a text: not 7"),
        ("lowtide.cuda_graph(None, tag=None).__enter__()", "a tag is a text: not None"),
        ("lowtide.pause(5)", "a tag is a text: not 5"),
        ("lowtide.pause('a\\0b')", "a tag has characters, none of them zero: not 'a\\x00b'"),
    ],
)
def test_arguments_that_are_none(gpu: Machine, call: str, expected: str) -> None:
    printed = gpu.code(
        f"""
        import lowtide
        try:
            {call}
        except (TypeError, ValueError) as error:
            print(error)
        """
    )
    assert printed == f"{expected}\n"


def test_figures_are_with_those_of_the_device_and_in_the_snapshot(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        for backup in (None, "host"):
            with lowtide.region("kv", backup):
                allocate(30 * MIB)
        with lowtide.region("kv"):
            allocate(30 * MIB, device=1)
        lowtide.pause()
        for device in (0, 1):
            figures = lowtide.memory_stats(device)
            print(json.dumps({key: value for key, value in figures.items() if key.startswith("region.")}))
        snapshot = lowtide.snapshot()
        print(json.dumps(snapshot["regions"]))
        print(json.dumps(snapshot["pauses"]))
        lowtide.dump_snapshot("held.pickle")
        """,
        FAKECUDA_DEVICES="2",
    )
    figures, dropped, regions, pauses = (json.loads(line) for line in printed.splitlines())
    mib = 1 << 20
    assert figures["region.kv.live_bytes"] == figures["region.kv.paused_bytes"] == 60 * mib
    assert figures["region.kv.mapped_bytes"] == figures["region.kv.disk_bytes"] == 0
    assert figures["region.kv.saved_bytes"] == figures["region.kv.last_saved_bytes"] == 30 * mib
    assert figures["region.kv.host_bytes"] >= 30 * mib
    assert figures["region.kv.pauses"] == 2
    assert 0 < figures["region.kv.last_pause_ns"] <= figures["region.kv.pause_ns"]
    assert 0 < figures["region.kv.save_ns"] < figures["region.kv.pause_ns"]
    # What took place beside the copying does not count.
    for copy in ("region.kv.saved", "region.kv.last_saved"):
        save_ns = figures[copy.replace("saved", "save_ns")]
        assert figures[f"{copy}_bytes_per_second"] == 30 * mib * 10**9 // save_ns
    assert figures["region.kv.restored_bytes_per_second"] == 0
    assert dropped["region.kv.pause_ns"] > 0
    assert dropped["region.kv.saved_bytes_per_second"] == 0
    assert [(seen["tag"], seen["device"], seen["backup"], seen["state"]) for seen in regions] == [
        ("kv", 0, None, "paused"),
        ("kv", 1, None, "paused"),
        ("kv", 0, "host", "paused"),
    ]
    speeds = [seen["saved_bytes_per_second"] > 0 for seen in regions]
    assert speeds == [seen["backup"] == "host" for seen in regions]
    events = [(paused["device"], paused["event"]) for paused in pauses]
    assert sorted((device, event["user_metadata"], event["size"]) for device, event in events) == [
        (0, "kv", 30 * mib),
        (0, "kv", 30 * mib),
        (1, "kv", 30 * mib),
    ]
    command = str(Path(get_path("scripts")) / "lowtide")
    done = gpu.command(command, "convert", "held.pickle", "held.lowtide")
    assert done.stdout.startswith("held.lowtide: 0 events of "), done


def test_a_backup_that_cannot_be_kept_loses_nothing(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        with lowtide.region("weights", "disk"):
            memory = allocate(30 * MIB)
        write(memory, b"kept")
        lowtide.set_backup_directory("no-such-directory")
        print(refusal(lowtide.pause))
        print(read(memory, 4), lowtide.regions()[0]["state"])
        lowtide.set_backup_directory(os.getcwd())
        lowtide.pause()
        lowtide.resume()
        print(read(memory, 4))
        """,
    )
    refused, held, again = printed.splitlines()
    assert refused.startswith("BackupError ")
    assert "no-such-directory" in refused
    assert held == "b'kept' mapped"
    assert again == "b'kept'"


def test_a_card_that_is_full_at_a_resume_is_told_from_other_failures(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        for tag in ("a", "b"):
            with lowtide.region(tag, "host"):
                memory = allocate(60 * MIB)
        write(memory, b"kept")
        lowtide.pause()
        taken = allocate(60 * MIB)
        print(refusal(lowtide.resume))
        print({seen["tag"]: seen["state"] for seen in lowtide.regions()})
        free(taken)
        lowtide.resume()
        print(read(memory, 4))
        """,
        FAKECUDA_CAPACITY=str(150 << 20),
    )
    refused, states, again = printed.splitlines()
    assert refused.startswith('OutOfMemoryError region "b" on device 0: ')
    # What had room is back, and stays.
    assert states == "{'a': 'mapped', 'b': 'paused'}"
    assert again == "b'kept'"


def test_the_host_s_memory_is_retained_as_asked(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        """
        with lowtide.region("weights", "host"):
            allocate(30 * MIB)
        lowtide.retain_backups()
        for _ in range(2):
            lowtide.pause()
            lowtide.resume()
        print(lowtide.regions()[0]["host_bytes"] >= 30 * MIB)
        lowtide.release_backups()
        lowtide.retain_backups(False)
        lowtide.pause()
        lowtide.resume()
        print(lowtide.regions()[0]["host_bytes"])
        """,
    )
    assert printed == "True\n0\n"


def test_a_region_of_another_allocator_s_memory_is_refused(machine: Machine) -> None:
    printed = machine.code(
        MEMORY,
        """
        import torch
        def enter():
            with lowtide.region("a"):
                pass
        print(refusal(enter))
        lowtide.install()
        enter()
        """,
    )
    assert printed == (
        "Error lowtide is not PyTorch's allocator, so a region would hold nothing: call lowtide.install() before "
        "anything is on the GPU, or start the script by `lowtide run`, and install no other after it\n"
    )


# As much of a tensor on the card as its backup is found by.
TENSOR = """
    from types import SimpleNamespace
    import torch
    # The real one serves this, and no card.
    lowtide._install._is_installed = True

    def tensor_at(memory, of_bytes, like):
        storage = SimpleNamespace(data_ptr=lambda: memory, nbytes=lambda: of_bytes)
        return SimpleNamespace(
            untyped_storage=lambda: storage, dtype=like.dtype, size=like.size, stride=like.stride,
            storage_offset=like.storage_offset, is_conj=like.is_conj, is_neg=like.is_neg,
        )
"""


def test_a_backup_is_read_as_the_tensor_that_it_is_of(gpu: Machine) -> None:
    pytest.importorskip("torch")
    printed = gpu.code(
        MEMORY,
        TENSOR,
        """
        whole = torch.arange(6000, dtype=torch.int32)
        # Every second column of some rows.
        view = whole.reshape(60, 100)[10:50, 1::2]
        with lowtide.region("weights", "host"):
            memory, next_memory = allocate(24000), allocate(24000)
        write(memory, whole.numpy().tobytes())
        tensor = tensor_at(memory, 24000, view)
        print(refusal(lowtide.get_backup, tensor))
        lowtide.pause()
        backup = lowtide.get_backup(tensor)
        print(backup.dtype, tuple(backup.shape), backup.stride() == view.stride(), torch.equal(backup, view))
        print(backup.untyped_storage().data_ptr() == lowtide.get_backup(tensor).untyped_storage().data_ptr())
        lowtide.retain_backups()
        lowtide.resume()
        write(memory, bytes(24000))
        print(torch.equal(lowtide.get_backup(tensor), view))
        lowtide.release_backups()
        print(refusal(lowtide.get_backup, tensor))
        """,
    )
    nothing = (
        'Error there is no copy: the tensor is not in a region with the backup "host" that is paused, '
        "or retained a copy"
    )
    assert printed.splitlines() == [nothing, "torch.int32 (40, 50) True True", "True", "True", nothing]


# What captures do with an allocator, without a device: the thread's requests go to the pool of the graph.
CAPTURES = """
    import torch
    from contextlib import contextmanager
    from types import SimpleNamespace
    from lowtide._library import Mempool
    lowtide.install()
    cleared, pools = [], iter(range(7, 100))

    @contextmanager
    def capture(graph, pool, stream, capture_error_mode):
        graph.pool = Mempool(*pool)
        check(library().lowtide_begin_allocate_to_pool(0, graph.pool, None, None, None))
        yield
        check(library().lowtide_end_allocate_to_pool(0, graph.pool))

    torch.cuda.graph = capture
    torch.cuda.graph_pool_handle = lambda: (0, next(pools))
    torch.cuda.current_device = lambda: 0
    torch._C = SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: cleared.append(live()))
    library().lowtide_pool_use_count.argtypes = [ctypes.c_int, Mempool, ctypes.POINTER(ctypes.c_int)]

    def uses(pool):
        count = ctypes.c_int()
        check(library().lowtide_pool_use_count(0, Mempool(*pool), ctypes.byref(count)))
        return count.value
"""


def test_the_pool_of_a_graph_is_a_region(machine: Machine) -> None:
    printed = machine.code(
        MEMORY,
        CAPTURES,
        """
        graph = SimpleNamespace()
        with lowtide.cuda_graph(graph, tag="graphs", backup="host"):
            memory = allocate(30 * MIB)
        outside = allocate(512)
        write(memory, b"kept")
        print(live(), len(cleared), uses((0, 7)))
        # Another of the same pool, and one whose capture fails.
        with lowtide.cuda_graph(SimpleNamespace(), pool=(0, 7), tag="graphs", backup="host"):
            allocate(30 * MIB)
        print(live(), uses((0, 7)))
        lowtide.pause("graphs")
        lowtide.resume("graphs")
        print(read(memory, 4))
        def refused():
            with lowtide.cuda_graph(SimpleNamespace(), pool=(0, 7), tag="others"):
                pass
        print(refusal(refused) is not None, uses((0, 7)))
        """,
    )
    assert printed.splitlines() == [
        f"{{('graphs', 'host'): {30 << 20}}} 2 1",
        f"{{('graphs', 'host'): {60 << 20}}} 2",
        "b'kept'",
        "True 2",
    ]


def test_memory_of_the_host_that_a_resume_leaves_is_counted(gpu: Machine) -> None:
    program = """
        with lowtide.region("kv", backup="host"):
            held = allocate(20 * MIB)
        def kept():
            (region,) = lowtide.regions()
            return region["host_bytes"], lowtide.memory_stats(0)["kept_host_bytes"]
        before = kept()
        lowtide.pause()
        lowtide.resume()
        after = kept()
        lowtide.release_backups()
        print(json.dumps([before, after, kept()]))
    """
    before, (host_bytes, kept), released = json.loads(gpu.code(MEMORY, program))
    assert before == released == [0, 0]
    assert host_bytes == 0
    assert kept >= 20 << 20
