"""Ports, files, settings and the doctor."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from infra.files import locks
from infra.files.ends import tail
from infra.files.locks import LockError, LockHeld, locked
from infra.files.private import make_private
from infra.files.writing import write_whole
from infra.stack import doctor, kafka_install, ports
from infra.stack.kafka_config import LARGEST_BATCH, server_properties
from infra.stack.paths import StackPaths
from infra.stack.processes import run_tool
from infra.stack.s3 import Credentials, S3Access, ensure_credentials
from infra.stack.stack_errors import PortTaken, ToolFailed, ToolMissing


class Listener:
    """Somebody who has a port."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.port = ports.any_free_port()
        self.socket.bind(("127.0.0.1", self.port))
        self.socket.listen()

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener() as port:
        monkeypatch.setenv("STREAMRL_THING_PORT", str(port))
        with pytest.raises(PortTaken, match=rf"port {port} \(STREAMRL_THING_PORT\) is in use.*\n.*unset"):
            ports.choose_port("thing", 21_500)


def test_a_usual_port_that_is_taken_gives_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMRL_THING_PORT", raising=False)
    with Listener() as port:
        assert port < ports.choose_port("thing", port) <= port + 100


def test_the_last_port_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last = ports.any_free_port()
    (tmp_path / "port").write_text(str(last))
    for asked in ("", "0"):
        monkeypatch.setenv("STREAMRL_THING_PORT", asked)
        assert ports.choose_port("thing", 21_500, remembered=tmp_path / "port") == last


@pytest.mark.parametrize("asked", ["x", "-1", "70000"])
def test_what_is_no_port_is_an_error(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("STREAMRL_THING_PORT", asked)
    with pytest.raises(PortTaken, match="is not a port"):
        ports.choose_port("thing", 21_500)


def test_write_whole_sets_the_mode_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    write_whole(file, "one", mode=0o600)
    write_whole(file, "two", mode=0o600)
    assert file.read_text() == "two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_lock_that_is_held_names_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    second = locked(lock, what="the stack", deadline_s=0.1)
    with (
        locked(lock, what="the stack", deadline_s=1.0),
        pytest.raises(LockHeld, match=r"the stack is locked by process \d+"),
        second,
    ):
        raise AssertionError("two hold the lock")
    with locked(lock, what="the stack", deadline_s=0.1):
        pass


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_lock_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locks.os, call, full)
    with (
        pytest.raises(LockError, match=r"the stack can't be locked: .*lock: No space left.*\n.*make room in"),
        locked(tmp_path / "lock", what="the stack", deadline_s=0.1),
    ):
        raise AssertionError("nobody holds it")


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", none)
    with (
        pytest.raises(LockError, match=r"the stack can't be locked: .*lock: No locks available"),
        locked(tmp_path / "lock", what="the stack", deadline_s=0.1),
    ):
        raise AssertionError("nobody holds it")


def test_tail_of_a_log_and_of_no_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(str(n) for n in range(10_000)))
    assert tail(tmp_path / "log", lines=2) == "9998\n9999"
    assert tail(tmp_path / "none") == ""


def test_the_home_and_the_cache_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMRL_CACHE", raising=False)
    assert StackPaths.locate().home == tmp_path / ".streamrl"
    assert StackPaths.locate().kafka_lib == tmp_path / ".streamrl/kafka/lib"
    monkeypatch.setenv("STREAMRL_HOME", "elsewhere")
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    paths = StackPaths.locate()
    assert (paths.home, paths.bin) == (tmp_path / "elsewhere", tmp_path / "cache/bin")
    paths.make()
    for folder in (paths.home, paths.kafka, paths.s3, paths.prefect, paths.logs, paths.run):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_are_private_and_those_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with locked(shared / "runs" / "count-1" / ".lock", what="it", deadline_s=0):
        write_whole(shared / "logs" / "x", "text")
    assert shared.stat().st_mode & 0o777 == 0o755
    for made in ("runs", "runs/count-1", "logs"):
        assert (shared / made).stat().st_mode & 0o777 == 0o700
    (shared / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_private(shared / "file" / "below")


def test_doctor_says_who_else_may_look_and_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMRL_LISTEN", raising=False)
    paths = StackPaths(home=tmp_path / ".streamrl", cache=tmp_path)
    paths.make()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o755)
    found = {check.name: check for check in doctor._privacy(paths)}
    assert found["privacy of .streamrl"].ok and not found["privacy of runs"].ok
    assert found["privacy of runs"].fix.startswith("chmod 700 runs")
    assert found["listeners"].ok and "every user of this machine" in found["listeners"].found
    monkeypatch.setenv("STREAMRL_LISTEN", "10.0.0.5")
    assert not {check.name: check for check in doctor._privacy(paths)}["listeners"].ok


def test_the_broker_listens_on_the_loopback_address_and_makes_no_topics(tmp_path: Path) -> None:
    text = server_properties(data=tmp_path, port=1234, controller_port=1235)
    settings = dict(line.split("=", 1) for line in text.splitlines())
    assert settings["listener.security.protocol.map"] == "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:1234,CONTROLLER://127.0.0.1:1235"
    assert settings["auto.create.topics.enable"] == "false"
    assert int(settings["message.max.bytes"]) == LARGEST_BATCH > 8 << 20
    # Kafka refuses to start otherwise.
    assert (
        int(settings["queued.max.request.bytes"]) >= int(settings["socket.request.max.bytes"]) > LARGEST_BATCH
    )


def test_s3_keys_are_made_once_and_those_given_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = StackPaths(home=tmp_path, cache=tmp_path)
    made = ensure_credentials(paths)
    assert ensure_credentials(paths) == made
    assert len(made.secret_key) >= 32
    monkeypatch.setenv("STREAMRL_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("STREAMRL_S3_SECRET_KEY", "b")
    given = ensure_credentials(paths)
    assert given == Credentials("a", "b")
    assert S3Access("http://x", "streamrl", given).env()["AWS_SECRET_ACCESS_KEY"] == "b"


@pytest.mark.parametrize(("release", "version"), [("17.0.15", 17), ("1.8.0_402", 8), ("21", 21)])
def test_reads_a_java_version(tmp_path: Path, release: str, version: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{release}"\n')
    assert kafka_install.java_version(str(tmp_path / "bin" / "java")) == version


def test_without_java_or_maven_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ToolMissing, match="install Java 17"):
        kafka_install.java_command()
    paths = StackPaths(home=tmp_path, cache=tmp_path)
    with pytest.raises(ToolMissing, match="install Maven"):
        kafka_install.ensure_jars(paths, cancel=threading.Event())
    failed = {check.name: check for check in doctor.checks(paths=paths) if not check.ok}
    assert {"java", "mvn", "kafka jars"} <= failed.keys()
    assert all(check.fix for check in failed.values())


def test_a_tool_that_fails_or_hangs_is_named_with_its_log(tmp_path: Path) -> None:
    log, cancel = tmp_path / "tool.log", threading.Event()
    with pytest.raises(ToolFailed, match=r"status 3: sh -c .*\nno such thing"):
        run_tool(["sh", "-c", "echo no such thing; exit 3"], log=log, deadline_s=10, cancel=cancel)
    with pytest.raises(ToolFailed, match="did not end within 0 s"):
        run_tool(["sh", "-c", "sleep 60"], log=log, deadline_s=0.1, cancel=cancel)
    with pytest.raises(ToolMissing, match="no-such-tool"):
        run_tool(["no-such-tool"], log=log, deadline_s=1, cancel=cancel)


def test_the_doctor_says_what_to_do_about_each_failure(tmp_path: Path) -> None:
    found = list(doctor.checks(paths=StackPaths(home=tmp_path, cache=tmp_path)))
    assert len({check.name for check in found}) == len(found)
    assert all(check.fix for check in found if not check.ok)
    assert next(check for check in found if check.name == "crc32c").ok


@pytest.mark.parametrize(("said", "shown"), [("1", "1"), ("3", "3"), ("many", "unknown")])
def test_the_doctor_counts_the_cores_that_a_run_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, shown: str
) -> None:
    monkeypatch.setenv("STREAMRL_CORES", said)
    found = {check.name: check for check in doctor.checks(paths=StackPaths(home=tmp_path, cache=tmp_path))}
    assert (found["cores"].found, found["cores"].ok) == (shown, said == "3")
    assert said != "many" or "STREAMRL_CORES=many is not allowed" in found["cores"].fix
