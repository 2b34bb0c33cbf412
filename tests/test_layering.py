"""The rooms of csrc/ depend on each other in one direction only; `#include "room/…"` is the evidence."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"

# What each room may include besides itself. Everything may include base.
MAY_INCLUDE = {
    "base": set(),
    "simd": {"base"},
    "net": {"base"},
    "shm": {"base", "simd"},
    "store": {"base", "net"},
    "sampler": {"base"},
    "cuda": {"base"},
    "coll": {"base", "simd", "net", "shm"},
    "backend": {"base", "simd", "net", "shm", "coll", "cuda"},
    "group": {"base", "simd", "net", "shm", "coll", "backend", "store"},
    "ddp": {"base", "simd", "shm", "backend", "group"},
    "py": {"base", "simd", "net", "shm", "store", "sampler", "cuda", "coll", "backend", "group", "ddp"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z]+)/', re.MULTILINE)
SYSTEM = re.compile(r"^\s*#\s*include\s+<([^>]+)>", re.MULTILINE)


def sources(room):
    return sorted((CSRC / room).glob("*.[ch]")) + sorted((CSRC / room).glob("*.cu"))


def test_the_table_names_every_room():
    rooms = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert rooms == set(MAY_INCLUDE)


@pytest.mark.parametrize("room", sorted(MAY_INCLUDE))
def test_room_includes_only_what_it_may(room):
    allowed = MAY_INCLUDE[room] | {room}
    wrong = [
        f"{path.relative_to(CSRC)} includes {target}/"
        for path in sources(room)
        for target in INCLUDE.findall(path.read_text())
        if target not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("room", sorted(set(MAY_INCLUDE) - {"py"}))
def test_only_py_knows_python(room):
    wrong = [
        str(path.relative_to(CSRC))
        for path in sources(room)
        if any(name.startswith(("Python.h", "numpy/")) for name in SYSTEM.findall(path.read_text()))
    ]
    assert not wrong
