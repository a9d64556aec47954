"""Runs a run file's `model.build` in a process of its own: `python -m flows.run.build_model`.

Progress goes to a file, a line of JSON each time, so that the function's own output does not get in between.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from infra.logs import set_up
from infra.supervise.last_words import leave_last_words
from producers.tasks import load_function
from schemas.importing import said


def main() -> int:
    """Build one model. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.run.build_model", description=__doc__)
    parser.add_argument("--build", required=True, help="FILE.py:function")
    parser.add_argument("--folder", required=True, type=Path, help="where the model goes")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--progress", required=True, type=Path, help="file that progress is appended to")
    given = parser.parse_args()
    log = set_up("model", "builder")
    with given.progress.open("a", buffering=1) as file:

        def progress(fraction: float, text: str) -> None:
            file.write(json.dumps([float(fraction), str(text)]) + "\n")

        try:
            load_function(given.build)(given.folder, given.seed, progress)
        except Exception as error:  # the user's code may raise anything
            log.exception("%s failed", given.build)
            leave_last_words(said(error))
            return 1
    if not (given.folder / "config.json").is_file():
        log.error("%s wrote no config.json to its folder: it is not a Hugging Face model", given.build)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
