"""Announcements that are signed: a version counts as announced only if somebody who is trusted says so."""

from __future__ import annotations

import json

from blake3 import blake3
from msgspec import structs

from infra.weights.signing import Keys
from infra.weights.weights_error import WeightsError
from schemas.messages import WeightsAnnouncement

_KIND = "announcement"


def signed(announcement: WeightsAnnouncement, keys: Keys | None = None) -> WeightsAnnouncement:
    """An announcement with this publisher's signature, if it has a key."""
    signature = (keys or Keys.from_env()).sign(_content(announcement), _KIND)
    return structs.replace(announcement, signature=signature) if signature else announcement


def untrusted(announcement: WeightsAnnouncement, keys: Keys) -> str:
    """Why an announcement is not believed; empty if it is."""
    if not keys.trusts:
        return ""
    where = f"the announcement of weights {announcement.version}"
    try:
        keys.verify(_content(announcement), announcement.signature, where, _KIND)
    except WeightsError as error:
        return str(error)
    return ""


def _content(said: WeightsAnnouncement) -> bytes:
    """What is signed: named one by one, so that a field of a newer version changes no signature."""
    content = {
        "run": said.run, "version": said.version, "root": said.root, "manifest": said.manifest,
        "size": said.size, "trainer_epoch": said.trainer_epoch, "announced_at": said.announced_at,
        "content": blake3(said.content).hexdigest(),
    }  # fmt: skip
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
