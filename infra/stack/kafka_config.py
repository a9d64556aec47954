"""The local broker's settings, each with its reason."""

from collections.abc import Mapping
from pathlib import Path

from infra.bus import LARGEST_RECORD
from infra.stack.ports import LOOPBACK, address

# A batch adds its header to the largest record, and compression may not help.
LARGEST_BATCH = LARGEST_RECORD + (2 << 20)

JVM_OPTIONS = (
    "-Xms96m",
    "-Xmx256m",
    # One thread for the collector: with a small heap and few cores the parallel ones only cost memory.
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # the second compiler takes CPU from the run that it would make faster
    # The first compiler starts after 40 calls, not 200: less of a short run is interpreted.
    "-XX:Tier3InvocationThreshold=40",
    "-XX:Tier3MinInvocationThreshold=20",
    "-XX:Tier3CompileThreshold=200",
    # A broker without memory must die and be named, not linger half alive.
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
)


Login = tuple[str, str]  # user name and password


def server_properties(
    *,
    data: Path,
    port: int,
    controller_port: int,
    login: Login | None = None,
    listen: str | None = None,
    name: str | None = None,
) -> str:
    """Return the file that Kafka reads. A container listens at `listen`, and clients find it by `name`."""
    return _lines(
        {
            # One process is broker and controller.
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            # There is no TLS here, and no login if none is given: nothing but this machine may reach it.
            "listeners": f"PLAINTEXT://{listen or address()}:{port},CONTROLLER://{LOOPBACK}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{name or address()}:{port}",
            "inter.broker.listener.name": "PLAINTEXT",
            **_access(login),
            "log.dirs": str(data),
            # A mistyped topic is an error, not a new topic.
            "auto.create.topics.enable": "false",
            # One broker: one copy of everything.
            "default.replication.factor": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "min.insync.replicas": "1",
            "unclean.leader.election.enable": "false",
            "auto.leader.rebalance.enable": "false",
            # Groups serve lag displays here; 50 partitions for them would be 50 logs to recover.
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            **_sizes(),
            **_durability(),
        }
    )


def _access(login: Login | None) -> dict[str, str]:
    """Return the settings for access to broker and controller: for everybody, or with a password."""
    if login is None:
        return {"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"}
    user, password = (_quoted(word) for word in login)
    known = (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f"username={user} password={password} user_{login[0]}={password};"
    )
    return {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": known,
        "listener.name.controller.plain.sasl.jaas.config": known,
    }


def _quoted(word: str) -> str:
    """Quote a word for JAAS in a properties file: each of the two formats takes one backslash away."""
    return '"' + word.replace("\\", "\\" * 4).replace('"', "\\" * 2 + '"') + '"'


def _sizes() -> dict[str, str]:
    return {
        "message.max.bytes": str(LARGEST_BATCH),
        "replica.fetch.max.bytes": str(LARGEST_BATCH),
        # The heap is 256 MB: requests in line may take a quarter of it, the compactor's index 8 MB (not 128).
        "socket.request.max.bytes": str(32 << 20),
        "queued.max.request.bytes": str(64 << 20),
        "log.cleaner.dedupe.buffer.size": str(8 << 20),
        "log.cleaner.threads": "1",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        # The log is what a run is replayed from; a topic that may be thinned out says so itself.
        "log.retention.ms": "-1",
    }


def _durability() -> dict[str, str]:
    """Return the settings that matter after a kill.

    An acknowledged record is in the page cache, which survives when a process is killed, so kill -9 loses no
    record. (A power cut may; flushing each record would prevent that, but is far slower.) After a kill the
    broker reads again each segment that it does not know to be flushed. It flushes a segment when it begins
    the next one. Smaller segments, and a note every few seconds of how far it has flushed, make that short.
    """
    return {
        "log.segment.bytes": str(64 << 20),
        "log.flush.offset.checkpoint.interval.ms": "5000",
        "num.recovery.threads.per.data.dir": "2",
        # The controller takes a killed broker's successor for a double until the old session has run out.
        # Heartbeats, and records that say that nothing is new, cost processor time at rest: one each half
        # second would cost half of all that the broker uses in a small run.
        "broker.heartbeat.interval.ms": "2000",
        "metadata.max.idle.interval.ms": "10000",
        "broker.session.timeout.ms": "6000",
        "initial.broker.registration.timeout.ms": "60000",
    }


def log4j_properties(log: Path) -> str:
    return _lines(
        {
            "status": "warn",
            "appender.file.type": "RollingFile",
            "appender.file.name": "file",
            "appender.file.fileName": str(log),
            "appender.file.filePattern": f"{log}.%i",
            "appender.file.layout.type": "PatternLayout",
            "appender.file.layout.pattern": "%d %p %c{1}: %m%n",
            "appender.file.policies.type": "Policies",
            "appender.file.policies.size.type": "SizeBasedTriggeringPolicy",
            "appender.file.policies.size.size": "8MB",
            "appender.file.strategy.type": "DefaultRolloverStrategy",
            "appender.file.strategy.max": "2",
            "rootLogger.level": "info",
            "rootLogger.appenderRef.file.ref": "file",
            # At start it prints every setting several times over.
            "logger.config.name": "org.apache.kafka.common.config",
            "logger.config.level": "warn",
            "logger.server.name": "kafka.server.KafkaConfig",
            "logger.server.level": "warn",
        }
    )


def _lines(settings: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in settings.items())
