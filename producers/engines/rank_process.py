"""The process of a rank of an engine that is not rank 0: it does what rank 0 does, at the same time."""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from infra import choices
from infra.supervise.argument_file import read_argument
from infra.weights.slices import Slicing
from producers.engines.engine import LocalEngine
from producers.engines.engine_process import answer
from producers.engines.engine_ranks import rank_deadline_s
from producers.engines.following_rank import FollowingRank, heard, serve_beside
from producers.engines.other_engine_ranks import RankOptions, connections
from producers.engines.rank_group import EngineRank
from producers.engines.rank_marks import RankMarks
from producers.engines.shared_plan import Share
from producers.engines.vllm_engine import VllmSettings
from producers.engines.vllm_in_process import VllmEngine
from schemas.generation import ENGINES
from schemas.runspec import RunSpec


def main() -> None:
    """Serve rank 0 until it closes the connection."""
    options = msgspec.json.decode(read_argument(sys.argv[1]), type=RankOptions)
    acts, beside = connections(options)

    def serve(link: Connection, engine: LocalEngine) -> None:
        assert isinstance(engine, VllmEngine)

        def work() -> None:
            if choices.cuda():
                torch.cuda.set_device(options.local)  # else this thread would take memory of the first GPU
            serve_beside(beside, engine)

        threading.Thread(target=work, daemon=True, name="beside").start()
        FollowingRank(link, engine, options.number, RankMarks(Path(options.marks))).run()

    answer(acts, lambda: following_engine(options, lambda own: heard(acts)), serve)


def following_engine(options: RankOptions, share: Share) -> VllmEngine:
    """Return the engine of this rank."""
    spec = RunSpec.model_validate_json(options.engine.spec)
    settings = ENGINES.loaded(spec.generator)
    assert isinstance(settings, VllmSettings)
    slicing = Slicing.of(Path(options.engine.model), settings.layout)
    rank = EngineRank(
        options.number, options.local, slicing, options.meeting, options.group, rank_deadline_s(spec), share
    )
    return settings.own_engine(options.engine.model, spec, rank)


if __name__ == "__main__":
    main()
