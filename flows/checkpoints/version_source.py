"""Where versions come from: a run, whose model is known, or anybody's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.errors import Explained
from infra.runs import RunError, RunRecord, find
from infra.stores.opening import open_store
from infra.weights.folder import ModelFolder
from infra.weights.places import run_at
from schemas.runspec import ModelSection

CONFIG = "config.json"


class ExportError(Explained):
    """A version can't be written as a folder; the message says why."""


@dataclass(frozen=True)
class VersionSource:
    """What versions do not say of themselves."""

    name: str  # for people
    base: str | None = None  # folder of the model that they began with
    spec: ModelSection | None = None  # of their run

    @classmethod
    def of_run(cls, record: RunRecord, base: str | None = None) -> VersionSource:
        """Of a run's versions."""
        return cls(f"run {record.id} in {record.store}", base or record.model, record.spec.model)

    @classmethod
    def at(cls, url: str, base: str | None = None) -> VersionSource:
        """Of the versions at an address, which may be a run's."""
        if of_run := run_at(url):
            try:
                return cls.of_run(find(open_store(of_run[0]), of_run[1]), base)
            except RunError:
                pass  # they were copied without it
        return cls(url, base)

    @property
    def folder(self) -> ModelFolder:
        """The model that they began with."""
        if self.base is None or not (Path(self.base) / CONFIG).is_file():
            raise ExportError(
                f"{self.base or self.name} has no {CONFIG}: the model that {self.name} began with is needed "
                "for config, tokenizer and what an adapter is for; say where it is with --base"
            )
        return ModelFolder(self.base)
