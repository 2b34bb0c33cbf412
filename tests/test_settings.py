"""The README's table of settings is the code's, and the code reads no setting that is not in it."""

import re
from pathlib import Path

import cdist.settings

ROOT = Path(__file__).parent.parent


def test_readme_table():
    text = (ROOT / "README.md").read_text()
    assert cdist.settings.table() in text


def test_every_setting_that_is_read_has_a_row():
    known = {name for name, _, _ in cdist._core.settings()}
    read = set()
    for path in [*(ROOT / "csrc").rglob("*.[ch]"), *(ROOT / "python").rglob("*.py")]:
        read |= set(re.findall(r'"(CDIST_[A-Z_]+)"', path.read_text()))
    assert read <= known
