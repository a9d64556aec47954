"""Registries: where the things of one kind are found, such as the losses.

ours          files `NAME_ENDING.py` of one folder, such as `consumers/losses/grpo_loss.py` for the loss grpo
installed     entry points of packages, in a group such as `streamrl.losses`
a user's own  `FILE.py:CLASS` or `module:CLASS`
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from schemas.importing import BadImport, imported

_PREFIX = __name__.removesuffix("schemas.registry")  # "" in a checkout, "streamrl." in the wheel


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The classes of one kind of thing. `word` names a thing in messages; `first` are listed first."""

    word: str
    folder: str
    ending: str
    first: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The group of entry points, named like the folder."""
        return f"streamrl.{self.folder.rpartition('.')[2]}"

    def accepts(self, found: type) -> bool:
        """Whether a class is one of these things. Ours end with the ending's word."""
        return found.__name__.endswith(self.ending.capitalize())

    @property
    def expected(self) -> str:
        """The kind of class that is expected, for messages."""
        return f"a class is expected whose name ends with {self.ending.capitalize()}"

    def built_in(self) -> list[str]:
        """Return the names of our own things."""
        folder, ending = importlib.import_module(_PREFIX + self.folder), f"_{self.ending}"
        modules = [one.name for one in pkgutil.iter_modules(folder.__path__)]
        names = {name.removesuffix(ending) for name in modules if name.endswith(ending)}
        return [name for name in self.first if name in names] + sorted(names - set(self.first))

    def installed(self) -> dict[str, str]:
        """Return the things of installed packages by name, as `module:CLASS`."""
        return {point.name: point.value for point in entry_points(group=self.group)}

    def own_class(self, name: str) -> type[Any]:
        """Return our own class of this name."""
        module = importlib.import_module(f"{_PREFIX}{self.folder}.{name}_{self.ending}")
        mine = [
            one for name, one in vars(module).items()
            if isinstance(one, type) and one.__module__ == module.__name__ and not name.startswith("_")
        ]  # fmt: skip
        accepted = [one for one in mine if self.accepts(one)]
        if len(accepted) != 1:
            raise TypeError(f"{module.__file__}: {self.expected}, and only one such class")
        return accepted[0]

    def class_at(self, where: str) -> type[Any]:
        """Return the class that `FILE.py:CLASS` or `module:CLASS` names. Raises BadImport."""
        found = imported(where, "CLASS")
        if not isinstance(found, type) or not self.accepts(found):
            raise BadImport(
                f"{where} is no {self.word}: {self.expected} (see docs/extending/{self.ending}.md)"
            )
        if lacks := sorted(getattr(found, "__abstractmethods__", ())):
            raise BadImport(f"{where} has no {', '.join(lacks)}(): see docs/extending/{self.ending}.md")
        return found
