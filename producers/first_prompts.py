"""The process that reads the first problems that a run would train, for `streamrl profile`.

The task's code is the user's own, so it runs in a process without credentials, which is killed if it hangs.
"""

from __future__ import annotations

import json
import random
import sys
import time
from multiprocessing.connection import Connection

import msgspec

from infra.supervise.argument_file import read_argument
from producers.chat import load_tokenize_prompt, tokens_of
from producers.tasks import TaskError, load_problems
from producers.tokenizing import TokenizerError
from schemas.identity import derive_seed
from schemas.importing import said
from schemas.runspec import RunSpec


class FirstPrompt(msgspec.Struct, frozen=True):
    """A problem, as JSON, and the tokens of its prompt."""

    name: str
    problem: str
    tokens: list[int]


class PromptsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the process."""

    spec: str  # the run spec, as JSON
    model: str  # folder
    count: int


class PromptsFound(msgspec.Struct, frozen=True, kw_only=True):
    """The first prompts, or why there are none."""

    prompts: list[FirstPrompt] = []
    error: str = ""


def main() -> None:
    """Read the problems, and send their prompts."""
    asked = msgspec.json.decode(read_argument(sys.argv[1]), type=PromptsAsked)
    try:
        found = PromptsFound(prompts=first_prompts(asked))
    except (TaskError, TokenizerError) as error:
        found = PromptsFound(error=str(error))
    except Exception as error:  # the task may raise anything
        found = PromptsFound(error=f"the task's problems can't be read: {said(error)}")
    Connection(int(sys.argv[2])).send_bytes(msgspec.msgpack.encode(found))


def first_prompts(asked: PromptsAsked) -> list[FirstPrompt]:
    """Return the prompts that a run would admit first and that are short enough, in its order."""
    spec = RunSpec.model_validate_json(asked.spec)
    problems = load_problems(spec, spec.task.train_split)
    order = list(range(len(problems)))
    if spec.task.shuffle:
        random.Random(derive_seed("epoch", spec.seed, 0)).shuffle(order)
    tokenize = load_tokenize_prompt(asked.model, spec.task, time.time())
    found = []
    for number in order:
        tokens = tokens_of(problems[number], tokenize)
        if 0 < len(tokens) <= spec.sampling.max_prompt_tokens:
            found.append(FirstPrompt(str(problems[number]["id"]), json.dumps(problems[number]), tokens))
        if len(found) == asked.count:
            break
    if not found:
        raise TaskError(
            f"none of the task's {len(problems)} prompts has 1 to {spec.sampling.max_prompt_tokens} tokens "
            "(sampling.max_prompt_tokens)"
        )
    return found


if __name__ == "__main__":
    main()
