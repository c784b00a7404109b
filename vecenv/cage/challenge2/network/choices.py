"""What a blue agent that remembers chooses from: fewer choices than the env has actions."""

from __future__ import annotations

from typing import NamedTuple

from vecenv.cage.challenge2.network.scenario import (
    Decoy,
    Host,
    Scenario,
    action_index,
)

__all__ = ["Choice", "blue_choices"]


class Choice(NamedTuple):
    """Something that blue may choose to do.

    Attributes:
        name: "Sleep", "Analyse", "Remove", "Restore", or "Decoy": place the next decoy.
        host: Name of the host; None for Sleep.
        actions: Numbers of the env's actions it stands for: one, or for "Decoy" one per decoy of
            the host, in the order in which they are placed.
    """

    name: str
    host: str | None
    actions: tuple[int, ...]


def blue_choices(scenario: Scenario) -> tuple[Choice, ...]:
    """Return what a blue agent chooses from: Sleep, and four things on hosts that can fall.

    Decoys are placed in the order of red's preference for the exploits they catch; only those count
    that a fresh host takes, and of two that open the same port the first.

    Example:
        >>> from vecenv.cage import cage2_scenario
        >>> choices = blue_choices(cage2_scenario())
        >>> len(choices), choices[-1].name, choices[-1].host, choices[0].actions
        (44, 'Decoy', 'User3', (0,))
    """
    hosts = [host for host in scenario.hosts if _can_fall(host, scenario)]
    choices = [Choice("Sleep", None, (action_index(scenario, "Sleep"),))]
    for name in ("Analyse", "Remove", "Restore"):
        choices += [Choice(name, h.name, (action_index(scenario, name, h.name),)) for h in hosts]
    for host in hosts:
        decoys = _decoys_in_order(host, scenario)
        if decoys:
            actions = tuple(action_index(scenario, decoy.name, host.name) for decoy in decoys)
            choices.append(Choice("Decoy", host.name, actions))
    return tuple(choices)


def _can_fall(host: Host, scenario: Scenario) -> bool:
    """Whether red does not hold the host from the start, and some exploit works on it."""
    offered = {(service.port, service.process) for service in host.services}
    return host.name != scenario.foothold and any(
        (exploit.port, exploit.process) in offered
        and not (exploit.is_brute_force and host.brute_force_user is None)
        for exploit in scenario.exploits
    )


def _decoys_in_order(host: Host, scenario: Scenario) -> list[Decoy]:
    """Return the decoys that a fresh host takes, those first that catch what red likes best."""
    rank = {(e.port, e.process): number for number, e in enumerate(scenario.exploits)}
    in_use = {service.port for service in host.services}
    found = [
        decoy
        for decoy in scenario.decoys
        if decoy.os in (None, host.os)
        and decoy.checks not in in_use
        and decoy.opens not in in_use
        and (decoy.opens, decoy.process) in rank
    ]
    found.sort(key=lambda decoy: rank[decoy.opens, decoy.process])
    return [d for k, d in enumerate(found) if d.opens not in {other.opens for other in found[:k]}]
