"""Apache Kafka as one local process, in KRaft mode: broker and controller."""

import contextlib
import re
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import ClassVar

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from infra.files.writing import write_whole
from infra.kafka_security import PREFIX, checked_settings, security_from_environment
from infra.stack.kafka_config import JVM_OPTIONS, log4j_properties, server_properties
from infra.stack.kafka_install import ensure_jars, java_command
from infra.stack.paths import StackPaths
from infra.stack.ports import accepts, address, any_free_port, next_free_port
from infra.stack.processes import run_tool
from infra.stack.services import Launch, Service, ServiceContext, ServicesFile, base_env
from infra.stack.stack_errors import WrongCredentials

FORMAT_DEADLINE_S = 180.0


class KafkaService(Service):
    name: ClassVar[str] = "kafka"
    usual_port: ClassVar[int] = 9092
    # After kill -9 it reads its open segments again before it answers.
    start_deadline_s: ClassVar[float] = 300.0
    stop_grace_s: ClassVar[float] = 20.0

    def prepare(self, context: ServiceContext) -> None:
        context.progress(self.name, "looking for the jars")
        if ensure_jars(context.paths, cancel=context.cancel):
            context.progress(self.name, "fetched the jars")

    def launch(self, context: ServiceContext, port: int) -> Launch:
        paths = context.paths
        controller_port = next_free_port(port + 1) if port == self.usual_port else any_free_port()
        write_whole(_log4j(paths), log4j_properties(_server_log(paths)))
        write_whole(
            _properties(paths),
            server_properties(
                data=paths.kafka_data, port=port, controller_port=controller_port, login=_login()
            ),
            mode=0o600,
        )
        if not (paths.kafka_data / "meta.properties").exists():
            self._format(context)
        return Launch(
            command=[*_java(paths), "kafka.Kafka", str(_properties(paths))],
            env=base_env("KAFKA_"),
            url=f"{address()}:{port}",
            extra={"controller_port": str(controller_port)},
        )

    def _format(self, context: ServiceContext) -> None:
        """Give the empty folder its cluster id. A log that was formatted once is never formatted again."""
        context.progress(self.name, "formatting its storage")
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # In one word: an id may begin with "-", and after a space that reads as another option.
        tool = ["kafka.tools.StorageTool", "format", "--ignore-formatted", f"--cluster-id={cluster}"]
        run_tool(
            [*_java(context.paths), *tool, "-c", str(_properties(context.paths))],
            log=context.paths.log_file(self.name),
            deadline_s=FORMAT_DEADLINE_S,
            cancel=context.cancel,
        )

    def is_ready(self, record: ServicesFile, paths: StackPaths) -> bool:
        # The port is open before the broker answers, and a client that gets no answer waits long: ask gently.
        return accepts(record.port) and _answers(record.url)

    def logs(self, paths: StackPaths) -> list[Path]:
        return [paths.log_file(self.name), _server_log(paths)]


def _answers(address: str) -> bool:
    """Return whether a broker there is ready: it lists itself in its cluster only once it may serve."""
    with contextlib.suppress(KafkaError):
        admin = KafkaAdminClient(
            bootstrap_servers=address,
            bootstrap_timeout_ms=10_000,
            request_timeout_ms=10_000,
            client_id="streamrl-up",
            **(security_from_environment() if _login() else {}),
        )
        try:
            return len(admin.describe_cluster()["brokers"]) > 0
        finally:
            admin.close()
    return False


def _login() -> tuple[str, str] | None:
    """Return the login of the local broker, if the environment asks for one without TLS; else None."""
    found = security_from_environment()
    if found.get("security_protocol") != "SASL_PLAINTEXT" or found.get("sasl_mechanism") != "PLAIN":
        return None
    checked_settings(found)
    user, password = str(found["sasl_plain_username"]), str(found["sasl_plain_password"])
    if not re.fullmatch(r"[A-Za-z0-9_]+", user) or not re.fullmatch(r"[ -~]+", password):
        raise WrongCredentials(
            f"{PREFIX}USERNAME or {PREFIX}PASSWORD has characters that the local Kafka can't take",
            fix="take letters, digits and _ for the name, and ASCII for the password",
        )
    return user, password


def _java(paths: StackPaths) -> list[str]:
    return [
        java_command(),
        *JVM_OPTIONS,
        f"-Dlog4j2.configurationFile={_log4j(paths).as_uri()}",
        "-cp",
        f"{paths.kafka_lib}/*",
    ]


def _properties(paths: StackPaths) -> Path:
    return paths.kafka / "server.properties"


def _log4j(paths: StackPaths) -> Path:
    return paths.kafka / "log4j2.properties"


def _server_log(paths: StackPaths) -> Path:
    return paths.log_file("kafka-server")
