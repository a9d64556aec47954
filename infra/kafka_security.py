"""Login settings for Kafka, read from the environment, never from the run file, and checked before any use.

STREAMRL_KAFKA_SECURITY_PROTOCOL   PLAINTEXT (if not set), SSL, SASL_PLAINTEXT or SASL_SSL
STREAMRL_KAFKA_CAFILE              PEM file of the authority that signed the broker's certificate;
                                   if not set, the system's authorities
STREAMRL_KAFKA_CERTFILE, _KEYFILE  PEM files of a client certificate and its key; _KEY_PASSWORD opens the key
STREAMRL_KAFKA_SASL_MECHANISM      PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, GSSAPI, OAUTHBEARER or AWS_MSK_IAM
STREAMRL_KAFKA_USERNAME, _PASSWORD for PLAIN and SCRAM
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.bus import BusError

PREFIX = "STREAMRL_KAFKA_"
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
WITH_PASSWORD = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
MECHANISMS = (*WITH_PASSWORD, "GSSAPI", "OAUTHBEARER", "AWS_MSK_IAM")

KAFKA_OPTIONS = {
    "SECURITY_PROTOCOL": "security_protocol",
    "SASL_MECHANISM": "sasl_mechanism",
    "USERNAME": "sasl_plain_username",
    "PASSWORD": "sasl_plain_password",
    "CAFILE": "ssl_cafile",
    "CERTFILE": "ssl_certfile",
    "KEYFILE": "ssl_keyfile",
    "KEY_PASSWORD": "ssl_password",
}


def security_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return kafka-python's options for TLS and SASL, as the environment sets them."""
    found = {option: environment.get(f"{PREFIX}{name}") for name, option in KAFKA_OPTIONS.items()}
    return {option: value for option, value in found.items() if value}


def checked_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options if they can be used together; else raise BusError that names the variable."""
    protocol = options.get("security_protocol", "PLAINTEXT")
    if protocol not in PROTOCOLS:
        raise _wrong("SECURITY_PROTOCOL", f"{protocol!r} is none of {', '.join(PROTOCOLS)}")
    if protocol.startswith("SASL"):
        _check_login(options)
    elif "sasl_mechanism" in options:
        raise _wrong("SASL_MECHANISM", f"it is of no use with the protocol {protocol}: take SASL_SSL")
    if uses_tls(options):
        tls_context(options)
    elif named := [name for name, one in KAFKA_OPTIONS.items() if one.startswith("ssl_") and one in options]:
        raise _wrong(named[0], f"it is of no use with the protocol {protocol}: take SSL or SASL_SSL")
    return options


def uses_tls(options: Mapping[str, Any]) -> bool:
    """Return whether connections are encrypted."""
    return str(options.get("security_protocol", "")).endswith("SSL")


def tls_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    """Return a TLS context with the trusted authorities and our certificate, as kafka-python makes it too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority := options.get("ssl_cafile"):
        try:
            context.load_verify_locations(_file("CAFILE", authority))
        except (ssl.SSLError, OSError) as error:
            raise _wrong("CAFILE", f"{authority} is no PEM file of certificates ({_short(error)})") from error
    else:
        context.load_default_certs()
    if certificate := options.get("ssl_certfile"):
        _show(context, certificate, options)
    elif key := options.get("ssl_keyfile"):
        raise _wrong("KEYFILE", f"{key} needs the certificate that belongs to it: set {PREFIX}CERTFILE")
    return context


def _show(context: ssl.SSLContext, certificate: str, options: Mapping[str, Any]) -> None:
    _file("CERTFILE", certificate)
    key = options.get("ssl_keyfile")
    if key:
        _file("KEYFILE", key)
    try:
        # an empty password: without any, OpenSSL would ask the terminal
        context.load_cert_chain(certificate, key, password=options.get("ssl_password") or "")
    except (ssl.SSLError, OSError) as error:
        said, reason = _short(error), getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            raise _wrong("KEYFILE", f"{key} is not the key of the certificate in {certificate}") from error
        if _locked(key or certificate):
            raise _wrong("KEY_PASSWORD", f"it does not open {key or certificate} ({said})") from error
        raise _wrong("CERTFILE", f"{certificate}, key {key or 'in it'}: can't be used ({said})") from error


def _locked(file: str) -> bool:
    """Return whether the key in a PEM file needs a password. OpenSSL's error does not always say so."""
    try:
        return b"ENCRYPTED" in Path(file).read_bytes()
    except OSError:
        return False


def _check_login(options: Mapping[str, Any]) -> None:
    mechanism = options.get("sasl_mechanism")
    if mechanism is None:
        raise _wrong("SASL_MECHANISM", f"the protocol {options['security_protocol']} needs one of "
                     f"{', '.join(MECHANISMS)}")  # fmt: skip
    if mechanism not in MECHANISMS:
        raise _wrong("SASL_MECHANISM", f"{mechanism!r} is none of {', '.join(MECHANISMS)}")
    for name in ("USERNAME", "PASSWORD") if mechanism in WITH_PASSWORD else ():
        if KAFKA_OPTIONS[name] not in options:
            raise _wrong(name, f"{mechanism} needs it")


def _file(name: str, path: str) -> str:
    if not Path(path).is_file():
        raise _wrong(name, f"there is no file {path}")
    if not os.access(path, os.R_OK):
        raise _wrong(name, f"{path} can't be read by this user")
    return path


def _wrong(name: str, why: str) -> BusError:
    return BusError(f"{PREFIX}{name}: {why}")


def _short(error: BaseException) -> str:
    return str(error).partition(" (_ssl.c")[0]
