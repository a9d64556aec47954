"""The base of all sections of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

# For numbers without bounds of their own. A field that has some writes all of them: a second `le` here would
# win over the field's.
Positive = Annotated[int, Field(gt=0, le=1_000_000_000)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, numbers finite, nothing changes after reading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false as numbers. Python takes true for 1: `groups: true` would mean one group."""
        given = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) for one in given) and info.field_name:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            if bool not in kinds and kinds & {int, float}:
                word = str(next(one for one in given if isinstance(one, bool))).lower()
                raise ValueError(f"a number is expected, found {word} (yes and on are true to YAML, too)")
        return value


def _kinds(annotation: Any) -> Iterator[type]:
    """Yield all plain types in an annotation, and the types of a Literal's values."""
    if get_origin(annotation) is Literal:
        yield from (type(one) for one in get_args(annotation))
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from _kinds(inner)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the section that a field is or may be; None if it can't be one."""
    found = [field.annotation, *get_args(field.annotation)]
    for kind in [*found, *(inner for one in found for inner in get_args(one))]:  # list[Annotated[…]]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def is_named(field: FieldInfo) -> bool:
    """Whether a field holds several sections, each by its name."""
    return get_origin(field.annotation) is dict


def is_listed(field: FieldInfo) -> bool:
    """Whether a field holds a list of sections."""
    return get_origin(field.annotation) is list and section_of(field) is not None


def keys_of(kind: type[BaseModel]) -> list[str]:
    """Return the keys of a section as a run file writes them."""
    return [field.alias or name for name, field in kind.model_fields.items()]
