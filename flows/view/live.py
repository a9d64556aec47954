"""Shows a run as a live view in a terminal, elsewhere as a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows.view.balance_words import balance_in_words
from flows.view.run_view import RunView
from flows.view.screen import Screen
from schemas.messages import SiteReport
from schemas.metrics import REWARD_PART

PLAIN_EVERY_S = 5.0
_MOST_PARTS = 4  # of a reward, on one line
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def terminal(console: Console) -> Iterator[Screen]:
    """Yield a live screen if the console is a terminal, a plain one if it is a file or a pipe."""
    if not console.is_terminal:
        yield PlainScreen(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield LiveScreen(live)


class PlainScreen:
    """A screen of plain lines: news at once, the state of the run every few seconds if it has changed."""

    def __init__(self, console: Console, every_s: float = PLAIN_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._next = 0.0
        self._shown: object = None

    def say(self, text: str) -> None:
        self._write(text)

    def progress(self, fraction: float, text: str) -> None:
        if self._due():
            self._write(f"{fraction:4.0%} {text}")

    def show(self, view: RunView) -> None:
        if not self._due():
            return
        line = one_line(view)
        waits = [f"{name} {process.doing}" for name, process in _alive(view) if process.beat.waits_for]
        text = " | ".join(filter(None, [line, "; ".join(waits), view.trouble]))
        if text != self._shown:
            self._shown = text
            self._write(text)

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every_s
        return True

    def _write(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveScreen:
    """A screen with a table that is drawn again in place. News scroll by above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, text: str) -> None:
        self._live.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim]", Text(text))

    def progress(self, fraction: float, text: str) -> None:
        full = int(30 * min(1.0, max(0.0, fraction)))
        self._live.update(
            Text.assemble(("━" * full, "green"), ("━" * (30 - full), "dim"), f" {fraction:4.0%} {text}")
        )

    def show(self, view: RunView) -> None:
        self._live.update(picture(view))


def one_line(view: RunView) -> str:
    """Return the state of a run as one line."""
    row = view.last
    if row is None:
        if not view.processes:
            return f"{view.run}: its processes are starting"
        return f"{view.run}: {int(view.generated.sum())} samples generated, no step trained yet{_dead(view)}"
    parts = [
        f"{view.run}: iteration {_of(row['iteration'], view)}",
        f"reward {number(row['reward'], 3)}",
        f"length {number(row['length'], 1)}",
        f"samples/s {number(view.generated_per_s, 0)} generated {number(view.trained_per_s, 0)} trained",
        f"staleness {number(row['staleness'], 2)}",
        f"queued {_count(view.to_generate)} to generate {_count(view.to_train)} to train",
    ]
    if view.rewards.failed:
        parts.append(f"{view.rewards.failed} without a reward")
    if view.rewards.without_gradient:
        parts.append(f"no gradient in {view.rewards.without_gradient} iterations")
    if view.left_out:
        parts.append(f"left out: {', '.join(sorted(view.left_out))}")
    return ", ".join(parts) + _dead(view)


def picture(view: RunView) -> Group:
    """Return the state of a run as tables."""
    row = view.last or {}
    facts = Table.grid(padding=(0, 2))
    facts.add_row("iteration", _of(row.get("iteration"), view), "reward", number(row.get("reward"), 3), "")
    facts.add_row(
        "samples/s", f"{number(view.generated_per_s, 0)} generated, {number(view.trained_per_s, 0)} trained",
        "staleness", f"{number(row.get('staleness'), 2)}, at most {row.get('staleness_max', '–')}",
        f"weights version {'–' if view.version is None else view.version}",
    )  # fmt: skip
    facts.add_row(
        "length", f"{number(row.get('length'), 1)}, longest {row.get('length_max', '–')}",
        "logprob gap", tiny(view.logprob_gap), f"dead letters {view.dead_letters}",
    )  # fmt: skip
    facts.add_row(
        "ranked", f"{share(row.get('ranker_recall'))} of the longest fifth were expected",
        "queued", f"{_count(view.to_generate)} to generate, {_count(view.to_train)} to train", "",
    )  # fmt: skip
    facts.add_row(
        "policy", f"entropy {number(row.get('entropy'), 2)}, clipped {share(row.get('clip_fraction'))}, "
        f"divergence {tiny(row.get('divergence'))}",
        "gradient norm", number(row.get("grad_norm"), 3), f"learning rate {tiny(row.get('learning_rate'))}",
    )  # fmt: skip
    if parts_ := reward_parts(row):
        facts.add_row("reward parts", parts_, "", "", "")
    title = Text.assemble((f"run {view.run}", "bold"), "  ", (_spark(view), "green"))
    parts: list[Any] = [title, facts, _queues(view), _processes(view)]
    if view.sites:
        parts.append(sites_table(view.sites.values()))
    if view.dead_letters:
        parts.append(Text(f"last dead letter: {view.last_dead}", style="yellow"))
    for name, why in sorted(view.left_out.items()):
        parts.append(Text(f"{name} is left out: {why.splitlines()[0]}", style="yellow"))
    if view.balance:
        parts.append(Text(balance_in_words(view.balance[-1]), style="cyan"))
    parts += [Text(one.text, style="red") for one in view.rewards.sentences()]
    if view.trouble:
        parts.append(Text(view.trouble, style="yellow"))
    return Group(*parts)


def reward_parts(row: Mapping[str, Any]) -> str:
    """Return the means of the first parts of a step's rewards."""
    found = [(name.removeprefix(REWARD_PART), row[name]) for name in row if name.startswith(REWARD_PART)]
    return ", ".join(f"{name} {number(value, 3)}" for name, value in found[:_MOST_PARTS])


def _queues(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("length class", *_classes(view), style="dim")
    table.add_row("generated", *map(str, view.generated))
    return table


def _classes(view: RunView) -> list[str]:
    """Name each length class by its range of predicted lengths."""
    edges = [edge for edge in view.edges if edge != float("inf")]
    if not edges:
        return [str(number) for number in range(len(view.generated))]
    return [*(f"< {edge:.0f}" for edge in edges), f"≥ {edges[-1]:.0f}"]


def _processes(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, process in sorted(view.processes.items()):
        style = "" if process.alive else "dim"
        table.add_row(
            name,
            f"idle {share(process.idle_share)}",
            f"cpu {share(process.cpu.per_s)}",
            process.doing,
            style=style,
        )
    return table


def sites_table(reports: Iterable[SiteReport]) -> Table:
    """Return a table of the sites' relays and their weights, with a row for each report."""
    table = Table.grid(padding=(0, 2))
    for row in map(site_row, sorted(reports, key=lambda report: (report.site, report.relay))):
        table.add_row(*row.values())
    return table


def site_row(report: SiteReport) -> dict[str, str]:
    """Return one relay's report in words, by column."""
    rate = sum(report.rates.values())
    doing = "idle"
    if report.target >= 0:
        doing = f"fetching {report.target}: {report.done / 1e6:.1f} of {report.whole / 1e6:.1f} MB"
    return {
        "site": f"site {report.site}", "relay": f"relay {report.relay}",
        "version": f"weights {'–' if report.version < 0 else report.version}",
        "lag": f"{report.lag_s:.1f} s behind", "fetched": f"{report.crossed / 1e6:.1f} MB fetched",
        "rate": f"{rate / 1e6:.1f} MB/s" if rate else "–", "doing": report.trouble or doing,
    }  # fmt: skip


def _alive(view: RunView) -> list[Any]:
    return [(name, process) for name, process in sorted(view.processes.items()) if process.alive]


def _of(iteration: Any, view: RunView) -> str:
    done = 0 if iteration is None else int(iteration) + 1
    return f"{done} of {view.spec.algorithm.iterations}"


def _dead(view: RunView) -> str:
    return f", {view.dead_letters} dead letters ({view.last_dead})" if view.dead_letters else ""


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def ago(at: float) -> str:
    """Write for people how long ago a moment was."""
    seconds = max(0.0, time.time() - at)
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def number(value: Any, digits: int) -> str:
    """Write a number for people; None is a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def tiny(value: Any) -> str:
    """Write a number that may be very small; None is a dash."""
    return "–" if value is None else f"{value:.1e}"


def share(value: float | None) -> str:
    """Write a share in percent; None is a dash."""
    return "–" if value is None else f"{value:.0%}"


def _spark(view: RunView, width: int = 40) -> str:
    """Draw the rewards of the newest steps as bars."""
    newest = list(view.rows)[-width:]
    rewards: Sequence[float] = [row["reward"] for row in newest if row["reward"] is not None]
    if not rewards:
        return ""
    low, high = min(rewards), max(rewards)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in rewards)
