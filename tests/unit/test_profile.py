"""Profiles: their files, what they are refused for, and the times that come of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flows.planning.fitted_curves import DecodeCurve, TrainCurve
from flows.planning.measuring import unsteadiness
from flows.planning.nonnegative import nonnegative_fit
from flows.planning.profile_file import (
    BadProfile,
    profile_for,
    read_profile,
    usual_place,
    write_profile,
)
from flows.planning.profile_identity import (
    WrongProfile,
    check_profile,
    identity_differences,
    profile_identity,
)
from flows.planning.profile_times import (
    SCALING_SPREAD,
    held_out_errors,
    measured_engine,
    measured_learner,
    measured_link,
)
from flows.planning.profile_view import profile_rows
from schemas.profile import Profile, ProfileIdentity
from tests.factories import make_model_files, make_spec
from tests.profiles import (
    BATCH_S,
    CONTEXT_S,
    FILLED_S,
    MICRO_BATCH_S,
    PROMPT_S,
    TOKEN_S,
    call_s,
    decode_point,
    decode_points,
    known_profile,
    profile_data,
    step_s,
    train_point,
    train_points,
)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_profile_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    write_profile(known_profile(), tmp_path / "made" / name)
    assert read_profile(tmp_path / "made" / name) == known_profile()
    assert [one.name for one in (tmp_path / "made").iterdir()] == [name]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"took_s": 0.0}, "took_s"),
        ({"made_at": float("nan")}, "made_at"),
        ({"generation": {"points": []}}, "generation.points"),
        ({"generation": {"start_s": float("inf")}}, "generation.start_s"),
        ({"generation": {"busy_cores": True}}, "generation.busy_cores"),
        ({"generation": {"points": [{"samples": -1, "context": 0, "steps": 1, "seconds": 1}]}}, "samples"),
        ({"training": {"step_s": -1}}, "training.step_s"),
        ({"weights": {"delta_bytes": -5}}, "weights.delta_bytes"),
        ({"lengths": {"answers": [1]}}, "answers has 1 lengths"),
        ({"lengths": {"informative": 2.0}}, "lengths.informative"),
        ({"together": {"unknown": 1}}, "together.unknown"),
        ({"identity": {"sizes": {"sampling": 9}}}, "sizes lacks generator.slots"),
        (
            {"generation": {"points": [decode_point(1, 9, held_out=True).model_dump()]}},
            "all points are held out",
        ),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    data = profile_data(**changed)
    with pytest.raises(ValidationError):
        Profile.model_validate(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(BadProfile, match=r"bad\.json") as refused:
        read_profile(tmp_path / "bad.json")
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"1", b"\xff\xfe", b"format: 7", b'{"format": 2}', b"[" * 100_000, b"x" * (2 << 20)],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(BadProfile, match=name):
        read_profile(tmp_path / name)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="streamrl profile RUNFILE -o"):
        read_profile(tmp_path / "none.yaml")


def _identity(**changes: Any) -> ProfileIdentity:
    return known_profile().identity.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "c" * 32, "parameters": 5000}, "the model: it was made of one with 1,000 parameters"),
        ({"machine": "torch 1; another CPU"}, "the machine"),
        ({"cores": 8}, "the cores: it was made with 2, and here are 8"),
        ({"libraries": {"vllm": "2"}}, "the library vllm: it was 1, and is 2"),
        ({"settings": {"model.dtype": '"bfloat16"'}}, 'the setting model.dtype: it was "float32"'),
        ({"settings": {}}, "is not there"),
    ],
)
def test_a_profile_of_something_else_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongProfile) as refused:
        check_profile(known_profile(), _identity(**changes), named="p.yaml", runfile="run.yaml")
    assert said in str(refused.value)
    assert "streamrl profile run.yaml --again" in str(refused.value)
    assert refused.value.lasting


def test_other_slots_and_ranks_are_no_reason_to_refuse_a_profile() -> None:
    assert identity_differences(_identity(), _identity(sizes={"generator.slots": 8}, root="c")) == []


def test_the_model_is_known_by_its_shape(tmp_path: Path) -> None:
    spec = make_spec()
    first = profile_identity(spec, make_model_files(tmp_path / "a"))
    assert profile_identity(spec, make_model_files(tmp_path / "b")) == first
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert profile_identity(spec, tmp_path / "b") == first
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    assert profile_identity(spec, tmp_path / "b").model != first.model
    assert profile_identity(make_spec(model={"dtype": "bfloat16"}), tmp_path / "a").settings != first.settings


def test_a_profile_is_found_by_what_its_figures_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    model = make_model_files(tmp_path / "model")
    spec, other = make_spec(), make_spec(generator={"slots": 7})
    assert profile_for(spec, model, runfile="run.yaml") is None
    mine = known_profile().model_copy(update={"identity": profile_identity(spec, model)})
    write_profile(mine, usual_place(spec, mine.identity))
    assert profile_for(spec, model, runfile="run.yaml") == mine
    assert profile_for(other, model, runfile="run.yaml") == mine
    assert profile_for(make_spec(task={"python": "other.py"}), model, runfile="run.yaml") is None
    assert profile_for(other, model, runfile="run.yaml", file=usual_place(spec, mine.identity)) == mine
    bf16 = make_spec(model={"dtype": "bfloat16"})
    with pytest.raises(WrongProfile, match=r"model\.dtype"):
        profile_for(bf16, model, runfile="run.yaml", file=usual_place(spec, mine.identity))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.01, 0.02]))
def test_curves_recover_what_was_planted(seed: int, noise: float) -> None:
    decode = DecodeCurve.fitted(decode_points(noise, seed))
    train = TrainCurve.fitted(train_points(noise, seed))
    for samples, context in [(3, 100), (20, 2000), (50, 9000)]:
        expected = step_s(samples, context)
        assert decode.seconds(decode_point(samples, context)) == pytest.approx(expected, rel=0.01 + 3 * noise)
    for samples, tokens, context in [(10, 900, 30_000), (60, 6000, 400_000)]:
        expected = call_s(samples, tokens, context, 1)
        found = train.seconds(train_point(samples, tokens, context))
        assert found == pytest.approx(expected, rel=0.01 + 4 * noise)
    assert decode.spread <= 0.005 + 2 * noise
    if not noise:
        assert decode.context_s == pytest.approx(CONTEXT_S, rel=0.02)
        assert decode.prompt_s == pytest.approx(PROMPT_S, rel=0.02)
        assert decode.filled_s == pytest.approx(FILLED_S, rel=0.1)
        assert train.token_s == pytest.approx(TOKEN_S, rel=0.02)
        assert train.micro_batch_s == pytest.approx(MICRO_BATCH_S, rel=0.02)


def test_one_spoiled_point_does_not_bend_a_curve() -> None:
    points = decode_points(0.005)
    points[3] = points[3].model_copy(update={"seconds": points[3].seconds * 4})
    curve = DecodeCurve.fitted(points)
    assert curve.seconds(decode_point(4, 800)) == pytest.approx(step_s(4, 800), rel=0.1)
    assert curve.seconds(decode_point(50, 5000)) == pytest.approx(step_s(50, 5000), rel=0.05)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_a_curve_never_falls_with_the_batch(seed: int) -> None:
    curve = DecodeCurve.fitted(decode_points(0.3, seed))
    table = [curve.batch_s(size) for size in range(1, 130)]
    assert all(after >= before > 0 for before, after in itertools.pairwise(table))
    assert min(curve.context_s, curve.prompt_s, curve.begun_s, curve.ended_s) >= 0


def test_a_curve_through_one_point_is_level() -> None:
    curve = DecodeCurve.fitted([decode_point(4, 0)])
    assert curve.batch_s(1) == curve.batch_s(100) == pytest.approx(step_s(4, 0))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(5, 12))
def test_the_fit_is_as_good_as_any_that_is_not_negative(seed: int, columns: int, rows: int) -> None:
    draw = np.random.default_rng(seed)
    matrix, goal = draw.random((rows, columns)), draw.standard_normal(rows)
    found = nonnegative_fit(matrix, goal)
    slope = matrix.T @ (goal - matrix @ found)
    assert (found >= 0).all()
    assert (slope <= 1e-7).all()  # no coefficient could grow …
    assert np.abs(slope[found > 0]).max(initial=0.0) <= 1e-7  # … and none that is not 0 could change


def test_times_of_an_engine() -> None:
    times = measured_engine(known_profile())
    assert times.slots == 64
    assert times.batch_s[0] == times.batch_s[1] == pytest.approx(BATCH_S[0] + BATCH_S[1], rel=0.01)
    assert times.batch_s[64] == pytest.approx(BATCH_S[0] + 64 * BATCH_S[1], rel=0.01)
    assert times.install_s == 4e-4
    assert times.prefill_s > PROMPT_S  # a sample's begin and end are in it
    assert (times.beside(1), times.beside_samples) == (1.5, 1.1)
    fixed = (BATCH_S[0] + BATCH_S[1]) / times.batch_s[64]
    assert times.beside(64) == pytest.approx(1.5 * fixed + 1.1 * (1 - fixed), rel=0.01)


def test_more_than_was_measured_is_less_sure() -> None:
    profile = known_profile()
    near, far = measured_engine(profile), measured_engine(profile, slots=1024)
    assert far.batch_s[1024] == pytest.approx(BATCH_S[0] + 1024 * BATCH_S[1], rel=0.02)
    assert far.spread > near.spread >= 0.01
    many = measured_engine(profile, threads=4)
    assert many.batch_s[1] == pytest.approx(near.batch_s[1] / 4**0.75)
    assert many.spread >= SCALING_SPREAD * np.log(4)
    assert many.cores == pytest.approx(4.0, rel=0.02)  # and some for the rewards


def test_times_of_a_learner() -> None:
    profile = known_profile()
    times = measured_learner(profile, trained=1.0)
    assert times.microbatch_s == pytest.approx(MICRO_BATCH_S, rel=0.02)
    samples, tokens, context = 4, 128, (17**2 + 27**2 + 37**2 + 47**2) / 2
    other = (1e-5 + 0.002 / 64) * samples
    assert times.token_s * tokens == pytest.approx(call_s(samples, tokens, context, 0) + other, rel=0.02)
    assert (times.step_s, times.beside) == (pytest.approx(0.025), 1.2)
    assert measured_learner(profile).token_s < times.token_s  # half of the groups train nothing
    two = measured_learner(profile, ranks=2, trained=1.0)
    assert two.microbatch_s == pytest.approx(times.microbatch_s / 2**0.75)
    assert two.step_s == pytest.approx(times.step_s)
    assert two.spread > times.spread
    long = measured_learner(profile, trained=1.0, lengths=[(7, 2000)])
    assert long.spread > times.spread


def test_a_checkpoint_is_a_part_of_the_steps_between_two() -> None:
    slow = known_profile(training={"snapshot_s": 0.5})
    step_s = measured_learner(slow).step_s
    assert measured_learner(slow, checkpoint_steps=10).step_s == pytest.approx(step_s + 0.05)


def test_times_of_the_link_are_those_of_the_way_to_the_engine() -> None:
    link = measured_link(known_profile())
    assert link.fetch_s(1_000_000) == pytest.approx(0.04)


def test_errors_are_those_at_points_that_were_held_out() -> None:
    errors = held_out_errors(known_profile())
    assert len(errors.decode) == 2
    assert len(errors.train) == 1
    assert errors.decode_error < 0.01
    wrong = known_profile(
        generation={"points": [*profile_data()["generation"]["points"], decode_point(
            10, 100, held_out=True, seconds=2 * step_s(10, 100)).model_dump()]}
    )  # fmt: skip
    assert measured_engine(wrong).spread > measured_engine(known_profile()).spread + 0.2
    assert np.isnan(held_out_errors(_without_held_out()).decode_error)


def _without_held_out() -> Profile:
    data = profile_data()
    data["generation"]["points"] = [one for one in data["generation"]["points"] if not one["held_out"]]
    return Profile.model_validate(data)


def test_a_profile_is_shown_in_rows() -> None:
    rows = {part: (figure, remark) for part, figure, remark in profile_rows(known_profile())}
    assert rows["decode step"][0] == "4.10, 4.80, 10.40 ms"
    assert "2 held-out points" in rows["decode error"][1]
    assert rows["reward"] == ("0.10 ms", "0 of 100 failed")


def test_how_steady_a_machine_is_shows_in_the_same_work_at_different_times() -> None:
    assert unsteadiness([]) == unsteadiness([[1.0], [2.0]]) == 0.0  # nothing was done twice
    assert unsteadiness([[3.0, 3.0], [7.0, 7.0, 7.0]]) == 0.0
    rng = np.random.default_rng(0)
    works = [rng.uniform(0.1, 10) * np.exp(rng.normal(0, 0.1, 2)) for _ in range(2000)]
    assert unsteadiness(works) == pytest.approx(0.1, rel=0.05)  # type: ignore[arg-type]


def test_an_unsteady_machine_widens_the_range() -> None:
    profile = known_profile()
    together = profile.together.model_copy(update={"unsteady": 0.12})
    engine = measured_engine(profile.model_copy(update={"together": together}))
    assert engine.unsteady == 0.12
    plain = measured_engine(profile)
    assert 0.08 <= plain.unsteady < 0.12  # no minute sees all of it
    assert replace(engine, unsteady=plain.unsteady) == plain
