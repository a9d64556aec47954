"""Real services for the tests, each on demand: a broker and an S3 server a session, a Prefect server a file.

A test gets its marker from its folder: tests/integration/test_x.py is marked `integration`.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stack.s3 import S3Access
from tests.stacks import ending_with_us, own_broker
from tests.wheels import build_wheel, install_wheel

TESTS = Path(__file__).parent
LONGEST = (
    "test_sharded",
    "test_ranks",
    "test_tensor_parallel",
    "test_served_engine",
    "test_prefect_deployment",
    "test_zoo",
)
MARKERS = ("unit", "long", "kernels", "integration", "e2e", "chaos", "gpu")


def pytest_configure() -> None:
    gc.disable()  # it would take half of the collection, while millions of objects come and none goes
    # The machine may be busy: a slow example is no failure.
    hypothesis.settings.register_profile("streamrl", deadline=None)
    hypothesis.settings.load_profile("streamrl")
    # A shell's background jobs ignore Ctrl-C, and so would what the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The jars and the S3 server are fetched once, by make, and not for each temporary home.
    os.environ.setdefault("STREAMRL_CACHE", str(TESTS.parent / ".streamrl"))
    # Tests run side by side: threads of one would only hold up the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Hundreds of processes import torch or vLLM. In huge pages that takes half the time where a page fault is
    # slow, as on a machine within a machine.
    os.environ.setdefault("PYTHONMALLOC", "malloc")
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # A developer's own stack may be running: take free ports and leave its keys alone.
    for service in ("KAFKA", "S3", "PREFECT"):
        os.environ[f"STREAMRL_{service}_PORT"] = "0"
    for key in ("STREAMRL_HOME", "STREAMRL_S3_ACCESS_KEY", "STREAMRL_S3_SECRET_KEY"):
        os.environ.pop(key, None)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKERS:
            item.add_marker(folder)
    take_cases_out_of_thorough(items)
    # The longest files come first: at the end one worker would be left with them.
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def take_cases_out_of_thorough(items: list[pytest.Item]) -> None:
    """`@pytest.mark.thorough(but=["a", "b"])`: of the test's cases, `make test` runs only those two."""
    found: dict[str, dict[str, pytest.Item]] = {}
    kept: dict[str, list[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("thorough")) and "but" in mark.kwargs:
            test, _, case = item.nodeid.partition("[")
            found.setdefault(test, {})[case.removesuffix("]")] = item
            kept[test] = mark.kwargs["but"]
    for test, cases in found.items():
        if len(cases) > 1 and (unknown := set(kept[test]) - cases.keys()):  # else one was asked for alone
            raise pytest.UsageError(f"{test} has no case {', '.join(sorted(unknown))}")
        for item in (cases[case] for case in kept[test] if case in cases):
            item.own_markers = [one for one in item.own_markers if one.name != "thorough"]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, str]:
    """Files of two pairs of keys: `own`, `own.pub`, `other` and `other.pub`."""
    files = {}
    for name in ("own", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        files |= {name: str(private), f"{name}.pub": str(public)}
    return files


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StackPaths]:
    """A fresh home for a stack, with the shared downloads."""

    def make(name: str) -> StackPaths:
        return StackPaths.locate(tmp_path_factory.mktemp(name))

    return make


@pytest.fixture(scope="session")
def kafka(new_home: Callable[[str], StackPaths]) -> Iterator[str]:
    """Bootstrap servers of the session's broker. Use topics of your own; to kill a broker, start your own."""
    with own_broker(new_home("kafka")) as address:
        yield address


@pytest.fixture(scope="session")
def s3_home(new_home: Callable[[str], StackPaths]) -> StackPaths:
    return new_home("s3")


@pytest.fixture(scope="session")
def s3(s3_home: StackPaths) -> Iterator[S3Access]:
    """The session's S3 server: `.endpoint_url`, `.bucket`, `.url`, and `.env()` with the keys."""
    with ending_with_us(s3_home):
        access = local.start_stack(kafka=False, s3=True, prefect=False, paths=s3_home).s3
        assert access is not None
        yield access


@pytest.fixture(scope="module")
def prefect_stack(new_home: Callable[[str], StackPaths]) -> Iterator[local.Stack]:
    """A Prefect server; `.env()` is what its clients need. Idle it is busy, too: it ends with the file."""
    paths = new_home("prefect")
    with ending_with_us(paths):
        yield local.start_stack(kafka=False, prefect=True, paths=paths)


@pytest.fixture(scope="module")
def prefect_api(prefect_stack: local.Stack) -> str:
    """The URL of its API."""
    assert prefect_stack.prefect_api_url is not None
    return prefect_stack.prefect_api_url


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's file."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def bin_folder(wheel: Path) -> Path:
    """The commands of an environment that holds the wheel alone."""
    return install_wheel(wheel)
