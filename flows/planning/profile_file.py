"""Keeps profiles in files: one for each run file's name, model, machine and settings, in the local home.

.streamrl/profiles/<run>-<hash of what the figures depend on>.yaml
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flows.planning.profile_identity import check_profile, identity_differences, profile_identity
from infra.errors import Explained
from infra.files.writing import write_whole
from infra.stack.paths import StackPaths
from schemas.profile import PROFILE_FORMAT, Profile, ProfileIdentity
from schemas.runspec import RunSpec
from schemas.shortening import printable, shown
from schemas.yaml_text import LARGEST_FILE, BadYaml, read_yaml

_MOST_PROBLEMS = 5


class BadProfile(Explained):
    """A profile's file can't be read; the message says where and why."""

    lasting = True


def profiles_folder() -> Path:
    """Return the folder for profiles of this machine."""
    return StackPaths.locate().home / "profiles"


def usual_place(spec: RunSpec, identity: ProfileIdentity) -> Path:
    """Return the file that a profile of a run file is kept in, if nobody says another."""
    kept = identity.model_dump_json(exclude={"root", "parameters"})
    return profiles_folder() / f"{spec.run}-{hashlib.blake2b(kept.encode(), digest_size=6).hexdigest()}.yaml"


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile, whole or not at all: as JSON if the name says so, else as YAML."""
    data = profile.model_dump(mode="json")
    as_json = file.suffix == ".json"
    text = json.dumps(data) if as_json else yaml.safe_dump(data, sort_keys=False, width=4000)
    write_whole(file, text)


def read_profile(file: Path) -> Profile:
    """Return the profile in a file. Raises BadProfile."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise BadProfile(f"{file}: it is larger than {LARGEST_FILE:,} bytes, so it is no profile")
        return _checked(file, _data(file, raw.decode()))
    except FileNotFoundError:
        raise BadProfile(f"{file}: no such file; `streamrl profile RUNFILE -o {file}` makes one") from None
    except OSError as error:
        raise BadProfile(f"{file}: can't be read: {error}") from None
    except UnicodeDecodeError:
        raise BadProfile(f"{file}: it is not UTF-8 text") from None


def _data(file: Path, text: str) -> Any:
    try:
        return json.loads(text) if file.suffix == ".json" else read_yaml(text).data
    except BadYaml as error:
        raise BadProfile(f"{file}{f':{error.line}' if error.line else ''}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"{file}: not valid JSON: {printable(str(error), 200)}") from None


def _checked(file: Path, data: Any) -> Profile:
    if not isinstance(data, dict) or "format" not in data:
        raise BadProfile(f"{file}: it is no profile: it has no field `format`")
    if data["format"] != PROFILE_FORMAT:
        raise BadProfile(
            f"{file}: its format is {shown(data['format'])}; this StreamRL reads format {PROFILE_FORMAT}. "
            "Measure again with `streamrl profile RUNFILE --again`"
        )
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']} (found {shown(one['input'])})"
            for one in error.errors(include_url=False)
        ]
        more = f"\n  and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise BadProfile(
            f"{file}: it can't be used as a profile:\n  " + "\n  ".join(problems[:_MOST_PROBLEMS]) + more
        ) from None


def profile_for(spec: RunSpec, model: Path, *, runfile: str, file: Path | None = None) -> Profile | None:
    """Return the profile of a run file: the one in `file`, else the one in its usual place, if there is one.

    Else the newest one that was made with other sizes, such as slots: a run that follows a plan changes them.
    Raises WrongProfile if it is of something else, and BadProfile if it can't be read.
    """
    wanted = profile_identity(spec, model)
    place = file or usual_place(spec, wanted)
    if file is None and not place.is_file():
        return _with_other_sizes(spec, wanted)
    profile = read_profile(place)
    check_profile(profile, wanted, named=str(place), runfile=runfile)
    return profile


def _with_other_sizes(spec: RunSpec, wanted: ProfileIdentity) -> Profile | None:
    found = None
    for file in profiles_folder().glob(f"{spec.run}-*.yaml"):
        with suppress(BadProfile):  # of another version, or of another run whose name goes on
            profile = read_profile(file)
            if not identity_differences(profile.identity, wanted):
                found = max(found or profile, profile, key=lambda one: one.made_at)
    return found
