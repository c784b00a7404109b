"""Names of hosts and labels of actions, as the original has them."""

from __future__ import annotations

from typing import Any

from vecenv.cage.challenge4.rules.codes import (
    ACTION_FAMILY,
    ACTION_SOURCE,
    ACTION_TARGET,
    ALLOW,
    BLOCK,
    FAMILY_NAMES,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    MONITOR,
    NUM_ACTIONS,
    SLEEP,
)

__all__ = ["ZONE_NAMES", "action_labels", "host_name"]

ZONE_NAMES = (
    "restricted_zone_a_subnet",
    "operational_zone_a_subnet",
    "restricted_zone_b_subnet",
    "operational_zone_b_subnet",
    "contractor_network_subnet",
    "public_access_zone_subnet",
    "admin_network_subnet",
    "office_network_subnet",
    "internet_subnet",
)


def host_name(host: int) -> str:
    """Return the name of a host, 16 * subnet + k."""
    subnet, k = divmod(host, HOSTS_PER_SUBNET)
    kind, number = ("user", k) if k < FIRST_SERVER else ("server", k - FIRST_SERVER)
    return f"{ZONE_NAMES[subnet]}_{kind}_host_{number}"


def action_labels(agent: int, mask: Any = None) -> list[str]:
    """Return what each action of a blue agent does.

    Args:
        agent: 0 to 4.
        mask: bool (actions,), or longer; those that are false get the prefix "[Invalid] ".
    """
    labels = []
    for index in range(NUM_ACTIONS[agent]):
        family, target = int(ACTION_FAMILY[agent, index]), int(ACTION_TARGET[agent, index])
        name = FAMILY_NAMES[family]
        if family in (ALLOW, BLOCK):
            source = int(ACTION_SOURCE[agent, index])
            label = f"{name}Zone {ZONE_NAMES[target]} <- {ZONE_NAMES[source]}"
        elif family in (SLEEP, MONITOR):
            label = name
        else:
            label = f"{name} {host_name(target)}"
        labels.append(label if mask is None or mask[index] else f"[Invalid] {label}")
    return labels
