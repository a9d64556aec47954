"""The settings that a what-if may change: they decide what is learned of samples, not which are drawn."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from consumers.losses.loss import CriticSettings
from consumers.what_if import RECORDED, Variant
from schemas.algorithm import AlgorithmSection
from schemas.loading import RunFileError, changes_of
from schemas.losses import LOSSES
from schemas.runspec import RunSpec
from schemas.seams import IMPORT, Seam, SeamSection
from schemas.section import keys_of
from schemas.shortening import printable
from schemas.training import LEARNERS

_OF_ALGORITHM = ("learning_rate", "warmup_steps", "betas", "weight_decay", "max_grad_norm")
_OF_DRAWING = {"loss": ("resample", "replay"), "trainer": ("compose", "bundle_tokens")}
_IDLE = {
    "algorithm": ("iterations",), "trainer": ("checkpoint_every", "keep_checkpoints", "keep_weights"),
}  # fmt: skip
_IDLE_SECTIONS = ("placement", "deadlines", "trackers", "prometheus", "report", "evaluation")
_MOST_VARIANTS = 12  # more lines can't be told apart in a picture


def variants_of(spec: RunSpec, shared: Sequence[str], each: Sequence[str]) -> list[Variant]:
    """Return the variants that a user asks for. Raises RunFileError.

    `shared`: changes, as in `loss.clip_high=0.3`, that all variants have. `each`: of each variant its own
    changes, with blanks between them; without any, there is one variant, with the shared changes.
    """
    if len(each) > _MOST_VARIANTS:
        raise RunFileError(f"{len(each)} variants are asked for; at most {_MOST_VARIANTS} are taken at once")
    found: list[Variant] = []
    for text in each or [""] if each or shared else []:
        changes = [*shared, *_words(text)]
        name = printable(" ".join(_words(text) or changes), 200)
        if name in (RECORDED, *(one.name for one in found)):
            raise RunFileError(f"--variant {name}: given twice")
        found.append(Variant(name, with_changes(spec, changes)))
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RunFileError(f"--variant {printable(text, 200)}: {error}") from None


def with_changes(spec: RunSpec, changes: Sequence[str]) -> RunSpec:
    """Return a run's settings with changes. Raises RunFileError for one that a what-if can't have."""
    said = changes_of(changes)
    for section, value in said.items():
        for key in value if isinstance(value, dict) else [""]:
            _allow(spec, section, str(key), value)
    try:
        sections: dict[str, Any] = {name: getattr(spec, name) for name in type(spec).model_fields}
        if "algorithm" in said:
            merged = spec.algorithm.model_dump() | said["algorithm"]
            sections["algorithm"] = AlgorithmSection.model_validate(merged)
        for name, seam in (("loss", LOSSES), ("trainer", LEARNERS)):
            if name in said:
                sections[name] = seam.read(with_changed_keys(getattr(spec, name), said[name], seam))
        found = RunSpec.model_validate(sections)
    except ValidationError as error:
        raise RunFileError("\n".join(_problems(error, changes))) from None
    if has_critic(found) and not has_critic(spec):
        raise RunFileError(
            f"loss.kind={found.loss.kind} trains a critic, and this run has none: its first steps would be "
            "taken with a critic that knows nothing"
        )
    return found


def _allow(spec: RunSpec, section: str, key: str, value: Any) -> None:
    """Raise RunFileError unless a what-if may change a setting."""
    name = f"{section}.{key}" if key else section
    if section not in type(spec).model_fields:
        raise RunFileError(
            f"--set {printable(name, 200)}: there is no section {printable(section, 80)} in a run file"
        )
    if section in _IDLE_SECTIONS or key in _IDLE.get(section, ()):
        raise RunFileError(f"--set {name}: no step depends on it, so nothing would be different")
    allowed = section in ("loss", "trainer") or (section == "algorithm" and key in _OF_ALGORITHM)
    if not allowed or key in _OF_DRAWING.get(section, ()):
        raise RunFileError(
            f"--set {printable(name, 200)}: it decides which samples there are, and the recorded ones were "
            "made otherwise. A what-if may change the loss, the trainer's arithmetic, and of the algorithm "
            f"{', '.join(_OF_ALGORITHM)}. For all else start a new run: streamrl fork, or streamrl run"
        )
    if not isinstance(value, dict):
        raise RunFileError(f"--set {section}: write it as section.key=value")


def with_changed_keys(section: SeamSection, said: Mapping[str, Any], seam: Seam[Any]) -> dict[str, Any]:
    """Return the keys of a section with changes.

    If another kind is chosen, only those keys stay that both kinds have and that the user set otherwise than
    the old kind does by itself: each kind has defaults of its own.
    """
    now = section.model_dump(mode="json")
    chosen = said.get(seam.key, now[seam.key])
    if IMPORT not in said and chosen == now[seam.key]:
        return now | dict(said)
    old: type[SeamSection] = type(section)
    new = seam.chosen_class({seam.key: chosen} if IMPORT not in said else dict(said))
    names = {field.alias or name: field for name, field in old.model_fields.items()}
    kept = {
        key: value for key, value in now.items()
        if key in keys_of(new) and key not in (seam.key, IMPORT) and value != names[key].default
    }  # fmt: skip
    return kept | dict(said)


def _problems(error: ValidationError, changes: Sequence[str]) -> Iterator[str]:
    for one in error.errors(include_url=False):
        where = ".".join(str(part) for part in one["loc"])
        said = f"{where}: " if where else ""
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            message = "there is no such setting"
        yield f"--set {printable(' '.join(changes), 200)}: {said}{message}"


def has_critic(spec: RunSpec) -> bool:
    """Return whether a run's loss trains a critic."""
    return isinstance(LOSSES.loaded(spec.loss), CriticSettings)
