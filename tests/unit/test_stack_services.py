"""The life of a service, with small Python processes in the place of the real ones."""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from infra.stack import processes, services
from infra.stack.paths import StackPaths
from infra.stack.ports import accepts
from infra.stack.services import Launch, Service, ServiceContext, ServicesFile, ServiceState
from infra.stack.stack_errors import Cancelled, NotReady, ServiceDied
from tests.waiting import wait_until

SERVE = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()
"""
FAIL = "import sys; sys.exit('no room on the disk')"
IDLE = "import time; time.sleep(600)"
# It ignores SIGTERM, and its child leaves the session.
STUBBORN = (
    """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
    + SERVE
)


class Small(Service):
    name: ClassVar[str] = "small"
    usual_port: ClassVar[int] = 21_000
    start_deadline_s: ClassVar[float] = 20.0
    stop_grace_s: ClassVar[float] = 0.3

    def __init__(self, code: str) -> None:
        self.code = code
        self.prepared = 0

    def prepare(self, context: ServiceContext) -> None:
        self.prepared += 1

    def launch(self, context: ServiceContext, port: int) -> Launch:
        return Launch(
            [sys.executable, "-c", self.code, str(port)], dict(os.environ), f"http://127.0.0.1:{port}"
        )

    def is_ready(self, record: ServicesFile, paths: StackPaths) -> bool:
        return accepts(record.port)


class Impatient(Small):
    start_deadline_s: ClassVar[float] = 0.2


@pytest.fixture
def context(tmp_path: Path) -> Iterator[ServiceContext]:
    paths = StackPaths(home=tmp_path, cache=tmp_path)
    paths.make()
    yield ServiceContext(paths)
    services.stop(Small(IDLE), paths)
    assert left(paths) == []


def left(paths: StackPaths) -> list[psutil.Process]:
    return processes.members(None, services.mark(paths, "small"))


def look(context: ServiceContext) -> ServiceState:
    return services.service_state(Small(SERVE), context.paths)


def test_starts_once_and_stops(context: ServiceContext) -> None:
    assert look(context).status == "stopped"
    record, fresh = services.start_service(Small(SERVE), context)
    assert fresh
    again = Small(SERVE)
    assert services.start_service(again, context) == (record, False)
    assert again.prepared == 0
    shown = look(context)
    assert (shown.status, shown.pid, shown.port) == ("running", record.pid, record.port)
    assert services.stop(Small(SERVE), context.paths) == 1
    assert look(context).status == "stopped"
    assert services.stop(Small(SERVE), context.paths) == 0


def test_a_clock_that_is_set_leaves_a_process_alive(
    context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, log = services.mark(context.paths, "small"), context.paths.log_file("small")
    command = [sys.executable, "-c", IDLE]
    found = processes.spawn(command, env=os.environ, log=log, mark=mark, cwd=context.paths.home)
    by_older_release = processes.Identity(found.pid, found.created)
    assert processes.is_alive(found) and processes.is_alive(by_older_release)
    assert not processes.is_alive(dataclasses.replace(by_older_release, created=found.created - 60.0))
    born = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: born(process) + 3.0)
    assert processes.is_alive(found)
    assert not processes.is_alive(processes.Identity(found.pid, found.created + 3.0, f"{found.birth}0"))
    assert not processes.is_alive(processes.Identity(found.pid, found.created + 3.0, f"0{found.birth}"))
    assert processes.end(found, mark, grace_s=0.3) == 1
    assert not processes.is_alive(found)


def test_a_service_is_not_started_again_when_the_clock_is_set(
    context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = services.start_service(Small(SERVE), context)[0]
    born = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: born(process) + 3.0)
    assert services.start_service(Small(SERVE), context) == (first, False)
    file = context.paths.state_file("small")
    older = json.loads(file.read_text())
    del older["birth"]
    file.write_text(json.dumps(older))
    assert look(context).status == "died", "an older release knew only what its clock said"
    monkeypatch.undo()
    assert look(context).status == "running"


def test_keeps_its_port_over_a_restart(context: ServiceContext) -> None:
    first, _ = services.start_service(Small(SERVE), context)
    psutil.Process(first.pid).kill()
    wait_until(lambda: look(context).status == "died", what="the death to be noticed")
    second, fresh = services.start_service(Small(SERVE), context)
    assert fresh
    assert (second.port, second.pid == first.pid) == (first.port, False)


def test_a_death_while_starting_is_told_with_the_end_of_the_log(context: ServiceContext) -> None:
    with pytest.raises(ServiceDied, match="no room on the disk"):
        services.start_service(Small(FAIL), context)
    assert look(context).status == "stopped"


def test_a_service_that_never_answers_is_ended(context: ServiceContext) -> None:
    with pytest.raises(NotReady, match=r"within 0 s"):
        services.start_service(Impatient(IDLE), context)
    assert left(context.paths) == []


def test_cancelling_ends_what_was_starting(context: ServiceContext) -> None:
    threading.Timer(0.2, context.cancel.set).start()
    with pytest.raises(Cancelled):
        services.start_service(Small(IDLE), context)
    assert left(context.paths) == []
    assert look(context).status == "stopped"


def test_stop_ends_also_what_ignores_sigterm_or_left_the_session(context: ServiceContext) -> None:
    services.start_service(Small(STUBBORN), context)
    assert services.stop(Small(STUBBORN), context.paths) == 2


def test_an_unfinished_start_is_finished(context: ServiceContext) -> None:
    record, _ = services.start_service(Small(SERVE), context)
    unfinished = dataclasses.replace(record, ready=False)
    context.paths.state_file("small").write_text(json.dumps(dataclasses.asdict(unfinished)))
    assert look(context).status == "starting"
    assert services.running_record(context.paths, "small") is None
    assert services.start_service(Small(SERVE), context) == (record, False)
    assert look(context).status == "running"


@pytest.mark.parametrize("text", ["", "not json", "{}", '{"name": "small"}'])
def test_processes_are_found_although_the_state_file_is_broken(context: ServiceContext, text: str) -> None:
    services.start_service(Small(SERVE), context)
    context.paths.state_file("small").write_text(text)
    assert services.stop(Small(SERVE), context.paths) == 1


def test_a_pid_that_belongs_to_somebody_else_is_left_alone(context: ServiceContext) -> None:
    # This test's own process: alive, but not born when the state file says.
    stale = ServicesFile("small", os.getpid(), time.time() - 86_400, 1, "http://x", 0.0, "small.log", True)
    context.paths.state_file("small").write_text(json.dumps(dataclasses.asdict(stale)))
    assert look(context).status == "died"
    _, fresh = services.start_service(Small(SERVE), context)
    assert fresh
    assert services.stop(Small(SERVE), context.paths) == 1
