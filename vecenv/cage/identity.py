"""The tables and rules behind a score, policy or state: other scores are not comparable."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["CAGE4_RULES_VERSION", "RULES_VERSION", "describe_identity", "warn_of_other"]

RULES_VERSION = 1
"""Version of CAGE Challenge 2's simulator.

The version is raised when equal tables, actions and random numbers no longer give equal
observations and rewards: scores of different versions are not comparable.
"""

CAGE4_RULES_VERSION = 1
"""Version of CAGE Challenge 4's simulator, raised as `RULES_VERSION` is."""


def describe_identity(identity: Mapping[str, Any]) -> str:
    """Return the result of `Scenario.identity` in words.

    Example:
        >>> describe_identity({"scenario": "Harbour", "rules": "harbour", "rules_version": 1})
        "'Harbour' with 'harbour' rules, version 1"
    """
    scenario, rules = identity.get("scenario"), identity.get("rules")
    return f"{scenario!r} with {rules!r} rules, version {identity.get('rules_version')}"


def warn_of_other(what: str, made_for: Any, own: Mapping[str, Any], stacklevel: int = 2) -> None:
    """Warn if an object is used with other tables or rules than those it was made for.

    Args:
        what: Name of the object; the warning begins with it.
        made_for: Identity (`Scenario.identity`) of the scenario that it was made for. Without one
            (None, empty, no mapping) there is no warning: old files and envs without a scenario.
        own: Identity of the scenario that it is used with.
        stacklevel: Stack level of the caller, as `warnings.warn` counts.
    """
    if not isinstance(made_for, Mapping) or not made_for:
        return
    if all(made_for.get(name) == value for name, value in own.items()):
        return
    names = ("scenario", "rules", "rules_version")
    other = "" if any(made_for.get(name) != own[name] for name in names) else " and other tables"
    warnings.warn(
        f"{what} was made for {describe_identity(made_for)}{other}, and is used in "
        f"{describe_identity(own)}: scores under the two are not comparable",
        stacklevel=stacklevel + 1,
    )
