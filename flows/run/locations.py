"""Finds a run's broker, store and local files, also where the run file says `local`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from infra.runs import RunRecord
from infra.stack import local as stack
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.stores.store import Store, StoreError
from schemas.addresses import LOCAL, StoreUrl
from schemas.runspec import RunSpec

# The rule of run files: some kinds of stores take an empty name, and list nothing.
_STORE_URL: TypeAdapter[str] = TypeAdapter(StoreUrl)


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of a run's broker and store.

    `env`: variables for the processes that we start. It may hold S3 keys, and is never shown.
    """

    bootstrap_servers: str
    store_url: str
    env: dict[str, str] = field(default_factory=dict, repr=False)

    def open_store(self) -> Store:
        """Open the object store of the run."""
        return open_store(self.store_url)


def start_local_stack(spec: RunSpec, say: Callable[[str], None]) -> Places:
    """Return the run's places. Starts the local broker if the run file wants it; it outlives the run."""
    kafka = spec.placement.kafka.bootstrap_servers
    running = stack.current()
    if kafka == LOCAL and running.bootstrap_servers is None:
        say("starting Apache Kafka (it stays up after the run: `streamrl down` ends it)")
        running = stack.start_stack(
            kafka=True, prefect=False, progress=lambda name, text: say(f"{name}: {text}")
        )
    return _places(spec, running)


def known_places(spec: RunSpec) -> Places:
    """Like `start_local_stack`, without starting anything."""
    return _places(spec, stack.current())


def _places(spec: RunSpec, running: stack.Stack) -> Places:
    kafka = spec.placement.kafka.bootstrap_servers
    env: dict[str, str] = {"STREAMRL_HOME": str(running.paths.home)}
    url = store_url(spec.placement.store, running.paths)
    env |= use_local_keys(url, running)
    servers = running.bootstrap_servers if kafka == LOCAL else kafka
    return Places(servers or "", url, env)


def use_local_keys(url: str, running: stack.Stack | None = None) -> dict[str, str]:
    """Have this process use the keys of the local S3 server, and return them.

    Nothing is done if a URL is not S3's, if there is no local server, or if the environment names another.
    """
    if not url.startswith("s3") or _own_s3():
        return {}
    s3 = (running or stack.current()).s3
    keys = {} if s3 is None else s3.env()
    os.environ.update(keys)
    return keys


def named_store(store: str) -> Store:
    """Open a store by its URL, or this machine's by `local`. Raise StoreError if a run can't be there."""
    try:
        _STORE_URL.validate_python(store)
    except ValidationError as error:
        raise StoreError(f"store {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    url = store_url(store)
    use_local_keys(url)
    return open_store(url)


def store_option(store: str) -> str:
    """Return the option by which a command finds a store; empty for this machine's."""
    return "" if store == LOCAL else f"--store {shlex.quote(store)}"


def named_as(url: str) -> str:
    """Return how a command names the store at a URL: `local` if it is this machine's."""
    return LOCAL if url == store_url(LOCAL) else url


def _own_s3() -> bool:
    """Whether the user's environment says which S3 to use: then the local server is not meant."""
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    return any(os.environ.get(name) for name in names)


def store_url(store: str, paths: StackPaths | None = None) -> str:
    """Return the URL of a run file's `placement.store`."""
    if store != LOCAL:
        return store
    return f"file://{(paths or StackPaths.locate()).home / 'store'}"


def models_folder() -> Path:
    """Return the folder for models that were built for runs."""
    return StackPaths.locate().home / "models"


def report_folder(record: RunRecord) -> Path:
    """Return the folder for a run's report and logs."""
    return Path(record.spec.report) / record.id


def logs_folder(record: RunRecord) -> Path:
    """Return the folder for the logs of a run's processes on this machine."""
    return report_folder(record) / "logs"
