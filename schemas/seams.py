"""Seams: places where one file adds a thing to StreamRL, such as a loss.

A run file chooses the thing by one key of a section, and sets it up with the other keys. The file of a thing
has a class of settings, which extends the section's own class and can make the thing. `schemas.registry`
finds it by its name, or by `import: FILE.py:CLASS` in the place of a name.

Code that is not ours runs only where it is asked for: when a run file is read to be started (context LOAD),
and in the process that makes the thing. Whoever only reads a run's record gets the section with the keys that
all things have; the others are kept as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError, core_schema

from schemas.addresses import FilePath
from schemas.importing import BadImport, said
from schemas.registry import Registry
from schemas.section import Section, keys_of
from schemas.shortening import shown

LOAD: Mapping[str, Any] = {"load": True}  # validation context: also code that is not ours may be imported
IMPORT = "import"


class SeamSection(Section):
    """A section whose keys depend on the thing that it chooses."""

    is_read: ClassVar[bool] = True  # False: the code is not loaded, and its own keys are not checked
    free_on_resume: ClassVar[frozenset[str]] = frozenset()  # own keys that a resumed run may change

    imported: FilePath | None = Field(
        None,
        alias=IMPORT,
        description="FILE.py:CLASS or module:CLASS of your own, in the place of a name.",
    )


SectionT = TypeVar("SectionT", bound=SeamSection)


@dataclass(frozen=True, kw_only=True)
class Seam(Registry, Generic[SectionT]):
    """One seam. It stands in the annotation of the run file's field. `key` chooses the thing by name."""

    base: type[SectionT]
    key: str
    default: str
    on_resume: Literal["kept", "bits", "free"] = "kept"  # own keys of a resumed run, see infra.resuming
    _unread: list[type[SectionT]] = dataclass_field(default_factory=list, compare=False, repr=False)

    def accepts(self, found: type) -> bool:
        return issubclass(found, self.base)

    @property
    def expected(self) -> str:
        return f"a class is expected that extends {self.base.__name__}"

    def class_of(self, name: str) -> type[SectionT]:
        """Return the settings of our own thing of this name."""
        found: type[SectionT] = self.own_class(name)
        return found

    def own_fields(self, kind: type[SectionT]) -> dict[str, FieldInfo]:
        """Return the fields that not all things have, or that this one has another default for."""
        base = self.base.model_fields
        return {
            name: field for name, field in kind.model_fields.items()
            if name not in base or base[name].default != field.default
        }  # fmt: skip

    def default_section(self) -> SectionT:
        """Return the section of a run file that does not mention it."""
        return self.class_of(self.default).model_validate({})

    def read(self, data: Mapping[str, Any]) -> SectionT:
        """Return the section as these keys set it up, with all code that it needs."""
        return self._class_for(data, load=True).model_validate(data, context=LOAD)

    def loaded(self, section: SectionT) -> SectionT:
        """Return the section with its own keys checked; it may import code that is not ours."""
        if not isinstance(section, self._unread_class()):
            return section
        data = section.model_dump()
        try:
            return self.read(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadImport(f"{self.word} {data[self.key]}: {where}: {first['msg']}") from error

    def _class_for(self, data: Mapping[str, Any], *, load: bool) -> type[SectionT]:
        where, name = data.get(IMPORT), data.get(self.key, self.default)
        if where is not None:
            return self._at(where) if load and isinstance(where, str) else self._unread_class()
        own = self.built_in()
        if name in own:
            return self.class_of(name)
        if not load:
            return self._unread_class()
        installed = self.installed()
        if isinstance(name, str) and name in installed:
            return self._at(installed[name], key=self.key)
        raise _refusal(self.key, name, _not_one_of(name, [*own, *sorted(installed)]))

    def _at(self, where: str, key: str = IMPORT) -> type[SectionT]:
        try:
            return self.class_at(where)
        except BadImport as error:
            raise _refusal(key, where, str(error)) from None

    def _unread_class(self) -> type[SectionT]:
        """Return the section's class that keeps the keys of a thing that is not loaded."""
        if not self._unread:
            body = {
                "model_config": ConfigDict(extra="allow"),
                "__module__": self.base.__module__,
                "is_read": False,
                "__annotations__": {"is_read": "ClassVar[bool]"},
            }
            made = type(f"Unread{self.base.__name__}", (self.base,), body)
            self._unread.append(cast("type[SectionT]", made))
        return self._unread[0]

    def chosen_class(self, data: Any) -> type[SectionT]:
        """Return the class of a section's keys, for messages; the base if it can't be told."""
        if isinstance(data, str):
            data = {self.key: data}
        try:
            return self._class_for(data if isinstance(data, dict) else {}, load=True)
        except (ValidationError, TypeError):
            return self.base

    def _choose(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            value = {self.key: value}
        if not isinstance(value, dict):
            return value  # the section's own error says more
        kind = self._class_for(value, load=bool(info.context and info.context.get("load")))
        given = {
            key: one for key, one in value.items()
            if one is not None or not self._is_foreign(key, kind)
        }  # fmt: skip
        if isinstance(where := given.get(IMPORT), str):
            name = where.rpartition(":")[2]
            if given.setdefault(self.key, name) != name:
                already = f"{IMPORT} chooses the {self.word} already: leave {self.key} out"
                raise _refusal(self.key, given[self.key], already)
        if foreign := [key for key in given if self._is_foreign(key, kind)]:
            own = self.own_fields(kind)
            has = f"; it has {', '.join(own)}" if own else ""
            raise ValueError(f"{given.get(self.key, self.default)} has no {' and no '.join(foreign)}{has}")
        try:
            return kind.model_validate(given, context=info.context)
        except ValueError:
            raise
        except Exception as error:  # the user's own code failed
            raise ValueError(f"{given.get(self.key, self.default)} can't be set up: {said(error)}") from error

    def _is_foreign(self, key: Any, kind: type[SectionT]) -> bool:
        """Whether another thing of ours has this key, and this one has not."""
        if key in keys_of(kind) or kind.model_config.get("extra") == "allow":
            return False
        return any(key in keys_of(self.class_of(name)) for name in self.built_in())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._choose, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        """Return the schema of the section by name; a string alone is the name, too."""
        from pydantic import TypeAdapter

        own = {name: self.class_of(name) for name in self.built_in()}
        found = []
        for name, kind in own.items():
            one = handler(TypeAdapter(kind).core_schema)
            one = handler.resolve_ref_schema(one)
            one["properties"][self.key] = {"const": name}
            if name != self.default:
                one["required"] = [self.key]
            found.append(one)
        where = {IMPORT: {"type": "string", "description": SeamSection.model_fields["imported"].description}}
        foreign = {"type": "object", "properties": where, "required": [IMPORT]}
        return {"anyOf": [*found, foreign, {"type": "string"}]}


def seam_of(field: FieldInfo) -> Seam[Any] | None:
    """Return the seam that a run file's field has; None if it has none."""
    inner = [one for kind in get_args(field.annotation) for one in getattr(kind, "__metadata__", ())]
    return next((one for one in (*field.metadata, *inner) if isinstance(one, Seam)), None)


def _not_one_of(name: object, names: list[str]) -> str:
    close = difflib.get_close_matches(name[:80], names, n=1) if isinstance(name, str) else []
    expected = " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))
    return f"{shown(name)} is not one of {expected}{f'; did you mean {close[0]!r}?' if close else ''}"


def _refusal(key: str, given: object, message: str) -> ValidationError:
    error = PydanticCustomError("value_error", "{message}", {"message": message})
    return ValidationError.from_exception_data("section", [{"type": error, "loc": (key,), "input": given}])
