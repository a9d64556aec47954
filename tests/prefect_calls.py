"""Calls of Prefect's API over HTTP, as patient as Prefect's own client."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx

from tests.waiting import wait_until

_PATIENT_S = 60  # two cores are shared with other tests
_BUSY = 503  # the server's database was locked for too long: Prefect's client asks again, too


@cache
def _client() -> httpx.Client:
    """Made once, as each reads all certificates of the system. A server may be gone for the next call."""
    return httpx.Client(trust_env=False, timeout=_PATIENT_S, limits=httpx.Limits(max_keepalive_connections=0))


def ask(method: str, url: str, body: object = None) -> Any:
    """Return what the server answers; None if it answers nothing."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(_client().request(method, url, json=body))
        return answers[-1].status_code != _BUSY

    wait_until(answered, what=f"an answer to {method} {url}", deadline_s=60)
    answer = answers[-1].raise_for_status()
    return answer.json() if answer.content else None
