"""Code that several trackers share: values of a row, settings of a run, and packages that may be missing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import ValidationInfo, model_validator

from flows.trackers.tracker import TrackedRun, TrackerSettings
from flows.view.metric_rows import MetricRow
from schemas.importing import BadImport

_UNUSUAL, _LONGEST = re.compile(r"[^\w :-]"), 200
_PLACES = {"ledger", "finished_at"}  # values of a row that say where and when it was written


class PackageSettings(TrackerSettings):
    """Settings of a tracker that needs a package which StreamRL does not install by itself."""

    package: ClassVar[str]  # the name by which it is imported, and of the extra that installs it

    @model_validator(mode="after")
    def _installed(self, info: ValidationInfo) -> Self:
        # Only where a run is started: whoever reads the record of a run does not need the package.
        if info.context and info.context.get("load") and importlib.util.find_spec(self.package) is None:
            raise ValueError(_missing(self.package))
        return self

    def imported_package(self, part: str = "") -> Any:
        """Return the package, or a part of it. Raises BadImport if it is not installed or does not work."""
        try:
            return importlib.import_module(f"{self.package}{part}")
        except ImportError as error:
            raise BadImport(f"{_missing(self.package)} ({error})") from error


def _missing(package: str) -> str:
    return f"the package {package} is not installed: pip install 'streamrl[{package}]'"


def curves_of(row: MetricRow, prefix: str) -> dict[str, float]:
    """Return the numbers of a row that make curves, such as `train/reward`.

    A user's loss or reward may name metrics in any way; characters that a tracker may refuse become `_`.
    """
    return {
        f"{prefix}/{_UNUSUAL.sub('_', name)[:_LONGEST]}": float(value) for name, value in row.items()
        if name not in _PLACES and isinstance(value, int | float) and math.isfinite(value)
    }  # fmt: skip


def settings_of(run: TrackedRun) -> dict[str, Any]:
    """Return the run's settings, as the run file has them."""
    return run.spec.model_dump(mode="json", by_alias=True)


def flat_settings(run: TrackedRun) -> dict[str, str]:
    """Return the run's settings by full name, such as `sampling.max_tokens`."""
    return dict(_flat(settings_of(run), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


class Progress:
    """Knows how far a run is, so that a tracker can say at the end whether the run was trained to its end."""

    def __init__(self, run: TrackedRun) -> None:
        algorithm = run.spec.algorithm
        self._steps = algorithm.iterations * algorithm.optimizer_steps
        self._step = run.last_step

    def took(self, row: MetricRow) -> int:
        """Note the step of a row, and return it."""
        self._step = int(row["step"] or 0)
        return self._step

    @property
    def is_done(self) -> bool:
        """Whether the last step of the run was taken."""
        return self._step + 1 >= self._steps
