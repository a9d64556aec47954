"""What `streamrl run FILE --check` finds out about task, model, store and broker, and survives."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.run.checks import problems_of
from flows.run.inspection import inspect_run, task
from flows.run.inspection import store_and_broker as places
from flows.run.inspection.architectures import generated, trained
from flows.run.inspection.finding import Finding, NoAnswer, within
from flows.run.inspection.model import look_at_model
from flows.run.inspection.store_and_broker import look_at_places
from flows.run.inspection.task import look_at_task
from infra.bus import BusError
from infra.credentials import without_credentials
from infra.ranks import rank_addresses
from infra.stores.store import StoreError
from schemas.runspec import RunSpec
from tests.factories import make_model_files, make_spec
from tests.waiting import wait_until

OWN = "10.1.2.3"  # an address of this machine

TASK = """
def problems(split):
    return [{"id": str(n), "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(100)]

def reward(problem, completion):
    return {"right": completion == problem["answer"], "length": 0.5}
"""


GARBAGE = """
import os
for descriptor in range(3, 1024):
    try:
        os.write(descriptor, b"garbage\\n")
    except OSError:
        pass
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))


def spec_of(folder: Path, code: str = TASK, **sections: Any) -> RunSpec:
    (folder / "task.py").write_text(code)
    return make_spec(**{"task": {"python": f"{folder}/task.py"}, "deadlines": {"start_s": 2}, **sections})


def looked_at(folder: Path, code: str, **sections: Any) -> list[Finding]:
    return look_at_task(spec_of(folder, code, **sections), make_model_files(folder / "model"))


def wrong(found: list[Finding]) -> list[str]:
    assert all(len(one.line) <= 1_000 and "\n" not in one.line for one in found)
    return [one.line for one in found if one.wrong]


def test_a_task_that_is_fine(tmp_path: Path) -> None:
    found = looked_at(tmp_path, TASK, evaluation={"problems": 4})
    assert [one.line for one in found] == [
        "task: the first 32 problems of split 'train' can be used",
        "task: the first 32 problems of split 'held_out' can be used",
        "tokenizer: prompts of 4 to 5 tokens; 8 are allowed (sampling.max_prompt_tokens)",
        "reward: '1' earns 1.5 (right, length)",
    ]
    assert not wrong(found)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import time\ntime.sleep(600)", "task: the import of .*task.py:reward: it takes longer than 2 s"),
        ("while True: pass", "task: the import of .*: it takes longer than 2 s"),
        ("import os\nos._exit(0)", "task: the import of .*: the process ended with exit code 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "the process was killed by SIGKILL"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "it takes longer than 2 s"),
        ("import os\nprint('bye')\nos._exit(4)", "exit code 4; its last line: 'bye'"),
        ("raise SystemExit('no')", "reward: .*task.py can't be imported: SystemExit: no"),
        ("raise RuntimeError('x' * 10**6)", "reward: .*task.py can't be imported: RuntimeError: xxx"),
        ("import nothing_of_the_kind", "reward: .*can't be imported: ModuleNotFoundError"),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(): f()\nf()", "killed|longer than|Recursion"),
        (GARBAGE, "it writes to descriptors that it did not open"),
        ("import os\nos.closerange(0, 64)\nimport time\ntime.sleep(600)", "task: .*(takes longer|exit code)"),
    ],
)  # fmt: skip
def test_tasks_that_do_not_come_to_their_end(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "MOST_MEMORY", 1 << 29)
    said = wrong(looked_at(tmp_path, code + TASK))
    assert said
    assert any(re.search(expected, line) for line in said), said
    assert not psutil.Process().children(recursive=True)


def test_a_task_that_takes_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "MOST_MEMORY", 1 << 29)
    hoarding = "hoard = []\nwhile True: hoard.append(bytearray(1 << 24))"
    said = wrong(looked_at(tmp_path, hoarding + TASK, deadlines={"start_s": 60}))
    assert any("GiB of memory; 0.5 are allowed here" in line for line in said), said
    assert not psutil.Process().children(recursive=True)


def test_a_task_that_prints_and_forks_is_looked_at_all_the_same(tmp_path: Path) -> None:
    code = "import os\nprint('x' * 10**6)\nos.write(2, b'{\"pid\": 1}')\nos.fork()\n"
    found = looked_at(tmp_path, code + TASK)
    assert not wrong(found)
    assert [one.thing for one in found] == ["task", "tokenizer", "reward"]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_a_task_leaves_behind_is_killed(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(left)!r}, "w").write(str(child.pid))
"""
    assert not wrong(looked_at(tmp_path, code + TASK))
    pid = int(left.read_text())
    wait_until(lambda: has_ended(pid), what="the end of what the task has left")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("def reward(problem): return 1", "the function can't be called as reward(problem, completion)"),
        ("def reward(problem, completion, more): return 1", "missing a required argument: 'more'"),
        ("def reward(problem, completion): return None", "not a number, but a NoneType"),
        ("def reward(problem, completion): return '1.0'", "not a number: '1.0' is text"),
        ("def reward(problem, completion): return float('nan')", "not a finite number"),
        ("def reward(problem, completion): return {}", "the reward has 0 parts"),
        ("def reward(problem, completion): return {'a': 'b'}", "not a number: 'b' is text"),
        ("def reward(problem, completion): return [1]", "not a number, but a list"),
        ("async def reward(problem, completion): return 1", "not a number, but a coroutine"),
        (
            "def reward(problem, completion): return problem['solution']",
            "fails on problem '0': KeyError: 'solution'",
        ),
        ("def reward(problem, completion): raise SystemExit(3)", "fails on problem '0': SystemExit: 3"),
        (
            "def reward(problem, completion): import time; time.sleep(600)",
            "of problem '0': it takes longer than 1 s",
        ),
        ("reward = 3", "has no function reward()"),
    ],
)
def test_rewards_that_cannot_be_used(function: str, expected: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/task.py"
    said = wrong(looked_at(tmp_path, f"{TASK}\n{function}\n", task={"python": path, "reward_deadline_s": 1}))
    assert len(said) == 1
    assert expected in said[0]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def problems(split): return []", "task: there are no problems in split 'train'"),
        ("def problems(split): yield {'prompt': 3}", "task: problem 0 has no text in 'prompt'"),
        ("def problems(split): raise OSError('no disk')", "problems('train') failed: OSError: no disk"),
        ("def problems(split): yield {'prompt': '1' * 99}", "none of the first 1 could be used"),
        (
            "def problems(split):\n  while True: pass",
            "reading the first problems of split 'train': it takes longer",
        ),
    ],
)
def test_problems_that_cannot_be_used(code: str, expected: str, tmp_path: Path) -> None:
    said = wrong(looked_at(tmp_path, f"{TASK}\n{code}\n"))
    assert expected in said[0]


def test_an_endless_source_is_read_to_its_first_problems(tmp_path: Path) -> None:
    rows = "({'prompt': f'{n}', 'answer': ''} for n in itertools.count())"
    code = f"import itertools\ndef problems(split): return {rows}"
    assert not wrong(looked_at(tmp_path, f"{TASK}\n{code}\n"))


def test_a_task_gets_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [
        "AWS_SECRET_ACCESS_KEY",
        "STREAMRL_KAFKA_PASSWORD",
        "HF_TOKEN",
        "MY_API_KEY",
        "GOOGLE_APPLICATION",
    ]
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("MY_DATA", "/data")
    code = (
        f"import os\nassert os.environ['MY_DATA'] == '/data'\nassert not set({secrets}) & set(os.environ)\n"
    )
    assert not wrong(looked_at(tmp_path, code + TASK))
    assert without_credentials({"PATH": "x", "A_SECRET": "y"}) == {"PATH": "x"}


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    model = make_model_files(tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    said = wrong(look_at_task(spec_of(tmp_path), model))
    assert len(said) == 1
    assert "tokenizer: " in said[0]
    assert "there is no tokenizer that can be read" in said[0]


def test_a_dataset_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    spec = make_spec(task={"python": None, "dataset": "someone/something", "reward": "math:pow"})
    (found,) = look_at_task(spec, None)
    assert not found.wrong
    assert "not on this machine" in found.said


def header_of(said: Any, data: bytes = b"\0" * 32) -> bytes:
    raw = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("<Q", len(raw)) + raw + data


CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MODELS = {
    "damaged config": ("config.json", b"{", "config.json is damaged: Expecting"),
    "config of bytes": ("config.json", b"\xff\xfe", "config.json is damaged: 'utf-8'"),
    "deep config": ("config.json", b"[" * 100_000, "config.json is damaged"),
    "a config that is a list": ("config.json", b"[]", "it is a list, not a mapping"),
    "no kind": ("config.json", b"{}", "has no model_type"),
    "an odd kind": ("config.json", b'{"model_type": 3}', "config.json is damaged: model_type is 3"),
    "a model of images": (
        "config.json", b'{"model_type": "vit"}', "'vit' is no causal language model"
    ),
    "an unknown class": (
        "config.json", json.dumps({**CONFIG, "architectures": ["MyForCausalLM"]}).encode(),
        "vLLM does not generate with the architecture 'MyForCausalLM'",
    ),
    "odd classes": ("config.json", b'{"architectures": "Qwen2ForCausalLM"}', "damaged: model_type is None"),
    "no tensors": ("model.safetensors", None, "has no model.safetensors: save the model"),
    "an empty file": ("model.safetensors", b"", "0 bytes can't hold the header"),
    "a huge header": ("model.safetensors", struct.pack("<Q", 1 << 60), "can't hold the header"),
    "a header of bytes": ("model.safetensors", header_of(b"\xff"), "its header can't be read"),
    "a deep header": ("model.safetensors", header_of(b"[" * 50_000), "its header can't be read"),
    "a header that is a list": ("model.safetensors", header_of([]), "its header can't be read"),
    "a tensor beyond the end": (
        "model.safetensors", header_of({"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}),
        "does not hold the tensor 'a'",
    ),
    "a tensor of no shape": (
        "model.safetensors", header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "'a'"
    ),
    "a damaged index": ("model.safetensors.index.json", b"{}", "is damaged"),
    "an index of what is missing": (
        "model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"
    ),
    "an index that leads elsewhere": (
        "model.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}', "no plain name of a file"
    ),
    "no tokenizer": ("tokenizer.json", None, "has no tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    file, content, expected = MODELS[name]
    model = make_model_files(tmp_path)
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_bytes(content)
    said = wrong(list(look_at_model(model)))
    assert any(expected in line for line in said), said


def test_a_model_that_is_fine(tmp_path: Path) -> None:
    model = make_model_files(tmp_path)
    assert [one.line for one in look_at_model(model)] == [
        f"model: {model} has a qwen2 of 1 tensors, and a tokenizer"
    ]


@pytest.mark.parametrize("name", ["damaged config", "a model of images", "an unknown class", "a huge header"])
def test_what_is_wrong_with_a_model_is_said_before_a_start(name: str, tmp_path: Path) -> None:
    file, content, expected = MODELS[name]
    (make_model_files(tmp_path / "model") / file).write_bytes(content)
    spec = spec_of(tmp_path, model={"path": str(tmp_path / "model")})
    (problem,) = problems_of(spec)
    assert problem.startswith("model.path: ")
    assert expected in problem
    assert not [one for one in inspect_run(spec, [problem]) if one.said in problem]


def test_the_tables_of_models_are_found() -> None:
    assert trained()["qwen2"] == "Qwen2ForCausalLM"
    assert not generated() or "Qwen2ForCausalLM" in generated()


def placed(folder: Path, **placement: Any) -> dict[str, Finding]:
    return {one.thing: one for one in look_at_places(spec_of(folder, placement=placement))}


@pytest.mark.parametrize(
    ("name", "address", "noted"),
    [
        ("ranks", "127.0.0.1", True),
        ("ranks", "localhost", True),
        ("ranks", OWN, False),
        ("engine_ranks", "127.0.0.1", True),
        ("engine_ranks", "127.1.2.0/24", True),
        ("engine_ranks", "10.0.0.0/24", False),
    ],
)
def test_ranks_elsewhere_that_reach_this_machine_alone_are_noted(
    tmp_path: Path, name: str, address: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_addresses, "_own_addresses", lambda: {"127.0.0.1": "lo", OWN: "eth0"})
    ranks = {"trainer": {"ranks": 2}, "generator": {"tensor_parallel": 2}}
    spec = spec_of(tmp_path, placement={name: {"elsewhere": 1, "address": address}}, **ranks)
    found = [one for one in look_at_places(spec) if one.thing == "ranks elsewhere"]
    assert [(one.noted, one.wrong) for one in found] == ([(True, False)] if noted else [])
    assert all(one.said.startswith(f"placement.{name}.address is {address}, which no other") for one in found)
    assert not [one for one in look_at_places(spec_of(tmp_path, **ranks)) if one.thing == "ranks elsewhere"]


@pytest.mark.parametrize(
    ("address", "means", "wrong", "said"),
    [
        ("10.9.9.9", "10.9.9.9", True, "10.9.9.9 is no address of this machine"),
        ("vm.internal", "127.0.1.1", True, "vm.internal is 127.0.1.1 on this machine (/etc/hosts or DNS)"),
        ("vm.internal", "127.0.0.1", False, "is vm.internal (127.0.0.1 on this machine), which no other"),
        ("vm.internal", None, True, "placement.ranks.address: vm.internal has no IPv4 address"),
    ],
)
def test_an_address_that_this_machine_lacks_is_named(
    tmp_path: Path, address: str, means: str | None, wrong: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*_: object) -> list[Any]:
        if means is None:
            raise OSError("Name or service not known")
        return [(None, None, None, None, (means, 0))]

    monkeypatch.setattr(rank_addresses, "_own_addresses", lambda: {"127.0.0.1": "lo", OWN: "eth0"})
    monkeypatch.setattr(rank_addresses.socket, "getaddrinfo", resolved)
    spec = spec_of(tmp_path, placement={"ranks": {"elsewhere": 1, "address": address}}, trainer={"ranks": 2})
    (found,) = (one for one in look_at_places(spec) if one.thing == "ranks elsewhere")
    assert said in found.said and found.wrong == wrong


def test_a_store_in_a_folder_is_not_made_by_looking(tmp_path: Path) -> None:
    found = placed(tmp_path, store=f"file://{tmp_path}/a/b")["store"]
    assert not found.wrong
    assert "can be written" in found.said
    assert not (tmp_path / "a").exists()


def test_stores_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("file/store", "gone/store"):
        spec = spec_of(
            tmp_path,
            placement={"store": f"file://{tmp_path}/{name}"},
            model={"build": "math:pow", "path": None},
        )
        assert any("placement.store: " in one and "is no folder" in one for one in problems_of(spec))
        assert placed(tmp_path, store=f"file://{tmp_path}/{name}")["store"].wrong
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "this user may not write to" in placed(tmp_path, store=f"file://{tmp_path}/x")["store"].said


class DeadStore:
    def __init__(self, url: str) -> None:
        self.url = url

    def list(self, prefix: str) -> list[str]:
        raise StoreError(f"{self.url}/{prefix} can't be listed: no such bucket")


def test_a_store_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "open_store", DeadStore)
    found = placed(tmp_path, store="s3://bucket/prefix")["store"]
    assert found.wrong
    assert "placement.store: s3://bucket/prefix/streamrl-looks-here can't be listed: no such" in found.line


class FakeKafka:
    brokers: int | Exception = 3

    def __init__(self, servers: str, **_: Any) -> None:
        pass

    def broker_count(self) -> int:
        if isinstance(self.brokers, Exception):
            raise self.brokers
        return self.brokers


@pytest.mark.parametrize(
    ("brokers", "replication", "expected"),
    [
        (3, 3, "a:9092 answers with 3 brokers"),
        (1, 1, "a:9092 answers with 1 broker"),
        (2, 3, "a:9092 has 2 brokers: placement.kafka.replication is 3, lower it"),
        (
            BusError("Kafka at a:9092 can't be reached"),
            1,
            "bootstrap_servers: Kafka at a:9092 can't be reached",
        ),
    ],
)
def test_a_broker(
    brokers: int | Exception, replication: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "KafkaBus", FakeKafka)
    monkeypatch.setattr(FakeKafka, "brokers", brokers)
    found = placed(tmp_path, kafka={"bootstrap_servers": "a:9092", "replication": replication})["broker"]
    assert expected in found.line
    assert found.wrong == (isinstance(brokers, Exception) or brokers < replication)


def test_the_local_broker_is_not_started(tmp_path: Path) -> None:
    assert "does not run: a run starts it" in placed(tmp_path)["broker"].said
    assert placed(tmp_path, kafka={"replication": 3})["broker"].wrong


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_what_does_not_answer_holds_up_nobody(never: threading.Event) -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
        within(0.1, never.wait)
    with pytest.raises(KeyError):
        within(10, lambda: {}["a"])
    assert within(10, lambda: 3) == 3
