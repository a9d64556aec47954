"""A machine that holds a rank of an engine, until it is killed: by the folder of a run, and its id."""

from __future__ import annotations

import sys
from pathlib import Path

from infra.runs import find
from infra.stores.opening import open_store
from producers.engines import machine_ranks
from tests.factories import make_context


def main() -> None:
    folder, run = Path(sys.argv[1]), sys.argv[2]
    record = find(open_store(f"file://{folder}/store"), run)
    context = make_context(record.spec, folder, role=machine_ranks.ROLE, run=run)
    context.record = record
    machine_ranks.body(1, None, context)


if __name__ == "__main__":
    main()
