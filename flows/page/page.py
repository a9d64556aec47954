"""Puts the page of a run together: one HTML file that loads nothing from elsewhere.

Its own script is named by its hash in the page's security policy, so a browser runs no other, whatever the
texts of samples hold.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import cache
from pathlib import Path

from flows.page import curve_charts as curves
from flows.page.charts import chart_card
from flows.page.gantt import gantt_card
from flows.page.page_data import RUNNING, PageData
from flows.page.prediction_card import prediction_card
from flows.page.safe_text import safe
from flows.page.sample_texts import ReadSample
from flows.page.sections import (
    balance_section,
    head,
    letters_section,
    more_charts,
    processes_section,
    result_section,
    samples_section,
    settings_section,
)

_HERE = Path(__file__).parent


def page_html(data: PageData, *, refresh_s: float = 0.0) -> str:
    """Return the page. With `refresh_s` it asks its server for a newer one every so many seconds."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; "
        f"form-action 'none'; connect-src '{'self' if refresh_s else 'none'}'"
    )
    name = safe(data.record.id)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name} · StreamRL</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><style>{style}</style></head><body data-refresh="{refresh_s:g}">'
        f'<main>{_main(data, live=bool(refresh_s))}</main><div id="tip"></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _main(data: PageData, *, live: bool) -> str:
    facts, spec, rows = data.facts, data.spec, data.rows
    cards = [
        chart_card(curves.reward_chart(rows, data.evaluations, spec), _NO_STEP),
        chart_card(curves.rate_chart(rows), _NO_STEP),
        gantt_card(data.files.time, note=_times_missing(data)),
        result_section(data),
        prediction_card(data),
        chart_card(
            curves.predicted_chart(facts.lengths if facts else [], facts.edges if facts else [], data.last),
            _no_topics(data),
        ),
        chart_card(curves.length_chart(rows, spec), _NO_STEP),
        chart_card(curves.staleness_chart(rows, spec), _NO_STEP),
        chart_card(curves.gap_chart(rows, spec), "No step had samples of its own weights yet."),
        chart_card(curves.bytes_chart(_counters(data, "trainer-0")), _NO_NOTES),
        chart_card(
            curves.pause_chart({name: kept.kept for name, kept in data.files.counters.items()}), _NO_NOTES
        ),
        chart_card(curves.lag_chart(data.files.queues.kept), _NO_NOTES),
        chart_card(curves.metric_chart(rows, "entropy", "Entropy"), _NO_STEP),
        chart_card(curves.metric_chart(rows, "grad_norm", "Gradient norm"), _NO_STEP),
    ]
    others = [chart_card(chart) for chart in curves.metric_charts(rows, data.keys)]
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(data.made_at))
    return (
        head(data, live=live) + f'<div class="cards">{"".join(cards)}</div>'
        + samples_section(*_samples(data))
        + "<h2>More</h2>" + more_charts(others) + balance_section(data)
        + processes_section(data) + letters_section(data)
        + settings_section(data)
        + f"<footer>Made {safe(made)} by <code>streamrl report {safe(data.record.id)}</code>. "
        "A point of a long run is the mean of neighbouring steps.</footer>"
    )  # fmt: skip


def _samples(data: PageData) -> tuple[list[ReadSample], str]:
    return (data.facts.samples, data.facts.samples_missing) if data.facts else ([], _no_topics(data))


_NO_STEP = "No optimizer step is known yet."
_NO_NOTES = "The run's folder has no notes about this (yet)."


def _no_topics(data: PageData) -> str:
    return _NO_STEP if data.facts else "This is read from the run's topics, and they can't be reached."


def _counters(data: PageData, name: str) -> list[dict[str, object]]:
    found = data.files.counters.get(name)
    return found.kept if found else []


def _times_missing(data: PageData) -> str:
    if data.state == RUNNING and not data.files.time.processes():
        return "The notes are in the report folder of the machine on which the run was started."
    return ""


@cache
def _asset(name: str) -> str:
    text = (_HERE / name).read_text()
    assert "</" not in text, f"{name} would end its element"
    return text
