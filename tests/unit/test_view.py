"""What the live view, the plain lines and `status` show."""

import io
import json
import time

import numpy as np
import pytest
from rich.console import Console

from flows.view.live import LiveScreen, PlainScreen, one_line, picture, terminal
from flows.view.run_view import Rate, RunView
from schemas.messages import (
    DeadLetter,
    Evaluation,
    Heartbeat,
    RankerAnnouncement,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from tests.factories import make_spec
from tests.fakes.fill import fill


@pytest.fixture
def view() -> RunView:
    return RunView("test-1", make_spec(lengths={"classes": 2}))


def step(number: int, samples: int, **fields: object) -> StepRecord:
    return fill(
        StepRecord, step=number, iteration=number, groups=np.zeros(samples),
        partitions=np.zeros(samples, int), rewards=np.full(samples, 0.5), lengths=np.full(samples, 7),
        versions=np.zeros(samples), finished_at=float(number), **fields,
    )  # fmt: skip


def beat(role: str, waits_for: str = "", **fields: object) -> Heartbeat:
    now = time.time()
    given = {
        "role": role,
        "state": "working",
        "waits_for": waits_for,
        "unblocked_by": "the feeder",
        "since": now - 3,
    }
    return fill(Heartbeat, **{**given, "since": now - 3, "sent_at": now, **fields})


def test_queues_are_as_feeder_and_trainer_count_them(view: RunView) -> None:
    assert (view.to_generate, view.to_train) == (None, None)
    view.take(beat("feeder", counters={"undispatched": 3.0, "dispatched": 6.0}))
    view.take(beat("trainer", counters={"held": 18.0}))
    assert (view.to_generate, view.to_train) == (9, 18)
    assert "queued 9 to generate, 18 to train" in " ".join(text_of(picture(view)).split())


def test_programs_get_the_state_as_json(view: RunView) -> None:
    view.take(beat("trainer", waits_for="samples", counters={"held": 18.0}))
    view.take(step(3, 4))
    found = json.loads(json.dumps(view.as_json(), allow_nan=False))
    assert found["processes"]["trainer-0"]["waits_for"] == "samples"
    assert (found["to_train"], found["last_step"]["step"], found["generated"]) == (18, 3, [0, 0])


def test_a_view_holds_as_much_of_a_run_of_any_length(view: RunView) -> None:
    for number in range(100_000):
        view.rows.append({"step": number})
    for number in range(3000):
        view.take_all([step(100_000 + number, 2), beat("generator", number=number)], {0: number})
        view.take(fill(SiteReport, site="far", relay=number))
        view.take(fill(Evaluation, version=number))
    assert view.last is not None and view.last["step"] == 102_999
    assert len(view.rows) == len(view.evaluations) == 400
    assert len(view.processes) <= 2000 and len(view.sites) <= 2000
    assert max(len(rate._points) for rate in (view._generated_rate, view._trained_rate)) <= 400


def test_a_process_that_is_heard_is_alive_whatever_its_clock_says(view: RunView) -> None:
    view.live = True
    view.take(beat("generator", sent_at=time.time() - 7200))
    assert view.processes["generator-0"].alive and view.makes_samples()


def test_who_is_left_out_is_shown(view: RunView) -> None:
    view.take_all([step(0, 2)], {})
    view.leave_out({"generator-1": "died 4 times within an hour: no such device\nits log"})
    assert "generator-1 is left out: died 4 times within an hour: no such device" in text_of(picture(view))
    assert one_line(view).endswith("left out: generator-1")


def test_of_a_step_the_first_record_counts(view: RunView) -> None:
    view.take_all([step(0, 2), step(1, 2), step(2, 2), step(1, 2, trainer_epoch=1)], {})
    assert [(row["step"], row["trainer_epoch"]) for row in view.rows] == [(0, 0), (1, 0), (2, 0)]


def test_one_line_says_what_matters(view: RunView) -> None:
    assert one_line(view) == "test-1: its processes are starting"
    view.take(beat("trainer"))
    view.take_all([], {0: 3})
    assert one_line(view) == "test-1: 3 samples generated, no step trained yet"
    view.take(step(0, 4))
    view.take_all([fill(DeadLetter, topic="test-1.samples", offset=7, reason="not a StreamRL record")], {}, 1)
    line = one_line(view)
    assert "iteration 1 of 3, reward 0.500, length 7.0" in line
    assert "1 dead letters (test-1.samples[0]@7: not a StreamRL record)" in line


def test_what_a_process_waits_for_and_who_would_help(view: RunView) -> None:
    view.take(beat("generator", "prompts"))
    assert view.processes["generator-0"].doing == "waits 3 s for prompts ← the feeder"
    view.take(beat("generator", "prompts", sent_at=time.time() - 60))
    assert view.processes["generator-0"].doing == "silent for 60 s by this machine's clock (was: prompts)"
    assert not view.processes["generator-0"].alive


def test_the_idle_share_counts_the_wait_that_goes_on(view: RunView) -> None:
    for second in (0, 1, 2, 3, 4):
        view.take(beat("trainer", "samples", since=100.0, sent_at=100.0 + second))
    assert view.processes["trainer-0"].idle_share == 1.0
    view.take(beat("trainer", since=104.0, sent_at=108.0, counters={"idle_s": 4.0}))
    assert view.processes["trainer-0"].idle_share == 0.5


def test_a_new_process_under_an_old_name_starts_anew(view: RunView) -> None:
    view.take(beat("trainer", pid=1, sent_at=1.0, counters={"cpu_s": 50.0}))
    view.take(beat("trainer", pid=2, sent_at=2.0, counters={"cpu_s": 1.0}))
    view.take(beat("trainer", pid=2, sent_at=3.0, counters={"cpu_s": 1.5}))
    assert view.processes["trainer-0"].cpu.per_s == 0.5


def test_a_rate_forgets_what_is_old() -> None:
    rate = Rate(span_s=10)
    assert rate.per_s is None
    for second in range(30):
        rate.add(second, 100.0 * min(second, 20))
    assert rate.per_s == pytest.approx(100 * 2 / 11, rel=0.2)  # it grew in two of the last eleven seconds


def test_versions_do_not_go_back(view: RunView) -> None:
    for version in (1, 3, 2):
        view.take(fill(WeightsAnnouncement, version=version))
    assert view.version == 3


def text_of(thing: object) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_picture(view: RunView) -> None:
    assert "iteration" in text_of(picture(view))  # before anything is known
    view.take_all([beat("trainer", "samples"), *(step(n, 4) for n in range(50))], {1: 2})
    text = text_of(picture(view))
    assert "run test-1" in text
    assert "waits 3 s for samples ← the feeder" in text
    assert [line.split() for line in text.splitlines() if "generated  " in line] == [["generated", "0", "2"]]


def test_plain_lines_where_there_is_no_terminal(view: RunView) -> None:
    console = Console(file=io.StringIO(), width=80)
    with terminal(console) as screen:
        assert isinstance(screen, PlainScreen)
        screen.say(
            "run [test-1]: a line longer than the console is wide, which must stay in one piece anyway"
        )
        screen.show(view)
        screen.show(view)  # not again within seconds
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert lines[0].endswith("in one piece anyway")


def test_a_live_view_in_a_terminal(view: RunView) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with terminal(console) as screen:
        assert isinstance(screen, LiveScreen)
        screen.progress(0.5, "building")
        screen.say("news")
        screen.show(view)
    assert "news" in console.file.getvalue()  # type: ignore[attr-defined]


def test_classes_are_shown_by_their_lengths_and_the_ranker_by_its_recall(view: RunView) -> None:
    assert "length class  0  1" in text_of(picture(view))
    view.take(fill(RankerAnnouncement, edges=[12.4]))
    groups = np.repeat(np.arange(10), 2)
    predicted = np.where(groups == 9, 50.0, 10.0 - groups)  # right about the longest, wrong about the others
    record = fill(
        StepRecord, groups=groups, lengths=1 + groups, predicted=predicted, partitions=np.zeros(20, int),
        rewards=np.full(20, 0.5), versions=np.zeros(20), finished_at=1.0,
    )  # fmt: skip
    view.take(record)
    shown = text_of(picture(view))
    assert "< 12" in shown and "≥ 12" in shown
    assert "50% of the longest fifth were expected" in shown
