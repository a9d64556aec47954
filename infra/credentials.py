"""Keeps our credentials from the user's code: rewards, tasks and model builders run without them.

STREAMRL_TASK_ENV    names of variables, separated by ',', that such code gets nevertheless: a key of its own
                     for a model that judges, say

Only the environment of a child process is cleared. Code that runs as the same user may still read that user's
files. To prevent this, run generators as another user or in a container.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping

ALLOWED = "STREAMRL_TASK_ENV"
_OURS = (
    "STREAMRL_KAFKA_*", "STREAMRL_S3_*", "STREAMRL_SIGNING_KEY", "STREAMRL_TRUSTED_KEYS", "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_*DATABASE*",
)  # fmt: skip
_STORES = ("AWS_*", "FSSPEC_*", "GOOGLE_*", "GCE_*", "AZURE_*", "ROOT_ACCESS_KEY")
_OTHERS = (
    "*PASSWORD*", "*PASSWD*", "*SECRET*", "*PRIVATE_KEY*", "*CREDENTIAL*", "*_TOKEN", "*_KEY", "*APIKEY",
    "*_AUTH", "*COOKIE*", "KUBECONFIG", "SSH_AUTH_SOCK", "KRB5CCNAME", "MSK_*",
)  # fmt: skip


def is_secret(name: str) -> bool:
    """Return whether a variable is a credential, judging by its name."""
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in (*_OURS, *_STORES, *_OTHERS))


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the credentials in an environment that a task's code does not get."""
    allowed = {name.strip() for name in environment.get(ALLOWED, "").split(",")}
    return sorted(name for name in environment if is_secret(name) and name not in allowed)


def without_credentials(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of an environment for code that is not ours, without credentials."""
    dropped = set(secrets_in(environment))
    return {name: value for name, value in environment.items() if name not in dropped}


def unset_credentials(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words to put before a command to run it without credentials: `env -u NAME …`, or none."""
    names = secrets_in(environment)
    return ["env", *(word for name in names for word in ("-u", name))] if names else []
