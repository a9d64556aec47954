"""Makes the profile of a run file, or finds the one that was made before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.planning.profile_file import profile_for, usual_place, write_profile
from flows.planning.profile_identity import profile_identity
from flows.planning.profiled_learner import ProfilingFailed
from flows.planning.run_overheads import newest_overheads, overheads_of
from flows.plans.pace_of_run import pace_of_run
from flows.run.checks import check, check_context
from flows.run.inspection import inspect_built
from flows.run.locations import known_places
from flows.run.request import RunRequest
from flows.run.start_model import model_at_hand, prepare_model
from schemas.loading import load_run_file
from schemas.profile import OverheadsProfile, Profile

ShareOfWork = Callable[[float, str], None]

_TIMES = 2  # not all of a run's time grows with its pace
_MOST_PACE = 4.0


@dataclass(frozen=True)
class ProfileAsked:
    """The profile that somebody asks for."""

    runfile: str
    overrides: tuple[str, ...] = ()
    file: Path | None = None  # None: its usual place
    again: bool = False  # though there is one
    seconds: float = 40.0  # of measuring, about
    run: Path | None = None  # report folder of a run whose overheads are taken into it; None: the newest one


def profile_of_run(
    asked: ProfileAsked, progress: ShareOfWork, say: Callable[[str], None]
) -> tuple[Path, bool]:
    """Return the file with the profile that is asked for, and whether it was made now."""
    from flows.planning.measuring import measure

    engine = load_run_file(asked.runfile, asked.overrides).generator
    if engine.computes_elsewhere:
        raise ProfilingFailed(
            f"generator.engine is {engine.engine}: a server tells of tokens and not of decode steps, so they "
            "can't be timed. On a machine like the server's, profile the run file with generator.engine: "
            "vllm, and name the file at placement.machines.NAME.profile: plans with servers take it"
        )
    spec = check(RunRequest(asked.runfile, asked.overrides))
    run = (asked.run, overheads_of(asked.run)) if asked.run else newest_overheads(spec)
    built = model_at_hand(spec) is None
    model = prepare_model(spec, progress)
    check_context(spec, model)
    if built:
        inspect_built(spec, model, asked.runfile, say)
    place = asked.file or usual_place(spec, profile_identity(spec, model))
    if not asked.again and place.is_file():
        kept = profile_for(spec, model, runfile=asked.runfile, file=place)
        if kept is not None and run is not None and (asked.run or kept.overheads is None):
            write_with_run(kept, place, *run)
        return place, False
    found = measure(spec, model, known_places(spec), progress, seconds=asked.seconds)
    if run is None:
        write_profile(found, place)
    else:
        write_with_run(found, place, *run)
    return place, True


def write_with_run(profile: Profile, place: Path, run: Path, overheads: OverheadsProfile) -> None:
    """Write a profile with the overheads of a run, and with the run's pace beside what it says without."""
    for _ in range(_TIMES):
        write_profile(profile.model_copy(update={"overheads": overheads}), place)
        pace = overheads.pace * pace_of_run(place, run)
        overheads = overheads.model_copy(update={"pace": min(_MOST_PACE, max(1 / _MOST_PACE, pace))})
    write_profile(profile.model_copy(update={"overheads": overheads}), place)
