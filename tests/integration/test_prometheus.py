"""A real Prometheus finds a run by our configuration, reads its figures and judges them by our rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.monitoring.exporter import exporting
from infra.stack.ports import any_free_port
from tests.promtools import promtool
from tests.unit.test_monitoring import Seen, full_view, record
from tests.waiting import wait_until

MONITORING = Path(__file__).parents[2] / "infra" / "monitoring"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Prometheus with our configuration, in a folder like a user's."""
    server = promtool("prometheus")
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / ".streamrl"))
    monkeypatch.delenv("STREAMRL_LISTEN", raising=False)
    shutil.copytree(MONITORING, tmp_path / "infra" / "monitoring")
    config = tmp_path / "infra" / "monitoring" / "prometheus.yaml"
    config.write_text(config.read_text().replace("15s", "1s"))
    port = any_free_port()
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [server, f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=log, stderr=log,
    ) as process:  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(150)


def test_prometheus_finds_a_run_and_fires_its_alerts(served: str) -> None:
    view = full_view()
    view.leave_out({"generator-7": "it died 4 times within an hour"})
    follower: Any = Seen(view)
    with exporting(record("count-1", prometheus={"port": 0}), follower, lambda text: None):
        wait_until(lambda: values(served, 'up{job="streamrl"}') == [1.0], deadline_s=60, what="the run")
        wait_until(
            lambda: values(served, 'streamrl_trainer_samples_total{run="count-1", role="trainer"}') == [2.0],
            what="the trainer's figure",
        )
        alert = 'ALERTS{alertname="StreamRLProcessLeftOut", alertstate="firing", run="count-1"}'
        wait_until(lambda: values(served, alert) == [1.0], deadline_s=60, what="the alert")
    wait_until(lambda: not values(served, 'up{job="streamrl"}'), deadline_s=60, what="its end")


def values(server: str, query: str) -> list[float]:
    """The values that a query has now; none while the server starts."""
    asked = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{server}/api/v1/query?{asked}", timeout=50) as answer:
            return [float(one["value"][1]) for one in json.load(answer)["data"]["result"]]
    except OSError:
        return []
