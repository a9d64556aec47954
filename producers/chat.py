"""Turns prompts into tokens. Messages go through the model's chat template first.

text ──────────────────────────────────────────────► tokens
messages, and text with task.chat ──► template ──► text ──► tokens, and no second token for the beginning

A template may come from anywhere: transformers runs it in a sandbox, and time and size are bounded here.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from producers.chat_messages import ChatMessage, PromptContent
from producers.problems import LARGEST_PROBLEM, Problem, TaskError
from producers.tokenizing import TokenizerError, load_tokenize, load_whole_tokenizer
from schemas.importing import said
from schemas.runspec import TaskSection
from schemas.shortening import shown

MOST_TEMPLATE_S = 10.0  # for one prompt
_LARGEST_TEMPLATE = 1 << 20  # characters

Tokenize = Callable[[PromptContent], list[int]]


class ChatTemplate:
    """The chat template of a model's tokenizer, or of task.chat_template.

    `day`: when the run began. A template that asks for the date gets this one, so that a prompt has the same
    tokens on every day.
    """

    def __init__(self, model: str, task: TaskSection, day: datetime) -> None:
        self._system, self._day, self._place = task.system, day, task.chat_template or model
        self._tokenizer = load_whole_tokenizer(model)
        self._template = self._read(task.chat_template) if task.chat_template else self._own(model)
        if len(self._template) > _LARGEST_TEMPLATE:
            raise TokenizerError(
                f"{self._place}: the chat template has {len(self._template):,} characters; "
                f"{_LARGEST_TEMPLATE:,} are allowed"
            )

    def text(self, prompt: PromptContent) -> str:
        """Return the text of a prompt, up to where the answer begins. Raises TokenizerError."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            with _in_time(MOST_TEMPLATE_S):
                text = self._filled(messages)
        except Exception as error:  # jinja's errors, and those of Python's operators in a template
            raise TokenizerError(f"the chat template of {self._place} fails: {said(error)}") from error
        if len(text) > LARGEST_PROBLEM:
            raise TokenizerError(
                f"the chat template of {self._place} makes a text of {len(text):,} characters; "
                f"{LARGEST_PROBLEM:,} are allowed"
            )
        return text

    def _filled(self, messages: list[ChatMessage]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True,
                strftime_now=self._day.strftime,
            )
        )  # fmt: skip

    def _read(self, file: str) -> str:
        try:
            with Path(file).open(encoding="utf-8") as opened:
                return opened.read(_LARGEST_TEMPLATE + 1)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"task.chat_template: {file} can't be read: {said(error)}") from error

    def _own(self, model: str) -> str:
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError as error:
            raise TokenizerError(
                f"the tokenizer in {model} has no chat template, which prompts of messages need "
                f"({said(error).splitlines()[0][:200]}). Take the model's chat or instruct version, or name "
                "a file with a Jinja template in task.chat_template"
            ) from None


def load_tokenize_prompt(model: str, task: TaskSection, began_at: float) -> Tokenize:
    """Return a function that tokenizes a prompt. `began_at`: when the run began, in seconds since 1970.

    The template is loaded with the first prompt that needs it, for that takes seconds.
    """
    tokenize, day = load_tokenize(model), datetime.fromtimestamp(began_at, UTC)
    loaded: list[ChatTemplate] = []

    def tokens(prompt: PromptContent) -> list[int]:
        if isinstance(prompt, str) and not task.chat:
            return tokenize(prompt)
        if not loaded:
            loaded.append(ChatTemplate(model, task, day))
        return tokenize(loaded[0].text(prompt))

    return tokens


def tokens_of(problem: Problem, tokenize: Tokenize) -> list[int]:
    """Return the tokens of a problem's prompt. Raises TaskError with the problem's id."""
    try:
        return tokenize(problem["prompt"])
    except TokenizerError as error:
        raise TaskError(f"problem {shown(problem['id'])}: {error}") from error


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
