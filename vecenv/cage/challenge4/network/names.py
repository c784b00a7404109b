"""Names of hosts and labels of actions, as the original has them."""

from __future__ import annotations

from typing import Any

from vecenv.cage.challenge4.rules.codes import (
    ACTION_FAMILY,
    ACTION_SOURCE,
    ACTION_TARGET,
    ALLOW,
    BLOCK,
    BLUE_SUBNETS,
    FAMILY_NAMES,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    MESSAGE_BITS,
    MONITOR,
    NUM_ACTIONS,
    NUM_BLUE,
    SLEEP,
    SORTED,
)

__all__ = ["ZONE_NAMES", "action_labels", "host_name", "observation_labels"]

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


def observation_labels(agent: int) -> list[str]:
    """Return what each of the 92 or 210 values is that a blue agent, 0 to 4, observes."""
    labels, zones = ["phase"], [ZONE_NAMES[zone] for zone in SORTED]
    for subnet in BLUE_SUBNETS[agent]:
        labels += [f"{ZONE_NAMES[subnet]}: zone is {zone}" for zone in zones]
        labels += [f"traffic {ZONE_NAMES[subnet]} <- {zone} is blocked" for zone in zones]
        labels += [f"policy does not link {ZONE_NAMES[subnet]} and {zone}" for zone in zones]
        places = (*range(FIRST_SERVER, HOSTS_PER_SUBNET), *range(FIRST_SERVER))
        for event in ("process", "connection"):
            hosts = [host_name(HOSTS_PER_SUBNET * subnet + place) for place in places]
            labels += [f"{event} event on {host}" for host in hosts]
    senders = [sender for sender in range(NUM_BLUE) if sender != agent]
    return labels + [f"bit {k} from blue_agent_{s}" for s in senders for k in range(MESSAGE_BITS)]
