"""A generator whose engine has a rank on another machine: network namespaces. A lost rank is found again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml

from infra.runs import runs_of
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from tests.bench._link import two_sites
from tests.e2e.test_far_ranks import Trained, cli, command, log_of, vanishes
from tests.factories import TASK, make_spec
from tests.harness import trained_ids
from tests.stacks import own_broker, words_of
from tests.waiting import wait_until

ITERATIONS = 6
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="network namespaces need root and /dev/net/tun",
)


def far_rank(joined: subprocess.Popen[bytes]) -> psutil.Process | None:
    """The rank of the engine on the other machine."""
    found = psutil.Process(joined.pid).children(recursive=True)
    return next((one for one in found if any("rank_process" in word for word in words_of(one))), None)


def leaves(joined: subprocess.Popen[bytes]) -> None:
    """Ctrl-C on the other machine: nothing stays there."""
    there = [joined.pid, *(one.pid for one in psutil.Process(joined.pid).children(recursive=True))]
    assert len(there) > 2
    joined.send_signal(signal.SIGINT)
    joined.wait(300)
    wait_until(lambda: not any(map(psutil.pid_exists, there)), what="the end of all there")


def write_run_file(folder: Path, kafka: str, model: Path) -> None:
    (folder / "task.py").write_text(TASK)
    spec = make_spec(
        algorithm={"iterations": ITERATIONS, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
        generator={"slots": 16, "tensor_parallel": 2}, trainer={"bundle_tokens": 64},
        model={"path": str(model)}, task={"python": str(folder / "task.py")}, report=str(folder / "runs"),
        placement={
            "kafka": {"bootstrap_servers": kafka}, "store": f"file://{folder}/store",
            "engine_ranks": {"elsewhere": 1, "address": "10.77.0.0/24"},
        },
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))


@pytest.mark.thorough
def test_a_run_goes_on_when_a_rank_of_its_engine_on_another_machine_is_lost(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its machine vanishes, so that no connection is ever closed; once it is left by hand.

    It comes back. A rank that is killed: tests/integration/test_far_engine_ranks.py.
    """
    store = f"file://{tmp_path}/store"
    with ExitStack() as stack:
        link = stack.enter_context(two_sites(rate=1e9, delay_s=0.0))
        monkeypatch.setenv("STREAMRL_LISTEN", link.near_address)
        broker = stack.enter_context(own_broker(StackPaths.locate(tmp_path / "broker")))
        write_run_file(tmp_path, broker, tiny_model)
        with command(cli("run", str(tmp_path / "run.yaml")), tmp_path, "near") as flow:
            wait_until(lambda: runs_of(open_store(store)), what="the run", deadline_s=120)
            trained = Trained(store, broker)
            far = link.at_far(cli("join", trained.id, "--store", store, "--engine-ranks", "1"))
            with command(far, tmp_path, "far") as joined:
                wait_until(lambda: trained.steps(), what="a step", deadline_s=240)
                rank = far_rank(joined)
                assert rank is not None
                said = (
                    f"rank 1 of the engine (on 10.77.0.2) is lost with its machine: [Errno {errno.ETIMEDOUT}]"
                )
                vanishes(link, rank, lambda: said in log_of(tmp_path, "generator"))
                begun = len(trained.steps())
                wait_until(lambda: len(trained.steps()) > begun, what="a step after it", deadline_s=240)
                leaves(joined)
            with command(far, tmp_path, "far") as joined:
                wait_until(
                    lambda: flow.poll() is not None and joined.poll() is not None, what="the end of both",
                    deadline_s=300,
                )  # fmt: skip
        told = (tmp_path / "near.log").read_text() + (tmp_path / "far.log").read_text()
        assert (flow.returncode, joined.returncode) == (0, 0), told[-6000:]
        steps = trained.steps()
    assert sorted(trained_ids(steps)) == [(g, i) for g in range(8 * ITERATIONS) for i in range(4)]
    assert all(step.metrics["logprob_gap"] < 1e-3 for step in steps)
