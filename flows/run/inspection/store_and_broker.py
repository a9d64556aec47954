"""Inspects the store and the broker of a run, without making anything there."""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flows.run.inspection.finding import Finding, NoAnswer, within
from flows.run.locations import known_places
from infra.bus import BusError
from infra.errors import Explained
from infra.kafka_bus import KafkaBus
from infra.ranks.rank_addresses import WrongAddress, own_address
from infra.stores.opening import open_store
from producers.ranker.states import backbone_name, check_start
from schemas.addresses import LOCAL
from schemas.runspec import RunSpec

_ANSWER_S = 30.0
_LITTLE = 1 << 30  # free bytes of a disk that are too few
_FILE = "file://"


def look_at_places(spec: RunSpec) -> Iterator[Finding]:
    """Yield findings about the store, the caches of sites on this machine, and the broker."""
    places = known_places(spec)
    yield _report(spec)
    yield _store("store", "placement.store", places.store_url)
    for name, site in spec.placement.sites.items():
        if site.cache != LOCAL and not site.elsewhere:
            yield _store(f"cache of site {name}", f"placement.sites.{name}.cache", site.cache)
    yield _broker(spec, places.bootstrap_servers)
    yield from _meetings(spec)


def look_at_first_ranker(spec: RunSpec) -> Iterator[Finding]:
    """Yield a finding if a new run can't start from its `lengths.start`. A resumed run does not read it."""
    if (start := spec.lengths.start) is None:
        return
    store, backbone = known_places(spec).store_url, backbone_name(spec.lengths.backbone)
    try:
        within(_ANSWER_S, lambda: check_start(start, open_store(store), backbone))
    except Explained as error:
        yield Finding("ranker", str(error), wrong=True, away=not error.lasting)


def _meetings(spec: RunSpec) -> Iterator[Finding]:
    """Yield a note for ranks elsewhere that this machine alone can reach: some are meant to be here.

    The trainer is on this machine, which must have the address of its ranks; an engine need not be here.
    """
    placement = spec.placement
    for name, ranks in (("ranks", placement.ranks), ("engine_ranks", placement.engine_ranks)):
        if not ranks.elsewhere:
            continue
        setting, found = f"placement.{name}.address", ranks.address
        if name == "ranks" and not _is_loopback(found):
            try:
                found = own_address(found, setting)
            except WrongAddress as error:
                yield Finding("ranks elsewhere", str(error), wrong=True)
                continue
        if _is_loopback(found):
            here = "" if found == ranks.address else f" ({found} on this machine)"
            said = (
                f"{setting} is {ranks.address}{here}, which no other machine reaches: for ranks on other "
                "machines set an address of this one in their network"
            )
            yield Finding("ranks elsewhere", said, noted=True)


def _is_loopback(address: str) -> bool:
    """Whether an address, the name of a machine or a network is of one machine alone."""
    try:
        return ipaddress.IPv4Network(address, strict=False).is_loopback
    except ValueError:
        return address.rstrip(".").lower() == "localhost"


def _report(spec: RunSpec) -> Finding:
    folder = Path(spec.report).absolute()
    wrong = wrong_folder("report", f"{_FILE}{folder}").replace(_FILE, "", 1)
    return Finding("report", wrong or f"reports go to {folder}", wrong=bool(wrong))


def wrong_folder(field: str, url: str) -> str:
    """Return why a store in a folder can't be written; empty if it can, or if it is not in a folder."""
    if not url.startswith(_FILE):
        return ""
    folder = Path(url.removeprefix(_FILE))
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return f"{field}: {url}: {nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return (
            f"{field}: {url}: this user may not write to {nearest}: choose another place, or ask for access"
        )
    return ""


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.exists() or one.is_symlink())


def _store(thing: str, field: str, url: str) -> Finding:
    if url.startswith(_FILE):
        if wrong := wrong_folder(field, url):
            return Finding(thing, wrong, wrong=True)
        free = shutil.disk_usage(_nearest(Path(url.removeprefix(_FILE)))).free
        full = free < _LITTLE
        said = f"{url} can be written; {free / (1 << 30):.1f} GiB are free"
        said += ", which is little" if full else ""
        return Finding(thing, said, noted=full)
    try:
        within(_ANSWER_S, lambda: open_store(url).list("streamrl-looks-here"))
    except NoAnswer as error:
        return Finding(thing, f"{field}: {url}: {error}", wrong=True, away=True)
    except Explained as error:
        return Finding(thing, f"{field}: {error}", wrong=True, away=not error.lasting)
    return Finding(thing, f"{url} answers, and can be listed")


def _broker(spec: RunSpec, servers: str) -> Finding:
    kafka = spec.placement.kafka
    if kafka.bootstrap_servers == LOCAL:
        wanted = kafka.replication > 1
        state = f"runs at {servers}" if servers else "does not run: a run starts it"
        said = f"the local Kafka {state}"
        if wanted:
            said += f", and has one broker: placement.kafka.replication is {kafka.replication}, set it to 1"
        return Finding("broker", said, wrong=wanted)
    try:
        brokers = within(
            _ANSWER_S, lambda: KafkaBus(servers, name="streamrl-check", patient=False).broker_count()
        )
    except NoAnswer as error:
        said = f"placement.kafka.bootstrap_servers: {servers}: {error}"
        return Finding("broker", said, wrong=True, away=True)
    except BusError as error:
        said = f"placement.kafka.bootstrap_servers: {error}"
        return Finding("broker", said, wrong=True, away=not error.lasting)
    if brokers < kafka.replication:
        few = f"{servers} has {brokers} brokers: placement.kafka.replication is {kafka.replication}, lower it"
        return Finding("broker", few, wrong=True)
    return Finding("broker", f"{servers} answers with {brokers} broker{'s' if brokers != 1 else ''}")
