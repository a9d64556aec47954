"""What the sections of a run file have in common."""

from __future__ import annotations

from typing import Annotated, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field is, if it is one or may be one."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def is_named(field: FieldInfo) -> bool:
    """Whether there may be several such sections, each by its name."""
    return get_origin(field.annotation) is dict
