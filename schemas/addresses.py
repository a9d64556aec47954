"""Types for names of files, brokers and stores, and for text, in a run file. Unfit ones are refused."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from schemas.shortening import shown
from schemas.stores import OWN_STORES, has_scheme, own_stores

LOCAL = "local"
_LONGEST_NAME = 255  # maximum bytes of a file's name
_MOST_SERVERS = 100
_HOST = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]+)?\]"
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_NO_STORES = {
    "memory": "its content is gone when its process ends",
    "local": "write file:// with an absolute path",
    **dict.fromkeys(("data", "http", "https", "git", "github", "gist", "zip", "tar", "libarchive",
                     "reference", "jupyter", "jlab", "pyscript"), "it can't be written"),
    **dict.fromkeys(("simplecache", "filecache", "blockcache", "cached", "generic", "dask", "dir",
                     "async_wrapper", "asyncwrapper", "asynclocal"),
                    "it only wraps another store: name that one"),
}  # fmt: skip


def _is_text(text: str) -> str:
    strange = next((char for char in text if ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF), None)
    if strange is not None:
        raise ValueError(f"the character U+{ord(strange):04X} is not allowed here (found {shown(text)})")
    return text


def _is_plain_text(text: str) -> str:
    """Return text of one line or several. Other control characters than tabs and line ends are refused."""
    for line in text.replace("\t", " ").replace("\r", "\n").split("\n"):
        _is_text(line)
    return text


def _is_stop(text: str) -> str:
    if "\ufffd" in _is_plain_text(text):
        raise ValueError(f"U+FFFD stands for half a character, which no text has (found {shown(text)})")
    return text


def _is_path(text: str) -> str:
    longest = max(len(part.encode()) for part in _is_text(text).split("/"))
    if longest > _LONGEST_NAME:
        raise ValueError(
            f"a name of {longest} bytes is too long for a file; at most {_LONGEST_NAME} are allowed"
        )
    return text


Word = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_is_text)]
PlainText = Annotated[str, Field(min_length=1, max_length=16_384), AfterValidator(_is_plain_text)]
StopString = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_is_stop)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_is_path)]


def _is_host(text: str) -> str:
    if not _HOST.fullmatch(text) or text.startswith("["):
        raise ValueError(f"{shown(text)} is no name or IPv4 address of a machine (and has no port)")
    return text


HostName = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_is_host)]


def _is_host_or_network(text: str) -> str:
    if "/" not in text:
        return _is_host(text)
    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        raise ValueError(f"{shown(text)} is no IPv4 network such as 10.0.0.0/24: {error}") from error
    return text


HostOrNetwork = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_is_host_or_network)]


def _are_servers(text: str) -> str:
    if text == LOCAL:
        return text
    servers = [one.strip() for one in text.split(",")]
    if len(servers) > _MOST_SERVERS:
        raise ValueError(f"{len(servers)} servers are too many; a few are enough to find all of a cluster")
    for one in servers:
        if wrong := _wrong_server(one):
            raise ValueError(f"{shown(one)} {wrong}: write host:port, several with commas, or `local`")
    return ",".join(servers)


def _wrong_server(server: str) -> str:
    if "://" in server:
        return "has a protocol (STREAMRL_KAFKA_SECURITY_PROTOCOL sets it)"
    host, colon, port = server.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        return "has no port"
    if not _HOST.fullmatch(host):
        return "names no host"
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        return "has no port from 1 to 65535"
    return ""


def _is_store(text: str) -> str:
    if text == LOCAL:
        return text
    scheme, separator, rest = _is_text(text).partition("://")
    if not separator:
        raise ValueError(
            f"{shown(text)} is no URL: write s3://bucket/prefix, file:///absolute/path, or `local`"
        )
    if wrong := _wrong_store(scheme, rest):
        raise ValueError(f"{shown(text)}: {wrong}")
    return text


def _wrong_store(scheme: str, rest: str) -> str:
    if scheme == "file":
        return "" if rest.startswith("/") else "file:// needs an absolute path, as in file:///data/store"
    if not _SCHEME.fullmatch(scheme) or not _is_known(scheme):
        return (
            f"{shown(scheme)} is no kind of store that fsspec knows, such as s3, gs, abfs or file; "
            f"for a store of your own set {OWN_STORES}"
        )
    if scheme in _NO_STORES:
        return f"{scheme}:// is no store for a run: {_NO_STORES[scheme]}"
    place = rest.partition("/")[0]
    if not place and scheme not in own_stores():
        return f"{scheme}:// needs the name of a bucket, as in {scheme}://bucket/prefix"
    if ":" in place.rpartition("@")[0]:
        return "credentials come from the environment, never from the run file"
    return ""


def _is_known(scheme: str) -> bool:
    if has_scheme(scheme):
        return True
    from fsspec import available_protocols

    return scheme in available_protocols()


Servers = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_are_servers)]
StoreUrl = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_is_store)]
