"""Prepares the model that a run starts from: a folder, a name on the Hub, or a function that builds it once.

.streamrl/models/<hash>          there whole or not at all: committed by a rename
.streamrl/models/<hash>.lock     two runs don't build the same model twice
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import uuid
from pathlib import Path

from flows.checkpoints.folder_writer import ShareProgress
from flows.run.locations import models_folder
from flows.run.request import LastingFailure, RunFailed
from infra import choices
from infra.code import module
from infra.credentials import unset_credentials
from infra.files.locks import locked
from infra.files.private import make_private
from infra.hub import fetch_model, is_hub_name, model_folder
from infra.supervise.team import Team
from infra.waiting import Wait
from schemas.runspec import RunSpec


def prepare_model(spec: RunSpec, progress: ShareProgress) -> Path:
    """Return the folder with the starting weights and the tokenizer. Builds the model if need be."""
    if path := spec.model.path:
        if model_folder(path) is None and is_hub_name(path):
            progress(0.0, f"fetching {path} from the Hugging Face Hub")
            return fetch_model(path).resolve()
        return (model_folder(path) or Path(path)).resolve()
    assert spec.model.build is not None
    target = models_folder() / build_key(spec.model.build, spec.seed)
    if target.is_dir():
        return target
    make_private(target.parent)
    # Whoever holds the lock builds this very model, which may take long.
    with locked(target.with_suffix(".lock"), what=f"the model {target.name}", deadline_s=3600.0):
        if not target.is_dir():
            _build(spec, target, progress)
    return target


def model_at_hand(spec: RunSpec) -> Path | None:
    """Return the folder that `prepare_model` would return; None if it is not there. Builds nothing."""
    try:
        if spec.model.path:
            found = model_folder(spec.model.path)
            return found.resolve() if found else None
        folder = models_folder() / build_key(spec.model.build or "", spec.seed)
        return folder.resolve() if folder.is_dir() else None
    except (OSError, RunFailed):
        return None


def build_key(build: str, seed: int) -> str:
    """Return a hash of a builder's function, files and seed: if it changes, the model is built again."""
    source, _, function = build.rpartition(":")
    digest = hashlib.sha256(f"{function}\0{seed}\0".encode())
    try:
        for file in _sources(source):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    except OSError as error:
        raise RunFailed(f"model.build: {source} can't be read: {error}") from error
    return digest.hexdigest()[:16]


def _sources(source: str) -> list[Path]:
    """Return the builder's file, and the files beside it whose names it mentions."""
    if not source.endswith(".py"):
        try:
            found = importlib.util.find_spec(source)
        except (ImportError, ValueError):
            found = None
        if found is None or found.origin is None:
            raise RunFailed(f"model.build: there is no module {source}")
        source = found.origin
    main = Path(source)
    text = main.read_text(errors="replace")
    beside = (file for file in main.parent.glob("*.py") if file != main and file.stem in text)
    return [main, *sorted(beside)]


def _build(spec: RunSpec, target: Path, progress: ShareProgress) -> None:
    assert spec.model.build is not None
    for old in target.parent.glob(f"{target.name}.*.tmp"):
        shutil.rmtree(old, ignore_errors=True)  # left by a build that was killed: we hold the lock
    work = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    work.mkdir()
    (work / "progress").touch()
    argv = [
        *unset_credentials(), sys.executable, "-m", module("flows.run.build_model"),
        "--build", spec.model.build, "--folder", str(work / "model"), "--seed", str(spec.seed),
        "--progress", str(work / "progress"),
    ]  # fmt: skip
    threads = str(min(8, choices.cores()))
    try:
        with Team(target.parent / "logs", grace_s=2.0) as team, (work / "progress").open() as told:
            name = f"build-{target.name}"
            team.log(name).unlink(missing_ok=True)
            team.start(name, argv, {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"})
            wait = Wait(
                "a model of model.build", unblocked_by=spec.model.build, deadline_s=spec.deadlines.progress_s
            )
            while not (ended := team.poll(0.2)):
                lines = told.readlines()
                if lines and lines[-1].endswith("\n"):
                    fraction, text = json.loads(lines[-1])
                    progress(fraction, text)
                wait.progress() if lines else wait.check()
        if ended[0].code or ended[0].signal:
            one = ended[0]
            raise LastingFailure(f"model.build {spec.model.build} failed: {one.words} (its log is {one.log})")
        (work / "model").replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
