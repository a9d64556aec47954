"""How the process of a role ends by an error: its exit code, its last words, and its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from kafka.errors import InvalidReplicationFactorError, KafkaTimeoutError

from infra.errors import Explained
from infra.kafka_words import said_by_kafka
from infra.roles import entry
from infra.roles.entry import FAILED, LASTING, REPLACED, run_role
from infra.stores import s3_refusals
from infra.supervise.last_words import LAST_WORDS_VARIABLE, take_last_words
from producers.problems import TaskError
from producers.tokenizing import TokenizerError
from schemas.importing import BadImport
from schemas.loading import RunFileError


class Away(Explained):
    """A server that may come back."""


ENDS = [
    (Away("the store is away"), FAILED, "the store is away"),
    (TaskError("problem 3 has no text"), LASTING, "problem 3 has no text"),
    (TokenizerError("no tokenizer"), LASTING, "no tokenizer"),
    (RunFileError("run.yaml:3: no such setting"), LASTING, "run.yaml:3: no such setting"),
    (BadImport("task.py can't be imported"), LASTING, "task.py can't be imported"),
    (MemoryError("1 GiB"), FAILED, "there is not enough memory on this machine (MemoryError: 1 GiB)"),
    (KeyError("x"), FAILED, "an error that StreamRL does not explain, KeyError: 'x'"),
    (entry.Replaced("start 3 has replaced this one"), REPLACED, "start 3 has replaced this one"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
def test_the_exit_code_and_the_last_words(
    error: Exception, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def raises(url: str) -> None:
        raise error

    monkeypatch.setattr(entry, "open_store", raises)
    monkeypatch.setattr(entry.signal, "signal", lambda *_: None)
    monkeypatch.setenv(LAST_WORDS_VARIABLE, str(tmp_path / "words"))
    assert run_role("trainer", lambda context: None, ["--store", "file:///x", "--run", "test-1"]) == code
    assert take_last_words(tmp_path / "words") == words
    assert take_last_words(tmp_path / "words") == ""
    log = capfd.readouterr().err
    assert ("Traceback" in log) == isinstance(error, KeyError)


def test_an_error_of_kafka_has_no_dump_of_requests() -> None:
    dump = "Request 'CreateTopicsRequest_v5(topics=[..])' failed with response 'CreateTopicsResponse_v5()'."
    assert said_by_kafka(InvalidReplicationFactorError(dump)) == (
        "the cluster has fewer brokers than placement.kafka.replication says (InvalidReplicationFactorError: "
        "Replication-factor is invalid.)"
    )
    assert said_by_kafka(KafkaTimeoutError("no answer\x1b[2J")).endswith(
        "KafkaTimeoutError: no answer\\x1b[2J"
    )
    assert "KafkaTimeoutError" in said_by_kafka(KafkaTimeoutError())


def test_a_store_that_refuses_credentials_will_refuse_them_again() -> None:
    assert {"AccessDenied", "InvalidAccessKeyId", "NoSuchBucket"} <= s3_refusals.LASTING_CODES
    assert "QuotaExceeded" not in s3_refusals.LASTING_CODES
