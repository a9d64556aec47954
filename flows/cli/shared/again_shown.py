"""Shows samples that were sampled again, or whose rewards were computed again, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from flows.run.recorded_samples import RedrawnStep, RescoredStep

_SHOWN = 12  # samples


def show_redrawn(console: Console, found: RedrawnStep) -> None:
    """Say whether all bits are equal, or which sample and token differ first, and by how much."""
    from flows.run.again_rows import redrawn_row

    said = redrawn_row(found)
    first = said["first_other"]
    head = f"step {said['step']} of run {said['run']}: {said['samples']} samples, {said['tokens']} tokens"
    if said["cache_anew"]:
        name, places = next(iter(said["cache_anew"].items()))
        _say(
            console, f"{len(said['cache_anew'])} samples have these bits with a KV cache that was computed "
            f"anew, such as {name} before token {places[0]}: they moved to another generator, or made room",
        )  # fmt: skip
    if first is None:
        _say(console, f"{head}: sampled again, all tokens and log-probabilities have the same bits", "green")
        return
    count = said["samples"] - said["samples_equal"]
    style = "yellow" if found.as_expected else "red"
    _say(console, f"{head}: {count} samples come to OTHER BITS", style)
    _say(
        console, f"first: sample {first['sample']}, token {first['token']}: recorded {_token(first, '')}, "
        f"found {_token(first, '_found')}; drawn by {_by(first)}",
    )  # fmt: skip
    _table(
        console, ("sample", "token", "same tokens", "tokens", "found", "apart", "drawn by"),
        [
            (one["sample"], str(one["token"]), str(one["same_tokens"]), str(one["tokens"]),
             str(one["tokens_found"]), f"{one['apart']:.3g}", _by(one))
            for one in said["others"]
        ],
    )  # fmt: skip
    _say(
        console, f"logprobs of the same answer so far are apart by {said['apart']:.3g} at most (nats). "
        + _judgement(found),
    )  # fmt: skip


def _judgement(found: RedrawnStep) -> str:
    if found.same_machine:
        return (
            "The step was trained on this kind of machine. If its samples were drawn on such a one, too, by "
            "this version of vLLM, all bits should be equal: something is wrong"
        )
    record = f"The step was trained on another kind of machine ({found.record.made_on})"
    if found.as_expected:
        return (
            f"{record}, so this was judged by its tolerance for logprobs, {found.tolerance:g}: it is within "
            "that. A token may differ there where the draw falls between two tokens"
        )
    return f"{record}, but its tolerance for logprobs is {found.tolerance:g}: something else is wrong"


def _token(row: dict[str, Any], end: str) -> str:
    if row[f"token_id{end}"] is None:
        return f"the end ({row[f'finish{end}']})"
    return f"token id {row[f'token_id{end}']}, logprob {row[f'logprob{end}']:.8g}"


def _by(row: dict[str, Any]) -> str:
    pairs = zip(row["versions"], row["version_starts"], strict=True)
    return ", ".join(f"version {version}" + (f" from token {at}" if at else "") for version, at in pairs)


def show_rescored(console: Console, found: RescoredStep) -> None:
    """Name the samples whose reward differs now, and the parts that differ."""
    from flows.run.again_rows import rescored_row

    said = rescored_row(found)
    changed = {
        True: f"{said['code']} has changed since the run began",
        False: f"{said['code']} is as it was when the run began",
        None: f"whether {said['code']} has changed since the run began is not recorded",
    }[said["code_changed"]]
    head = f"step {said['step']} of run {said['run']}: rewards of {said['samples']} samples"
    if found.equal:
        _say(console, f"{head} come to the same numbers", "green")
        _say(console, changed)
        return
    count = said["samples"] - said["samples_equal"]
    _say(console, f"{head}: {count} are OTHERS now", "red")
    _table(
        console, ("sample", "problem", "recorded", "now"),
        [(one["sample"], one["problem"], _reward(one, ""), _reward(one, "_found")) for one in said["others"]],
    )  # fmt: skip
    reason = {
        True: "that may be the reason",
        False: "so it gives other rewards by chance, or by something beside it: a clock, a service, a file",
        None: "look there first",
    }[said["code_changed"]]
    _say(console, f"{changed}: {reason}")


def _reward(row: dict[str, Any], end: str) -> str:
    if row[f"error{end}"]:
        return f"none: {row[f'error{end}'][:80]}"
    parts = ", ".join(f"{name} {value:g}" for name, value in row[f"parts{end}"].items())
    return f"{row[f'reward{end}']:g} ({parts})"


def _table(console: Console, titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles)
    for row in rows[:_SHOWN]:
        table.add_row(*(Text(one[:120]) for one in row))
    console.print(table)
    if len(rows) > _SHOWN:
        _say(console, f"{len(rows) - _SHOWN} more: --json names all", "dim")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
