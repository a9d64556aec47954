"""Finds or fetches the files that generators and ranks on another machine need: the model and the reward.

Generators get the model as the newest version of the run's weights, with the config and tokenizer that lie
beside it. Code is not fetched: the user brings the reward's file and says where it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from flows.checkpoints.push_and_pull import newest_version, pull_version
from flows.run.locations import models_folder
from flows.run.request import RunFailed
from infra.files.locks import locked
from infra.hub import fetch_model, is_hub_name
from infra.runs import RunRecord, unique_name
from infra.stores.store import Store
from infra.waiting import wait_until
from infra.weights.folder import VERSION_FILE
from infra.weights.garbage import ByteProgress
from infra.weights.seen import Seen
from infra.weights.versions import WeightStore

_LOOK_S = 1.0
_CONFIG = "config.json"


def reward_here(record: RunRecord, reward: str | None) -> str | None:
    """Return where the reward is on this machine; None if it is where the run says.

    Raises RunFailed if the reward's file is missing.
    """
    task = record.spec.task
    where = reward or task.reward or f"{task.python}:reward"
    source, _, name = where.rpartition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise RunFailed(
            f"run {record.id} needs its reward, and {source} is not on this machine: bring the file here and "
            f"say where it is with --reward FILE.py:{name} (of a flow: the parameter reward)"
        )
    return f"{Path(source).resolve()}:{name}" if reward and source.endswith(".py") else reward


def start_model_here(record: RunRecord, model: str | None) -> str | None:
    """Return the folder of the starting model for the trainer's ranks; None if it is where the run says.

    A model of the Hub is looked for in this machine's cache, and fetched; the ranks compare its content.
    """
    named = record.spec.model.path or ""
    if model is None and is_hub_name(named) and not Path(record.model).is_dir():
        model = str(fetch_model(named))
    return str(Path(model).resolve()) if model else None


def model_here(
    record: RunRecord, model: str | None, near: Store, origin: Store, progress: ByteProgress
) -> str | None:
    """Return the folder of the starting model on this machine; None if it is where the run says.

    The model is fetched if it is not here. `near`: the store as this site sees it; `origin`: the run's store.
    """
    if model is not None:
        if not (Path(model) / _CONFIG).is_file():
            raise RunFailed(f"{model} has no {_CONFIG}: it is no folder of a model")
        return str(Path(model).resolve())
    if (Path(record.model) / _CONFIG).is_file():
        return None
    if record.spec.model.lora is not None:
        raise RunFailed(
            f"run {record.id} sends adapters of a model that is not on this machine ({record.model}): bring "
            "its folder here, and say where it is with --model FOLDER (of a flow: the parameter model)"
        )
    seen, folder = Seen(unique_name(record)), models_folder() / unique_name(record)
    start_s = record.spec.deadlines.start_s
    with locked(folder.with_name(f"{folder.name}.lock"), what=str(folder), deadline_s=start_s):
        if not (folder / VERSION_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)  # a pull that was killed may have left a part of it
            there = WeightStore(origin, record.id)
            wait_until(
                there.versions, f"the first weights of {record.id}", unblocked_by="the run's trainer",
                deadline_s=start_s, every_s=_LOOK_S,
            )  # fmt: skip
            version = newest_version(there, origin.url, None, seen)
            pull_version(WeightStore(near, record.id), version, folder, progress, seen=seen)
    return str(folder)
