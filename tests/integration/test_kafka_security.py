"""A broker with TLS, logins and client certificates: each wrong setting has an error of its own, at once."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from infra.bus import BusError, read_all
from infra.kafka_bus import KafkaBus
from infra.kafka_security import PREFIX
from infra.stack import local
from infra.stack.kafka import KafkaService, _java, _properties
from infra.stack.paths import StackPaths
from infra.stack.ports import any_free_port
from infra.stack.services import ServiceContext
from schemas.topics import Topic
from tests.certificates import KEY_PASSWORD, Authority
from tests.waiting import wait_until

USER, PASSWORD = "streamrl", "tell-nobody"
LISTENERS = ("PLAINTEXT", "SSL", "SASL_SSL", "SASL_PLAINTEXT", "MUTUAL")
FAST_S = 10.0  # a client alone tries for 15 s
JAAS = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


@dataclass
class Broker:
    """Ports by listener, and certificates."""

    folder: Path
    authority: Authority
    ports: dict[str, int] = field(default_factory=lambda: {name: any_free_port() for name in LISTENERS})

    def at(self, listener: str, host: str = "localhost") -> str:
        return f"{host}:{self.ports[listener]}"

    def lines(self) -> str:
        """What its settings have beside those of the local broker."""
        map_ = ",".join(f"{name}:{'SSL' if name == 'MUTUAL' else name}" for name in LISTENERS)
        at = ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.ports.items())
        said = ",".join(f"{name}://localhost:{port}" for name, port in self.ports.items())
        lines = [
            f"listeners={at},CONTROLLER://127.0.0.1:{any_free_port()}", f"advertised.listeners={said}",
            f"listener.security.protocol.map={map_},CONTROLLER:PLAINTEXT",
            "ssl.keystore.type=PEM", f"ssl.keystore.location={self.folder}/broker.both.pem",
            "ssl.truststore.type=PEM", f"ssl.truststore.location={self.authority.file}",
            "listener.name.mutual.ssl.client.auth=required",
        ]  # fmt: skip
        for name in ("sasl_ssl", "sasl_plaintext"):
            lines += [f"listener.name.{name}.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256",
                      f"listener.name.{name}.plain.sasl.jaas.config={JAAS}",
                      f"listener.name.{name}.scram-sha-256.sasl.jaas.config={SCRAM}"]  # fmt: skip
        return "\n".join(lines)


@pytest.fixture(scope="module")
def broker(new_home: Callable[[str], StackPaths]) -> Iterator[Broker]:
    paths = new_home("secure-kafka")
    folder = paths.home / "certificates"
    folder.mkdir()
    authority = Authority.new(folder, "authority")
    authority.issue("broker", hosts=("localhost",))
    authority.issue("client", password=KEY_PASSWORD)
    authority.issue("open")
    Authority.new(folder, "stranger").issue("strange", hosts=("localhost",))
    made = Broker(folder, authority)
    service, context = KafkaService(), ServiceContext(paths)
    paths.make()
    service.prepare(context)
    controller = any_free_port()
    service.launch(context, port=controller)  # formats its storage and writes its settings
    settings = _properties(paths).read_text().splitlines()
    ours = made.lines()
    own = {line.partition("=")[0] for line in ours.splitlines()}
    rest = [line for line in settings if line.partition("=")[0] not in own]
    quorum = ours.partition("CONTROLLER://")[2].partition("\n")[0]
    rest = [
        f"controller.quorum.voters=1@{quorum}" if line.startswith("controller.quorum.voters") else line
        for line in rest
    ]
    _properties(paths).write_text("\n".join([*rest, ours]))
    with (paths.home / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [*_java(paths), "kafka.Kafka", str(_properties(paths))], stdout=log, stderr=log,
            env={**os.environ, "STREAMRL_SERVICE": f"{paths.home}:kafka"},
        )  # fmt: skip
    try:
        wait_until(lambda: _answers(made), what="the broker", deadline_s=60.0)
        _add_scram_user(made)
        yield made
    finally:
        process.kill()
        process.wait()


def _answers(made: Broker) -> bool:
    try:
        KafkaBus(made.at("PLAINTEXT")).topic_names()
    except BusError:
        return False
    return True


def _add_scram_user(made: Broker) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ScramMechanism, UserScramCredentialUpsertion

    admin = KafkaAdminClient(bootstrap_servers=made.at("PLAINTEXT"))
    try:
        admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, ScramMechanism.SCRAM_SHA_256, PASSWORD.encode())]
        )
    finally:
        admin.close()


@pytest.fixture
def settings(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment; files are of the broker's folder."""

    def put(protocol: str, *, login: bool = False, **more: str) -> None:
        found = {"SECURITY_PROTOCOL": protocol}
        if protocol.endswith("SSL"):
            found["CAFILE"] = str(broker.authority.file)
        if login:
            found |= {"SASL_MECHANISM": "PLAIN", "USERNAME": USER, "PASSWORD": PASSWORD}
        for name, value in {**found, **more}.items():
            at = broker.folder / value
            monkeypatch.setenv(f"{PREFIX}{name}", str(at) if name.endswith("FILE") else value)

    return put


def use(address: str) -> None:
    """A record there and back."""
    bus, topic = KafkaBus(address), Topic(f"t-{uuid4().hex}", 1)
    bus.create_topics([topic])
    writer = bus.writer()
    writer.send(topic, b"it", key="k")
    writer.flush(100)
    writer.close()
    assert [record.value for record in read_all(bus, topic, deadline_s=100)] == [b"it"]


def refusal(address: str) -> str:
    """The error, which comes soon and names no secret."""
    began = time.monotonic()
    with pytest.raises(BusError) as caught:
        KafkaBus(address).topic_names()
    assert time.monotonic() - began < FAST_S
    said = str(caught.value)
    for secret in (PASSWORD, KEY_PASSWORD, "tell-somebody"):
        assert secret not in said
    return said


@pytest.mark.parametrize(
    ("listener", "given"),
    [
        ("PLAINTEXT", {"protocol": "PLAINTEXT"}),
        ("SSL", {"protocol": "SSL"}),
        ("SASL_SSL", {"protocol": "SASL_SSL", "login": True}),
        ("SASL_SSL", {"protocol": "SASL_SSL", "login": True, "SASL_MECHANISM": "SCRAM-SHA-256"}),
        ("SASL_PLAINTEXT", {"protocol": "SASL_PLAINTEXT", "login": True}),
        ("MUTUAL", {"protocol": "SSL", "CERTFILE": "client.pem", "KEYFILE": "client.key",
                    "KEY_PASSWORD": KEY_PASSWORD}),
        ("MUTUAL", {"protocol": "SSL", "CERTFILE": "open.both.pem"}),
    ],
    ids=["plain", "tls", "tls and password", "tls and scram", "password", "locked key", "certificate"],
)  # fmt: skip
def test_the_right_settings_work(
    broker: Broker, settings: Callable[..., None], listener: str, given: dict[str, str]
) -> None:
    settings(**given)
    use(broker.at(listener))


WRONG = {
    "password": ("SASL_SSL", {"protocol": "SASL_SSL", "login": True, "PASSWORD": "tell-somebody"},
                 "can't be used: the password: .* refuses user 'streamrl' with PLAIN: .*_USERNAME and"),
    "scram password": ("SASL_SSL", {"protocol": "SASL_SSL", "login": True, "SASL_MECHANISM": "SCRAM-SHA-256",
                                    "PASSWORD": "tell-somebody"}, "the password: .* with SCRAM-SHA-256"),
    "user": ("SASL_PLAINTEXT", {"protocol": "SASL_PLAINTEXT", "login": True, "USERNAME": "nobody"},
             "the password: .* refuses user 'nobody'"),
    "mechanism": ("SASL_SSL", {"protocol": "SASL_SSL", "login": True, "SASL_MECHANISM": "SCRAM-SHA-512"},
                  "the mechanism: .* does not know SCRAM-SHA-512, but PLAIN, SCRAM-SHA-256: "),
    "authority": ("SSL", {"protocol": "SSL", "CAFILE": "stranger.pem"},
                  "the certificate: .* is not trusted .*KAFKA_CAFILE = .*stranger.pem"),
    "no login": ("SASL_SSL", {"protocol": "SSL"},
                 "the protocol: .* asks for a login, by PLAIN, SCRAM-SHA-256: .*_SECURITY_PROTOCOL=SASL_SSL"),
    "no login, plain": ("SASL_PLAINTEXT", {"protocol": "PLAINTEXT"}, "asks for a login.*=SASL_PLAINTEXT"),
    "login for nothing": ("SSL", {"protocol": "SASL_SSL", "login": True},
                          "the protocol: .* knows no login: set STREAMRL_KAFKA_SECURITY_PROTOCOL=SSL"),
    "no tls": ("SSL", {"protocol": "PLAINTEXT"}, "the protocol: .* speaks TLS: set .*_SECURITY_PROTOCOL=SSL"),
    "no tls, login": ("SASL_SSL", {"protocol": "SASL_PLAINTEXT", "login": True},
                      "the protocol: .* speaks TLS: set .*_SECURITY_PROTOCOL=SASL_SSL"),
    "tls for nothing": ("PLAINTEXT", {"protocol": "SSL"}, "the protocol: .* speaks without TLS"),
    "no certificate": ("MUTUAL", {"protocol": "SSL"}, "the client's certificate: .*_CERTFILE and .*_KEYFILE"),
    "another's certificate": ("MUTUAL", {"protocol": "SSL", "CERTFILE": "strange.both.pem"},
                              "the client's certificate: "),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_each_wrong_setting_is_named(broker: Broker, settings: Callable[..., None], name: str) -> None:
    listener, given, said = WRONG[name]
    settings(**given)
    found = refusal(broker.at(listener))
    assert re.search(said, found), found


def test_a_host_that_is_not_in_the_certificate_is_named(
    broker: Broker, settings: Callable[..., None]
) -> None:
    settings("SSL")
    assert "the host name: the certificate of 127.0.0.1" in refusal(broker.at("SSL", "127.0.0.1"))


def test_one_broker_of_two_is_enough(broker: Broker, settings: Callable[..., None]) -> None:
    settings("SSL")
    use(f"localhost:{any_free_port()},{broker.at('SSL')}")


def test_a_broker_that_comes_late_is_waited_for(broker: Broker, settings: Callable[..., None]) -> None:
    """A network that is not there may come: clients try for a while, as before."""
    settings("PLAINTEXT")
    port, ended = any_free_port(), threading.Event()

    def forward() -> None:
        ended.wait(2.0)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(20)
            made, _ = server.accept()
            with made, socket.create_connection(("127.0.0.1", broker.ports["PLAINTEXT"])) as there:
                back = threading.Thread(target=_copy, args=(there, made), daemon=True)
                back.start()
                _copy(made, there)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    assert isinstance(KafkaBus(f"localhost:{port}").topic_names(), set)
    ended.set()


def _copy(one: socket.socket, other: socket.socket) -> None:
    try:
        while data := one.recv(1 << 16):
            other.sendall(data)
    except OSError:
        pass


def test_the_local_broker_asks_for_the_login_of_the_environment(
    new_home: Callable[[str], StackPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    login = {"SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_MECHANISM": "PLAIN", "USERNAME": "me"}
    for name, value in {**login, "PASSWORD": 'a "quoted" \\back\\ one'}.items():
        monkeypatch.setenv(f"{PREFIX}{name}", value)
    paths = new_home("login")
    try:
        address = local.start_stack(prefect=False, paths=paths).bootstrap_servers
        assert address is not None
        assert _properties(paths).stat().st_mode & 0o777 == 0o600
        use(address)
        monkeypatch.setenv(f"{PREFIX}PASSWORD", "another")
        assert "the password: " in refusal(address)
        for name in (*login, "PASSWORD"):
            monkeypatch.delenv(f"{PREFIX}{name}")
        assert "asks for a login, by PLAIN" in refusal(address)
    finally:
        local.stop_stack(paths=paths)
