"""A child that ends by itself says how, with what it printed."""

from __future__ import annotations

import msgspec
import pytest

from infra.supervise.quiet_child import ChildEnded, QuietChild


class Options(msgspec.Struct):
    name: str


def test_one_that_ends_says_how_with_its_last_lines() -> None:
    child = QuietChild("json.tool", Options("")).open()  # takes its first argument for the name of a file
    try:
        with pytest.raises(ChildEnded, match=r"(?s)ended with status [12]; its last lines:.*No such file"):
            child.receive(30)
        child.send(b"too late, and no error")
    finally:
        child.close()


def test_one_that_says_nothing_in_time_says_nothing() -> None:
    child = QuietChild("json.tool", Options(""), {"PYTHONINSPECT": "1"}).open()
    try:
        assert child.receive(0) is None
    finally:
        child.close()
