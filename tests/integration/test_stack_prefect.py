"""The local Prefect server."""

import json
import urllib.request
from collections.abc import Callable

from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stack.services import read_record
from tests.stacks import listens_on, processes_of


def post(url: str, body: dict[str, object]) -> object:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)


def test_serves_its_api_from_a_home_of_its_own(prefect_stack: local.Stack, prefect_api: str) -> None:
    made = post(f"{prefect_api}/flows/", {"name": "a-flow"})
    assert isinstance(made, dict)
    found = post(f"{prefect_api}/flows/filter", {"flows": {"name": {"any_": ["a-flow"]}}})
    assert isinstance(found, list)
    assert [flow["id"] for flow in found] == [made["id"]]
    assert (prefect_stack.paths.prefect / "prefect.db").exists()
    assert prefect_stack.env()["PREFECT_API_URL"] == prefect_api
    record = read_record(prefect_stack.paths, "prefect")
    assert record is not None
    assert listens_on(record.pid) == {"127.0.0.1"}


def test_down_leaves_no_process(new_home: Callable[[str], StackPaths]) -> None:
    paths = new_home("own-prefect")
    try:
        stack = local.start_stack(kafka=False, paths=paths)
        assert stack.bootstrap_servers is None
        assert local.start_stack(kafka=False, paths=paths) == stack
        assert processes_of(paths.home)
    finally:
        local.stop_stack(paths=paths)
    assert processes_of(paths.home) == []
    assert local.current(paths).prefect_api_url is None
