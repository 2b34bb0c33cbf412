"""The recorder, stall warnings, dumps, SIGUSR2 and the doctor."""

import contextlib
import io
import json
import os
import re
import signal
import time

import cdist
import numpy as np
import pytest
from cdist import doctor
from cdist.testing import run
from tally import Tally

HERE = os.path.basename(__file__)


def _captured_stderr(function):
    """Run with descriptor 2 in a temporary file; return (result, text)."""
    with open(os.memfd_create("stderr"), "w+") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            result = function()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return result, file.read()


def _late(rank, world):
    cdist.barrier()
    if rank == 2:
        time.sleep(1.0)
    try:
        cdist.all_reduce(np.ones(3), timeout=0.5)
    except cdist.DistTimeoutError as error:
        return str(error), error.rank
    return None


def test_a_timeout_names_who_came_and_who_did_not():
    for text, rank in run(_late, 3):
        assert "arrived ranks: [0, 1]; missing ranks: [2]" in text
        assert float(re.search(r"waited (\d+\.\d) s", text)[1]) >= 0.5
        assert "rank 2 last finished barrier 1" in text
        assert rank == 2


def _frozen(rank, world, through):
    cdist.barrier()
    through.note(rank)
    if rank == 1:
        through.wait_for(world)
        os.kill(os.getpid(), signal.SIGSTOP)
    pids = [None] * world
    pid = np.array([os.getpid()], dtype=np.int64)
    try:
        cdist.all_reduce(np.ones(3), timeout=0.5)
    except cdist.DistTimeoutError as error:
        pids = str(error)
    if rank == 0:
        victim = cdist._core._records(cdist.group.WORLD, 1, 1)["pid"]
        assert victim != pid[0]
        os.kill(victim, signal.SIGCONT)
    return pids


def test_a_frozen_rank_is_named_as_stopped():
    texts = run(_frozen, 3, Tally(), allow_failures=True)
    for rank in (0, 2):
        assert "missing ranks: [1]" in texts[rank]
        assert "its process is stopped" in texts[rank]


def _stall(rank, world):
    def body():
        cdist.barrier()
        if rank == 2:
            time.sleep(2.2)
        cdist.all_reduce(np.ones(3))
        cdist.all_reduce(np.ones(3))

    return _captured_stderr(body)[1]


def test_a_stall_is_reported_once_with_the_missing_ranks():
    """K11."""
    texts = run(_stall, 3, environ={"CDIST_STALL_SECONDS": 1})
    for rank in (0, 1):
        assert texts[rank].count("stall: all_reduce 2") == 1, texts[rank]
        assert "missing ranks: [2]" in texts[rank]
    assert "stall" not in texts[2]


def test_no_stall_is_reported_when_it_is_off():
    texts = run(_stall, 3, environ={"CDIST_STALL_SECONDS": 0})
    assert not any("stall" in text for text in texts)


def _mismatch(rank, world):
    cdist.barrier()
    try:
        if rank == 1:
            cdist.all_reduce(np.ones(4))
        else:
            cdist.all_reduce(np.ones(3))
    except cdist.MismatchError as error:
        return str(error)
    return None


def test_a_mismatch_tells_the_lines_of_the_others():
    texts = run(_mismatch, 2)
    lines = _mismatch.__code__.co_firstlineno
    assert f"rank 1 at {HERE}:{lines + 4}" in texts[0]
    assert f"rank 0 at {HERE}:{lines + 6}" in texts[1]


def _dump(rank, world, folder):
    cdist.all_reduce(np.ones(1000, dtype=np.float32), op=cdist.ReduceOp.MAX)
    work = None
    if rank == 0:
        work = cdist.isend(np.ones(2), 1)
    else:
        cdist.recv(np.ones(2), 0)
    if work:
        work.wait()
    cdist.barrier()
    with open(cdist.dump(os.path.join(folder, f"{rank}.json"))) as file:
        return json.load(file)


def test_dump(tmp_path):
    for rank, found in enumerate(run(_dump, 2, str(tmp_path))):
        assert found["rank"] == rank
        assert found["world_size"] == 2
        newest_first = found["operations"]
        assert [o["text"] for o in newest_first[:3]] == [
            "barrier 2", "send to rank 1" if rank == 0 else "recv from rank 0", "all_reduce 1"
        ]  # fmt: skip
        reduction = newest_first[2]
        assert (reduction["dtype"], reduction["reduction"], reduction["bytes"]) == ("float32", "MAX", 4000)
        assert {o["state"] for o in newest_first} == {"done"}
        assert [peer["rank"] for peer in found["peers"]] == [1 - rank]
        assert found["groups"][0]["ranks"] == [0, 1]
        assert found["groups"][0]["sequence"] == 2
        assert found["groups"][0]["broken"] is None
        main = found["threads"][0]
        assert main["main"]
        assert any(frame["function"] == "_dump" for frame in main["stack"])


def test_dump_needs_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        cdist.dump()


def _newest(rank):
    return cdist._core._records(cdist.group.WORLD, rank, 1)


def _hang(rank, world, folder):
    cdist.barrier()
    if rank == 2:
        for other in (0, 1):
            while (record := _newest(other))["operations"][0]["text"] != "all_reduce 2":
                time.sleep(0.01)
            os.kill(record["pid"], signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        while len([name for name in os.listdir(folder) if name.endswith(".json")]) < 3:
            time.sleep(0.01)
    cdist.all_reduce(np.ones(3))


def test_sigusr2_while_blocked_in_c_and_the_doctor(tmp_path):
    """K22."""
    run(_hang, 3, str(tmp_path), environ={"CDIST_DUMP_DIR": tmp_path})
    dumps = doctor.load(tmp_path)
    assert [d["rank"] for d in dumps] == [0, 1, 2]
    assert [d["operations"][0]["state"] for d in dumps] == ["running", "running", "done"]
    assert {d["reason"] for d in dumps} == {"SIGUSR2"}
    found = doctor.diagnose(dumps)
    assert found["rank"] == 2
    assert "rank 2 is missing from all_reduce 2" in found["verdict"]
    assert f"{HERE}:" in found["verdict"]
    assert "_hang" in found["verdict"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert doctor.main([str(tmp_path)]) == 0
    assert "at fault: rank 2 is missing" in out.getvalue()
    page = (tmp_path / "doctor.html").read_text()
    assert "rank 2 is missing from all_reduce 2" in page
    assert page.count("class=lane") == 3


def test_doctor_on_an_empty_folder(tmp_path, capsys):
    (tmp_path / "junk.json").write_text("[1, 2")
    (tmp_path / "other.json").write_text("[1, 2]")
    assert doctor.main([str(tmp_path)]) == 2
    assert "no dumps" in capsys.readouterr().err


def _timeout_dump(rank, world):
    store = cdist.group.WORLD.get_group_store()
    cdist.barrier()
    if rank == 1:
        store.get("over")
    with contextlib.suppress(cdist.DistTimeoutError):
        cdist.all_reduce(np.ones(3), timeout=0.3)
    store.set("over", "")


def test_a_timeout_writes_a_dump(tmp_path):
    run(_timeout_dump, 2, environ={"CDIST_DUMP_DIR": tmp_path})
    dumps = doctor.load(tmp_path)
    assert [d["rank"] for d in dumps] == [0, 1]
    assert "DistTimeoutError" in dumps[0]["reason"]
    assert doctor.diagnose(dumps)["rank"] == 1


def _handlers(rank, world):
    during = signal.getsignal(signal.SIGUSR2)
    cdist.destroy_process_group()
    return during != signal.SIG_DFL, signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_the_handler_is_there_only_while_a_group_is():
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert run(_handlers, 2) == [(True, True)] * 2


def _own_handler(rank, world, store):
    signal.signal(signal.SIGUSR2, print)
    cdist.init_process_group(store=cdist.HashStore(), rank=0, world_size=1)
    kept = signal.getsignal(signal.SIGUSR2) is print
    cdist.destroy_process_group()
    return kept and signal.getsignal(signal.SIGUSR2) is print


def test_a_handler_of_the_program_stays():
    assert run(_own_handler, 1, None, init=False) == [True]
