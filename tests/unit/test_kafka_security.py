"""Settings of Kafka's security that can't be right are said before anything is tried."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from infra.bus import BusError
from infra.kafka_bus import KafkaBus
from infra.kafka_probe import Trouble, trouble
from infra.kafka_security import PREFIX, checked_settings, security_from_environment
from tests.certificates import KEY_PASSWORD, Authority


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority.new(folder, "authority")
    authority.issue("client", password=KEY_PASSWORD)
    authority.issue("other")
    (folder / "text.pem").write_text("no certificate\n")
    return folder


LOGIN = {"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "PLAIN", "USERNAME": "u", "PASSWORD": "secret"}
TLS = {"SECURITY_PROTOCOL": "SSL", "CAFILE": "authority.pem"}
LOCKED = {**TLS, "CERTFILE": "client.pem", "KEYFILE": "client.key"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"SECURITY_PROTOCOL": "TLS"}, r"KAFKA_SECURITY_PROTOCOL: 'TLS' is none of PLAINTEXT, SSL, "),
        ({"SECURITY_PROTOCOL": "SASL_SSL"}, r"KAFKA_SASL_MECHANISM: the protocol SASL_SSL needs one of"),
        ({**LOGIN, "SASL_MECHANISM": "plain"}, r"KAFKA_SASL_MECHANISM: 'plain' is none of PLAIN, "),
        ({**LOGIN, "USERNAME": ""}, r"KAFKA_USERNAME: PLAIN needs it"),
        ({**LOGIN, "PASSWORD": ""}, r"KAFKA_PASSWORD: PLAIN needs it"),
        ({"SASL_MECHANISM": "PLAIN"}, r"KAFKA_SASL_MECHANISM: it is of no use with the protocol PLAINTEXT"),
        ({"CAFILE": "authority.pem"}, r"KAFKA_CAFILE: it is of no use with the protocol PLAINTEXT"),
        ({**TLS, "CAFILE": "nothing.pem"}, r"KAFKA_CAFILE: there is no file .*nothing\.pem"),
        ({**TLS, "CAFILE": "text.pem"}, r"KAFKA_CAFILE: .*text\.pem is no PEM file of certificates"),
        ({**TLS, "CERTFILE": "nothing.pem"}, r"KAFKA_CERTFILE: there is no file .*nothing\.pem"),
        ({**TLS, "KEYFILE": "other.key"}, r"KAFKA_KEYFILE: .* needs the certificate .*_CERTFILE"),
        ({**LOCKED, "KEYFILE": "nothing.key"}, r"KAFKA_KEYFILE: there is no file .*nothing\.key"),
        (LOCKED, r"KAFKA_KEY_PASSWORD: it does not open .*client\.key"),
        ({**LOCKED, "KEY_PASSWORD": "secret"}, r"KAFKA_KEY_PASSWORD: it does not open .*client\.key"),
        ({**LOCKED, "KEYFILE": "other.key"}, r"KAFKA_KEYFILE: .*other\.key is not the key of .*client\.pem"),
        ({**TLS, "CERTFILE": "text.pem"}, r"KAFKA_CERTFILE: .*text\.pem.* can't be used"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_right_are_named(
    pki: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"{PREFIX}{name}", str(pki / value) if name.endswith("FILE") else value)
    with pytest.raises(BusError, match=said) as caught:
        KafkaBus("127.0.0.1:1")
    assert "secret" not in str(caught.value) and KEY_PASSWORD not in str(caught.value)


def test_a_client_certificate_with_a_locked_key(pki: Path) -> None:
    files = {"CAFILE": "authority.pem", "CERTFILE": "client.pem", "KEYFILE": "client.key"}
    found = security_from_environment(
        {f"{PREFIX}SECURITY_PROTOCOL": "SSL", f"{PREFIX}KEY_PASSWORD": KEY_PASSWORD,
         **{f"{PREFIX}{name}": str(pki / file) for name, file in files.items()}}
    )  # fmt: skip
    assert checked_settings(found) == {
        "security_protocol": "SSL", "ssl_cafile": str(pki / "authority.pem"),
        "ssl_certfile": str(pki / "client.pem"), "ssl_keyfile": str(pki / "client.key"),
        "ssl_password": KEY_PASSWORD,
    }  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4\0\0\0\7", b"\x7f\xff\xff\xff", b"\0\0\0\2\0\0"],
)
def test_a_listener_that_is_no_broker_is_no_lasting_trouble(answer: bytes) -> None:
    """It may be a proxy whose broker comes back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    made, _ = server.accept()
                except TimeoutError:
                    continue
                with made:
                    made.recv(1000)
                    made.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            found = trouble(f"127.0.0.1:{server.getsockname()[1]}", {})
        finally:
            ended.set()
            thread.join()
    assert found is not None and not found.lasting
    assert re.match(r"the network: 127\.0\.0\.1:\d+ does not answer as Kafka does", found.what)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("127.0.0.1:1", "the network: 127.0.0.1:1: Connection refused"),
        ("no.such.host.invalid:9092", "the network: the name no.such.host.invalid can't be resolved"),
        ("127.0.0.1:99999", "the network: 127.0.0.1:99999"),
        (f"{'x' * 80}.invalid:1", "the network: "),
    ],
)
def test_the_network_is_no_lasting_trouble(server: str, said: str) -> None:
    found = trouble(server, {})
    assert found is not None and not found.lasting and said in found.what


def test_whether_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(servers: str) -> bool:
        said = trouble(servers, {})
        assert said is not None and not said.lasting
        return said.at_once

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr("infra.kafka_probe.ANSWER_S", 0.1)
        assert found("127.0.0.1:1") and found("127.0.0.1:1,127.0.0.1:2")
        assert not found(f"127.0.0.1:1,127.0.0.1:{port}")  # it may be slow


def test_where_nobody_listens_only_the_patient_go_on_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def client(**options: object) -> None:
        tried.append("client")
        raise OSError("none")

    monkeypatch.setattr("infra.kafka_bus.KafkaAdminClient", client)
    monkeypatch.setattr("infra.kafka_bus._REFUSED_S", 0.0)
    with pytest.raises(BusError, match=r"127\.0\.0\.1:1: Connection refused"):
        KafkaBus("127.0.0.1:1", patient=False).topic_names()
    assert not tried
    with pytest.raises(BusError, match=r"127\.0\.0\.1:1: Connection refused"):
        KafkaBus("127.0.0.1:1").topic_names()
    assert tried


def test_a_broker_that_comes_up_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    away, there = Trouble("the network", lasting=False, at_once=True), None
    answers = iter([away, away, there])
    monkeypatch.setattr("infra.kafka_bus.trouble", lambda servers, options: next(answers))
    monkeypatch.setattr("infra.kafka_bus.time.sleep", lambda seconds: None)

    class Admin:
        def __init__(self, **options: object) -> None: ...
        def list_topics(self) -> list[str]:
            return ["a"]

        def close(self) -> None: ...

    monkeypatch.setattr("infra.kafka_bus.KafkaAdminClient", Admin)
    assert KafkaBus("nowhere:1", patient=False).topic_names() == {"a"}
