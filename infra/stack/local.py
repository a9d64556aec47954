"""Starts, stops and describes the whole local stack.

up ── lock ──► kafka   ┐ each in a thread of its own,
               s3      ├ all of them or none ──► Stack
               prefect ┘
      Ctrl-C, or one that fails ──► the others are cancelled; what this call started is ended
"""

import contextlib
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from infra.files.locks import locked
from infra.stack import s3 as s3_module
from infra.stack.kafka import KafkaService
from infra.stack.paths import StackPaths
from infra.stack.prefect_server import PrefectService, client_env
from infra.stack.s3 import S3Access, S3Service
from infra.stack.services import (
    Service,
    ServiceContext,
    ServiceProgress,
    ServicesFile,
    ServiceState,
    running_record,
    service_state,
    start_service,
    stop,
)

BOOTSTRAP = "STREAMRL_BOOTSTRAP_SERVERS"
LOCK_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Stack:
    """The running services, and how to reach them; None for each that does not run."""

    paths: StackPaths
    bootstrap_servers: str | None
    prefect_api_url: str | None
    s3: S3Access | None

    def env(self) -> dict[str, str]:
        """Return the environment for a process that uses the stack. It holds the S3 secret: don't print."""
        env = {"STREAMRL_HOME": str(self.paths.home)}
        if self.bootstrap_servers is not None:
            env[BOOTSTRAP] = self.bootstrap_servers
        if self.prefect_api_url is not None:
            env |= client_env(self.paths, self.prefect_api_url)
        if self.s3 is not None:
            env |= self.s3.env()
        return env


def start_stack(
    *,
    kafka: bool = True,
    s3: bool = False,
    prefect: bool = True,
    progress: ServiceProgress | None = None,
    paths: StackPaths | None = None,
) -> Stack:
    """Start the services that are asked for and don't run. Return all that run, once all of them answer.

    `progress(service, message)` is called from other threads, one call at a time.
    """
    paths = paths or StackPaths.locate()
    paths.make()
    wanted: list[Service] = []
    if kafka:
        wanted.append(KafkaService())
    if s3:
        wanted.append(S3Service())
    if prefect:
        wanted.append(PrefectService())
    with _changing(paths):
        context = ServiceContext(paths, _one_at_a_time(progress)) if progress else ServiceContext(paths)
        _start_all(wanted, context)
    return current(paths)


def stop_stack(
    *, keep: Collection[str] = (), progress: ServiceProgress | None = None, paths: StackPaths | None = None
) -> int:
    """End every process of the stack, even of a broken one. Return how many there were. Data stays.

    `keep`: names of services that go on.
    """
    paths = paths or StackPaths.locate()
    if not paths.run.exists():
        return 0
    tell = _one_at_a_time(progress) if progress else ServiceContext(paths).progress

    def stop_one(service: Service) -> int:
        ended = stop(service, paths)
        if ended:
            tell(service.name, "stopped")
        return ended

    with _changing(paths), ThreadPoolExecutor(3) as pool:
        return sum(pool.map(stop_one, (one for one in _all_services() if one.name not in keep)))


def stack_state(*, paths: StackPaths | None = None) -> list[ServiceState]:
    """Return the state of every service of the stack, running or not."""
    paths = paths or StackPaths.locate()
    return [service_state(service, paths) for service in _all_services()]


def current(paths: StackPaths | None = None) -> Stack:
    """Return the services that run now. Nothing is started."""
    paths = paths or StackPaths.locate()
    kafka = running_record(paths, KafkaService.name)
    prefect = running_record(paths, PrefectService.name)
    return Stack(
        paths=paths,
        bootstrap_servers=kafka.url if kafka else None,
        prefect_api_url=prefect.url if prefect else None,
        s3=s3_module.access(paths),
    )


def _start_all(wanted: Sequence[Service], context: ServiceContext) -> None:
    pool = ThreadPoolExecutor(max(1, len(wanted)))
    futures: dict[Future[tuple[ServicesFile, bool]], Service] = {}
    try:
        for service in wanted:  # in here: Ctrl-C may come before the first wait
            futures[pool.submit(start_service, service, context)] = service
        # With a timeout: a wait without one does not let Ctrl-C through on every platform.
        while wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                break
        failed = [error for future in futures if future.done() and (error := future.exception())]
        if failed:
            raise failed[0]
    except BaseException:
        with _no_interrupt():
            _undo(futures, context)
        raise
    finally:
        pool.shutdown(wait=True)


def _undo(futures: dict[Future[tuple[ServicesFile, bool]], Service], context: ServiceContext) -> None:
    """End the services that this `start_stack` started; those that ran before stay."""
    context.cancel.set()
    wait(futures)  # each ends its own process on the way out, within its grace time
    for future, service in futures.items():
        if future.exception() is None and future.result()[1]:
            stop(service, context.paths)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C during the block: a second one must not stop the clearing up after the first one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _changing(paths: StackPaths) -> contextlib.AbstractContextManager[int]:
    return locked(paths.run / "stack.lock", what=f"the stack in {paths.home}", deadline_s=LOCK_DEADLINE_S)


def _all_services() -> list[Service]:
    return [KafkaService(), S3Service(), PrefectService()]


def _one_at_a_time(progress: ServiceProgress) -> ServiceProgress:
    lock = threading.Lock()

    def tell(service: str, message: str) -> None:
        with lock:
            progress(service, message)

    return tell
