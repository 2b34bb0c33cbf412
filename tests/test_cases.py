"""Every case of the list of public reports that this library was made against (K and a number) is a test.

A case's number stands in the docstring, in the name or beside its test, so that it can be found. Cases that
cannot be a test here say why. A section is the subject that its cases have in common.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SECTIONS = {
    "hangs instead of errors": [1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29],
    "store: scale, threads, keys, timeouts": [73, 74, 76, 77, 79, 80, 82, 83, 85, 86],
    "teardown, re-initialisation, abort": [88, 89, 91, 92, 94, 95],
    "security": [172, 173, 175, 176],
    "gradient reducer": [139, 140, 142, 143, 145, 146, 148, 149, 151, 152, 154, 155],
    "samplers": [157, 158, 160, 161],
    "ports, rendezvous, hostnames, interfaces": [31, 32, 34, 35, 37, 38, 40, 41, 43, 44, 46, 47],
    "large, empty and oddly shaped data": [49, 50, 52, 53, 55, 56, 58, 59, 61, 62],
    "dtypes and reduction semantics": [64, 65, 67, 68, 70, 71],
    "object collectives": [97, 98, 100, 101],
    "point-to-point": [103, 104, 106, 107, 109, 110],
    "subgroups and rank translation": [112, 113, 115, 116, 118],
    "processes": [119, 121, 122, 124, 125, 127, 128, 130, 131, 133, 134, 136, 137],
    "performance, threads, affinity, shared memory": [163, 164, 166, 167, 169, 170],
}

# What is no test of this suite, and why.
ELSEWHERE = {
    163: "a matter of time: benchmarks/collectives.py sets every size beside Gloo and Open MPI",
    164: "a matter of time: benchmarks/collectives.py",
}


def _found():
    paths = [path for path in TESTS.rglob("*") if path.suffix in (".py", ".c", ".h")]
    texts = [path.read_text() for path in paths if path.name != Path(__file__).name]
    return {int(number) for text in texts for number in re.findall(r"\bK(\d{2,3})\b", text)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_case_has_a_test(section):
    missing = set(SECTIONS[section]) - _found() - set(ELSEWHERE)
    assert not missing


def test_reasons_are_for_cases_that_have_no_test():
    numbers = {number for section in SECTIONS.values() for number in section}
    assert set(ELSEWHERE) <= numbers
    assert not set(ELSEWHERE) & _found()
