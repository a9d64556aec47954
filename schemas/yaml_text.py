"""Reads YAML from people, within bounds: only text, numbers, true, false, null, lists and mappings.

text ──► events of PyYAML's parser, one at a time ──► values, and the line of each
             │ depth, nodes (an alias counts as all that it stands for), lengths of text and of numbers
             ▼
         BadYaml, with the line and the name

PyYAML's own composer recurses without a bound, lets aliases multiply without end, and builds dates, sets and
bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from schemas.shortening import printable, shown

LARGEST_FILE = 1 << 20  # bytes of a file
DEEPEST = 16  # levels of lists and mappings: a run file has four
MOST_NODES = 10_000  # an alias counts as all that it stands for
LONGEST_TEXT = 4_096  # characters of one value
LONGEST_KEY = 200
LONGEST_NUMBER = 40  # characters

Location = tuple[str | int, ...]
_YAML = "tag:yaml.org,2002:"
_TEXT, _MERGE, _DATE = f"{_YAML}str", f"{_YAML}merge", f"{_YAML}timestamp"
_NUMBERS = {f"{_YAML}int", f"{_YAML}float"}
_SCALARS = {_TEXT, _MERGE, f"{_YAML}bool", f"{_YAML}null", f"{_YAML}value", *_NUMBERS}


class BadYaml(ValueError):
    """A text can't be used. The message has the value's name and the reason; `line` is 0 if not known."""

    def __init__(self, reason: str, *, line: int = 0, name: str = "") -> None:
        super().__init__(f"{name}: {reason}" if name else reason)
        self.line = line


@dataclass(slots=True)
class Document:
    """The data in a YAML text, the lines of its parts by place, and the keys that come twice, with lines."""

    data: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    double: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Anchored:
    """A value that aliases may stand for."""

    value: Any
    nodes: int
    levels: int


def read_yaml(text: str) -> Document:
    """Return the one document in a text; data is None if it is empty. Raises BadYaml, and nothing else."""
    if len(text) > LARGEST_FILE:
        raise BadYaml(f"{len(text):,} characters are too many: at most {LARGEST_FILE:,} are read")
    try:
        return _Reading(text).document()
    except yaml.YAMLError as error:
        raise BadYaml(f"not valid YAML: {printable(str(error))}") from None
    except BadYaml:
        raise
    except (ValueError, OverflowError, IndexError) as error:  # PyYAML's scanner, about escapes such as \U
        raise BadYaml(f"not valid YAML: {type(error).__name__}: {shown(str(error))}") from None


class _Reading:
    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._resolver, self._constructor = Resolver(), SafeConstructor()
        self._anchors: dict[str, _Anchored] = {}
        self._nodes = 0
        self._found = Document()

    def document(self) -> Document:
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return self._found
        self._found.data, _ = self._value(next(self._events), ())
        next(self._events)  # the document's end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise BadYaml("a second document begins here; only one is allowed", line=_line(after))
        return self._found

    def _value(self, event: Any, at: Location) -> tuple[Any, int]:
        """Return the value that begins with an event, and how many levels of lists and mappings it has."""
        self._count(1, event, at)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, at)
        self._found.lines.setdefault(at, _line(event))
        before = self._nodes
        if isinstance(event, yaml.ScalarEvent):
            value, levels = self._scalar(event, at), 0
        else:
            if len(at) >= DEEPEST:
                raise _bad(f"there are more than {DEEPEST} levels of lists and mappings", event, at)
            build = self._mapping if isinstance(event, yaml.MappingStartEvent) else self._list
            value, levels = build(event, at)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, 1 + self._nodes - before, levels)
        return value, levels

    def _count(self, nodes: int, event: Any, at: Location) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            raise _bad(
                f"there are more than {MOST_NODES:,} values (an alias counts as all that it stands for)",
                event,
                at,
            )

    def _alias(self, event: Any, at: Location) -> tuple[Any, int]:
        meant = self._anchors.get(event.anchor)
        if meant is None:
            raise _bad(
                f"the alias *{shown(event.anchor)} stands for nothing: no value that ends before it has this "
                "name",
                event,
                at,
            )
        self._count(meant.nodes - 1, event, at)
        if len(at) + meant.levels > DEEPEST:
            raise _bad(f"there are more than {DEEPEST} levels of lists and mappings, by aliases", event, at)
        return copy.deepcopy(meant.value), meant.levels  # a change of one must not change the other

    def _list(self, start: Any, at: Location) -> tuple[list[Any], int]:
        self._allow_tag(start, f"{_YAML}seq", at)
        values: list[Any] = []
        levels = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            value, inner = self._value(event, (*at, len(values)))
            values.append(value)
            levels = max(levels, inner)
        return values, levels + 1

    def _mapping(self, start: Any, at: Location) -> tuple[dict[str, Any], int]:
        self._allow_tag(start, f"{_YAML}map", at)
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        levels = 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, merges = self._key(event, at)
            place = (*at, key)
            if key in own:
                self._found.double.append((name_of(place), _line(event)))
            self._found.lines[place] = _line(event)
            value, inner = self._value(next(self._events), place)
            levels = max(levels, inner)
            if merges:
                merged |= _to_merge(value, event, place)
            else:
                own[key] = value
        return {**merged, **own}, levels + 1

    def _key(self, event: Any, at: Location) -> tuple[str, bool]:
        """Return a key, and whether it is `<<`, which merges other mappings in."""
        if not isinstance(event, yaml.ScalarEvent):
            raise _bad("a key is a name, not a list, a mapping or an alias", event, at)
        self._count(1, event, at)
        if len(event.value) > LONGEST_KEY:
            raise _bad(
                f"the key has {len(event.value):,} characters; at most {LONGEST_KEY} are allowed", event, at
            )
        key = self._scalar(event, at)
        if not isinstance(key, str):
            raise _bad(
                f"the key {shown(event.value)} is a {type(key).__name__}: put names in quotes", event, at
            )
        return key, self._tag(event) == _MERGE

    def _scalar(self, event: Any, at: Location) -> Any:
        text, tag = event.value, self._tag(event)
        if len(text) > LONGEST_TEXT:
            raise _bad(
                f"the text has {len(text):,} characters; at most {LONGEST_TEXT:,} are allowed", event, at
            )
        if strange := next((char for char in text if not _ordinary(char)), None):
            raise _bad(f"the character U+{ord(strange):04X} is not allowed in text", event, at)
        if tag == _DATE:
            raise _bad(f"{shown(text)} is a date in YAML: put it in quotes if text is meant", event, at)
        if tag not in _SCALARS:
            raise _bad(
                f"the tag {shown(tag.replace(_YAML, '!!'))} is not allowed: values are text, numbers, true, "
                "false and null", event, at,
            )  # fmt: skip
        if tag in _NUMBERS and ":" in text:
            return text  # 12:30 is a number of base 60 to YAML 1.1, and to nobody else
        if tag in _NUMBERS and len(text) > LONGEST_NUMBER:
            raise _bad(
                f"the number has {len(text):,} digits; at most {LONGEST_NUMBER} are allowed", event, at
            )
        return self._constructed(tag, text, event, at)

    def _constructed(self, tag: str, text: str, event: Any, at: Location) -> Any:
        kind = tag.removeprefix(_YAML)
        if kind not in ("int", "float", "bool", "null"):
            return text
        try:
            return getattr(self._constructor, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, text))
        except (ValueError, OverflowError, LookupError):
            raise _bad(f"{shown(text)} is no {kind}", event, at) from None

    def _tag(self, event: Any) -> str:
        if event.tag is not None and event.tag != "!":
            return str(event.tag)
        return str(self._resolver.resolve(yaml.ScalarNode, event.value, event.implicit))

    def _allow_tag(self, event: Any, usual: str, at: Location) -> None:
        if event.tag not in (None, "!", usual):
            raise _bad(f"the tag {shown(event.tag.replace(_YAML, '!!'))} is not allowed", event, at)


def name_of(at: Location) -> str:
    """Write a place as people do, such as task.python."""
    return ".".join(str(part) for part in at)


def _to_merge(value: Any, event: Any, at: Location) -> dict[str, Any]:
    """Merge one or several mappings. The first one that has a key decides."""
    several = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in several):
        raise _bad("<< merges mappings, and this value is not one", event, at)
    return {key: one[key] for one in reversed(several) for key in one}


def _ordinary(char: str) -> bool:
    code = ord(char)
    return (code >= 32 and code != 127 and not 0xD800 <= code <= 0xDFFF) or char in "\t\n"


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _bad(reason: str, event: Any, at: Location) -> BadYaml:
    return BadYaml(reason, line=_line(event), name=shown_name(at))


def shown_name(at: Location) -> str:
    """Write a place for a message: short, whatever the keys are."""
    return ".".join(printable(str(part), 60) for part in at[:8])
