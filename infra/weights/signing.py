"""Signs manifests with Ed25519, and checks their signatures. `infra.keys` says where the keys come from."""

from __future__ import annotations

from typing import ClassVar

from infra.errors import Explained
from infra.keys import SIGNING, TRUSTED, KeyRing, named_in_env
from infra.weights.manifest import Signed, _Part
from infra.weights.weights_error import WeightsError

__all__ = ["SIGNING", "TRUSTED", "Keys"]


class Keys(KeyRing):
    """A key to sign with, and trusted keys. Without keys nothing is signed, and everything is believed."""

    error: ClassVar[type[Explained]] = WeightsError

    @classmethod
    def from_env(cls) -> Keys:
        """Return the keys that the environment names."""
        return cls(*named_in_env())

    def signed(self, manifest: _Part) -> _Part:
        """Return a manifest or a keyframe with this publisher's signature; unchanged if there is no key."""
        signature = self.sign(manifest.content())
        return manifest if signature is None else manifest.model_copy(update={"signature": signature})

    def check(self, manifest: Signed, where: str) -> None:
        """Raise unless one of the trusted keys, if there are any, signed a manifest or a keyframe."""
        self.verify(manifest.content() if self.trusts else b"", manifest.signature, where)
