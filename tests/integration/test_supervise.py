"""Real processes: however the flow or the guard ends, nothing of a team is left."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from flows.run.commands import FEEDER, GENERATOR, Worker
from flows.run.request import LastingFailure
from flows.run.supervision import RunProcesses
from infra.supervise import guard
from infra.supervise.team import GuardDied, SuperviseError, Team
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# A worker with a child in a session of its own, which nobody but the guard can find when the worker is gone.
WORKER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(3600)
"""

STUBBORN = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(3600)"
)

HOLDER = """
import json, sys
from pathlib import Path
from infra.supervise.team import Team
with Team(Path(sys.argv[1]), grace_s=1.0) as team:
    for name in ("one", "two"):
        team.start(name, [sys.executable, "-c", sys.argv[2]])
    print(json.dumps({"guard": team.guard_pid, **team.running}), flush=True)
    while True:
        team.poll(1.0)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def pids_told_by(log: Path) -> list[int]:
    """The worker's own process id and its child's, as it printed them."""
    words: list[str] = []

    def told() -> bool:
        words[:] = log.read_text().split() if log.exists() else []
        return len(words) == 2

    wait_until(told, what=f"two numbers in {log}")
    return [int(word) for word in words]


def gone(pids: list[int]) -> bool:
    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(alive(pid) for pid in pids)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int], int]]:
    """A process that holds a team of two: itself, every process id below it, and the guard's."""
    process = subprocess.Popen(
        [*python(HOLDER), str(tmp_path), WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        pids = json.loads(process.stdout.readline())
        below = [pids["guard"], *pids_told_by(tmp_path / "one.log"), *pids_told_by(tmp_path / "two.log")]
        yield process, below, pids["guard"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_holder(holder, number: signal.Signals) -> None:
    process, below, _ = holder
    process.send_signal(number)
    process.wait(150)
    wait_until(lambda: gone(below), what="the end of guard, workers and their children")


def test_nothing_outlives_the_guard(holder) -> None:
    process, below, guard = holder
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: gone(below), what="the end of workers and their children")
    assert process.wait(150) != 0  # it says so, and does not go on as if all were well


def test_the_guard_ends_in_order_when_told(holder) -> None:
    _, below, guard = holder
    os.kill(guard, signal.SIGTERM)
    wait_until(lambda: gone(below), what="the end of workers and their children")


def test_ctrl_c_in_the_terminal_does_not_reach_workers(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        pid = team.start("one", python(WORKER))
        assert os.getsid(pid) != os.getsid(0)
        assert os.getpgid(pid) == pid


def test_leaving_the_block_ends_the_deaf_too(tmp_path: Path) -> None:
    with Team(tmp_path, grace_s=0.3) as team:
        pids = [team.start("deaf", python(STUBBORN)), team.start("one", python(WORKER))]
        wait_until(lambda: team.tail("deaf"), what="a worker that ignores SIGTERM")
        pids += pids_told_by(team.log("one"))
    assert gone(pids)


def test_an_error_in_the_block_ends_all(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError), Team(tmp_path, grace_s=0.3) as team:
        team.start("one", python(WORKER))
        pids += pids_told_by(team.log("one"))
        raise ZeroDivisionError
    assert len(pids) == 2
    assert gone(pids)


def test_a_death_is_told_with_code_log_and_last_lines(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        pid = team.start("one", python("import sys; print('out of luck'); sys.exit(7)"))
        (ended,) = team.poll(30)
        assert (ended.name, ended.pid, ended.code, ended.signal, ended.asked) == ("one", pid, 7, 0, False)
        assert ended.story == (
            f"one (process {pid}) ended with exit code 7; its log is {tmp_path / 'one.log'}: out of luck"
        )
        assert team.running == {}


def test_last_words_are_told_rather_than_the_end_of_the_log_and_only_once(tmp_path: Path) -> None:
    code = """
from infra.supervise.last_words import leave_last_words
leave_last_words("the disk is full: make room\x1b[2J")
print("Traceback: noise of a library")
raise SystemExit(5)
"""
    with Team(tmp_path) as team:
        team.start("one", python(code))
        (ended,) = team.poll(30)
        assert ended.words == "the disk is full: make room\\x1b[2J"
        assert ended.story.endswith(f"its log is {tmp_path / 'one.log'}: {ended.words}")
        team.start("one", python("print('out of luck')"))
        (again,) = team.poll(30)
        assert again.words == "out of luck"
    assert not list(tmp_path.glob("*.words"))


def test_a_kill_is_told_with_its_signal(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        pid = team.start("one", python(WORKER))
        below = pids_told_by(team.log("one"))
        os.kill(pid, signal.SIGKILL)
        (ended,) = team.poll(30)
        assert (ended.signal, ended.how) == (signal.SIGKILL, "was killed by SIGKILL")
        assert "memory is short" in ended.story
    assert gone(below)


def test_stop_is_a_request_first(tmp_path: Path) -> None:
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True)"
    with Team(tmp_path) as team:
        team.start("polite", python(polite + "; time.sleep(3600)"))
        team.start("deaf", python(STUBBORN))
        wait_until(lambda: team.tail("polite") and team.tail("deaf"), what="both are up")
        team.stop("polite", grace_s=30)
        (ended,) = team.poll(30)
        assert (ended.name, ended.code, ended.asked) == ("polite", 3, True)
        team.stop("deaf", grace_s=0.1)
        (ended,) = team.poll(30)
        assert (ended.name, ended.signal) == ("deaf", signal.SIGKILL)


def test_a_worker_can_be_started_again_into_the_same_log(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        for number in (1, 2):
            team.start("one", python(f"print('turn {number}')"))
            (ended,) = team.poll(30)
            assert ended.code == 0
        assert team.tail("one") == "turn 1\nturn 2"


def test_what_can_not_be_started_is_said(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        with pytest.raises(SuperviseError, match=r"one can't be started: .*No such file.*nowhere"):
            team.start("one", ["/nowhere/at/all"])
        team.start("two", python(WORKER))
        with pytest.raises(SuperviseError, match="two runs already"):
            team.start("two", python(WORKER))


def test_a_dead_guard_is_an_error_that_says_so(tmp_path: Path) -> None:
    with Team(tmp_path) as team:
        team.start("one", python(WORKER))
        below = pids_told_by(team.log("one"))
        os.kill(team.guard_pid, signal.SIGKILL)
        with pytest.raises(GuardDied, match=r"was killed by SIGKILL, and with it its workers \(one\)"):
            while True:
                team.poll(30)
        wait_until(lambda: gone(below), what="the end of the workers")


def test_a_dead_guard_is_replaced_by_one_that_holds_the_same_locks(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lock"
    with path.open("w") as held, path.open("w") as other:
        with Team(tmp_path, grace_s=0.3, holds=[held.fileno()]) as team:
            fcntl.flock(held, fcntl.LOCK_EX)
            first = team.start("one", python(WORKER))
            below = pids_told_by(team.log("one"))
            os.kill(team.guard_pid, signal.SIGKILL)
            with pytest.raises(GuardDied) as died:
                while True:
                    team.poll(30)
            assert gone(below), "what it left behind is gone before anyone is started again"
            (lost,) = died.value.lost
            assert (lost.name, lost.pid, lost.how) == ("one", first, "was killed by SIGKILL")
            team.renew()
            assert team.running == {}
            second = team.start("one", python(WORKER))
            assert team.running == {"one": second}
            held.close()  # as if this process were gone
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert gone([second])


def test_a_worker_without_a_log_works_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(number: int) -> None:
        def refuse(path: str, mode: str) -> BinaryIO:
            if path == os.devnull:
                return io.BytesIO()  # type: ignore[return-value]
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(guard, "open", refuse, raising=False)

    refused(errno.ENOSPC)
    assert guard._log(str(tmp_path / "one.log")).read() == b""
    refused(errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        guard._log(str(tmp_path / "nowhere" / "one.log"))


def test_a_held_lock_is_let_go_of_after_the_workers(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lock"
    with path.open("w") as held, path.open("w") as other:
        with Team(tmp_path, grace_s=0.3, holds=[held.fileno()]) as team:
            fcntl.flock(held, fcntl.LOCK_EX)
            team.start("deaf", python(STUBBORN))
            held.close()  # as if this process were gone
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_folders_of_the_user_do_not_hide_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "__init__.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "mytask.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with Team(tmp_path / "logs") as team:
        team.start("one", python("import schemas.topics, mytask; print('found')"))
        (ended,) = team.poll(30)
        assert ended.last_lines == "found"


LASTING_END = """
import logging
from infra.roles.entry import LASTING, _ends
words = "task.jsonl: problem 3 has no text in 'prompt'"
raise SystemExit(_ends(logging.getLogger("streamrl"), words, LASTING))
"""


@pytest.mark.parametrize(("role", "name"), [(FEEDER, "feeder"), (GENERATOR, "generator-0")])
def test_a_process_whose_error_lasts_is_started_once_and_its_words_are_the_runs(
    role: str, name: str, tmp_path: Path
) -> None:
    said: list[str] = []
    with Team(tmp_path) as team:
        crew = RunProcesses(team, [Worker(name, role, python(LASTING_END), {})], restarts=3, say=said.append)
        crew.start()

        def one_round() -> bool:
            crew.poll(0.2)
            crew.start_again()
            crew.check()
            return False

        with pytest.raises(LastingFailure) as caught:
            wait_until(one_round, what="the end of the process")
    assert str(caught.value) == (
        "task.jsonl: problem 3 has no text in 'prompt'\n"
        f"({name} ended by this error, and another start would, too; the log is {tmp_path / f'{name}.log'})"
    )
    assert said == []
    assert (tmp_path / f"{name}.log").read_text().count("problem 3") == 1
