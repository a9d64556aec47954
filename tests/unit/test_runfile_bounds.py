"""Whatever is in a run file: reading it gives a run spec or a short error, in bounded time and memory."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from schemas.loading import RunFileError, load_run_file
from schemas.runspec import RunSpec
from schemas.section import is_named, section_of
from schemas.yaml_text import LARGEST_FILE, MOST_NODES

ROOT = Path(__file__).parents[2]
GOOD = "run: count\ntask: {python: task.py}\nmodel: {path: model}\n"
LONG = "x" * 5_000

# Name of the case: what is added to a good run file, and what the message says.
TEXTS = {
    "deep lists": ("seed: " + "[" * 5_000 + "]" * 5_000, "more than 16 levels"),
    "deep mappings": ("seed: " + "{a: " * 500 + "1" + "}" * 500, "more than 16 levels"),
    "deep blocks": ("seed:\n" + "".join(" " * n + "-\n" for n in range(1, 300)), "more than 16 levels"),
    "deep on one line": ("seed:\n  " + "- " * 2_000 + "1\n", "more than 16 levels"),
    "a billion laughs": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        r"more than 10,000 values \(an alias counts",
    ),
    "aliases that deepen": (
        "a: &a [[[[[[[[1]]]]]]]]\nb: &b [[[[[[[*a]]]]]]]\nc: [[[[[[[*b]]]]]]]\n", "levels of .* by aliases"
    ),
    "an alias of itself": ("seed: &a [*a]\n", r"seed.0: the alias \*'a' stands for nothing"),
    "an alias of nothing": ("seed: *a\n", r"seed: the alias \*'a' stands for nothing"),
    "an alias as a key": ("x: &a y\n*a : 1\n", "a key is a name"),
    "very many keys": ("\n".join(f"k{n}: 1" for n in range(20_000)), "more than 10,000 values"),
    "many unknown keys": ("\n".join(f"k{n}: 1" for n in range(3_000)), r"… and \d+ more"),
    "a long value": (f"report: {LONG}\n", "report: the text has 5,000 characters; at most 4,096"),
    "a long key": (f"{LONG[:500]}: 1\n", "the key has 500 characters; at most 200"),
    "a long number": ("seed: " + "9" * 4_090 + "\n", "seed: the number has 4,090 digits; at most 40"),
    "a long float": ("algorithm: {learning_rate: 0." + "9" * 4_000 + "}\n", "the number has 4,002"),
    "a long anchor": (f"seed: *{LONG}\n", "stands for nothing"),
    "a long tag": (f"seed: !{LONG} 1\n", "seed: the tag .*….* is not allowed"),
    "a date": ("seed: 2024-05-06\n", "seed: '2024-05-06' is a date in YAML: put it in quotes"),
    "a date that is none": ("seed: 2024-99-99\n", "seed: '2024-99-99' is a date"),
    "a time": ("report: 2001-12-14t21:59:43.10-05:00\n", "report: .* is a date in YAML"),
    "a Python object": ("seed: !!python/object:os.system {}\n", "tag '!!python/object:os.system' is"),
    "a tag of one's own": ("seed: !mine 1\n", "seed: the tag '!mine' is not allowed"),
    "a tagged section": ("lengths: !mine {classes: 1}\n", "lengths: the tag '!mine' is not allowed"),
    "bytes": ("report: !!binary aGVsbG8=\n", "report: the tag '!!binary' is not allowed"),
    "damaged bytes": ("report: !!binary '*'\n", "report: the tag '!!binary' is not allowed"),
    "a set": ("report: !!set {a, b}\n", "report: the tag '!!set' is not allowed"),
    "an ordered map": ("report: !!omap [a: 1]\n", "report: the tag '!!omap' is not allowed"),
    "an int that is none": ("seed: !!int many\n", "seed: 'many' is no int"),
    "an empty int": ("seed: !!int ''\n", "seed: '' is no int"),
    "a float that is none": ("seed: !!float many\n", "seed: 'many' is no float"),
    "a bool that is none": ("seed: !!bool many\n", "seed: 'many' is no bool"),
    "binary digits without one": ("seed: 0b_\n", "seed: '0b_' is no int"),
    "a NUL": ('report: "a\\0b"\n', r"report: the character U\+0000 is not allowed"),
    "a lone surrogate": ('report: "a\\ud800b"\n', r"report: the character U\+D800 is not allowed"),
    "an escape beyond Unicode": ('report: "\\UFFFFFFFF"\n', "not valid YAML"),
    "an escape beyond Unicode, small": ('report: "\\U00110000"\n', "not valid YAML"),
    "a terminal's command": ('report: "\\e[31mred"\n', r"report: the character U\+001B is not allowed"),
    "a tab": ("seed:\t\t{\t", "not valid YAML"),
    "a second document": ("---\nseed: 1\n", "a second document begins"),
    "a number as a key": ("1: 2\n", "the key '1' is a int: put names in quotes"),
    "true as a key": ("on: 2\n", "the key 'on' is a bool: put names in quotes"),
    "nothing as a key": ("~: 2\n", "the key '~' is a NoneType: put names in quotes"),
    "a list as a key": ("? [a]\n: 2\n", "a key is a name"),
    "a merge of a number": ("lengths: {<<: 3}\n", "<< merges mappings"),
    "a key twice below": ("lengths:\n  classes: 1\n  classes: 2\n", ":6: lengths.classes: given twice"),
    "a directive": ("%YAML 9.9\n---\n", "not valid YAML"),
}  # fmt: skip

# Each is one setting, and a part of the message besides the name of the field.
SETTINGS: list[tuple[str, Any, str]] = [
    ("seed", True, "a number is expected, found true"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**70, "less than or equal to 9223372036854775807"),
    ("seed", 10**30, "less than or equal"),
    ("seed", 1.5, "integer"),
    ("seed", [1], "integer"),
    ("seed", {"a": 1}, "integer"),
    ("report", "", "at least 1 character"),
    ("report", "a/" * 3 + "n" * 300, "300 bytes is too long"),
    ("report", 5, "string"),
    ("run", "../other", "small letters, digits and dashes"),
    ("run", "n" * 50, "at most 49"),
    ("task.python", "n" * 300 + ".py", "too long for a file"),
    ("task.python", True, "string"),
    ("task.limit", 0, "greater than 0"),
    ("task.limit", 10**12, "less than or equal to 100000000"),
    ("task.limit", False, "a number is expected, found false"),
    ("task.reward_deadline_s", float("inf"), "finite number"),
    ("task.reward_deadline_s", float("nan"), "finite number"),
    ("task.reward_deadline_s", 1e9, "less than or equal to 86400"),
    ("task.reward_workers", True, "a number is expected"),
    ("task.reward_workers", 10**6, "less than or equal to 1024"),
    ("task.prompt_field", "", "at least 1 character"),
    ("task.id_field", "n" * 257, "at most 256"),
    ("task.train_split", 3, "string"),
    ("model.path", ["a"], "string"),
    ("model.dtype", ["float32"], "not one of"),
    ("model.dtype", "float16", "not one of"),
    ("model.lora", {"rank": 10**6}, "less than or equal to 16384"),
    ("model.lora", {"rank": True}, "a number is expected"),
    ("model.lora", {"alpha": float("inf")}, "finite number"),
    ("model.lora", {"targets": []}, "names of layers"),
    ("model.lora", {"targets": ["a"] * 2_000}, "at most 1000"),
    ("model.lora", {"targets": [["q"] * 9] * 9}, "names of layers"),
    ("sampling.temperature", float("inf"), "finite number"),
    ("sampling.temperature", float("nan"), "finite number"),
    ("sampling.temperature", 1e-9, "vLLM raises it to 0.01 by itself"),
    ("sampling.temperature", 1e30, "less than or equal to 100"),
    ("sampling.temperature", True, "a number is expected"),
    ("sampling.max_tokens", 10**30, "less than or equal to 10000000"),
    ("sampling.max_tokens", True, "a number is expected"),
    ("sampling.max_prompt_tokens", 10**9, "less than or equal"),
    ("algorithm.mode", ["sync"], "not one of"),
    ("algorithm.mode", {"sync": 1}, "not one of"),
    ("algorithm.recorded", "../../other", "pattern"),
    ("algorithm.staleness", float("inf"), "finite number"),
    ("algorithm.staleness", True, "a number is expected"),
    ("algorithm.iterations", 10**30, "less than or equal to 100000000"),
    ("algorithm.iterations", True, "a number is expected"),
    ("algorithm.groups", 150_000, "the record of a step holds 150000"),
    ("evaluation.problems", 150_001, "the record of an evaluation holds 150000"),
    ("evaluation.per_problem", 32_769, "less than or equal to 32768"),
    ("algorithm.groups", True, "a number is expected, found true"),
    ("algorithm.groups", 10**30, "less than or equal to 1000000"),
    ("algorithm.groups", float("inf"), "finite number"),
    ("algorithm.groups", "1" * 39, "less than or equal"),
    ("algorithm.group_size", 10**30, "less than or equal to 32768"),
    ("algorithm.group_size", True, "a number is expected"),
    ("algorithm.optimizer_steps", 10**30, "less than or equal"),
    ("algorithm.learning_rate", float("inf"), "finite number"),
    ("algorithm.learning_rate", float("nan"), "finite number"),
    ("algorithm.learning_rate", "inf", "finite number"),
    ("algorithm.learning_rate", 1e30, "less than or equal to 10"),
    ("algorithm.learning_rate", True, "a number is expected"),
    ("algorithm.warmup_steps", 10**30, "less than or equal"),
    ("algorithm.betas", [2, 0.9], "less than 1"),
    ("algorithm.betas", [0.9, 1], "less than 1"),
    ("algorithm.betas", [-0.1, 0.9], "greater than or equal to 0"),
    ("algorithm.betas", [0.9, float("nan")], "finite number"),
    ("algorithm.betas", [True, 0.9], "a number is expected"),
    ("algorithm.betas", [0.9], "missing"),
    ("algorithm.weight_decay", float("inf"), "finite number"),
    ("algorithm.weight_decay", 100, "less than or equal to 10"),
    ("algorithm.max_grad_norm", float("inf"), "finite number"),
    ("algorithm.max_grad_norm", True, "a number is expected"),
    ("loss.kind", ["grpo"], "not one of"),
    ("loss.kind", {"grpo": 1}, "not one of"),
    ("loss.kind", None, "not one of"),
    ("loss.kind", 3, "not one of"),
    ("loss", ["grpo"], "a section with keys is expected"),
    ("loss.clip_low", 1, "less than 1"),
    ("loss.clip_high", float("inf"), "finite number"),
    ("loss.clip_high", True, "a number is expected"),
    ("loss.kl", float("inf"), "finite number"),
    ("loss.kl", 1e30, "less than or equal"),
    ("loss.correction_cap", float("nan"), "finite number"),
    ("loss", {"kind": "ppo", "value_learning_rate": float("inf")}, "finite number"),
    ("loss", {"kind": "tb", "reward_temperature": 1e30}, "less than or equal"),
    ("loss", {"kind": "dapo", "overlong_tokens": 10**30}, "less than or equal"),
    ("loss", {"kind": "dapo", "overlong_penalty": float("inf")}, "finite number"),
    ("loss.reference", "n" * 300, "too long for a file"),
    ("lengths.classes", True, "a number is expected"),
    ("lengths.classes", 1000, "less than or equal to 64"),
    ("lengths.edges", [1.0] * 70, "at most 63"),
    ("lengths.edges", [True, 3], "a number is expected"),
    ("lengths.edges", [1, float("inf")], "finite number"),
    ("lengths.edges", [1e30, 2e30], "less than or equal"),
    ("trainer.ranks", 10**6, "less than or equal to 1024"),
    ("trainer.zero_stage", True, "a number is expected"),
    ("trainer.threads", 10**30, "less than or equal"),
    ("trainer.microbatch_tokens", 10**30, "less than or equal"),
    ("trainer.bundle_tokens", True, "a number is expected"),
    ("trainer.least_microbatches", 10**30, "less than or equal"),
    ("trainer.logits_chunk", 10**30, "less than or equal"),
    ("trainer.checkpoint_every", 10**30, "less than or equal"),
    ("trainer.keep_checkpoints", 10**30, "less than or equal"),
    ("trainer.keep_weights", 10**30, "less than or equal"),
    ("trainer.exact_sums", "maybe", "boolean"),
    ("generator.slots", 10**30, "less than or equal to 65536"),
    ("generator.kv_cache_mib", 10**30, "less than or equal"),
    ("dispatch.silence_s", float("inf"), "finite number"),
    ("dispatch.prefill_tokens_per_s", float("inf"), "finite number"),
    ("evaluation.problems", True, "a number is expected"),
    ("evaluation.every", 10**30, "less than or equal"),
    ("evaluation.per_problem", 10**30, "less than or equal"),
    ("placement.kafka.bootstrap_servers", "broker", "'broker' has no port"),
    ("placement.kafka.bootstrap_servers", "broker:", "has no port from 1"),
    ("placement.kafka.bootstrap_servers", "broker:0", "has no port from 1"),
    ("placement.kafka.bootstrap_servers", "broker:99999", "has no port from 1"),
    ("placement.kafka.bootstrap_servers", "broker:kafka", "has no port from 1"),
    ("placement.kafka.bootstrap_servers", ":9092", "names no host"),
    ("placement.kafka.bootstrap_servers", "a:9092,,b:9092", "'' has no port"),
    ("placement.kafka.bootstrap_servers", "a:9092,b", "'b' has no port"),
    ("placement.kafka.bootstrap_servers", "SSL://a:9092", "has a protocol"),
    ("placement.kafka.bootstrap_servers", "a b:9092", "names no host"),
    ("placement.kafka.bootstrap_servers", "::1:9092", "has no port"),
    ("placement.kafka.bootstrap_servers", 9092, "string"),
    ("placement.kafka.bootstrap_servers", ",".join(["a:1"] * 500), "too many"),
    ("placement.kafka.replication", 10**30, "less than or equal to 32"),
    ("placement.kafka.retention_hours", 10**30, "less than or equal"),
    ("placement.store", "store", "no URL"),
    ("placement.store", "../store", "no URL"),
    ("placement.store", "/data/store", "no URL"),
    ("placement.store", "file://data/store", "absolute path"),
    ("placement.store", "file://~/store", "absolute path"),
    ("placement.store", "s4://bucket", "no kind of store that fsspec knows"),
    ("placement.store", "://bucket", "no kind of store"),
    ("placement.store", "s3://", "needs the name of a bucket"),
    ("placement.store", "s3:///prefix", "needs the name of a bucket"),
    ("placement.store", "s3://key:secret@bucket", "credentials come from the environment"),
    ("placement.store", "memory://x", "its content is gone when its process ends"),
    ("placement.store", "https://host/x", "can't be written"),
    ("placement.store", "", "at least 1 character"),
    ("placement.generators", True, "a number is expected"),
    ("placement.generators", 10**30, "less than or equal to 4096"),
    ("placement.restarts", 10**30, "less than or equal"),
    ("placement.sites", {"Far Away": {}}, "small letters"),
    ("placement.sites", {"far": {"cache": "cache"}}, "no URL"),
    ("placement.sites", {"far": {"relays": 10**6}}, "less than or equal to 256"),
    ("placement.sites", {"far": {"generators": True}}, "a number is expected"),
    ("deadlines.start_s", float("inf"), "finite number"),
    ("deadlines.progress_s", float("inf"), "finite number"),
    ("deadlines.progress_s", 1e30, "less than or equal"),
    ("deadlines", 5, "a section with keys is expected"),
    ("deadlines", [], "a section with keys is expected"),
]  # fmt: skip


def message(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The error about a run file; it is short and printable, and there soon."""
    file = folder / "count.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()
    with pytest.raises(RunFileError) as caught:
        load_run_file(file, overrides)
    assert time.process_time() - began < 10
    return checked(str(caught.value))


def checked(text: str) -> str:
    assert 0 < len(text.encode()) <= 4096
    assert all(char.isprintable() or char == "\n" for char in text), text
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_refused(name: str, tmp_path: Path) -> None:
    added, expected = TEXTS[name]
    assert re.search(expected, message(tmp_path, GOOD + added))


@pytest.mark.parametrize(("name", "value", "expected"), SETTINGS)
@pytest.mark.parametrize("by", ["the file", "--set"])
def test_settings_that_are_refused(name: str, value: Any, expected: str, by: str, tmp_path: Path) -> None:
    written = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    text = GOOD.replace("run: count\n", "") if name == "run" and by == "the file" else GOOD
    if by == "the file":
        data = yaml.safe_load(text)
        place = data
        *sections, key = name.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
        found = message(tmp_path, yaml.safe_dump(data))
    else:
        found = message(tmp_path, text, f"{name}={written}")
    assert name in found
    assert expected in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.encode() + b"report: \xff\n", "count.yaml:4: it is not UTF-8 text (found the byte 0xff)"),
        (GOOD.encode("utf-16"), "count.yaml:1: it is not UTF-8 text"),
        (GOOD.encode() + b"report: a\0b\n", "not valid YAML"),
        (b"# " + b"x" * LARGEST_FILE, "larger than 1,048,576 bytes"),
        (b"x" * 25_000_000, "larger than 1,048,576 bytes"),
        (b"", "a run file is a mapping of sections"),
        (b"# nothing\n", "a run file is a mapping of sections"),
        (b"- 1\n", "a run file is a mapping of sections"),
        (b"3\n", "a run file is a mapping of sections"),
    ],
)
def test_bytes_that_are_refused(text: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in message(tmp_path, text)


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "n/" * 3000, "\ud800", "folder", "pipe", "loop", ""])
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RunFileError) as caught:
        load_run_file(f"{tmp_path}/{name}")
    checked(str(caught.value))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=" + "[" * 5_000, "--set seed=[[[[["),
        ("seed=2024-99-99", "is a date in YAML"),
        ("seed=!!binary x", "the tag '!!binary' is not allowed"),
        ("seed=[&a [1], *b]", "stands for nothing"),
        ("seed=" + "9" * 5_000, "at most"),
        ('report="\\ud800"', "U+D800"),
        ("report=\udc80", "not valid YAML"),
        ("a..b=1", "write it as section.key=value"),
        ("=1", "write it as section.key=value"),
        (".".join("a" * 5_000) + "=1", "the name has 5000 parts"),
        ("lengths={classes: 1, classes: 2}", "classes: given twice"),
        ("x" * 100_000 + "=1", "unknown key"),
    ],
)
def test_overrides_that_are_refused(override: str, expected: str, tmp_path: Path) -> None:
    assert expected in message(tmp_path, GOOD, override)


def test_names_beside_a_file_that_cannot_be_looked_for(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop/x: can't be looked for" in message(tmp_path, GOOD.replace("path: model", "path: loop/x"))


def test_a_billion_laughs_take_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        message(tmp_path, GOOD + TEXTS["a billion laughs"][0])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_alias_is_a_copy(tmp_path: Path) -> None:
    file = tmp_path / "count.yaml"
    file.write_text(
        GOOD + "placement: {sites: {a: &site {relays: 2}, b: *site, c: {<<: *site, generators: 3}}}\n"
    )
    sites = load_run_file(file, ["placement.sites.b.relays=5"]).placement.sites
    assert [(site.relays, site.generators) for site in sites.values()] == [(2, 1), (5, 1), (2, 3)]


@pytest.mark.parametrize(
    "servers", ["local", "a:1", "kafka-0.kafka.svc:9092, kafka_1:65535", "[::1]:9092", "10.0.0.1:9092"]
)
def test_servers_that_are_fine(servers: str, tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD)
    spec = load_run_file(tmp_path / "count.yaml", [f"placement.kafka.bootstrap_servers='{servers}'"])
    assert spec.placement.kafka.bootstrap_servers == servers.replace(" ", "")


@pytest.mark.parametrize(
    "url", ["local", "file:///a/b", "s3://bucket", "s3://bucket/a/b", "gs://b/x", "abfs://c/x"]
)
def test_stores_that_are_fine(url: str, tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD)
    assert load_run_file(tmp_path / "count.yaml", [f"placement.store={url}"]).placement.store == url


def numbers(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All fields that hold numbers, by name."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from numbers(inner, f"{prefix}{name}{'.far' if is_named(field) else ''}.")
        elif {int, float} & set(kinds(field.annotation)) and get_origin(field.annotation) is not Literal:
            yield f"{prefix}{name}", field


def kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from kinds(inner)


@pytest.mark.parametrize(
    "value", ["1.0e+30", "10000000000000000000000000000000", "-1", ".inf", ".nan", "true"]
)
@pytest.mark.parametrize("name", [name for name, _ in numbers(RunSpec)])
def test_every_number_has_bounds(name: str, value: str, tmp_path: Path) -> None:
    several = f"[{value}, {value}]" if name in ("algorithm.betas", "lengths.edges") else value
    loss = {"overlong": "dapo", "resample": "dapo", "replay": "tb", "reward_t": "tb", "clip": "grpo"}
    kind = next((k for start, k in loss.items() if name.startswith(f"loss.{start}")), "ppo")
    section = f"loss: {{kind: {kind}}}\n" if name.startswith("loss.") else ""
    assert f"{name}" in message(tmp_path, GOOD + section, f"{name}={several}").replace("'", "")


EXAMPLES = [file.read_text() for file in sorted((ROOT / "examples").glob("*.yaml"))]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.dates(),
    st.binary(max_size=8),
    st.integers(min_value=10**20, max_value=10**60),
    st.sampled_from(["local", "s3://b", "a.py:f", "x" * 9_000]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
PIECES = st.sampled_from(
    ["[", "]", "{", "}", ": ", "- ", "&a ", "*a ", "!!binary ", "!x ", "|\n ", ">\n  ", "? ", "%TAG ",
     "---\n", "...\n",
     '"\\', "'", "\t", "\0", "\ufeff", "\x85", "# ", "<<: ", "0x", "1_0", "1e999",
     "2001-01-01", "~", ".nan", "\n"]
)  # fmt: skip


def read_or_refuse(file: Path, overrides: list[str] = []) -> None:  # noqa: B006
    try:
        assert isinstance(load_run_file(file, overrides), RunSpec)
    except RunFileError as error:
        checked(str(error))


PROPERTY = settings(
    max_examples=200, deadline=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@PROPERTY
@given(
    example=st.sampled_from(EXAMPLES), changes=st.lists(st.tuples(st.integers(0, 900), PIECES), max_size=8)
)
def test_any_damaged_text(example: str, changes: list[tuple[int, str]], tmp_path: Path) -> None:
    for place, piece in changes:
        example = example[:place] + piece + example[place + len(piece) % 3 :]
    file = tmp_path / "run.yaml"
    file.write_bytes(example.encode())
    read_or_refuse(file)


@PROPERTY
@given(
    example=st.sampled_from(EXAMPLES),
    changes=st.lists(st.tuples(st.integers(0, 900), st.binary(max_size=6)), max_size=4),
)
def test_any_damaged_bytes(example: str, changes: list[tuple[int, bytes]], tmp_path: Path) -> None:
    raw = example.encode()
    for place, piece in changes:
        raw = raw[:place] + piece + raw[place + len(piece) :]
    file = tmp_path / "run.yaml"
    file.write_bytes(raw)
    read_or_refuse(file)


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := section_of(field)) is not None:
            yield from leaves(inner, f"{prefix}{name}{'.far' if is_named(field) else ''}.")


@PROPERTY
@given(example=st.sampled_from(EXAMPLES), name=st.sampled_from(sorted(leaves(RunSpec))), value=VALUES)
def test_any_value_of_any_setting(example: str, name: str, value: Any, tmp_path: Path) -> None:
    data = yaml.safe_load(example)
    place = data
    *sections, key = name.split(".")
    for section in sections:
        place[section] = place[section] if isinstance(place.get(section), dict) else {}
        place = place[section]
    place[key] = value
    file = tmp_path / "run.yaml"
    file.write_bytes(yaml.safe_dump(data, allow_unicode=True).encode(errors="backslashreplace"))
    read_or_refuse(file)


@PROPERTY
@given(
    override=st.text(max_size=60)
    | st.builds("{}={}".format, st.sampled_from(sorted(leaves(RunSpec))), st.text())
)
def test_any_override(override: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(EXAMPLES[0])
    read_or_refuse(file, [override])


def test_the_examples_are_far_below_the_bounds() -> None:
    assert max(map(len, EXAMPLES)) * 100 < LARGEST_FILE
    assert max(example.count(":") for example in EXAMPLES) * 100 < MOST_NODES
