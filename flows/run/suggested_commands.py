"""Commands that are suggested to a user, with what they named themselves: each can be copied and run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from infra.step_file.unpacking import is_step_file
from schemas.addresses import LOCAL

# Commands by what they can be asked for.
OF_STEP_FILES = {"explain", "inspect", "replay", "what-if"}
OF_ARCHIVES = {"bisect", "bundle", "explain", "inspect", "ranker", "replay", "samples", "sql", "what-if"}
OF_OWN_CODE = {"explain", "inspect", "replay", "what-if"}


@dataclass(frozen=True)
class SuggestedCommands:
    """Writes commands about a run, or about a step file of it."""

    run: str  # its id
    store: str = LOCAL  # as the user named it
    step_file: str = ""
    archive_alone: bool = False
    own_code: bool = False

    @classmethod
    def as_asked(
        cls, run: str, source: str, store: str, *, archive_alone: bool = False, own_code: bool = False
    ) -> SuggestedCommands:
        """Return one that names what a user has named. `source`: a run's id, or a step file."""
        return cls(run, store, source if is_step_file(source) else "", archive_alone, own_code)

    def command(self, name: str, *words: str) -> str:
        """Return a command line: the words stand behind the run's id or the file's name.

        Of a step file the samples are shown by `inspect`. A command that takes no step file names the run:
        it has to be given where the run is.
        """
        if self.step_file:
            name = "inspect" if name == "samples" else name
            if name not in OF_STEP_FILES:
                return shlex.join(["streamrl", name, self.run, *words])
            own = ["--own-code"] if self.own_code and name in OF_OWN_CODE else []
            return shlex.join(["streamrl", name, self.step_file, *words, *own])
        more = ["--archive"] if self.archive_alone and name in OF_ARCHIVES else []
        more += ["--store", self.store] if self.store != LOCAL else []
        return shlex.join(["streamrl", name, self.run, *words, *more])
