"""By which tables and rules something was made: scores of others are not comparable."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["CAGE4_RULES_VERSION", "RULES_VERSION", "describe_identity", "warn_of_other"]

RULES_VERSION = 1
"""Version of CAGE Challenge 2's simulator.

It is raised when the same tables, actions and random numbers no longer give the same observations
and rewards: scores of different versions are not comparable.
"""

CAGE4_RULES_VERSION = 1
"""The same of CAGE Challenge 4's simulator."""


def describe_identity(identity: Mapping[str, Any]) -> str:
    """Say in words what `Scenario.identity` has returned.

    Example:
        >>> describe_identity({"scenario": "Harbour", "rules": "harbour", "rules_version": 1})
        "'Harbour' with 'harbour' rules, version 1"
    """
    scenario, rules = identity.get("scenario"), identity.get("rules")
    return f"{scenario!r} with {rules!r} rules, version {identity.get('rules_version')}"


def warn_of_other(what: str, made_for: Any, own: Mapping[str, Any], stacklevel: int = 2) -> None:
    """Warn if something was made for other tables or rules than those it is to be used with.

    Args:
        what: What was made; the sentence begins with it.
        made_for: What `Scenario.identity` returned then. None, or anything else that says nothing,
            is passed over: files from before it was kept, envs without a scenario.
        own: The same of what it is to be used with.
        stacklevel: Of the caller, as `warnings.warn` counts.
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
