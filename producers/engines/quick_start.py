"""Leaves out of vLLM's start on CPUs the work that serves nothing there: a third of its processor time."""

from __future__ import annotations

import sys
from types import ModuleType

_CHANGES = "vllm.env_override"


def leave_compiler_unchanged() -> None:
    """Keep vLLM from importing all of torch's compiler to change it: nothing is compiled on CPUs.

    To be called before vLLM is imported; later it does nothing.
    """
    if _CHANGES not in sys.modules:
        none = ModuleType(_CHANGES, "Nothing, in place of vLLM's changes to torch's compiler.")
        none._apply_constrain_to_fx_strides_patch = lambda: None  # type: ignore[attr-defined]  # others import it
        sys.modules[_CHANGES] = none
