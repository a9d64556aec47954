"""Predicts a run in a process beside it, says its speed once it is known, and keeps all in its folder."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flows.page.run_files import PREDICTION_FILE, PREDICTION_PICTURE
from flows.plans.predicted_speed import Prediction, has_profile
from flows.run.request import RunRequest
from flows.view.plain_json import plain_json
from flows.view.screen import Screens
from infra.code import child_environment, module
from infra.files.writing import write_whole
from schemas.loading import load_run_file

if TYPE_CHECKING:
    from flows.view.run_view import RunView
    from flows.view.screen import Screen

_LONGEST = 4 << 20  # characters of a line of a prediction, which may hold a picture


class PredictionBeside:
    """The prediction of a run. Nothing happens if its run file has no profile, or if a run is resumed.

    It is a screen, too, for the run's view says in which folder it is to be kept.
    """

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._row: dict[str, Any] = {}
        self.prediction: Prediction | None = None  # as soon as it is known

    def __enter__(self) -> Self:
        request = self._request
        if not request.resume and has_profile(load_run_file(request.runfile, request.overrides)):
            words = [
                sys.executable,
                "-m",
                module("flows.plans.prediction"),
                request.runfile,
                *request.overrides,
            ]
            with suppress(OSError):
                self._process = subprocess.Popen(
                    words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                    text=True, env=child_environment(),
                )  # fmt: skip
        return self

    def tell(self, screen: Screen) -> Screen:
        """Have a thread say the prediction on a screen, when it is known. Return the screen for the run."""
        if self._process is None:
            return screen
        self._listener = threading.Thread(target=self._wait, args=(self._process, screen), daemon=True)
        self._listener.start()
        return Screens([screen, self])

    def _wait(self, process: subprocess.Popen[str], screen: Screen) -> None:
        assert process.stdout is not None
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            line = process.stdout.readline(_LONGEST)
            self.prediction = Prediction.read(line)
            screen.say(self.prediction.words)
            self._keep(json.loads(line))
            self._keep(json.loads(process.stdout.readline(_LONGEST)))

    def say(self, text: str) -> None:
        """Show nothing: news is for people."""

    def progress(self, fraction: float, text: str) -> None:
        """Show nothing."""

    def show(self, view: RunView) -> None:
        """Learn which run it is."""
        if self._folder is None:
            self._folder = Path(view.spec.report) / view.run
            self._keep({})

    def _keep(self, more: dict[str, Any]) -> None:
        """Write all that is known by now into the run's folder, as soon as there is one."""
        with self._lock:
            self._row |= more
            if self._folder is None or not self._row:
                return
            row = dict(self._row)
            picture = base64.b64decode(row.pop("picture", ""))
            with suppress(OSError):  # a run does not end by this
                write_whole(self._folder / PREDICTION_FILE, plain_json(row) + "\n")
                if picture:
                    write_whole(self._folder / PREDICTION_PICTURE, picture)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._listener is not None:
                self._listener.join()  # the end of the process is the end of what it reads
            assert self._process.stdout is not None
            self._process.stdout.close()
