"""What is written down here of lowtide.h says what lowtide.h says."""

import ctypes
import re

from lowtide import _library


def header() -> str:
    return (_library.INCLUDE / "lowtide.h").read_text()


def test_the_version_is_that_of_the_header() -> None:
    found = re.search(r"#define LOWTIDE_ABI_VERSION (\d+)", header())
    assert found is not None
    assert int(found[1]) == _library.ABI_VERSION


def test_every_status_is_known() -> None:
    found = re.findall(r"^  LOWTIDE_STATUS_(\w+) = (\d+),$", header(), re.MULTILINE)
    assert {name: int(value) for name, value in found} == {status.name: status for status in _library.Status}


def test_every_function_takes_what_the_header_says() -> None:
    text = re.sub(r"/\*.*?\*/", "", header(), flags=re.DOTALL)
    for name, (result, arguments) in _library._FUNCTIONS.items():
        found = re.search(rf"^([\w ]+[ *]){name}\((.*?)\);", text, re.DOTALL | re.MULTILINE)
        assert found is not None, name
        declared = [] if found[2] == "void" else found[2].split(",")
        assert [kind_of_c(argument) for argument in declared] == [kind(type_) for type_ in arguments], name
        assert kind_of_c(found[1]) == kind(result), name


def kind_of_c(declaration: str) -> str:
    """Returns what a declaration in C is passed as."""
    words = declaration.replace("const ", "").split()
    if "lowtide_mempool" in words:
        return "mempool"
    # Our function types are pointers.
    if "*" in declaration or words[0].startswith("lowtide_"):
        return "pointer"
    return {"enum": "int", "uint32_t": "uint32"}.get(words[0], words[0])


def kind(type_: object) -> str:
    """Returns what ctypes passes a type as."""
    named = {
        None: "void",
        ctypes.c_double: "double",
        ctypes.c_int: "int",
        ctypes.c_size_t: "size_t",
        ctypes.c_uint32: "uint32",
        _library.Mempool: "mempool",
    }
    return named.get(type_, "pointer")  # type: ignore[call-overload, no-any-return]
