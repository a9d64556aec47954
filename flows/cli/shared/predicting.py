"""Predicts a run's speed in a process beside it, and says it when it is known."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from flows.plans.predicted_speed import Prediction, has_profile
from flows.run.request import RunRequest
from infra.code import ROOT, module
from schemas.loading import load_run_file

if TYPE_CHECKING:
    from flows.view.screen import Screen

_NICE = 19  # the run goes first
_LONGEST = 10_000  # characters of a prediction


class PredictionBeside:
    """The prediction of a run. Nothing happens if its run file has no profile, or if a run is resumed."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
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
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            with suppress(OSError):
                self._process = subprocess.Popen(
                    words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                    text=True, env={**os.environ, "PYTHONPATH": paths}, preexec_fn=lambda: os.nice(_NICE),
                )  # fmt: skip
        return self

    def tell(self, screen: Screen) -> None:
        """Have a thread say the prediction on a screen, when it is known."""
        if self._process is not None:
            self._listener = threading.Thread(target=self._wait, args=(self._process, screen), daemon=True)
            self._listener.start()

    def _wait(self, process: subprocess.Popen[str], screen: Screen) -> None:
        assert process.stdout is not None
        line = process.stdout.read(_LONGEST)
        with suppress(ValueError, KeyError, TypeError):
            self.prediction = Prediction.read(line)
            screen.say(self.prediction.words)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._listener is not None:
                self._listener.join()  # the end of the process is the end of what it reads
            assert self._process.stdout is not None
            self._process.stdout.close()
