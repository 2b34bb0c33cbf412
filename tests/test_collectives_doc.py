"""docs/collectives.md says what cdist.supports and the plan table say."""

import re
from pathlib import Path

import cdist

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "collectives.md").read_text()


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_table_of_legal_pairs():
    table = TEXT.split("<!-- legal pairs -->")[1].split("<!-- end of legal pairs -->")[0].strip().splitlines()
    ops = cells(table[0])[1:]
    told = {}
    for line in table[2:]:
        dtypes, *answers = cells(line)
        for dtype in dtypes.split(", "):
            told.update({(op, dtype): answer == "yes" for op, answer in zip(ops, answers, strict=True)})
    names = re.findall(r'\] = \{"(\w+)", ', (ROOT / "csrc" / "base" / "dtype.c").read_text())
    assert {dtype for _, dtype in told} == set(names) - {"bytes"}
    assert told == {(op, dtype): cdist.supports(getattr(cdist.ReduceOp, op), dtype) for op, dtype in told}


def test_every_algorithm_is_told():
    plan = (ROOT / "csrc" / "coll" / "plan.c").read_text()
    names = set(re.findall(r'\{CD_\w+, .*"(\w+)", cd_\w+_run\}', plan))
    assert len(names) > 3
    assert names == set(re.findall(r"`((?:shm|net)_(?!run)\w+)`", TEXT))
