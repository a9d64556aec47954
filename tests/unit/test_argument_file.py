"""Arguments of child processes may be longer than Linux allows of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest

from flows.planning import measuring
from flows.planning.profiled_learner import ProfilingFailed
from flows.run.inspection import task
from infra.supervise import quiet_child
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child
from infra.supervise.quiet_child import ChildEnded, QuietChild
from producers import rewards
from producers.engines import other_engine_ranks, remote
from producers.engines.engine_messages import EngineOptions
from producers.engines.engine_process import link_and_engine
from producers.engines.other_engine_ranks import RankOptions, start_rank
from producers.engines.rank_meeting import LocalMeeting
from producers.engines.remote import RemoteEngine
from schemas.runspec import RunSpec
from tests.factories import make_spec

MOST = 131_071  # bytes of an argument
READS = """
import os, sys
from infra.supervise.argument_file import read_argument
sys.stdout.write(read_argument(sys.argv[1]).decode())
try:
    os.fstat(int(sys.argv[1]))
except OSError:
    sys.stdout.write(" and it is closed")
"""


def test_a_child_reads_what_its_parent_wrote_and_closes_it() -> None:
    content = "ä" * MOST
    with argument_file(content.encode()) as said:
        child = subprocess.Popen(
            [sys.executable, "-c", READS, str(said)], pass_fds=[said], stdout=subprocess.PIPE, text=True
        )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(said)
    assert child.communicate()[0] == f"{content} and it is closed"


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    """A run file at its own limits."""
    sites = {
        f"site-{number}": {"elsewhere": True, "cache": f"file:///srv/a/folder/for/weights/of/runs/{number}"}
        for number in range(1000)
    }
    path = "/".join(["𝔸" * 60] * 67)
    files = {"jsonl": path, "held_out_jsonl": path, "chat_template": path, "reward": f"{path}.py:reward"}
    words = dict.fromkeys(("prompt_field", "id_field", "train_split"), "𝔸" * 256)
    task = {"python": None, **files, **words, "chat": True, "system": "𝔸" * 16_384}
    return make_spec(placement={"sites": sites}, task=task)


def start_an_engine(spec: RunSpec) -> None:
    options = EngineOptions(model="m", spec=spec.model_dump_json())
    RemoteEngine(options, threading.Event(), deadline_s=1).open().close()


def start_a_rank(spec: RunSpec) -> None:
    acts, beside = Pipe()
    options = RankOptions(
        engine=EngineOptions(model="m", spec=spec.model_dump_json()), number=1, local=1, group="g",
        meeting=LocalMeeting(""), marks="", acts=acts.fileno(), beside=beside.fileno(),
    )  # fmt: skip
    kill(start_rank(options, []))


def start_a_quiet_child(spec: RunSpec) -> None:
    child = QuietChild("a learner", EngineOptions(model="m", spec=spec.model_dump_json())).open()
    with pytest.raises(ChildEnded):
        child.receive(30)
    child.close()


def read_the_first_prompts(spec: RunSpec) -> None:
    with pytest.raises(ProfilingFailed, match="ended without them"):
        measuring.read_prompts(spec, "m")


def look_at_the_task(spec: RunSpec) -> None:
    (found,) = task.look_at_task(spec, None)
    assert "the process ended with exit code 0" in found.line


def start_a_reward_worker(spec: RunSpec) -> None:
    rewards.RewardPool(spec.task).close()


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (remote, start_an_engine),
        (other_engine_ranks, start_a_rank),
        (quiet_child, start_a_quiet_child),
        (measuring, read_the_first_prompts),
        (task, look_at_the_task),
        (rewards, start_a_reward_worker),
    ],
)
def test_a_run_file_at_its_limits_can_be_given_to_each_process(
    module: Any, start: Callable[[RunSpec], None], spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bytes] = []

    def true(command: list[str], **how: Any) -> Any:
        process = start_child(["true", *command[3:]], **how)  # the kernel decides
        given.append(os.pread(int(command[3]), 1 << 20, 0))
        return process

    monkeypatch.setattr(module, "start_child", true)
    start(spec)
    assert len(given[0]) > MOST and json.loads(given[0])


def test_an_engine_process_takes_a_run_file_at_its_limits(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()
    options = EngineOptions(model="m", spec=spec.model_dump_json())
    with argument_file(msgspec.json.encode(options)) as said:
        monkeypatch.setattr(sys, "argv", ["", str(os.dup(said)), str(os.dup(theirs.fileno()))])
        link, _ = link_and_engine()
    link.send_bytes(b"here")
    assert ours.recv_bytes() == b"here"
    link.close()
