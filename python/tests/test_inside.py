"""What a thread is in, whatever ends it, and whenever."""

import pytest
from machine import ALIAS, MEMORY, Machine

REGIONS = {
    "lowtide": "from lowtide import region",
    "torch_memory_saver": "from torch_memory_saver import torch_memory_saver as saver; region = saver.region",
}

# Makes a generator that leaves its region when it is collected.
GARBAGE = """\
def body():
    with region("garbage"):
        yield

def make_garbage():
    generator = body()
    next(generator)
    cycle = [generator]
    cycle.append(cycle)
"""

# Has something happen at the numbered line that lowtide's Python runs from then on, and says whether it came to that.
AT_LINE = """
    import gc, itertools, sys

    class AtLine:
        def __init__(self, number, act):
            self.left, self.act = number, act

        def __call__(self, frame, event, argument):
            if "lowtide" not in frame.f_code.co_filename:
                return None
            if event == "line":
                self.left -= 1
                if self.left == 0:
                    self.act()
            return self

        def __enter__(self):
            sys.settrace(self)
            return self

        def __exit__(self, *error):
            sys.settrace(None)
"""


@pytest.mark.parametrize("package", REGIONS)
def test_a_generator_that_is_collected_leaves_its_region_at_any_time(machine: Machine, package: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        AT_LINE,
        f"{REGIONS[package]}\n",
        GARBAGE,
        """\
gc.disable()
for number in itertools.count(1):
    entering, leaving = region("a"), region("b")
    make_garbage()
    with AtLine(number, gc.collect) as first:
        entering.__enter__()
    gc.collect()
    allocate(512)
    entering.__exit__(None, None, None)
    leaving.__enter__()
    make_garbage()
    with AtLine(number, gc.collect) as second:
        leaving.__exit__(None, None, None)
    gc.collect()
    allocate(1024)
    if first.left > 0 and second.left > 0:
        break
print(number > 20, {tag: size for (tag, _), size in live().items() if size} == {"a": 512 * number})
""",
    )
    assert printed == "True True\n"


@pytest.mark.parametrize("package", REGIONS)
def test_what_another_thread_entered_is_no_matter_of_who_collects_it(machine: Machine, package: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        AT_LINE,
        f"{REGIONS[package]}\n",
        GARBAGE,
        """\
sys.unraisablehook = lambda raised: print(raised.exc_value) if number == 1 else None
gc.disable()
for number in itertools.count(1):
    thread = threading.Thread(target=make_garbage)
    thread.start()
    thread.join()
    with AtLine(number, gc.collect) as lines:
        with region("a"):
            allocate(512)
    gc.collect()
    allocate(1024)
    if lines.left > 0:
        break
print(number > 20, {tag: size for (tag, _), size in live().items() if size} == {"a": 512 * number})
""",
    )
    assert printed == "a region is left by the thread that entered it\nTrue True\n"


def test_the_end_of_the_stack_is_an_error_and_ends_regions(machine: Machine) -> None:
    printed = machine.code(
        MEMORY,
        """
        import sys

        def deeper(frames):
            # Each level has the end of the stack somewhere else.
            if frames:
                deeper(frames - 1)
            with lowtide.region("a"):
                deeper(7)

        sys.setrecursionlimit(300)
        for frames in range(8):
            try:
                deeper(frames)
            except (RecursionError, ctypes.ArgumentError):
                allocate(1024)
        with lowtide.region("b"):
            allocate(512)
        print({tag: size for (tag, _), size in live().items() if size})
        """,
    )
    assert printed == f"{ {'b': 512} }\n"


def test_an_error_on_the_way_leaves_nothing_behind(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        """
        import torch
        from contextlib import nullcontext
        from torch_memory_saver import torch_memory_saver as saver

        def refused(*arguments):
            raise RuntimeError("no pool")

        torch.cuda.MemPool, torch.cuda.current_device = object, lambda: 0
        torch.cuda.use_mem_pool = lambda pool, device: nullcontext()

        def within(context):
            with context:
                yield

        def enter(context):
            generator = within(context)
            next(generator)
            return generator

        first, out, second = enter(saver.region("a")), enter(saver.disable()), enter(saver.region("b"))
        torch.cuda.use_mem_pool = refused
        try:
            first.close()
        except RuntimeError as error:
            print(error)
        # Those that were entered again are.
        allocate(512)
        second.close()
        try:
            with saver.region("c"):
                with saver.disable():
                    pass
        except RuntimeError as error:
            print(error)
        out.close()
        allocate(1024)
        with saver.region("d"):
            allocate(2048)
        print({tag: size for (tag, _), size in live().items() if size})
        """,
    )
    assert printed.splitlines() == ["no pool", "no pool", str({"b": 512, "d": 2048})]


@pytest.mark.parametrize("package", REGIONS)
def test_a_child_of_a_fork_leaves_in_any_order(machine: Machine, package: str) -> None:
    machine.write(
        "script.py",
        f"""
        import os, lowtide.compat, lowtide._library as c
        lowtide.compat.install_as_torch_memory_saver()
        {REGIONS[package]}

        def body(tag):
            with region(tag):
                yield

        c.library().lowtide_allocate(512, 0, None, c.ctypes.byref(c.ctypes.c_void_p()))
        first, second = body("a"), body("b")
        next(first), next(second)
        child = os.fork()
        if child == 0:
            first.close()
            second.close()
            try:
                next(body("c"))
            except lowtide.Error as error:
                print(str(error).partition(",")[0])
            else:
                print("entered")
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """,
    )
    done = machine.run("-u", "script.py")
    assert done.stdout == "this process was forked from one that had started CUDA\n0\n"
    reported = [line for line in done.stderr.splitlines() if "shim" not in line]
    assert len(reported) <= 1, reported
