"""The board and the alert rules name figures that are exported, and the rules fire when they should."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.monitoring.exporter import figures_of
from tests.promtools import promtool
from tests.unit.test_monitoring import full_view

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "infra" / "monitoring"
FIGURE = re.compile(r"\bstreamrl_[a-z0-9_]+\b")


def names() -> set[str]:
    """The figures of a view that has everything, from the code that exports them."""
    return {sample.name for family in figures_of(full_view(), 0.0) for sample in family.samples}


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, object]]:
    board = json.loads((MONITORING / "board.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_every_figure_of_the_rules_is_exported() -> None:
    for rule in rules():
        used = set(FIGURE.findall(rule["expr"]))
        assert used or rule["alert"] == "StreamRLRunGone"
        assert used <= names(), rule["alert"]


def test_every_figure_of_the_board_is_exported() -> None:
    text = (MONITORING / "board.json").read_text()
    assert set(FIGURE.findall(text)) <= names()
    for panel in panels():
        assert panel["targets"] and all(FIGURE.search(one["expr"]) for one in panel["targets"]), panel[
            "title"
        ]


def test_panels_of_the_board_do_not_overlap_and_have_titles_of_their_own() -> None:
    cells, titles = set[tuple[int, int]](), list[str]()
    for panel in json.loads((MONITORING / "board.json").read_text())["panels"]:
        place = panel["gridPos"]
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not mine & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine
        titles.append(panel["title"])
    assert len(titles) == len(set(titles))


def test_the_page_explains_every_alert() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    assert {rule["alert"] for rule in rules()} == set(re.findall(r"`(StreamRL\w+)`", page))


def test_rules_and_configuration_are_right_in_prometheus_s_own_eyes() -> None:
    for what, file in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(
            [promtool(), "check", what, str(MONITORING / file)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def test_expressions_of_the_board_are_promql(tmp_path: Path) -> None:
    found = [one["expr"] for panel in panels() for one in panel["targets"]]
    expressions = [one.replace("$__rate_interval", "1m").replace("$run", ".*") for one in found]
    made = [{"record": f"board:{number}", "expr": one} for number, one in enumerate(expressions)]
    file = tmp_path / "board.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": made}]}))
    done = subprocess.run(
        [promtool(), "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and f"{len(made)} rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("broken", [False, True])
def test_alerts_fire_when_they_should_and_not_before(broken: bool, tmp_path: Path) -> None:
    text = (MONITORING / "alerts.yaml").read_text()
    (tmp_path / "alerts.yaml").write_text(text.replace("> 60\n", "> 600\n") if broken else text)
    tests = (ROOT / "tests" / "unit" / "alerts_test.yaml").read_text()
    (tmp_path / "test.yaml").write_text(tests.replace("../../infra/monitoring/", ""))
    done = subprocess.run(
        [promtool(), "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode != 0) == broken, done.stdout + done.stderr
    fired = set(re.findall(r'alertname="(\w+)"', tests))
    assert fired == {rule["alert"] for rule in rules()}  # each of them is tested
