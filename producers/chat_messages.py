"""Checks the messages of a chat, and divides them into the prompt and the expected answer."""

from __future__ import annotations

from typing import Any

from schemas.shortening import shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST = 1_000  # messages of a prompt

ChatMessage = dict[str, Any]
PromptContent = str | list[ChatMessage]


def split_messages(given: list[Any]) -> tuple[list[ChatMessage], str | None]:
    """Return the messages of a prompt, and the text of the assistant's message behind them, if there is one.

    Raises ValueError with the reason if a message can't be used. Keys without a value are dropped: datasets
    fill them in.
    """
    if len(given) > _MOST:
        raise ValueError(f"{len(given):,} messages are too many; {_MOST:,} are allowed")
    messages = [_message(one, number) for number, one in enumerate(given)]
    answer = None
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop().get("content")
    if not messages:
        raise ValueError("there is no message before the assistant's" if given else "there is no message")
    return messages, answer


def _message(given: Any, number: int) -> ChatMessage:
    if not isinstance(given, dict):
        raise ValueError(f"message {number} is a {type(given).__name__}; a dict is expected")
    message = {str(key): value for key, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {shown(role)}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        found = "" if content is None else f"; a {type(content).__name__} is there"
        raise ValueError(f"message {number} has no text in 'content'{found}")
    if "\0" in (content or ""):
        raise ValueError(f"message {number} has the character U+0000, which is not allowed there")
    return message
