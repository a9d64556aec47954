"""streamrl replay"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.replay_options import ArchiveAlone, OwnCode, RunOrStepFile, StepRange
from flows.cli.shared.talk import FAILED, error_console, fail, out, plain_errors, say_json

if TYPE_CHECKING:
    from rich.console import Console

    from consumers.replay import Replayed, Spoilt
    from flows.run.replaying import Replaying

_NUMBER = re.compile(r"[0-9]{1,18}")  # of a step
_NAMED = 12  # maximum samples that are named


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(replay))


def replay(
    run: RunOrStepFile,
    step: StepRange = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="A step that could not be taken: which samples spoil it?")
    ] = False,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate", help="Sample the step's samples again, and compare tokens and logprobs."
        ),
    ] = False,
    rewards: Annotated[
        bool, typer.Option("--rewards", help="Compute the step's rewards again, by the task's own code.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(metavar="ID", help="With --regenerate or --rewards: only this sample, of any step."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a step and line, with all stages.")
    ] = False,
    own_code: OwnCode = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Take optimizer steps again, from the log and the store or from a step file, and compare all bits.

    It names the first stage that differs, by how much, and the sample that differs most. The replay begins at
    the newest checkpoint before the step or at the run's first model. It writes nothing.

    --regenerate and --rewards train nothing, and look at what came before the trainer. --regenerate samples
    the step's samples again, in vLLM, by the recorded seeds and the weights of the versions that drew them.
    --rewards computes their rewards again.

    Examples:

    [bold]streamrl replay count-3 --step 12[/bold]

    [bold]streamrl replay count-3 --step 0-59 --json > steps.jsonl[/bold]

    [bold]streamrl replay count-3 --step 12 --regenerate --rewards[/bold]

    [bold]streamrl replay count-3 --sample 0000097-02 --regenerate[/bold]

    [bold]streamrl replay step.tar.zst[/bold]   made by `streamrl bundle`; needs no broker, store or network

    [bold]streamrl replay count-3 --step 12 --archive[/bold]   from the archive and the store; needs no broker
    """  # fmt: skip
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.run.replaying import replaying

    first, last = steps_of(step)
    if failed and first != last:
        fail("--failed looks at one step")
    if sample is not None and not (regenerate or rewards):
        fail("--sample goes with --regenerate or --rewards; `streamrl inspect` shows a sample token by token")
    if regenerate or rewards:
        if first != last:
            fail("--regenerate and --rewards look at one step")
        asked = _Asked(run, store, last, sample, failed, own_code, archive)
        if not _samples_again(asked, regenerate=regenerate, rewards=rewards, as_json=as_json):
            raise typer.Exit(FAILED)
        return
    console, fine = out(), True
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("steps before it", total=None)

        def reading(done: int, total: int) -> None:
            bar.update(task, description="bytes of the step file", completed=done, total=total)

        def stepping(done: int, total: int) -> None:
            bar.update(task, description="steps before it", completed=done, total=total)

        with replaying(
            run, store, stepping, read=reading, own_code=own_code, archive_alone=archive
        ) as opened:
            failed = failed or (opened.index is not None and opened.index.failed and step is None)
            if failed:
                fine = _failed(console, opened.again.failed(last), as_json=as_json)
            else:
                fine = _steps(console, opened, first, last, as_json=as_json)
    if not fine:
        raise typer.Exit(FAILED)


@dataclass(frozen=True)
class _Asked:
    """The samples that are looked at again."""

    source: str
    store: str
    step: int | None
    sample: str | None
    failed: bool
    own_code: bool
    archive_alone: bool


def _samples_again(asked: _Asked, *, regenerate: bool, rewards: bool, as_json: bool) -> bool:
    """Do again what came before the trainer. Return whether it came out as expected."""

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.cli.shared.again_shown import show_redrawn, show_rescored
    from flows.run.again_rows import redrawn_row, rescored_row
    from flows.run.recorded_samples import recorded_samples

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(words: str) -> Callable[[int, int], None]:
            return lambda done, total: bar.update(task, description=words, completed=done, total=total)

        with recorded_samples(
            asked.source, asked.store, asked.step, asked.sample, failed=asked.failed, own_code=asked.own_code,
            archive_alone=asked.archive_alone, read=say("bytes of the step file"),
        ) as found:  # fmt: skip
            scored = found.rescored(say("rewards")) if rewards else None
            bar.update(task, description="starting the engine" if regenerate else "", completed=0)
            drawn = found.regenerated(say("steps before it"), say("samples")) if regenerate else None
    if as_json:
        said = (scored and {"rewards": rescored_row(scored)}) or {}
        said |= (drawn and {"regenerated": redrawn_row(drawn)}) or {}
        say_json(said)
    else:
        if scored is not None:
            show_rescored(out(), scored)
        if drawn is not None:
            show_redrawn(out(), drawn)
    return (scored is None or scored.equal) and (drawn is None or drawn.as_expected)


def steps_of(said: str | None) -> tuple[int | None, int | None]:
    """Return the first and last of the steps that a user names."""
    if said is None:
        return None, None
    first, dash, last = said.partition("-")
    if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
        fail(f"--step {said}: write the number of a step, such as 12, or of the first and last, such as 0-59")
    found = int(first), int(last) if dash else int(first)
    if found[0] > found[1]:
        fail(f"--step {said}: the first step comes after the last one")
    return found


def _steps(
    console: Console, opened: Replaying, first: int | None, last: int | None, *, as_json: bool
) -> bool:

    from flows.view.replay_rows import replay_row

    again = opened.again
    if first is None and opened.index is not None:
        first = last = opened.index.asked
    newest = again.newest() if last is None else last
    several, count, equal, fine = first is not None and first < newest, 0, 0, True
    for found in again.each(newest if first is None else first, newest):
        count, equal, fine = count + 1, equal + found.equal, fine and found.as_expected
        if as_json:
            say_json(replay_row(found))
        elif not several or not found.equal:
            _show(console, found)
    if several and not as_json:
        console.print(
            f"steps {first} to {newest}: {equal} of {count} came to the same bits", highlight=False,
            style="green" if equal == count else "red",
        )  # fmt: skip
    return fine


def _failed(console: Console, found: Spoilt, *, as_json: bool) -> bool:

    from flows.view.replay_rows import spoilt_row

    if as_json:
        say_json(spoilt_row(found))
    else:
        _show_spoilt(console, found)
    return bool(found.reason)


def _show(console: Console, found: Replayed) -> None:
    from rich.table import Table

    from flows.view.replay_rows import replay_row

    said = replay_row(found)
    groups = said["groups"]
    console.print(
        f"step {said['step']} of iteration {said['iteration']}, run {said['run']}: {said['samples']} samples "
        f"of {len(groups)} groups, {groups[0]} to {groups[-1]}; from {said['from']}",
        highlight=False,
    )
    table = Table("stage", "bits", "apart", "tolerance", "unit", "farthest sample")
    for one in said["stages"]:
        differs = one["equal"] is False
        table.add_row(
            one["stage"], {True: "equal", False: "OTHER", None: "not recorded"}[one["equal"]],
            f"{float(one['apart']):.3g}" if differs else "", f"{one['tolerance']:g}" if differs else "",
            one["unit"] if differs else "", one["sample"] or "",
        )  # fmt: skip
    console.print(table)
    console.print(f"root: recorded {said['root']}, found {said['root_found']}", highlight=False)
    if said["others_before"]:
        names = ", ".join(map(str, said["others_before"][:_NAMED]))
        console.print(f"steps before it have other bits already: {names}", style="yellow", highlight=False)
    if not said["same_recipe"]:
        console.print(
            "the ledger says that this step was taken with other settings, or by another version of StreamRL",
            style="yellow", highlight=False,
        )  # fmt: skip
    _conclude(console, found)


def _conclude(console: Console, found: Replayed) -> None:
    from flows.view.replay_rows import replay_row

    if found.equal:
        console.print("the replay came to the same bits", style="green")
        return
    said = replay_row(found)
    first = said["first_other"]
    by = f"{float(first['apart']):.3g} ({first['unit']})"
    sample = f", most in sample {first['sample']}" if first["sample"] else ""
    console.print(
        f"OTHER BITS from stage {first['stage']} on: apart by {by}{sample}",
        style="yellow" if found.as_expected else "red", highlight=False,
    )  # fmt: skip
    console.print(found.reason, highlight=False)


def _show_spoilt(console: Console, found: Spoilt) -> None:
    record = found.record
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    say(
        f"step {record.step} of iteration {record.iteration}, run {record.run}, which could not be taken: "
        f"{found.samples} samples in {found.batches} micro-batches; from {found.start}"
    )
    if not found.reason:
        say("the step can be taken this time: its samples are not the reason that it failed")
    elif found.batch is None:
        say(f"each micro-batch can be trained by itself, but not all together: {found.reason}")
    else:
        say(f"micro-batch {found.batch}: {found.reason}; its samples: {_names(found.members)}")
        if found.alone:
            for name, reason in found.alone[:_NAMED]:
                say(f"  sample {name}, by itself: {reason}")
            if len(found.alone) > _NAMED:
                say(f"  and {len(found.alone) - _NAMED} more")
        else:
            say("  each of these samples can be trained by itself")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
