"""What shows itself in a notebook."""

import html.parser
import json
import re
import textwrap

from machine import MEMORY, Machine


class Reader(html.parser.HTMLParser):
    """Reads a page, whose tags must all be closed."""

    VOID = frozenset({"br", "img", "meta", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_memory_stats_show_themselves(gpu: Machine) -> None:
    program = """
        with lowtide.region("kv<script>", backup="host"):
            kept = allocate(5 * MIB)
        stats = lowtide.memory_stats()
        assert isinstance(stats, dict) and json.loads(json.dumps(stats)) == stats
        print(stats._repr_html_())
    """
    reader = read(gpu.code(MEMORY, program))
    text = " ".join(" ".join(reader.text).split())
    assert "live what the program asked for and holds 5.00 MiB 5.00 MiB" in text
    assert "kv<script> 5.00 MiB 6.00 MiB 0 bytes" in text
    assert not any(tag == "script" for tag, _ in reader.attributes)
    assert "num_ooms 0" in text


def test_memory_stats_show_pauses_and_how_fast_contents_were_copied(gpu: Machine) -> None:
    program = """
        for tag, backup in (("kept", "host"), ("dropped", None)):
            with lowtide.region(tag, backup):
                allocate(30 * MIB)
        lowtide.pause()
        lowtide.resume("dropped")
        print(lowtide.memory_stats()._repr_html_())
    """
    text = " ".join(" ".join(read(gpu.code(MEMORY, program)).text).split())
    assert "region live on the device away in the host's memory on disk pauses resumes kept" in text
    kept = r"kept 30\.00 MiB 0 bytes 30\.00 MiB 3\d\.\d\d MiB 0 bytes 1 in [\d.]+ ms, copied at [\d.]+ GB/s 0 "
    assert re.search(kept, text), text
    dropped = r"dropped 30\.00 MiB 30\.00 MiB 0 bytes 0 bytes 0 bytes 1 in [\d.]+ ms 1 in [\d.]+ ms "
    assert re.search(dropped, text), text


def test_memory_stats_of_nothing_show_themselves(gpu: Machine) -> None:
    text = " ".join(read(gpu.code("import lowtide; print(lowtide.memory_stats()._repr_html_())")).text)
    assert "reserved over live" in text


# In the place of the command: a page that says what was asked for.
COMMAND = """\
#!/usr/bin/env python3
import json, os, sys
arguments = sys.argv[1:]
if "bad" in arguments:
    sys.exit("lowtide: bad: is no recording")
with open(arguments[-1], "w") as page:
    held = [os.path.getsize(name) > 100 for name in arguments[1:-2] if os.path.exists(name)]
    page.write(f"<!doctype html><script>let a = \\"'&\\"</script><p>{json.dumps([arguments, held])}</p>")
"""

USE = """
    import os, lowtide._report
    lowtide._report.find_command = lambda: os.path.abspath("command")
"""


def test_a_report_shows_itself_where_it_reaches_nothing(gpu: Machine) -> None:
    gpu.write("command", COMMAND).chmod(0o755)
    program = """
        report = lowtide.report("a.lowtide", "b.pickle", output="out.html")
        print(report._repr_html_())
    """
    ((tag, attributes),) = read(gpu.code(MEMORY, USE, program)).attributes
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts"
    shown = attributes["srcdoc"]
    assert shown == (gpu.directory / "out.html").read_text()
    assert json.loads(shown.split("<p>")[1].removesuffix("</p>")) == [
        ["report", "a.lowtide", "b.pickle", "-o", "out.html"],
        [],
    ]


def test_a_report_may_have_any_name(gpu: Machine) -> None:
    gpu.write("command", COMMAND + "sys.stdout.buffer.write(os.fsencode(arguments[-1]))\n").chmod(0o755)
    program = """
        report = lowtide.report("a.lowtide", output=os.fsdecode(b"any" + bytes([255]) + b".html"))
        print(os.listdir(b".").count(b"any" + bytes([255]) + b".html"), len(report.path.read_text()) > 0)
    """
    assert gpu.code(MEMORY, USE, program) == "1 True\n"


def test_the_command_makes_a_page_of_what_a_process_holds(gpu: Machine) -> None:
    program = """
        kept = allocate(3 * MIB)
        report = lowtide.report()
        page = report.path.read_text()
        print("lowtide-summary" in page, "now.pickle" in page)
    """
    assert gpu.code(MEMORY, program) == "True True\n"


def test_a_process_that_holds_nothing_has_no_report(gpu: Machine) -> None:
    why = "this process has asked lowtide for no GPU memory: there is nothing to report"
    assert gpu.code(MEMORY, "print(refusal(lowtide.report))") == f"Error {why}\n"


def test_a_report_without_recordings_is_about_this_process(gpu: Machine) -> None:
    gpu.write("command", COMMAND).chmod(0o755)
    program = """
        kept = allocate(MIB)
        report = lowtide.report()
        page = report.path.read_text()
        assert "[true]" in page, page
        path = report.path
        del report
        print(path.exists())
        print(refusal(lowtide.report, "bad"))
    """
    assert gpu.code(MEMORY, USE, textwrap.dedent(program)) == "False\nError bad: is no recording\n"
