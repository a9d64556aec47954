"""Signs announcements and checks their signatures: readers with trusted keys believe no others."""

from __future__ import annotations

import json

from blake3 import blake3
from msgspec import structs

from infra.weights.signing import Keys
from infra.weights.weights_error import WeightsError
from schemas.messages import WeightsAnnouncement

_KIND = "announcement"


def signed(announcement: WeightsAnnouncement, keys: Keys | None = None) -> WeightsAnnouncement:
    """Return an announcement with a signature, if there is a key. `keys` defaults to the environment's."""
    signature = (keys or Keys.from_env()).sign(_content(announcement), _KIND)
    return structs.replace(announcement, signature=signature) if signature else announcement


def untrusted(announcement: WeightsAnnouncement, keys: Keys) -> str:
    """Return why an announcement is not believed; an empty string if it is."""
    if not keys.trusts:
        return ""
    where = f"the announcement of weights {announcement.version}"
    try:
        keys.verify(_content(announcement), announcement.signature, where, _KIND)
    except WeightsError as error:
        return str(error)
    return ""


def _content(said: WeightsAnnouncement) -> bytes:
    """Return the bytes that are signed. Fields are listed, so that one added later changes no signature."""
    content = {
        "run": said.run, "version": said.version, "root": said.root, "manifest": said.manifest,
        "size": said.size, "trainer_epoch": said.trainer_epoch, "announced_at": said.announced_at,
        "content": blake3(said.content).hexdigest(),
    }  # fmt: skip
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
