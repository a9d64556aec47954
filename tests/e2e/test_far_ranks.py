"""Two machines train as one: network namespaces, and gloo between their ranks. Whoever dies comes back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from infra.bus import read_all
from infra.kafka_bus import KafkaBus
from infra.runs import newest_run, runs_of
from infra.stack.local import Stack
from infra.stack.paths import StackPaths
from infra.stores.opening import open_store
from infra.supervise.children import kill, start_child
from schemas.messages import StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.bench._link import Link, two_sites
from tests.factories import TASK, make_spec
from tests.harness import ROOT, running, trained_ids
from tests.stacks import own_broker, words_of
from tests.waiting import wait_until

NAME, ITERATIONS = "test", 10
ALGORITHM = {
    "iterations": ITERATIONS, "groups": 8, "group_size": 4, "learning_rate": 3e-3, "max_grad_norm": 1e9,
}  # fmt: skip
TRAINER = {"checkpoint_every": 2, "bundle_tokens": 64, "least_microbatches": 2}
SILENCE_S = 60  # by which a machine that is gone is missed: half a minute, and a grace
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_python", "--no_local_rank"],
}
DEPLOYMENT = """
import sys
from prefect import flow
flow.from_source(source=sys.argv[1], entrypoint="flows/join_run.py:join_run").serve(name="there")
"""


@contextmanager
def command(argv: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of our commands, with a home of its own."""
    environment = {**os.environ, "STREAMRL_HOME": str(folder / name), "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.log").open("ab") as log:
        process = start_child(argv, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(150)
        finally:
            kill(process)


def cli(*words: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", *words]


def computing_rank(joined: subprocess.Popen[bytes]) -> psutil.Process | None:
    """The process that computes on the other machine."""
    found = [
        one for one in psutil.Process(joined.pid).children(recursive=True) if "--connection" in words_of(one)
    ]
    return found[0] if found else None


def log_of(folder: Path, role: str) -> str:
    """The logs of a role, on the machine of the run."""
    return "".join(file.read_text() for file in (folder / "runs").rglob(f"{role}*.log"))


def vanishes(link: Link, rank: psutil.Process, is_missed: Callable[[], bool]) -> None:
    """The other machine, until both sides have noticed it by the silence of the other. Then it is back."""
    until = time.monotonic() + SILENCE_S
    link.cut()
    wait_until(is_missed, what="rank 0 to miss the machine", deadline_s=SILENCE_S)
    wait_until(
        lambda: not rank.is_running(), what="the rank there to miss rank 0",
        deadline_s=until - time.monotonic(),
    )  # fmt: skip
    link.mend()


class Trained:
    """A run of the command line, as its store and topics tell it."""

    def __init__(self, store: str, kafka: str) -> None:
        record = newest_run(open_store(store))
        assert record is not None
        self.id, self._topics = record.id, Topics(record.id, record.spec.lengths.classes)
        self._bus = KafkaBus(kafka)

    def steps(self) -> list[StepRecord]:
        return [
            decode(one.value, StepRecord) for one in read_all(self._bus, self._topics.ledger, deadline_s=150)
        ]


def write_run_file(
    folder: Path, kafka: str, model: Path, address: str, *, iterations: int = ITERATIONS, elsewhere: int = 1,
    learner: str = "fsdp", called: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    (folder / "task.py").write_text(TASK)
    spec = make_spec(
        algorithm={**ALGORITHM, "iterations": iterations}, model={"path": str(model)},
        trainer={**TRAINER, "ranks": 1 + elsewhere, "learner": learner},
        task={"python": str(folder / "task.py")}, report=str(folder / "runs"),
        placement={
            "kafka": {"bootstrap_servers": kafka}, "store": f"file://{folder}/store",
            "ranks": {"elsewhere": elsewhere, "address": address, "deployments": dict(called or {})},
        },
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_ranks(tmp_path: Path, kafka: str, tiny_model: Path, launcher: str) -> None:
    """Each starts a process for each GPU of its machine, and says to it which one it is.

    They begin first, as in a job that starts all machines at once, and wait for the run.
    """
    write_run_file(tmp_path, kafka, tiny_model, "127.0.0.1", iterations=2, elsewhere=2, learner="torch")
    store = f"file://{tmp_path}/store"
    words = cli("join", NAME, "--newest", "--wait", "300", "--store", store, "--ranks", "1")
    with command([sys.executable, *LAUNCHERS[launcher], *words], tmp_path, "far") as joined:
        far = tmp_path / "far.log"
        wait_until(
            lambda: joined.poll() is not None or far.read_text().count("waiting up to 300 s") == 2,
            what="the ranks to wait for the run", deadline_s=120,
        )  # fmt: skip
        with command(cli("run", str(tmp_path / "run.yaml"), "--no-prefect"), tmp_path, "near") as flow:
            wait_until(
                lambda: flow.poll() is not None and joined.poll() is not None, what="the end of both",
                deadline_s=240,
            )  # fmt: skip
    told = (tmp_path / "near.log").read_text() + far.read_text()
    assert (flow.returncode, joined.returncode) == (0, 0), told[-6000:]
    check_two_ranks(tmp_path, kafka)


def check_two_ranks(folder: Path, kafka: str) -> None:
    assert len(Trained(f"file://{folder}/store", kafka).steps()) == 2
    log = log_of(folder, "trainer")
    for rank, number in ((1, 0), (2, 1)):
        assert f"rank {rank} is number {number} on 127.0.0.1" in log


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_calls_the_deployments_that_hold_its_ranks(
    killed: bool, tmp_path: Path, kafka: str, tiny_model: Path, prefect_stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Their flow run ends with the run, by itself.

    `killed`: the first one is killed, and its deployment called again. Prefect takes minutes to start that.
    """
    for name, value in prefect_stack.env().items():
        monkeypatch.setenv(name, value)
    called = {"join-run/there": 2}
    write_run_file(
        tmp_path, kafka, tiny_model, "127.0.0.1", iterations=2, elsewhere=2, learner="torch", called=called
    )
    with command([sys.executable, "-c", DEPLOYMENT, str(ROOT)], tmp_path, "far") as serving:
        far = tmp_path / "far.log"
        wait_until(lambda: "join-run/there" in far.read_text(), what="the deployment", deadline_s=120)
        with command(cli("run", str(tmp_path / "run.yaml")), tmp_path, "near") as flow:
            if killed:
                wait_until(lambda: computing_rank(serving), what="a rank there", deadline_s=240)
                rank = computing_rank(serving)
                flow_runs = psutil.Process(serving.pid).children()
                next(one for one in flow_runs if rank in one.children(recursive=True)).kill()
            wait_until(
                lambda: flow.poll() is not None or "in state Failed" in far.read_text(),
                what="the end of the run", deadline_s=600 if killed else 240,
            )  # fmt: skip
        told = (tmp_path / "near.log").read_text() + far.read_text()
        assert flow.returncode == 0, told[-6000:]
        assert ("join-run/there had ended, and was called again for 2 ranks" in told) == killed
        wait_until(lambda: "Finished in state Completed" in far.read_text(), what="the end of its ranks")
    check_two_ranks(tmp_path, kafka)


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="network namespaces need root and /dev/net/tun",
)
def test_two_machines_train_as_one_also_if_a_rank_is_killed_or_a_machine_vanishes(
    cut_off: bool, tmp_path: Path, kafka: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody starts anything by hand: the bits at the end are those of one process that nothing disturbed.

    That process has the whole model. The two share it out, and each writes its part of checkpoints.
    `cut_off`: a machine also vanishes as by a power cut. Nothing that was sent arrives any more, so no
    connection is ever closed.
    """
    with running(
        tmp_path / "alone", kafka, make_spec(algorithm=ALGORITHM, trainer=TRAINER), tiny_model
    ) as run:
        run.wait_for_end()
        undisturbed = [step.root_out for step in run.steps()]
    store = f"file://{tmp_path}/store"
    with ExitStack() as stack:
        link = stack.enter_context(two_sites(rate=1e9, delay_s=0.0))
        monkeypatch.setenv("STREAMRL_LISTEN", link.near_address)
        broker = stack.enter_context(own_broker(StackPaths.locate(tmp_path / "broker")))
        write_run_file(tmp_path, broker, tiny_model, link.near_address)
        with command(cli("run", str(tmp_path / "run.yaml")), tmp_path, "near") as flow:
            wait_until(lambda: runs_of(open_store(store)), what="the run", deadline_s=120)
            trained = Trained(store, broker)
            far = link.at_far(cli("join", trained.id, "--store", store, "--ranks", "1"))
            with command(far, tmp_path, "far") as joined:
                wait_until(lambda: len(trained.steps()) >= 3, what="three steps", deadline_s=240)
                rank = computing_rank(joined)
                assert rank is not None
                rank.kill()
                begun = len(trained.steps()) + 1  # one may just be written
                wait_until(lambda: len(trained.steps()) > begun, what="steps after it", deadline_s=240)
                if cut_off:
                    rank = computing_rank(joined)
                    assert rank is not None
                    said = f"rank 1 (on 10.77.0.2) is lost: [Errno {errno.ETIMEDOUT}]"
                    vanishes(link, rank, lambda: said in log_of(tmp_path, "trainer"))
                wait_until(
                    lambda: flow.poll() is not None and joined.poll() is not None, what="the end of both",
                    deadline_s=400,
                )  # fmt: skip
        told = (tmp_path / "near.log").read_text() + (tmp_path / "far.log").read_text()
        assert (flow.returncode, joined.returncode) == (0, 0), told[-6000:]
        steps = trained.steps()
    assert [step.root_out for step in steps] == undisturbed
    assert sorted(trained_ids(steps)) == [(g, i) for g in range(8 * ITERATIONS) for i in range(4)]
    assert "trainer was killed" not in told and "trainer ended with exit code 1" in told
    assert "rank 1 (on 10.77.0.2) closed its connection" in log_of(tmp_path, "trainer")
