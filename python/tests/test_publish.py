"""What a process shows of itself: to `lowtide top`, and to Prometheus."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from machine import MEMORY, Machine

LOWTIDE = shutil.which("lowtide", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

PROGRAM = """
    with lowtide.region("kv cache", backup="host"):
        kept = allocate(5 * MIB)
    other = allocate(3 * MIB)
    lowtide.pause("kv cache")
    print("ready", flush=True)
    try:
        while input():
            free(allocate(MIB))
            print("done", flush=True)
    except EOFError:
        pass
"""


@contextmanager
def job(machine: Machine, program: str = PROGRAM, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program that allocates once for each line that it is told."""
    program = "".join(map(textwrap.dedent, (MEMORY, program)))
    environment = {**machine.environment, **variables}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=machine.directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def send_line(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("x\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def top(machine: Machine) -> dict[int, Any]:
    """Returns what `lowtide top` shows, by process."""
    assert LOWTIDE is not None
    done = machine.command(LOWTIDE, "top", "--json", "--interval", "0.05")
    assert done.returncode == 0, done.stderr
    return {process["pid"]: process for process in json.loads(done.stdout)}


def sockets(machine: Machine, process: "subprocess.Popen[str]") -> list[str]:
    """Returns the names of a process's sockets."""
    directory = Path(machine.environment["XDG_RUNTIME_DIR"], "lowtide")
    return [path.name for path in directory.glob(f"*/top-{process.pid}-*")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


def eventually(look: Callable[[], Any]) -> Any:
    """Returns the first answer that is something."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def test_top_shows_what_a_process_holds(gpu: Machine) -> None:
    with job(gpu) as first, job(gpu, LOWTIDE_STRATEGY="buddy") as second, job(gpu, LOWTIDE_PUBLISH="0") as hidden:
        send_line(first)
        shown = top(gpu)
        assert hidden.pid not in shown
        assert shown[second.pid]["config"] == "buddy"
        process = shown[first.pid]
        assert process["config"] == "tide"
        assert process["command"].startswith("python")
        (device,) = process["devices"]
        assert device["device"] == 0
        assert device["live_bytes"] == 8 << 20
        assert device["allocations"] == 3
        assert device["allocations_per_second"] == 0
        assert device["reserved_bytes"] >= device["live_bytes"]
        (region,) = device["regions"]
        assert (region["tag"], region["backup"], region["pauses"]) == ("kv cache", "host", 1)
        assert region["live_bytes"] == 5 << 20
        assert region["mapped_bytes"] == 0 < region["paused_bytes"]
        (stream,) = device["streams"]
        assert stream["stream"] == "0x0"
        assert stream["allocated_bytes"] == 8 << 20
        assert stream["reserved_bytes"] == device["reserved_bytes"]
        assert LOWTIDE is not None
        table = gpu.command(LOWTIDE, "top", "--once", "--interval", "0.05").stdout
        assert "region kv cache (host): 5.00 MiB live, 0 bytes mapped" in table
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert sockets(gpu, first)
        assert first.pid not in top(gpu)
        assert not sockets(gpu, first)
        assert second.stdin is not None
        second.stdin.close()
        second.wait()
        assert not sockets(gpu, second), "they go with the process"


def test_a_job_that_was_stopped_holds_nobody_up(gpu: Machine) -> None:
    with job(gpu) as stopped, job(gpu) as other:
        stopped.send_signal(signal.SIGSTOP)
        # Each looks twice: more often than connections may wait.
        for _ in range(12):
            shown = top(gpu)
            assert other.pid in shown
            assert stopped.pid not in shown
        stopped.send_signal(signal.SIGCONT)
        assert eventually(lambda: stopped.pid in top(gpu))


def test_the_child_of_a_fork_leaves_the_socket_alone(gpu: Machine) -> None:
    program = """
        allocate(MIB)
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        print("ready", flush=True)
        input()
    """
    with job(gpu, program) as process:
        assert process.pid in top(gpu)


def page(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text: str = answer.read().decode()
    return text


def test_metrics_are_served_to_this_machine(gpu: Machine) -> None:
    port = free_port()
    with job(gpu, LOWTIDE_METRICS=str(port)) as process:
        text = page(port)
        assert 'lowtide_requested_bytes{device="0"} 8388608\n' in text
        assert 'lowtide_allocations_total{device="0"} 2\n' in text
        assert 'lowtide_region_pauses_total{device="0",region="kv cache",backup="host"} 1\n' in text
        assert "python" not in text, "the command line is nobody's business"
        send_line(process)
        assert 'lowtide_allocations_total{device="0"} 3\n' in page(port)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            page(port, "/other")
        # Connections that say nothing hold nobody up, and least of all the job.
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        send_line(process)
        for connection in silent:
            connection.close()
        assert eventually(lambda: _served(port))


def _served(port: int) -> bool:
    try:
        return "lowtide_info" in page(port)
    except OSError:
        return False


def test_each_rank_has_a_port(gpu: Machine) -> None:
    port = free_port()
    with job(gpu, LOWTIDE_METRICS=str(port), LOCAL_RANK="1"):
        assert "lowtide_info" in page(port + 1)


def test_metrics_in_a_file_go_with_the_process(gpu: Machine) -> None:
    with job(gpu, LOWTIDE_METRICS="job.prom") as process:
        text = (gpu.directory / "job.prom").read_text()
        # What was there at the first request, whose segment is counted by then or not.
        assert f'lowtide_reserved_bytes{{pid="{process.pid}",device="0"}} ' in text
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert list(gpu.directory.iterdir()) == []


def test_the_last_process_to_write_a_file_of_metrics_wins(gpu: Machine) -> None:
    with job(gpu, LOWTIDE_METRICS="job.prom") as first, job(gpu, LOWTIDE_METRICS="job.prom") as second:
        text = (gpu.directory / "job.prom").read_text()
        written_by = {f'pid="{process.pid}"' in text for process in (first, second)}
        assert written_by == {True, False}
        assert [path.name for path in gpu.directory.iterdir()] == ["job.prom"]
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    assert list(gpu.directory.iterdir()) == []


def test_a_file_of_metrics_that_a_killed_process_left_is_replaced(gpu: Machine) -> None:
    for _ in range(2):
        with job(gpu, LOWTIDE_METRICS="job.prom") as process:
            assert f'pid="{process.pid}"' in (gpu.directory / "job.prom").read_text()
            process.kill()
            process.wait()
    assert [path.name for path in gpu.directory.iterdir()] == ["job.prom"]


def test_metrics_that_cannot_be_had_are_one_line(gpu: Machine) -> None:
    program = "".join(map(textwrap.dedent, (MEMORY, "allocate(1)\nprint('goes on')\n")))
    expectations = {
        "here": "expected a port, an address with a port like 0.0.0.0:9400, or a path that ends in .prom",
        "no/such/a.prom": "No such file or directory (os error 2)",
        "8.8.8.8:1": "Cannot assign requested address (os error 99)",
        "0": "port 0 would be any free port, which is not reported: name one from 1 to 65535",
    }
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    expectations[str(port)] = f"another process has 127.0.0.1:{port}; choose another port, or a path that ends in .prom"
    for value, why in expectations.items():
        done = gpu.run("-c", program, LOWTIDE_METRICS=value)
        assert done.stdout == "goes on\n"
        assert done.stderr == f"lowtide: no metrics: LOWTIDE_METRICS={value}: {why}\n"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_prometheus_scrapes_it(gpu: Machine) -> None:
    port, own = free_port(), free_port()
    gpu.write(
        "prometheus.yml",
        f"""
        global:
          scrape_interval: 1s
        scrape_configs:
          - job_name: lowtide
            static_configs:
              - targets: ["127.0.0.1:{port}"]
        """,
    )
    checked = gpu.command("promtool", "check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    server = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        job(gpu, LOWTIDE_METRICS=str(port)) as process,
        (gpu.directory / "log").open("w") as log,
        subprocess.Popen(
            [*server, f"--web.listen-address=127.0.0.1:{own}"], cwd=gpu.directory, stdout=log, stderr=log
        ) as prometheus,
    ):
        try:
            send_line(process)
            lint = subprocess.run(
                ["promtool", "check", "metrics"], input=page(port), capture_output=True, text=True, check=False
            )
            assert (lint.returncode, lint.stdout + lint.stderr) == (0, "")
            expected = {"lowtide_requested_bytes": 8 << 20, "lowtide_allocations_total": 3, "up": 1}
            for name, value in expected.items():
                assert eventually(partial(_query, own, name)) == value
            for expression in _dashboard_expressions():
                assert _query_status(own, expression) == "success", expression
        finally:
            prometheus.terminate()


def _dashboard_expressions() -> list[str]:
    """Returns what the dashboard asks for, with its variables filled in."""
    dashboard = Path(__file__).resolve().parents[2] / "docs/grafana/lowtide.json"
    panels = json.loads(dashboard.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 8
    return [expression.replace("$__rate_interval", "1m").replace("$instance", ".*") for expression in expressions]


def _query(port: int, expression: str) -> float | None:
    try:
        results = _answer(port, expression)["data"]["result"]
    except OSError:
        return None
    return float(results[0]["value"][1]) if results else None


def _query_status(port: int, expression: str) -> str:
    status: str = _answer(port, expression)["status"]
    return status


def _answer(port: int, expression: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)
