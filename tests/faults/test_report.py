"""What the launcher says when a job dies: the doctor's table, the rank and the line, the traceback last."""

import os
import re
import subprocess
import sys

import cdist
import pytest

PYTHON = os.path.dirname(os.path.dirname(cdist.__file__))
PROGRAM = """
import os, sys, time
import numpy as np
import cdist

cdist.init_process_group()
for step in range(8):
    if cdist.get_rank() == 1 and step == 5:
        {what}
    cdist.all_reduce(np.ones(10), timeout=2)
cdist.destroy_process_group()
"""
LINE = PROGRAM.split("\n").index("        {what}") + 1


def _launch(tmp_path, what, *options, **environ):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.format(what=what))
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "cdist.run", "--nproc-per-node", "3", *options, str(path)]
    env = dict(os.environ, PYTHONPATH=PYTHON, TMPDIR=str(tmp_path / "tmp"), **environ)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert os.listdir(tmp_path / "tmp") == []
    return done


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("raise ValueError('no good')", rf"rank 1 ended with ValueError: no good, at train.py:{LINE} in .*"),
        # The line stands there if rank 1 waited long enough in operation 5 to say where it is.
        (
            "os.kill(os.getpid(), 9)",
            rf"rank 1 is gone; its last operation was all_reduce 5 \(done\)(, at train.py:{LINE + 1})?",
        ),
        ("time.sleep(60)", rf"rank 1 is missing from all_reduce 6: .*, at train.py:{LINE} in <module>"),
        ("os.kill(os.getpid(), 19)", r"rank 1 .*its process is stopped\)"),
    ],
)
def test_the_table_points_at_rank_and_line(tmp_path, what, fault):
    done = _launch(tmp_path, what)
    assert done.returncode != 0
    report = done.stderr[done.stderr.index("cdistrun: what the ranks were at:") :]
    assert re.search(rf"^at fault: {fault}$", report, re.MULTILINE), report
    assert re.search(r"^2 +\d+ +dump +all_reduce [56] (failed|done) +train.py:", report, re.MULTILINE)
    if "ValueError" in what:
        assert report.endswith("ValueError: no good\n")


def test_nothing_is_said_when_nothing_is_wrong(tmp_path):
    done = _launch(tmp_path, "pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dumps_and_timeline_stay_where_they_were_asked_for(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    done = _launch(tmp_path, "raise ValueError('no good')", CDIST_DUMP_DIR=str(kept))
    assert f"timeline: {kept}/doctor.html" in done.stderr
    assert "rank 1 ended with ValueError" in (kept / "doctor.html").read_text()
    assert len(list(kept.glob("*.json"))) == 3
