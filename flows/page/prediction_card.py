"""The card that sets a run beside its prediction, with the picture of a predicted iteration."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping

from flows.page.axes import in_words
from flows.page.charts import note_of
from flows.page.curve_charts import is_number
from flows.page.page_data import PageData
from flows.page.run_files import PREDICTION_FILE, PREDICTION_PICTURE, read_json, read_picture
from schemas.messages import WAIT

# by cause of the simulation, the cause that processes note
_TRAINER = {
    "waiting for samples": WAIT + "samples",
    "waiting for weights": WAIT + "weights",
    "waiting for its turn": WAIT + "the other's turn",
}
_GENERATORS = {
    "waiting for jobs": WAIT + "assignments",
    "waiting for weights": WAIT + "weights",
    "waiting for its turn": WAIT + "the other's turn",
    "drawing the tail": "generating the long tail",
}
_SEEN = 0.0005  # a share below it is not shown
_NOTE = (
    "In nine cases of ten a figure is expected to lie in its range. Predicted is the steady part of a run; "
    "measured is all of it. Shares are of the time after the start of a process."
)

Figure = tuple[float, float, float]  # expected, and its range


def prediction_card(data: PageData) -> str:
    """Return the card; nothing for a run that nobody predicted."""
    # The file may hold anything. Only its numbers get into the page.
    said = read_json(data.files.folder / PREDICTION_FILE)
    picture = read_picture(data.files.folder / PREDICTION_PICTURE)
    algorithm, measured_rate = data.spec.algorithm, data.totals["samples_per_s"]
    rate = float(measured_rate) if is_number(measured_rate) and measured_rate > 0 else None
    rows = _row("samples a second", _figure_of(said.get("samples_per_s")), rate, in_words, compared=True)
    step_s = algorithm.groups * algorithm.group_size / rate if rate else None
    rows += _row("seconds of an iteration", _figure_of(said.get("step_s")), step_s, in_words, compared=True)
    for side, role, causes in (("trainer", "trainer", _TRAINER), ("generators", "generator", _GENERATORS)):
        expected, measured = said.get(side), data.files.time.side_shares(role)
        for cause, noted in causes.items():
            figure = _figure_of(expected.get(cause)) if isinstance(expected, Mapping) else None
            if figure is not None and max(figure[0], measured.get(noted, 0.0)) >= _SEEN:
                share = measured.get(noted, 0.0) if measured else None
                rows += _row(f"{side}: {cause}", figure, share, _percent)
    if not rows and not picture:
        return ""
    names = "".join(f'<th class="n">{name}</th>' for name in ("predicted", "range", "measured", ""))
    note = _NOTE if said.get("simulated") is not False else f"{_NOTE} It was predicted by a formula."
    return (
        '<figure class="card full"><figcaption>Predicted and measured</figcaption>'
        f"<table><tr><th></th>{names}</tr>{rows}</table>{note_of(note)}{_image(picture)}</figure>"
    )


def _figure_of(found: object) -> Figure | None:
    """Return a figure with its range, if that is what was found."""
    if not isinstance(found, Mapping):
        return None
    numbers = [
        float(one) for name in ("value", "low", "high") if is_number(one := found.get(name)) and one >= 0
    ]
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None


def _row(
    name: str, figure: Figure | None, measured: float | None, words: Callable[[float], str], *,
    compared: bool = False,
) -> str:  # fmt: skip
    if figure is None:
        return ""
    value, low, high = figure
    cells = [words(value), f"{words(low)} to {words(high)}", "–", ""]
    if measured is not None:
        judged = "inside the range" if low <= measured <= high else "outside the range"
        off = f"{value / measured - 1:+.1%}, " if compared and measured > 0 else ""
        cells[2:] = [words(measured), off + judged]
    return f"<tr><td>{name}</td>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _image(picture: bytes) -> str:
    if not picture:
        return ""
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return f'<img class="picture" alt="One iteration as it was predicted" src="{source}">'
