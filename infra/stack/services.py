"""Services: started detached, found again by their state files, and stopped with all their processes.

      state file?
    no ──┐     yes ── its process alive? ── yes ──► wait until ready ──► there already
         │                    │ no: stale, removed
         ▼                    ▼
      prepare ──► choose port ──► spawn ──► write state ──► wait until ready ──► write state: ready
                                              └── it died, too slow, or Ctrl-C ──► end it, remove state, raise

Waits for: the service's answer.
Unblocked by: the service, its death, the deadline, or `ServiceContext.cancel`.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import psutil

from infra.files.ends import tail
from infra.files.writing import write_whole
from infra.stack import processes
from infra.stack.paths import StackPaths
from infra.stack.ports import choose_port
from infra.stack.processes import Identity
from infra.stack.stack_errors import Cancelled, NotReady, ServiceDied

ServiceProgress = Callable[[str, str], None]
Status = Literal["running", "starting", "died", "stopped"]

# A log that grew past this is set aside when its service starts again.
LOG_LIMIT_BYTES = 16 << 20


def _silent(service: str, message: str) -> None:
    """Ignore progress: for callers that do not show it."""


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The stack's paths, a callback for progress, and an event that is set when the user cancels."""

    paths: StackPaths
    progress: ServiceProgress = _silent
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Launch:
    command: Sequence[str]
    env: Mapping[str, str]
    url: str
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServicesFile:
    """The state file of a service."""

    name: str
    pid: int
    created: float  # the process's time of birth, by the clock as it was then
    port: int
    url: str
    started_at: float  # seconds since 1970
    log: str
    ready: bool
    extra: Mapping[str, str] = field(default_factory=dict)
    birth: str = ""  # another process may get the pid later; empty in files of older releases

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.created, self.birth)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The state of a service, for `status`. `died`: its process is gone, and nobody stopped it."""

    name: str
    status: Status
    log: Path
    pid: int | None = None
    port: int | None = None
    url: str | None = None
    started_at: float | None = None
    rss_bytes: int | None = None


class Service(ABC):
    name: ClassVar[str]
    usual_port: ClassVar[int]
    start_deadline_s: ClassVar[float] = 60.0
    stop_grace_s: ClassVar[float] = 10.0

    @abstractmethod
    def prepare(self, context: ServiceContext) -> None:
        """Fetch and format what is missing. Quick when nothing is."""

    @abstractmethod
    def launch(self, context: ServiceContext, port: int) -> Launch:
        """Write the service's settings and return how to start it."""

    @abstractmethod
    def is_ready(self, record: ServicesFile, paths: StackPaths) -> bool:
        """Ask the service whether it is ready. False: not yet. An exception: it never will be."""

    def logs(self, paths: StackPaths) -> list[Path]:
        return [paths.log_file(self.name)]


def start_service(service: Service, context: ServiceContext) -> tuple[ServicesFile, bool]:
    """Make sure that a service runs. Return its state file, and whether this call started it."""
    paths = context.paths
    record = read_record(paths, service.name)
    if record is not None and processes.is_alive(record.identity):
        # If it dies at this very moment, it is started again like one that is dead.
        with contextlib.suppress(ServiceDied):
            wait_until_ready(service, record, context)
            if not record.ready:
                # The command that started it was killed before it was ready.
                record = dataclasses.replace(record, ready=True)
                _write_record(paths, record)
            return record, False
    if record is not None:
        context.progress(service.name, "died since its last start; starting it again")
        paths.state_file(service.name).unlink(missing_ok=True)
    # A process that outlived its parent may hold the port or the data's lock.
    processes.end(None, mark(paths, service.name), grace_s=service.stop_grace_s)
    service.prepare(context)
    return _start_fresh(service, context), True


def _start_fresh(service: Service, context: ServiceContext) -> ServicesFile:
    paths, name = context.paths, service.name
    port = choose_port(name, service.usual_port, remembered=paths.port_file(name))
    launch = service.launch(context, port)
    log = paths.log_file(name)
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".log.1"))
    context.progress(name, "starting")
    identity: Identity | None = None
    try:
        identity = processes.spawn(
            launch.command, env=launch.env, log=log, mark=mark(paths, name), cwd=paths.home
        )
        record = ServicesFile(
            name=name,
            pid=identity.pid,
            created=identity.created,
            birth=identity.birth,
            port=port,
            url=launch.url,
            started_at=time.time(),
            log=str(log),
            ready=False,
            extra=dict(launch.extra),
        )
        _write_record(paths, record)
        wait_until_ready(service, record, context)
        record = dataclasses.replace(record, ready=True)
        _write_record(paths, record)
        write_whole(paths.port_file(name), str(port))
    except BaseException:
        processes.end(identity, mark(paths, name), grace_s=service.stop_grace_s)
        paths.state_file(name).unlink(missing_ok=True)
        raise
    context.progress(name, f"ready at {record.url}")
    return record


def wait_until_ready(service: Service, record: ServicesFile, context: ServiceContext) -> None:
    until = time.monotonic() + service.start_deadline_s
    while not service.is_ready(record, context.paths):
        logs = service.logs(context.paths)
        if not processes.is_alive(record.identity):
            raise ServiceDied(
                f"{service.name} (process {record.pid}) ended while starting\n{_tails(logs)}",
                fix=f"read {logs[-1]}",
            )
        if time.monotonic() > until:
            raise NotReady(
                f"{service.name} (process {record.pid}) did not answer at {record.url} within "
                f"{service.start_deadline_s:.0f} s\n{_tails(logs)}",
                fix=f"read {logs[-1]}; `streamrl down` ends it",
            )
        if context.cancel.wait(0.05):
            raise Cancelled(f"cancelled while {service.name} was starting", fix="run the command again")


def stop(service: Service, paths: StackPaths) -> int:
    """End every process of a service. Return how many there were; 0 is not an error."""
    record = read_record(paths, service.name)
    identity = record.identity if record is not None else None
    ended = processes.end(identity, mark(paths, service.name), grace_s=service.stop_grace_s)
    paths.state_file(service.name).unlink(missing_ok=True)
    return ended


def service_state(service: Service, paths: StackPaths) -> ServiceState:
    log = service.logs(paths)[-1]
    record = read_record(paths, service.name)
    if record is None:
        return ServiceState(service.name, "stopped", log)
    if not processes.is_alive(record.identity):
        return ServiceState(service.name, "died", log, port=record.port, url=record.url)
    try:
        rss = psutil.Process(record.pid).memory_info().rss
    except psutil.NoSuchProcess:
        return ServiceState(service.name, "died", log, port=record.port, url=record.url)
    return ServiceState(
        name=service.name,
        status="running" if record.ready else "starting",
        log=log,
        pid=record.pid,
        port=record.port,
        url=record.url,
        started_at=record.started_at,
        rss_bytes=rss,
    )


def read_record(paths: StackPaths, name: str) -> ServicesFile | None:
    try:
        return ServicesFile(**json.loads(paths.state_file(name).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        # Unreadable, or from another version: the processes are still found by their mark.
        return None


def running_record(paths: StackPaths, name: str) -> ServicesFile | None:
    """Return the state file of a service that is up; None if it is not."""
    record = read_record(paths, name)
    return record if record is not None and record.ready and processes.is_alive(record.identity) else None


def mark(paths: StackPaths, name: str) -> str:
    return f"{paths.home}:{name}"


def base_env(*without: str) -> dict[str, str]:
    """Return the environment without variables of the given prefixes, and with this Python's tools first."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(without)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def _write_record(paths: StackPaths, record: ServicesFile) -> None:
    write_whole(paths.state_file(record.name), json.dumps(dataclasses.asdict(record), indent=1), mode=0o600)


def _tails(logs: Sequence[Path]) -> str:
    return "\n".join(text for log in logs if (text := tail(log)))
