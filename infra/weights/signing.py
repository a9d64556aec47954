"""Who may publish: manifests signed with Ed25519. `infra.keys` says where the keys come from."""

from __future__ import annotations

from typing import ClassVar

from infra.errors import Explained
from infra.keys import SIGNING, TRUSTED, KeyRing, named_in_env
from infra.weights.manifest import Signed, _Part
from infra.weights.weights_error import WeightsError

__all__ = ["SIGNING", "TRUSTED", "Keys"]


class Keys(KeyRing):
    """One to sign with, and those that are believed; without them nothing is signed, and all is believed."""

    error: ClassVar[type[Explained]] = WeightsError

    @classmethod
    def from_env(cls) -> Keys:
        """As the environment says."""
        return cls(*named_in_env())

    def signed(self, manifest: _Part) -> _Part:
        """A manifest, or a keyframe, with this publisher's signature."""
        signature = self.sign(manifest.content())
        return manifest if signature is None else manifest.model_copy(update={"signature": signature})

    def check(self, manifest: Signed, where: str) -> None:
        """Raise unless somebody who is trusted has signed it, if there is anybody."""
        self.verify(manifest.content() if self.trusts else b"", manifest.signature, where)
