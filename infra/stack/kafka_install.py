"""Apache Kafka's jars: taken from the cache, where Maven puts them if they are missing."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

from infra.files.locks import locked
from infra.files.writing import write_whole
from infra.stack.paths import StackPaths
from infra.stack.processes import run_tool
from infra.stack.stack_errors import ToolFailed, ToolMissing

POM = Path(__file__).parent / "kafka_jars" / "pom.xml"
NEEDED_JAVA = 17
FETCH_DEADLINE_S = 600.0


def jars_present(paths: StackPaths) -> bool:
    """Return whether the jars of this very POM are there. The stamp comes last, after a whole fetch."""
    try:
        return _stamp(paths).read_text() == _pom_hash()
    except OSError:
        return False


def ensure_jars(paths: StackPaths, *, cancel: threading.Event) -> bool:
    """Fetch the jars if they are missing. Return whether this call fetched them."""
    if jars_present(paths):
        return False
    with locked(paths.cache / ".kafka.lock", what="the fetch of Kafka's jars", deadline_s=FETCH_DEADLINE_S):
        if jars_present(paths):
            return False
        mvn = shutil.which("mvn")
        if mvn is None:
            raise ToolMissing(
                f"no Kafka jars in {paths.kafka_lib}, and mvn (Maven), which fetches them, was not found",
                fix="install Maven (Debian: apt install maven), or copy a folder that has the jars there",
            )
        java_command()
        fresh = paths.kafka_lib.with_name("lib.partial")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={fresh}", "-DincludeScope=runtime"]
        run_tool(
            [mvn, "--batch-mode", "--quiet", "--file", str(POM), *goal],
            log=paths.log_file("mvn"),
            deadline_s=FETCH_DEADLINE_S,
            cancel=cancel,
        )
        if not list(fresh.glob("kafka_2.13-*.jar")):
            raise ToolFailed(
                f"mvn succeeded but brought no Kafka into {fresh}", fix=f"read {paths.log_file('mvn')}"
            )
        shutil.rmtree(paths.kafka_lib, ignore_errors=True)
        fresh.rename(paths.kafka_lib)
        write_whole(_stamp(paths), _pom_hash())
    return True


def java_command() -> str:
    """Return the path of a Java that is new enough, of JAVA_HOME or else the PATH; raise ToolMissing."""
    home = os.environ.get("JAVA_HOME")
    candidates = ([str(Path(home) / "bin" / "java")] if home else []) + ["java"]
    java = next((found for name in candidates if (found := shutil.which(name))), None)
    how = (
        f"install Java {NEEDED_JAVA} or newer (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME"
    )
    if java is None:
        raise ToolMissing("java, which runs Kafka, was not found", fix=how)
    version = java_version(java)
    if version < NEEDED_JAVA:
        raise ToolMissing(f"{java} is Java {version or '?'}; Kafka needs {NEEDED_JAVA}", fix=how)
    return java


def java_version(java: str) -> int:
    """Return a Java's major version: 17 for "17.0.15", 8 for "1.8.0"; 0 if it can't be told."""
    try:
        # A Java's own folder says it without starting a JVM, which takes a second on a busy machine.
        text = (Path(java).resolve().parent.parent / "release").read_text()
    except OSError:
        try:
            done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        text = done.stderr
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else 0


def _stamp(paths: StackPaths) -> Path:
    return paths.kafka_lib / ".complete"


def _pom_hash() -> str:
    return hashlib.sha256(POM.read_bytes()).hexdigest()
