"""The origin of versions: a run, whose model is known, or checkpoints that somebody pushed."""

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
    """The facts about versions that their manifests lack, such as the model that they began with."""

    name: str  # for people
    base: str | None = None  # folder of the model that they began with
    spec: ModelSection | None = None  # of their run; None: they are of no run that is known

    @classmethod
    def of_run(cls, record: RunRecord, base: str | None = None) -> VersionSource:
        """Describe a run's versions. `base`: folder of the model, by default as the run says."""
        return cls(f"run {record.id} in {record.store}", base or record.model, record.spec.model)

    @classmethod
    def at(cls, url: str, base: str | None = None) -> VersionSource:
        """Describe the versions at a URL, which may be those of a run."""
        if of_run := run_at(url):
            try:
                return cls.of_run(find(open_store(of_run[0]), of_run[1]), base)
            except RunError:
                pass  # the versions were copied without the run's record
        return cls(url, base)

    @property
    def folder(self) -> ModelFolder:
        """The folder of the model that the versions began with. Raises ExportError if it has no config."""
        if self.base is None or not (Path(self.base) / CONFIG).is_file():
            raise ExportError(
                f"{self.base or self.name} has no {CONFIG}: name the folder of the model that {self.name} "
                "began with (--base); config, tokenizer and the base of an adapter are taken from it"
            )
        return ModelFolder(self.base)
