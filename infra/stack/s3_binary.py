"""versitygw, an S3 server over a folder: taken from the cache, where Go builds it if it is missing."""

import os
import shutil
import threading
from pathlib import Path

from infra.files.locks import locked
from infra.stack.paths import StackPaths
from infra.stack.processes import run_tool
from infra.stack.stack_errors import ToolFailed, ToolMissing

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILD_DEADLINE_S = 900.0


def binary(paths: StackPaths) -> Path:
    """Return the binary's path. The version is in its name, so that a new one is built beside the old."""
    return paths.bin / f"versitygw-{VERSION}"


def ensure_binary(paths: StackPaths, *, cancel: threading.Event) -> bool:
    """Build the binary if it is missing. Return whether this call built it."""
    if binary(paths).exists():
        return False
    with locked(paths.cache / ".s3.lock", what="the build of versitygw", deadline_s=BUILD_DEADLINE_S):
        if binary(paths).exists():
            return False
        go = shutil.which("go")
        if go is None:
            raise ToolMissing(
                f"{binary(paths)} is not there, and go, which builds it, was not found",
                fix="install Go 1.24 or newer, copy a versitygw binary there, or use a file:// store instead",
            )
        partial = paths.bin / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        run_tool(
            [go, "install", MODULE],
            log=paths.log_file("go"),
            deadline_s=BUILD_DEADLINE_S,
            cancel=cancel,
            env={**os.environ, "GOBIN": str(partial), "CGO_ENABLED": "0"},
        )
        built = partial / "versitygw"
        if not built.exists():
            raise ToolFailed(f"go succeeded but built no {built}", fix=f"read {paths.log_file('go')}")
        built.rename(binary(paths))
        partial.rmdir()
    return True
