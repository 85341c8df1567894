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


def test_a_region_is_what_the_header_says() -> None:
    text = re.sub(r"/\*.*?\*/", "", header(), flags=re.DOTALL)
    found = re.search(r"typedef struct lowtide_region \{(.*?)\}", text, re.DOTALL)
    assert found is not None
    declared = [field.replace("*", "* ").rsplit(maxsplit=1) for field in found[1].split(";") if field.strip()]
    ours = [(name, kind(type_)) for name, type_ in _library.Region._fields_]
    assert [(name, kind_of_c(type_)) for type_, name in declared] == ours


def kind_of_c(declaration: str) -> str:
    """Returns what a declaration in C is passed as."""
    words = declaration.replace("const ", "").split()
    if "lowtide_mempool" in words:
        return "mempool"
    # Our function types are pointers.
    if "*" in declaration or words[0].startswith("lowtide_"):
        return "pointer"
    return {"enum": "int", "uint32_t": "uint32", "uint64_t": "uint64", "size_t": "uint64"}.get(words[0], words[0])


def kind(type_: object) -> str:
    """Returns what ctypes passes a type as."""
    named = {
        None: "void",
        ctypes.c_bool: "bool",
        ctypes.c_double: "double",
        ctypes.c_int: "int",
        ctypes.c_uint32: "uint32",
        ctypes.c_uint64: "uint64",
        _library.Mempool: "mempool",
    }
    return named.get(type_, "pointer")  # type: ignore[call-overload, no-any-return]
