"""What prefect.yaml deploys."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
import yaml
from prefect import Flow
from prefect.exceptions import ParameterTypeError

from flows.cli.shared.deploying import Deploying, deploy_run_file
from infra.runs import RunError
from tests.factories import make_spec

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def flow(entrypoint: str) -> Flow[..., object]:
    file, _, name = entrypoint.partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_is_of_a_flow_that_takes_its_parameters(deployment: dict[str, object]) -> None:
    found = flow(str(deployment["entrypoint"]))
    assert found.description and found.parameters.properties.keys() >= deployment.get("parameters", {}).keys()  # type: ignore[attr-defined]


def flows() -> list[Flow[..., object]]:
    modules = [importlib.import_module(f"flows.{file.stem}") for file in (ROOT / "flows").glob("*.py")]
    return [one for module in modules for one in vars(module).values() if isinstance(one, Flow)]


@pytest.mark.parametrize("served", flows(), ids=lambda served: served.name)
def test_a_flow_can_be_served_from_a_script_elsewhere(served: Flow[..., object]) -> None:
    """`serve()` pickles it for the process of each flow run, as it is imported and no file of that script."""
    copied = cloudpickle.loads(cloudpickle.dumps(served))
    with pytest.raises(ParameterTypeError):  # it knows the types still
        copied.validate_parameters(dict.fromkeys(served.parameters.properties, object()))


def test_each_has_a_name_of_its_own() -> None:
    names = Counter(f"{flow(one['entrypoint']).name}/{one['name']}" for one in DEPLOYMENTS)
    assert {"keyframe/local", "verify/local", "collect/local", "promote/local"} <= set(names)
    assert max(names.values()) == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [({"cron": "0 2 * *"}, "--cron '0 2 \\* \\*'"), ({"name": "night/ly"}, "--name night/ly")],
)
def test_what_prefect_can_not_take_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str
) -> None:
    def made(*args: object, **named: object) -> None:
        raise AssertionError("a work pool is made")

    monkeypatch.setattr("flows.cli.shared.deploying.get_client", made)
    wanted = Deploying(tmp_path / "a.yaml", make_spec(), given.get("name", "a"), "pool", tmp_path,
                       cron=given.get("cron"))  # fmt: skip
    with pytest.raises(RunError, match=why):
        deploy_run_file(wanted)
