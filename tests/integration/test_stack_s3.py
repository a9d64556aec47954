"""The local S3 server, through the client that the system uses."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs
from typer.testing import CliRunner

from flows.cli import app
from infra.stack import local
from infra.stack.paths import StackPaths
from infra.stack.s3 import S3Access
from infra.stack.services import read_record
from infra.stack.stack_errors import WrongCredentials
from tests.factories import make_model_files
from tests.stacks import listens_on, processes_of


def open_store(access: S3Access, secret: str | None = None) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        endpoint_url=access.endpoint_url,
        key=access.credentials.access_key,
        secret=secret or access.credentials.secret_key,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def test_puts_and_gets_and_creates_only_once(s3: S3Access) -> None:
    store = open_store(s3)
    name = f"{s3.bucket}/once/manifest.json"
    store.pipe_file(name, b"first", mode="create")
    with pytest.raises(FileExistsError):
        store.pipe_file(name, b"second", mode="create")
    assert store.cat_file(name) == b"first"
    assert store.cat_file(name, start=1, end=3) == b"ir"


def test_refuses_another_secret(s3: S3Access) -> None:
    with pytest.raises(PermissionError):
        open_store(s3, secret="wrong").ls(s3.bucket)


def test_objects_and_keys_outlive_a_restart(
    new_home: Callable[[str], StackPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = new_home("own-s3")
    try:
        first = local.start_stack(kafka=False, s3=True, prefect=False, paths=paths).s3
        assert first is not None
        open_store(first).pipe_file(f"{first.bucket}/kept", b"still here")
        record = read_record(paths, "s3")
        assert record is not None
        assert listens_on(record.pid) == {"127.0.0.1"}
        assert local.start_stack(kafka=False, s3=True, prefect=False, paths=paths).s3 == first

        assert local.stop_stack(paths=paths) == 1
        assert processes_of(paths.home) == []
        second = local.start_stack(kafka=False, s3=True, prefect=False, paths=paths).s3
        assert second == first, "the same address and keys"
        assert open_store(second).cat_file(f"{second.bucket}/kept") == b"still here"

        monkeypatch.setenv("STREAMRL_S3_ACCESS_KEY", "somebody")
        monkeypatch.setenv("STREAMRL_S3_SECRET_KEY", "else")
        with pytest.raises(WrongCredentials, match="streamrl down"):
            local.start_stack(kafka=False, s3=True, prefect=False, paths=paths)
    finally:
        local.stop_stack(paths=paths)


def test_the_secret_is_in_one_file_that_only_its_owner_reads(s3_home: StackPaths, s3: S3Access) -> None:
    file = s3_home.run / "s3-credentials.json"
    assert file.stat().st_mode & 0o777 == 0o600
    secret = s3.credentials.secret_key
    assert json.loads(file.read_text())["secret_key"] == secret
    others = [path for path in s3_home.home.rglob("*") if path.is_file() and path != file]
    assert others
    assert not [path for path in others if secret.encode() in path.read_bytes()]
    assert secret not in repr(s3)


def test_every_command_finds_the_local_keys(
    s3: S3Access, s3_home: StackPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `up --s3`, with no variable set but the home."""
    monkeypatch.setattr(os, "environ", {**os.environ})  # commands put the keys there
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STREAMRL_HOME", str(s3_home.home))
    store, model = f"{s3.url}/commands", make_model_files(tmp_path / "model")

    def streamrl(*words: str) -> str:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)  # each command is a process of its own
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, done.output
        return done.output

    assert f"there are no runs in {store}" in streamrl("runs", "--store", store)
    assert "version 0 is in" in streamrl("weights", "push", str(model), f"{store}/mine")
    assert "1 versions, all whole" in streamrl("weights", "verify", f"{store}/mine")
    assert "version 0 is in" in streamrl("weights", "pull", f"{store}/mine", str(tmp_path / "out"))
