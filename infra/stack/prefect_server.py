"""A Prefect server with a home of its own: no profile, key or database of the user is touched."""

import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from infra.files.private import make_private
from infra.stack.paths import StackPaths
from infra.stack.ports import address
from infra.stack.services import Launch, Service, ServiceContext, ServicesFile, base_env


class PrefectService(Service):
    name: ClassVar[str] = "prefect"
    usual_port: ClassVar[int] = 4200
    # 4 s on quiet cores, 20 s on busy ones; the first start makes the database too.
    start_deadline_s: ClassVar[float] = 300.0
    stop_grace_s: ClassVar[float] = 10.0

    def prepare(self, context: ServiceContext) -> None:
        make_private(context.paths.prefect)

    def launch(self, context: ServiceContext, port: int) -> Launch:
        url = f"http://{address()}:{port}/api"
        return Launch(
            command=[
                sys.executable,
                "-P",  # our folder must not hide a library
                str(Path(__file__).with_name("prefect_main.py")),
                "server",
                "start",
                "--host",
                address(),
                "--port",
                str(port),
            ],
            env=base_env("PREFECT_") | client_env(context.paths, url) | server_env(),
            url=url,
        )

    def is_ready(self, record: ServicesFile, paths: StackPaths) -> bool:
        return healthy(record.url)


def client_env(paths: StackPaths, api_url: str) -> dict[str, str]:
    """Return the environment variables that a process needs to talk to this server."""
    return {
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(paths.prefect),
        # Never start a second, throw-away server when this one is away: fail and say so.
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }


def server_env() -> dict[str, str]:
    """Return the server's own settings."""
    return {
        # Its database is SQLite: on busy cores a statement waits for the lock longer than the usual 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # It looks for late, paused and lost runs every few seconds, on the cores that the run needs.
        "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "30",
        "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "60",
        "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "60",
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "60",
        "PYTHONUNBUFFERED": "1",
    }


def healthy(api_url: str, busy_s: float = 2.0) -> bool:
    """Whether a Prefect server answers. One that is busy has `busy_s` for it; one that is not there, 3 s."""
    # No proxy: it can't reach an address that only this machine has.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        found = urlsplit(api_url)
        port = found.port or (443 if found.scheme == "https" else 80)
        socket.create_connection((str(found.hostname), port), timeout=3).close()
        with opener.open(f"{api_url}/health", timeout=busy_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
