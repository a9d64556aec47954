"""Finds out why a broker can't be used, by one connection step by step. A client would only retry.

connect ──► TLS handshake ──► ApiVersions ──► SaslHandshake ──► SaslAuthenticate
network     certificate,      protocol        mechanism,        password
            host name                         or no login

The wire format of these requests is fixed since Kafka 1.0. Nothing secret is sent to a listener that does not
speak the configured protocol.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kafka.errors import KafkaError
from kafka.net.sasl import get_sasl_mechanism

from infra.kafka_security import PREFIX, WITH_PASSWORD, tls_context, uses_tls

CONNECT_S, ANSWER_S = 3.0, 8.0
_LARGEST = 1 << 20  # bytes of an answer
_API_VERSIONS, _SASL_HANDSHAKE, _SASL_AUTHENTICATE = 18, 17, 36
_NO_SUCH_MECHANISM, _NO_LOGIN_HERE, _REFUSED = 33, 34, 58
_NOBODY = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
_OTHER_NAME = (62, 64)  # OpenSSL's codes: the certificate is for another host name, or address


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason why a broker can't be used. `lasting`: waiting does not mend it."""

    what: str
    lasting: bool
    at_once: bool = False  # whether nobody is there to wait for: each address is refused, or unreachable


class _Cut(Exception):
    """The broker has closed the connection, or its answer is not one of Kafka's."""


def trouble(bootstrap_servers: str, options: Mapping[str, Any]) -> Trouble | None:
    """Return why no broker can be used; None if one of them can. The first lasting reason counts most."""
    found: list[Trouble] = []
    for server in bootstrap_servers.split(","):
        host, port = _address(server.strip())
        now = _of_one(host, port, options)
        if now is None:
            return None
        found.append(now)
    first = next((one for one in found if one.lasting), found[0])
    return replace(first, at_once=all(one.at_once for one in found))


def _address(server: str) -> tuple[str, int]:
    host, colon, port = server.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdecimal() else (server, 9092)


def _of_one(host: str, port: int, options: Mapping[str, Any]) -> Trouble | None:
    try:
        with _connected(host, port) as plain:
            if not uses_tls(options):
                return _talk(plain, host, port, options)
            try:
                wrapped = tls_context(options).wrap_socket(plain, server_hostname=host.rstrip("."))
            except (ssl.SSLError, ConnectionError, TimeoutError) as error:
                return _tls_trouble(host, port, error, options)
            with wrapped:
                return _talk(wrapped, host, port, options)
    except socket.gaierror as error:
        return Trouble(f"the network: the name {host} can't be resolved ({error.strerror})", False, True)
    except TimeoutError:
        return Trouble(f"the network: {host}:{port} does not answer", False)
    except (OSError, OverflowError, UnicodeError) as error:
        said = f"the network: {host}:{port}: {getattr(error, 'strerror', None) or error}"
        return Trouble(said, False, getattr(error, "errno", None) in _NOBODY)


def _connected(host: str, port: int) -> socket.socket:
    made = socket.create_connection((host, port), timeout=CONNECT_S)
    made.settimeout(ANSWER_S)
    return made


def _tls_trouble(host: str, port: int, error: OSError, options: Mapping[str, Any]) -> Trouble:
    authority = options.get("ssl_cafile")
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if error.verify_code in _OTHER_NAME:
            return Trouble(
                f"the host name: the certificate of {host}:{port} is for another name ({why}). In "
                "placement.kafka.bootstrap_servers use a name that stands in the certificate",
                True,
            )
        trusted = f"{PREFIX}CAFILE = {authority}" if authority else f"the system's; {PREFIX}CAFILE is not set"
        return Trouble(
            f"the certificate: that of {host}:{port} is not trusted ({why}). Trusted certificates: {trusted}",
            True,
        )
    if (client := _about_our_certificate(error)) is not None:
        return client
    if _speaks_plainly(host, port):
        return Trouble(
            f"the protocol: {host}:{port} speaks without TLS, and {PREFIX}SECURITY_PROTOCOL is "
            f"{options['security_protocol']}: take PLAINTEXT or SASL_PLAINTEXT, or another port",
            True,
        )
    return Trouble(f"the TLS handshake with {host}:{port} failed: {_said(error)}", False)


def _about_our_certificate(error: OSError) -> Trouble | None:
    """Return the trouble if the broker's alert is about our certificate or about a missing one, else None."""
    reason = getattr(error, "reason", None) or ""
    if not any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")):
        return None
    return Trouble(
        f"the client's certificate: the broker asks for one, or does not trust ours ({_said(error)}): "
        f"look at {PREFIX}CERTFILE and {PREFIX}KEYFILE",
        True,
    )


def _talk(made: socket.socket, host: str, port: int, options: Mapping[str, Any]) -> Trouble | None:
    line = _Line(made)
    try:
        line.ask(_API_VERSIONS, 0, b"")
    except (ssl.SSLError, _Cut, ConnectionError) as error:
        return _silent(host, port, error, options)
    protocol = options.get("security_protocol", "PLAINTEXT")
    mechanism = options.get("sasl_mechanism") if protocol.startswith("SASL") else None
    try:
        code, known = line.handshake(mechanism or "PLAIN")
    except (_Cut, OSError, struct.error):
        return None  # the broker does not know this request: the client will report it
    tls = "SSL" if uses_tls(options) else "PLAINTEXT"
    if mechanism is None:
        if code in (0, _NO_SUCH_MECHANISM):
            return Trouble(
                f"the protocol: {host}:{port} asks for a login, by {', '.join(known)}: set "
                f"{PREFIX}SECURITY_PROTOCOL=SASL_{tls} and the mechanism, user name and password",
                True,
            )
        return None
    if code == _NO_LOGIN_HERE:
        return Trouble(
            f"the protocol: {host}:{port} knows no login: set {PREFIX}SECURITY_PROTOCOL={tls}, or take "
            "another port",
            True,
        )
    if code == _NO_SUCH_MECHANISM:
        return Trouble(
            f"the mechanism: {host}:{port} does not know {mechanism}, but {', '.join(known)}: look at "
            f"{PREFIX}SASL_MECHANISM",
            True,
        )
    return _log_in(line, mechanism, host, port, options) if mechanism in WITH_PASSWORD and not code else None


def _silent(host: str, port: int, error: Exception, options: Mapping[str, Any]) -> Trouble:
    """Return why a connected broker does not answer: another protocol, or it refuses our certificate."""
    if uses_tls(options):
        refused = _about_our_certificate(error) if isinstance(error, OSError) else None
        return refused or Trouble(
            f"the network: {host}:{port} has cut the connection ({_said(error)})", False
        )
    if _speaks_tls(host, port):
        protocol = options.get("security_protocol", "PLAINTEXT").replace("PLAINTEXT", "SSL")
        return Trouble(
            f"the protocol: {host}:{port} speaks TLS: set {PREFIX}SECURITY_PROTOCOL={protocol} (or "
            f"{'SSL' if protocol != 'SSL' else 'SASL_SSL'}), or take another port",
            True,
        )
    return Trouble(f"the network: {host}:{port} does not answer as Kafka does ({_said(error)})", False)


def _log_in(line: _Line, mechanism: str, host: str, port: int, options: Mapping[str, Any]) -> Trouble | None:
    said = get_sasl_mechanism(mechanism)(host=host, **options)
    wrong = Trouble(
        f"the password: {host}:{port} refuses user {options['sasl_plain_username']!r} with {mechanism}: look "
        f"at {PREFIX}USERNAME and {PREFIX}PASSWORD",
        True,
    )
    try:
        while not said.is_done():
            code, answer = line.authenticate(said.auth_bytes())
            if code:
                return wrong if code == _REFUSED else None
            said.receive(answer)
    except (ValueError, KeyError, KafkaError):
        return wrong  # the broker's own proof is wrong, so it does not know the password either
    except (_Cut, OSError, struct.error):
        return None
    return None if said.is_authenticated() else wrong


class _Line:
    """A connection on which each request waits for its answer."""

    def __init__(self, made: socket.socket) -> None:
        self._made, self._number = made, 0

    def handshake(self, mechanism: str) -> tuple[int, list[str]]:
        """Ask for a login mechanism. Return Kafka's error code and the mechanisms that the listener knows."""
        name = mechanism.encode()
        answer = self.ask(_SASL_HANDSHAKE, 1, struct.pack(">h", len(name)) + name)
        code, count = struct.unpack_from(">hi", answer)
        known, at = [], 6
        for _ in range(min(count, 32)):
            (size,) = struct.unpack_from(">h", answer, at)
            known.append(answer[at + 2 : at + 2 + size].decode(errors="replace"))
            at += 2 + size
        return code, known

    def authenticate(self, token: bytes) -> tuple[int, bytes]:
        """Send a login token. Return Kafka's error code and the broker's answer to the token."""
        answer = self.ask(_SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token)
        code, size = struct.unpack_from(">hh", answer)
        at = 4 + max(size, 0)
        (size,) = struct.unpack_from(">i", answer, at)
        return code, answer[at + 4 : at + 4 + max(size, 0)]

    def ask(self, key: int, version: int, body: bytes) -> bytes:
        """Send a request and return its answer without the leading request number."""
        self._number += 1
        name = b"streamrl-probe"
        head = struct.pack(">hhih", key, version, self._number, len(name)) + name
        self._made.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        (size,) = struct.unpack(">i", self._exactly(4))
        if not 4 <= size <= _LARGEST:
            raise _Cut("an answer of another protocol")
        answer = self._exactly(size)
        if struct.unpack_from(">i", answer)[0] != self._number:
            raise _Cut("an answer of another protocol")
        return answer[4:]

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._made.recv(min(size - len(data), 1 << 16))
            if not part:
                raise _Cut("the connection was closed")
            data += part
        return data


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether a listener answers a TLS handshake. Nothing is sent through the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(host, port) as made, context.wrap_socket(made, server_hostname=host):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "") and "PROTOCOL_VERSION" not in (error.reason or "")
    except OSError:
        return False


def _speaks_plainly(host: str, port: int) -> bool:
    """Return whether a listener answers Kafka's first request without TLS."""
    with contextlib.suppress(OSError, _Cut, struct.error), _connected(host, port) as made:
        _Line(made).ask(_API_VERSIONS, 0, b"")
        return True
    return False


def _said(error: BaseException) -> str:
    return str(error).partition(" (_ssl.c")[0] or type(error).__name__
