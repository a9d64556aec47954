"""A process that tries out a user's task: imports it, reads its first problems, and scores one completion.

    argv 1  a file descriptor of a ProbeRequest, as JSON (`infra.supervise.argument_file`)
    argv 2  a file descriptor for the findings, one JSON line each:
            {"pid", "doing"}                  the check that begins now, so that the reader can name it
            {"pid", "thing", "said", "wrong", "noted"} a finding
            {"pid", "done"}                   all checks are done

The task's own prints go to standard output and error, which nobody parses. The task may hang, exit, fork or
print anything: `flows.run.inspection.task` waits for this process with a deadline, and kills it.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from typing import Any

from pydantic import BaseModel

from infra.errors import Explained
from infra.supervise.argument_file import read_argument
from producers.chat import load_tokenize_prompt, tokens_of
from producers.problems import Problem, TaskError
from producers.tasks import Reward, first_problems, load_reward, parts_of
from schemas.importing import said
from schemas.runspec import TaskSection
from schemas.shortening import printable, shown


class ProbeRequest(BaseModel):
    """The task to try out, and how much of it."""

    task: TaskSection
    splits: list[str]  # the splits to read the first problems of
    first: int
    tokenizer: str | None  # the model's folder; None if it is not there
    longest: int  # most tokens that a prompt may have


class _Answers:
    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1)
        self.pid = os.getpid()  # a task may fork: lines with another pid are not ours

    def tell(self, **line: Any) -> None:
        self._file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")

    def doing(self, what: str) -> None:
        self.tell(doing=what)

    def found(self, thing: str, said: str, *, wrong: bool = False, noted: bool = False) -> None:
        self.tell(thing=thing, said=said, wrong=wrong, noted=noted)


def main() -> None:
    """Run all checks and report each finding. One broken part does not keep the others from being checked."""
    answers = _Answers(int(sys.argv[2]))
    job = ProbeRequest.model_validate_json(read_argument(sys.argv[1]))
    reward = _reward(job, answers)
    problems = [problem for split in job.splits for problem in _problems(job, split, answers)]
    if problems and job.tokenizer:
        _tokenize(job, job.tokenizer, problems, answers)
    if problems and reward:
        _score(reward, problems[0], answers)
    answers.tell(done=True)


def _reward(job: ProbeRequest, answers: _Answers) -> Reward | None:
    where = job.task.reward or f"{job.task.python}:reward"
    answers.doing(f"the import of {where}")
    try:
        return load_reward(job.task)
    except TaskError as error:
        answers.found("reward", str(error), wrong=True)
        return None


def _problems(job: ProbeRequest, split: str, answers: _Answers) -> list[Problem]:
    answers.doing(f"reading the first problems of split {split!r}")
    try:
        found = first_problems(job.task, split, job.first)
    except TaskError as error:
        answers.found("task", str(error), wrong=True)
        return []
    if found:
        answers.found("task", f"the first {len(found)} problems of split {split!r} can be used")
    else:
        answers.found("task", f"there are no problems in split {split!r}", wrong=True)
    return found


def _tokenize(job: ProbeRequest, folder: str, problems: list[Problem], answers: _Answers) -> None:
    answers.doing(f"tokenizing with the tokenizer in {folder}")
    try:
        tokenize = load_tokenize_prompt(folder, job.task, time.time())
        lengths = [len(tokens_of(problem, tokenize)) for problem in problems]
    except Explained as error:
        answers.found("tokenizer", str(error), wrong=True)
        return
    except Exception as error:
        answers.found("tokenizer", f"the tokenizer in {folder} fails: {said(error)}", wrong=True)
        return
    out = sum(not 0 < length <= job.longest for length in lengths)
    allowed = f"{job.longest} are allowed (sampling.max_prompt_tokens)"
    text = f"prompts of {min(lengths)} to {max(lengths)} tokens; {allowed}"
    if out == len(lengths):
        answers.found("tokenizer", f"{text}: none of the first {len(lengths)} could be used", wrong=True)
    else:
        left = f": {out} of {len(lengths)} are left out" if out else ""
        answers.found("tokenizer", f"{text}{left}", noted=bool(out))


def _score(reward: Reward, problem: Problem, answers: _Answers) -> None:
    """Score the right answer if the problem has one; else an empty answer, or one that repeats the prompt."""
    answers.doing(f"the reward of problem {shown(problem['id'])}")
    answer = problem.get("answer")
    tried = [answer] if isinstance(answer, str) else ["", problem["prompt"]]
    failed = ""
    for completion in tried:
        try:
            _fits(reward, problem, completion)
            parts = parts_of(reward(problem, completion))
        except TaskError as error:
            failed = failed or f"problem {shown(problem['id'])}: {error}"
        except (Exception, SystemExit) as error:
            failed = failed or f"it fails on problem {shown(problem['id'])}: {said(error)}"
        else:
            names = printable(", ".join(parts), 200)
            answers.found("reward", f"{shown(completion)} earns {sum(parts.values()):g} ({names})")
            if failed:
                answers.found("reward", f"an empty answer has no reward: {failed}", noted=True)
            return
    answers.found("reward", failed, wrong=True)


def _fits(reward: Reward, problem: Problem, completion: str) -> None:
    try:
        inspect.signature(reward).bind(problem, completion)
    except TypeError as error:
        raise TaskError(f"the function can't be called as reward(problem, completion): {error}") from None
    except ValueError:
        return  # a built-in function without a signature


if __name__ == "__main__":
    main()
