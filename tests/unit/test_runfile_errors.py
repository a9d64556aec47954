"""Broken run files: each message names file, line, field and what is allowed."""

from pathlib import Path

import pytest

from schemas.loading import RunFileError, load_run_file

GOOD = "run: count\ntask: {python: task.py}\nmodel: {path: model}\n"
OF_ALGORITHM = (
    "betas, group_size, groups, iterations, learning_rate, max_grad_norm, mode, optimizer_steps, order, "
    "recorded, staleness, staleness_cap, warmup_steps, weight_decay"
)

BROKEN = {
    "a misspelt key": (
        GOOD + "algorithm:\n  learning_rat: 1.0e-4\n",
        (
            "count.yaml:5: algorithm.learning_rat: unknown key; did you mean 'learning_rate'? "
            f"(allowed here: {OF_ALGORITHM})"
        ),
    ),
    "a key of another section": (
        GOOD + "algorithm:\n  groups: 8\n  slots: 16\n",
        (
            "count.yaml:6: algorithm.slots: unknown key; did you mean 'generator.slots'? "
            f"(allowed here: {OF_ALGORITHM})"
        ),
    ),
    "a wrong type": (
        GOOD + "algorithm:\n  groups: many\n",
        (
            "count.yaml:5: algorithm.groups: input should be a valid integer, unable to parse string "
            "as an integer (found 'many')"
        ),
    ),
    "none of the choices": (
        GOOD + "algorithm:\n  mode: asynch\n",
        (
            "count.yaml:5: algorithm.mode: 'asynch' is not one of 'sync', 'async' or 'offline'; "
            "did you mean 'async'?"
        ),
    ),
    "a missing section": ("run: count\ntask: {python: task.py}\n", "count.yaml: model: missing"),
    "an impossible combination": (
        GOOD + "algorithm:\n  mode: sync\n  staleness: 2\n",
        "count.yaml:4: algorithm: staleness 2 needs mode async; sync is on-policy, its staleness is 0",
    ),
    "two sources of one thing": (
        GOOD.replace("{python: task.py}", "\n  python: task.py\n  jsonl: p.jsonl\n  reward: r.py:reward"),
        "count.yaml:2: task: exactly one of python, jsonl and dataset is needed; found python and jsonl",
    ),
    "a key given twice": (GOOD + "seed: 1\nseed: 2\n", "count.yaml:5: seed: given twice"),
    "a name that can't be a topic's": (
        GOOD.replace("run: count", "run: My Run"),
        "count.yaml:1: run: a name has small letters, digits and dashes, at most 49",
    ),
    "a wrong key of a section in a section": (
        GOOD.replace("{path: model}", "{path: model, lora: {rnk: 8}}"),
        (
            "count.yaml:3: model.lora.rnk: unknown key; did you mean 'rank'? "
            "(allowed here: alpha, rank, targets)"
        ),
    ),
    "a key that belongs to a section in the section": (
        GOOD.replace("{path: model}", "{path: model, rank: 8}"),
        (
            "count.yaml:3: model.rank: unknown key; did you mean 'model.lora.rank'? "
            "(allowed here: build, dtype, follow_routes, lora, path)"
        ),
    ),
    "no names of layers": (
        GOOD.replace("{path: model}", "\n  path: model\n  lora:\n    targets: q_proj"),
        (
            "count.yaml:6: model.lora.targets: write all-linear, or names of layers: [q_proj, v_proj] "
            "(found 'q_proj')"
        ),
    ),
    "a value where an optional section belongs": (
        GOOD.replace("{path: model}", "{path: model, lora: 8}"),
        "count.yaml:3: model.lora: a section with keys is expected, found 8",
    ),
    "a value where a section belongs": (
        GOOD.replace("{path: model}", "model"),
        "count.yaml:3: model: a section with keys is expected, found 'model'",
    ),
    "samples longer than a micro-batch": (
        GOOD + "sampling: {max_tokens: 100000}\n",
        (
            "count.yaml: run file: trainer.microbatch_tokens (8192) must hold the longest sample: "
            "sampling.max_prompt_tokens + sampling.max_tokens = 100256"
        ),
    ),
}


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(RunFileError) as caught:
        load_run_file(path, overrides)
    return str(caught.value).replace(str(path.parent) + "/", "")


@pytest.mark.parametrize("name", BROKEN)
def test_the_message(name: str, tmp_path: Path) -> None:
    text, expected = BROKEN[name]
    (tmp_path / "count.yaml").write_text(text)
    assert message(tmp_path / "count.yaml") == expected


def test_every_problem_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(
        GOOD + "algorithm: {groups: 0}\nsampling: {temperature: 0}\nlengths: {classes: 3, edges: [20, 10]}\n"
    )
    assert sorted(message(tmp_path / "count.yaml").splitlines()) == [
        "count.yaml:4: algorithm.groups: input should be greater than 0 (found 0)",
        "count.yaml:5: sampling.temperature: input should be greater than 0 (found 0)",
        "count.yaml:6: lengths: edges must grow: [20.0, 10.0]",
    ]


def test_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text("run: count\ntask: {python: task.py\n")
    assert message(tmp_path / "count.yaml").startswith(
        "count.yaml: not valid YAML: while parsing a flow mapping"
    )


def test_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text("- run\n- count\n")
    assert message(tmp_path / "count.yaml") == (
        "count.yaml: a run file is a mapping of sections; see examples/count.yaml"
    )


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD)
    assert message(tmp_path / "conut.yaml") == "conut.yaml: no such file; did you mean count.yaml?"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.groups", "--set algorithm.groups: write it as section.key=value"),
        ("run.x=1", "--set run.x=1: run is not a section"),
        (
            "algorithm.mode=asynch",
            (
                "--set algorithm.mode=asynch: algorithm.mode: 'asynch' is not one of 'sync', 'async' or "
                "'offline'; did you mean 'async'?"
            ),
        ),
        (
            "algorithm.staleness=1",
            (
                "count.yaml with --set algorithm.staleness=1: algorithm: staleness 1 needs mode async; "
                "sync is on-policy, its staleness is 0"
            ),
        ),
        (
            "sampling.max_tokens=100000",
            (
                "count.yaml with --set sampling.max_tokens=100000: run file: trainer.microbatch_tokens "
                "(8192) must hold the longest sample: "
                "sampling.max_prompt_tokens + sampling.max_tokens = 100256"
            ),
        ),
    ],
)
def test_broken_overrides(override: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD)
    assert message(tmp_path / "count.yaml", override) == expected


@pytest.mark.parametrize("written", ["", ", lora: {}", ", lora:", ", lora: {rank: 2}"])
def test_an_optional_section_by_override(written: str, tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD.replace("path: model", f"path: model{written}"))
    spec = load_run_file(tmp_path / "count.yaml", ["model.lora.rank=8", "model.lora.alpha=4"])
    assert spec.model.lora is not None
    assert (spec.model.lora.rank, spec.model.lora.scale, spec.model.lora.targets) == (8, 0.5, "all-linear")


def test_a_good_one_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(GOOD)
    spec = load_run_file(
        tmp_path / "count.yaml", ["algorithm.mode=async", "algorithm.staleness=1.5", "seed=3"]
    )
    assert (spec.algorithm.mode, spec.algorithm.staleness, spec.seed) == ("async", 1.5, 3)
