"""The page of a run: its charts, the time of its processes, and text that can't do anything."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.page.axes import axis_of, in_bins, in_words
from flows.page.charts import Chart, Curve, Dots, chart_card, picture_of
from flows.page.curve_charts import predicted_chart, reward_chart
from flows.page.gantt import gantt_card
from flows.page.line_tail import LineTail
from flows.page.live_page import serving
from flows.page.page import page_html
from flows.page.page_data import PageData, SaidState
from flows.page.page_file import write_page
from flows.page.run_files import RunFiles
from flows.page.time_use import TimeUse
from flows.run.failure_page import page_on_failure
from flows.run.locations import Places
from flows.run.request import RunCancelled, RunFailed
from flows.run.run_state import Phase, RunState
from infra.files.writing import write_whole
from infra.stores.opening import open_store
from tests.pages import (
    BEGAN,
    HOSTILE,
    make_facts,
    make_folder,
    make_page,
    make_record,
    process_line,
    step_line,
    write_lines,
)


@pytest.fixture
def data(tmp_path: Path) -> PageData:
    return make_page(tmp_path)


def test_foreign_text_is_only_text(data: PageData) -> None:
    assert data.facts is not None
    sample = replace(
        data.facts.samples[0],
        prompt=HOSTILE,
        completion=HOSTILE,
        problem=HOSTILE,
        why=HOSTILE,
        id=HOSTILE,
        reward_error=HOSTILE,
        parts={HOSTILE: 1.0},
    )
    data.facts.samples, data.facts.last_dead, data.facts.dead_letters = [sample], HOSTILE, 1
    data.said = SaidState("failed", HOSTILE)
    data.files.left_out = {HOSTILE: HOSTILE}
    data.files.time.add(process_line(HOSTILE, BEGAN + 9, {HOSTILE: 3.0}))
    data.files.take_step(step_line(60, **{HOSTILE: 1.0}))
    data.missing.append(HOSTILE)
    page = page_html(data)
    assert "&lt;script&gt;document.title" in page and "<img" not in page
    assert len(re.findall("<script", page)) == 1
    assert "\\u001b[31m\\u202eevil" in page.replace("&quot;", '"')
    inside = page.partition("<article")[2].partition("</article>")[0]
    assert "\x1b" not in inside and "\u202e" not in inside


def test_a_browser_may_run_the_script_of_the_page_alone(data: PageData) -> None:
    page = page_html(data)
    script = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    policy = re.findall('Content-Security-Policy" content="([^"]*)"', page)[0]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "connect-src 'self'" in page_html(data, refresh_s=3)
    assert not re.findall("(src|href)=[\"'](?!data:,)", page), "nothing is loaded from elsewhere"


def test_all_that_the_files_and_topics_say_is_on_the_page(data: PageData) -> None:
    page = page_html(data)
    for text in (
        "test-1",
        "running",
        "60 of 60",
        "30,720",
        "trainer-0",
        "wait: samples",
        "kzm 07 06 05",
        "held-out ± standard error",
        "Lag by length class",
        "Weights: bytes of a version",
        "max_prompt_tokens: 8",
        "numpy",
        "class 0, shortest",
        "Length classes end at 12, 40, 90",
    ):
        assert text in page, text
    assert "NaN" not in page and "Infinity" not in page


def test_a_run_of_which_nothing_is_known_has_a_page(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    page = page_html(PageData(record, RunFiles(tmp_path / "nothing")))
    assert "No optimizer step is known yet" in page and ">unknown</span>" in page
    assert "No process has said yet what its time goes to" in page


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "text", [1], True, {}])
def test_numbers_that_are_none_are_left_out(data: PageData, value: object) -> None:
    for step in range(60, 70):
        data.files.take_step(step_line(step, reward=value, logprob_gap=value, entropy=value, idle=value))
    data.files.queues.add({"step": 70, "at": value, "lag": [value, 3]})
    data.files.counters["trainer-0"].add({"published": value, "published_bytes": value, "pid": 1})
    page = page_html(data)
    hovers = re.findall('data-hover="([^"]*)"', page)
    for hover in hovers:
        for series in json.loads(hover.replace("&quot;", '"'))["s"]:
            assert all(math.isfinite(number) for point in series["p"] for number in point)
    assert len(hovers) > 10 and " nan" not in page


def test_a_page_of_any_number_of_steps_is_as_large(tmp_path: Path) -> None:
    small, large = make_page(tmp_path / "a", 1000), make_page(tmp_path / "b", 1000)
    for step in range(1000, 100_000):
        large.files.take_step(step_line(step))
    assert len(large.files.rows.kept) <= 4000
    assert large.files.totals.summary()["steps"] == 100_000
    assert len(page_html(large)) < 1.3 * len(page_html(small)) < 1_500_000


def test_newer_steps_of_the_topic_follow_those_of_the_file(tmp_path: Path) -> None:
    rows = [step_line(step, samples_per_s=None, finished_at=BEGAN + 2 * step) for step in range(50, 70)]
    data = make_page(tmp_path, 60, rows=rows)
    assert [row["step"] for row in data.rows] == list(range(70))
    assert data.totals["steps"] == 70 and data.last["step"] == 69
    assert data.rows[-1]["samples_per_s"] == pytest.approx(256), "rates follow from the step before"
    assert data.files.totals.summary()["steps"] == 60, "the file's lines may come later"
    assert "70 optimizer steps" in page_html(data)


# predicted and measured

PREDICTION = {
    "step_s": {"value": 2.0, "low": 1.5, "high": 3.0},
    "samples_per_s": {"value": 256.0, "low": 200.0, "high": 300.0}, "simulated": True,
    "trainer": {"waiting for samples": {"value": 0.3, "low": 0.25, "high": 0.9}},
    "generators": {"waiting for jobs": {"value": 0.001, "low": 0.0, "high": 0.002}},
}  # fmt: skip
PICTURE = b"\x89PNG\r\n\x1a\n and so on"


def test_a_run_is_set_beside_its_prediction(data: PageData) -> None:
    assert "Predicted and measured" not in page_html(data), "nobody predicted it"
    (data.files.folder / "prediction.json").write_text(json.dumps(PREDICTION))
    (data.files.folder / "prediction.png").write_bytes(PICTURE)
    page = page_html(data)
    card = page.partition("Predicted and measured")[2].partition("</figure>")[0]
    rate = data.totals["samples_per_s"]
    assert f'<td class="n">256</td><td class="n">200 to 300</td><td class="n">{in_words(rate)}</td>' in card
    assert f"{256 / rate - 1:+.1%}, inside the range" in card
    waits = data.files.time.side_shares("trainer")["wait: samples"]
    assert 'trainer: waiting for samples</td><td class="n">30.0%</td>' in card and f"{waits:.1%}" in card
    assert "generators: waiting for jobs" in card and "outside the range" in card
    assert f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}" in card


@pytest.mark.parametrize(
    "said",
    [
        "no json",
        "[]",
        json.dumps({"step_s": HOSTILE, "samples_per_s": {"value": HOSTILE, "low": 1, "high": 2}}),
        json.dumps({"trainer": {HOSTILE: {"value": 1, "low": 1, "high": 1}}, "generators": [HOSTILE]}),
        '{"step_s": {"value": NaN, "low": -1, "high": Infinity}, "samples_per_s": {"value": true}}',
        '{"step_s": {"value": 1' + "0" * 400 + ', "low": 0, "high": 1}, "trainer": 5}',
    ],
)
def test_a_prediction_that_makes_no_sense_is_no_part_of_the_page(data: PageData, said: str) -> None:
    (data.files.folder / "prediction.json").write_text(said)
    (data.files.folder / "prediction.png").write_text(HOSTILE)
    page = page_html(data)
    assert "Predicted and measured" not in page and "<img" not in page and "evil" not in page


def test_a_picture_that_is_too_large_is_left_out(data: PageData) -> None:
    (data.files.folder / "prediction.json").write_text(json.dumps(PREDICTION))
    (data.files.folder / "prediction.png").write_bytes(PICTURE + bytes(1 << 20))
    page = page_html(data)
    assert "Predicted and measured" in page and "<img" not in page


# the time of processes


def use_of(*notes: dict[str, object]) -> TimeUse:
    use = TimeUse()
    for note in notes:
        use.add(note)
    return use


def test_the_share_of_attributed_time_is_computed() -> None:
    whole = use_of(
        process_line("trainer-0", 10.0, {"starting": 10.0}),
        process_line("trainer-0", 110.0, {"starting": 10.0, "training": 60.0, "wait: samples": 40.0}),
    )
    assert whole.processes()[0].attributed() == pytest.approx(1.0)
    half = use_of(
        process_line("trainer-0", 10.0, {"starting": 10.0}),
        process_line("trainer-0", 110.0, {"starting": 10.0, "training": 50.0}),
    )
    assert half.processes()[0].attributed() == pytest.approx(0.5)
    assert "100 % of the time of every process" in gantt_card(whole)
    assert "at least 50 % of the time of every process" in gantt_card(half)
    nearly = use_of(process_line("trainer-0", 0.0, {"a": 0.0}), process_line("trainer-0", 1e4, {"a": 9999.0}))
    assert "at least 99.99 %" in gantt_card(nearly), "a share is never rounded up to all"


def test_starts_of_a_process_are_counted_each_by_itself() -> None:
    use = use_of(
        process_line("trainer-0", 10.0, {"training": 10.0}, pid=1),
        process_line("trainer-0", 20.0, {"training": 20.0}, pid=1),
        process_line("trainer-0", 50.0, {"training": 5.0}, pid=2),
        process_line("trainer-0", 60.0, {"training": 15.0}, pid=2),
    )
    process = use.processes()[0]
    assert [(life.begin, life.last[0]) for life in process.lives] == [(0.0, 20.0), (45.0, 60.0)]
    assert process.attributed() == pytest.approx(1.0) and process.totals()["training"] == 35.0


def test_no_second_is_lost_when_notes_are_left_out() -> None:
    use, spent = TimeUse(), {"training": 0.0, "wait: samples": 0.0}
    for second in range(50_000):
        spent["training" if second % 3 else "wait: samples"] += 1.0
        use.add(process_line("trainer-0", second + 1.0, dict(spent)))
    process = use.processes()[0]
    assert len(process.lives[0].points()) <= 1003
    assert process.attributed() == pytest.approx(1.0)
    assert process.totals()["wait: samples"] == pytest.approx(50_000 / 3, rel=1e-3)


def test_a_liar_makes_no_more_than_all_time_and_takes_no_memory() -> None:
    use = use_of(
        process_line("trainer-0", 0.0, {"a": 0.0}),
        process_line("trainer-0", 10.0, {"a": 1e9}),
        process_line("trainer-0", 20.0, {"a": -5.0, "b": math.nan}),
        process_line("trainer-0", math.nan, {"a": 1.0}),
        {"process": 5, "at": 1.0, "causes": {"a": 1}},
        {"process": "x-1", "at": 1.0, "causes": [1]},
    )
    assert (use.processes()[0].attributed() or 0) <= 1.0
    gantt_card(use)
    for number in range(5000):
        use.add(process_line(f"generator-{number}", 5.0, {f"cause {part}": 1.0 for part in range(100)}))
    assert len(use.processes()) == 64 and use.left_out > 4000
    assert "more processes are not shown" in gantt_card(use)


# charts


def test_axes_have_round_ticks() -> None:
    assert axis_of([0, 97], 0, 100, zero=True).ticks(5) == [0, 25, 50, 75, 100]
    assert axis_of([1e-6, 0.02], 0, 100, log=True).ticks(5) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert axis_of([3.0], 0, 100).at(3.0) == 50
    assert [in_words(value) for value in (0.0, 0.05, 12_300, 3.44e6, 2e-5, math.nan)] == [
        "0",
        "0.05",
        "12.3k",
        "3.44M",
        "2e-05",
        "–",
    ]


def test_bins_keep_the_mean_and_leave_out_gaps() -> None:
    bins = in_bins([(step, float(step % 2)) for step in range(10_000)] + [(10_000, math.nan)])
    assert len(bins) == 200 and all(one.mean == pytest.approx(0.5, abs=0.02) for one in bins)
    assert (bins[0].low, bins[0].high) == (0.0, 1.0) and in_bins([]) == []


def test_error_bars_have_the_length_of_the_error() -> None:
    dots = Dots("held-out", [(0, 0.5, 0.1), (10, 0.9, None)])
    chart = Chart("reward", "step", [Curve("training", [(0, 0.0), (10, 1.0)])], [dots])
    picture = picture_of(chart)
    low, high = (float(y) for y in re.findall(r'class="error[^"]*" d="M\S+ (\S+?)V(\S+?)M', picture)[0])
    span = float(re.findall(r'class="line[^"]*" d="M\S+ (\S+?)L', picture)[0]) - float(
        re.findall(r'class="line[^"]*" d="M\S+ \S+L\S+ (\S+?)"', picture)[0]
    )
    assert (low - high) / span == pytest.approx(0.2, abs=0.01)
    assert picture.count('class="error') == 1


def test_a_chart_without_points_says_so() -> None:
    card = chart_card(Chart("<b>", "step"), "nothing <yet>")
    assert "nothing &lt;yet&gt;" in card and "&lt;b&gt;" in card and "<svg" not in card


def test_rewards_have_a_band_and_held_out_ones_an_error(data: PageData) -> None:
    chart = reward_chart(data.rows, data.evaluations, data.spec)
    assert len(chart.lines[0].band) == len(chart.lines[0].points) == 60
    assert [at for at, _, _ in chart.dots[0].points] == list(range(0, 61, 10))
    assert all(error == 0.012 for _, _, error in chart.dots[0].points)


def test_predicted_lengths_may_be_anything() -> None:
    chart = predicted_chart([(math.inf, 3), (0.0, 0), (math.nan, 2)] + [(5.0, 5)] * 40, [], {})
    assert "<svg" in chart_card(chart)


# files


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    file, again = tmp_path / "lines.jsonl", [0]
    tail = LineTail(file, lambda: again.__setitem__(0, again[0] + 1))
    assert list(tail.new_lines()) == []
    file.write_text('{"a": 1}\nno json\n[1]\n{"a": 2')
    assert list(tail.new_lines()) == [{"a": 1}]
    with file.open("a") as opened:
        opened.write("}\n")
    assert list(tail.new_lines()) == [{"a": 2}] and list(tail.new_lines()) == [] and again == [0]
    write_whole(file, '{"b": 1}\n')
    assert list(tail.new_lines()) == [{"b": 1}] and again == [1]


def test_what_a_replaced_file_said_is_forgotten(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, 20)
    files = RunFiles(folder)
    files.refresh()
    write_whole(folder / "metrics.jsonl", json.dumps(step_line(0)) + "\n")
    files.refresh()
    assert len(files.rows.kept) == 1 and files.totals.summary()["steps"] == 1
    write_lines(folder / "metrics.jsonl", [step_line(0), step_line(1)])
    files.refresh()
    assert [row["step"] for row in files.rows.kept] == [0, 1], "the first line of a step counts"


# when the broker is away


def test_a_page_is_made_of_the_folder_alone(tmp_path: Path) -> None:
    record, store = make_record(tmp_path), open_store(f"file://{tmp_path}/store")
    folder = make_folder(tmp_path / record.id)
    began = time.monotonic()
    page = write_page(record, store, folder).read_text()
    assert time.monotonic() - began < 10, "whoever asks does not wait for a broker that refuses at once"
    assert "The run&#x27;s topics can&#x27;t be read: Kafka at 127.0.0.1:1" in page and "60 of 60" in page
    write_whole(folder / "topics.json", json.dumps(make_facts().as_json()))
    page = write_page(record, store, folder, tmp_path / "other.html", deadline_s=3).read_text()
    assert "kzm 07 06 05" in page and "are as they were at" in page
    assert "pill live" not in page, "old heartbeats say nothing of now"
    write_whole(folder / "topics.json", json.dumps({"at": 3, "samples": [5]}))
    assert "60 of 60" in write_page(record, store, folder, deadline_s=3).read_text()


# the end of a run


def interrupted(text: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RunFailed("trainer-0 ended: <b>why</b>"), "failed"),
        (ValueError("a bug"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (RunCancelled("cancelled"), "interrupted"),
    ],
)
def test_a_page_is_written_when_a_run_fails_and_the_error_goes_on(
    tmp_path: Path, error: BaseException, state: str
) -> None:
    record, said = make_record(tmp_path), list[str]()
    folder = make_folder(tmp_path / record.id)
    places = Places("127.0.0.1:1", f"file://{tmp_path}/store")
    with pytest.raises(type(error)) as raised, page_on_failure(record, places, said.append):
        raise error
    assert raised.value is error
    page = (folder / "report.html").read_text()
    assert f">{state}</span>" in page and said == [f"the page of the run: {folder / 'report.html'}"]
    assert ("&lt;b&gt;why" in page) == (state == "failed" and isinstance(error, RunFailed))


def test_no_page_is_written_while_all_goes_well(tmp_path: Path) -> None:
    places = Places("127.0.0.1:1", f"file://{tmp_path}/store")
    with page_on_failure(make_record(tmp_path), places, interrupted):
        pass
    assert not (tmp_path / "test-1").exists(), "the report phase writes it"


@pytest.mark.parametrize("trouble", [OSError("disk full"), RuntimeError("a bug")])
@pytest.mark.parametrize("said", [print, interrupted], ids=["no more", "and Ctrl-C again"])
def test_trouble_with_the_page_never_hides_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception, said: Callable[[str], None]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise trouble

    monkeypatch.setattr("flows.run.failure_page.write_page", broken)
    places = Places("127.0.0.1:1", f"file://{tmp_path}/store")
    with pytest.raises(RunFailed, match="the cause"), page_on_failure(make_record(tmp_path), places, said):
        raise RunFailed("the cause")


@pytest.mark.parametrize(
    ("kept", "shown"),
    [("starting", "starting"), ("training", "running"), ("reporting", "running"), ("failed", "failed")],
)
def test_the_command_shows_the_state_that_the_flow_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Phase, shown: str
) -> None:
    record = make_record(tmp_path)
    make_folder(tmp_path / record.id)
    store = open_store(f"file://{tmp_path}/store")
    monkeypatch.setattr("infra.runs.find", lambda *_: record)
    said = RunState(
        run=record.id,
        state=kept,
        at=time.time(),
        started_at=1.0,
        host="here",
        pid=1,
        iterations=60,
        why="out of <memory>" if kept == "failed" else "",
    )
    store.put(f"runs/{record.id}/state.json", said.model_dump_json().encode())
    done = CliRunner().invoke(app, ["report", record.id, "--store", store.url])
    assert done.exit_code == 0 and done.output.strip() == str(tmp_path / record.id / "report.html")
    page = Path(done.output.strip()).read_text()
    assert f">{shown}</span>" in page and ("out of &lt;memory&gt;" in page) == (kept == "failed")


# the server


class _Page:
    def page(self) -> bytes:
        return b"<main>hello</main>"


@contextmanager
def served() -> Iterator[int]:
    with serving(_Page(), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def answer(port: int, path: str = "/", host: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if host:
        request.add_header("Host", host)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_the_page_is_served_to_this_machine_alone() -> None:
    with served() as port:
        assert answer(port) == (200, "<main>hello</main>")
        assert answer(port, host=f"localhost:{port}")[0] == 200
        assert answer(port, host=f"evil.example:{port}")[0] == 403
        assert answer(port, "/../../etc/passwd")[0] == 404


def test_a_browser_that_goes_away_leaves_the_terminal_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    gone, tried = threading.Event(), threading.Event()

    class Slow:
        def page(self) -> bytes:
            gone.wait(10)
            return bytes(32 << 20)  # more than the network takes before it knows

    with serving(Slow(), 0) as server:
        server.shutdown_request = lambda request: tried.set()  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        port = server.server_address[1]
        browser = socket.create_connection(("127.0.0.1", port))
        browser.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.close()
        gone.set()
        assert tried.wait(10)
        server.shutdown()
        thread.join()
    assert capfd.readouterr().err == ""


def test_a_page_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, said = threading.Event(), list[str]()
    monkeypatch.setattr("flows.run.failure_page.write_page", lambda *_, **__: end.wait(60))
    monkeypatch.setattr("flows.run.failure_page._MOST_S", 0.05)
    places = Places("127.0.0.1:1", f"file://{tmp_path}/store")
    try:
        with pytest.raises(RunFailed), page_on_failure(make_record(tmp_path), places, said.append):
            raise RunFailed("the cause")
    finally:
        end.set()
    command = f"streamrl report test-1 --store {places.store_url}"
    assert said == [f"the page of the run: {command} writes it"]
