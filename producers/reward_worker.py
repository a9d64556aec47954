"""A process that computes rewards, so that a reward that hangs, raises or exits costs only its own sample.

    in   {"problem": …, "completion": …}     one JSON line a job
    out  {"parts": {…}} or {"error": …}      one JSON line an answer, in the order of the jobs

The task's own prints go to standard error, so that the pipe carries only answers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from infra.supervise.argument_file import read_argument
from producers.tasks import Reward, TaskError, load_reward, parts_of
from schemas.importing import said
from schemas.runspec import TaskSection


def main() -> None:
    """Answer jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        reward = load_reward(TaskSection.model_validate_json(read_argument(sys.argv[1])))
    except TaskError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        sys.exit(2)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(reward, json.loads(line))) + "\n")


def _answer(reward: Reward, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"parts": parts_of(reward(job["problem"], job["completion"]))}
    except TaskError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": said(error)}


if __name__ == "__main__":
    main()
