"""One environment spelled out: what is true, what blue sees, what was just done, in words."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.network.state import decode
from vecenv.cage.challenge2.rules.codes import (
    ACTIVITY_BITS,
    ACTIVITY_EXPLOIT,
    ACTIVITY_SCAN,
    BELIEF_BITS,
    BELIEF_PRIVILEGED,
    BELIEF_UNKNOWN,
    BELIEF_USER,
    BITS_PER_HOST,
    RED_ACTION_NAMES,
    RED_AGENT_NAMES,
    RED_SLEEP,
    SUCCESS_NAMES,
    SWEEP,
)

__all__ = ["Deed", "Episode", "HostView", "Snapshot", "draw_addresses", "take_snapshot"]

ACCESS_NAMES = ("None", "User", "Privileged")
ACTIVITY_NAMES = {0: "None", ACTIVITY_SCAN: "Scan", ACTIVITY_EXPLOIT: "Exploit"}
BELIEF_NAMES = {
    0: "No",
    BELIEF_UNKNOWN: "Unknown",
    BELIEF_USER: "User",
    BELIEF_PRIVILEGED: "Privileged",
}
_OUTCOMES = {"true": ", succeeded", "false": ", failed", "unknown": ""}
_NETWORK = ipaddress.ip_network("10.0.0.0/16")
_ADDRESS_BITS = 32


@dataclass(frozen=True, slots=True)
class HostView:
    """One host.

    Attributes:
        name, subnet, os: As in the scenario.
        activity: What blue saw there in this step: "None", "Scan" or "Exploit".
        compromised: What blue believes: "No", "Unknown", "User" or "Privileged".
        access: Red's best session there: "None", "User" or "Privileged".
        oldest_access: That of red's oldest session, which the original's table shows.
        num_sessions: How many red has there.
        is_known: Whether red knows its address.
        is_scanned: Whether red has seen its ports.
        has_malware: Whether a dropped tool is on disk.
        decoys: Names of the decoys in place.
    """

    name: str
    subnet: str
    os: str
    activity: str
    compromised: str
    access: str
    oldest_access: str
    num_sessions: int
    is_known: bool
    is_scanned: bool
    has_malware: bool
    decoys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deed:
    """What one side did in the latest step.

    Attributes:
        action: Its name.
        target: Host or subnet it was done on, or None.
        success: "true", "false" or "unknown".
        exploit: Name of the exploit red used, or "".
    """

    action: str
    target: str | None
    success: str
    exploit: str = ""

    def __str__(self) -> str:
        words = self.action if self.target is None else f"{self.action} {self.target}"
        return f"{words} ({self.exploit})" if self.exploit else words

    def with_outcome(self) -> str:
        """Return it in words, with what came of it if that is known."""
        return f"{self}{_OUTCOMES[self.success]}"


@dataclass(frozen=True, slots=True)
class Episode:
    """Where an env stands in its episode.

    Attributes:
        length: At which step it is truncated.
        total: Sum of its rewards so far.
        key: Numbers that tell this episode from others, from which its addresses are drawn.
    """

    length: int
    total: float
    key: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One environment after a step.

    Attributes:
        scenario: Its tables.
        episode: See `Episode`.
        step: Steps made in this episode.
        reward: Of the latest step.
        red_agent: Name of red's agent.
        blue, red: What they did in the latest step; None at the start of an episode.
        green_target: Host that green scanned in it, or None.
        is_service_running: Whether the operational service is.
        known_subnets: Those red has learnt of.
        hosts: In the order of the scenario.
    """

    scenario: Scenario
    episode: Episode
    step: int
    reward: float
    red_agent: str
    blue: Deed | None
    red: Deed | None
    green_target: str | None
    is_service_running: bool
    known_subnets: tuple[str, ...]
    hosts: tuple[HostView, ...]


def take_snapshot(state: Any, scenario: Scenario, episode: Episode) -> Snapshot:
    """Spell out one environment.

    Args:
        state: STATE_DTYPE record; copied from.
        scenario: Whose state it is.
        episode: See `Episode`.
    """
    has_begun = int(state["step"]) > 0
    green = int(state["green_target"])
    return Snapshot(
        scenario=scenario,
        episode=episode,
        step=int(state["step"]),
        reward=int(state["reward10"]) / 10,
        red_agent=RED_AGENT_NAMES[int(state["red_agent"])],
        blue=_blue_deed(state, scenario) if has_begun else None,
        red=_red_deed(state, scenario) if has_begun else None,
        green_target=scenario.hosts[green].name if has_begun and green >= 0 else None,
        is_service_running=bool(state["ot_running"]),
        known_subnets=tuple(
            name for k, name in enumerate(scenario.subnets) if int(state["known_subnet"]) >> k & 1
        ),
        hosts=_host_views(state, scenario),
    )


def _host_views(state: Any, scenario: Scenario) -> tuple[HostView, ...]:
    true = decode(np.asarray(state), scenario)
    bits = int(state["obs_bits"])
    views = []
    for index, host in enumerate(scenario.hosts):
        seen = bits >> BITS_PER_HOST * index
        sessions = sum(int(true[name][index]) for name in ("n_removable", "n_stuck", "n_priv"))
        decoys = int(true["decoys"][index])
        views.append(
            HostView(
                host.name,
                host.subnet,
                host.os,
                ACTIVITY_NAMES.get(seen & ACTIVITY_BITS, "None"),
                BELIEF_NAMES[seen & BELIEF_BITS],
                ACCESS_NAMES[true["access"][index]],
                ACCESS_NAMES[true["table_access"][index]],
                sessions,
                bool(true["known_ip"][index]),
                bool(true["table_scanned"][index]),
                bool(true["malware"][index]),
                tuple(d.name for k, d in enumerate(scenario.decoys) if decoys >> k & 1),
            )
        )
    return tuple(views)


def _blue_deed(state: Any, scenario: Scenario) -> Deed:
    action = blue_actions(scenario)[int(state["blue_action"])]
    return Deed(action.name, action.host, SUCCESS_NAMES[int(state["blue_success"])])


def _red_deed(state: Any, scenario: Scenario) -> Deed:
    kind, target = int(state["red_type"]), int(state["red_target"])
    names = scenario.subnets if kind == SWEEP else [host.name for host in scenario.hosts]
    has_target = kind != RED_SLEEP and 0 <= target < len(names)
    exploit = int(state["red_exploit"])
    return Deed(
        RED_ACTION_NAMES[kind],
        names[target] if has_target else None,
        SUCCESS_NAMES[int(state["red_success"])],
        scenario.exploits[exploit].name if exploit >= 0 else "",
    )


def draw_addresses(
    scenario: Scenario, key: tuple[int, ...]
) -> tuple[dict[str, str], dict[str, str]]:
    """Draw the addresses of an episode: distinct blocks of 10.0.0.0/16, distinct hosts in each.

    They stand in tables for people and influence nothing, so they are drawn when a table is.

    Args:
        scenario: Whose hosts and subnets.
        key: Non-negative integers that say which episode; equal ones give equal addresses.

    Returns:
        The blocks by subnet and the addresses by host.
    """
    generator = np.random.default_rng(key)
    names = {s: [h.name for h in scenario.hosts if h.subnet == s] for s in scenario.subnets}
    host_bits = max(4, max(len(hosts) + 1 for hosts in names.values()).bit_length())
    num_blocks = _NETWORK.num_addresses >> host_bits
    blocks = generator.choice(num_blocks, len(scenario.subnets), replace=False)
    subnets, hosts = {}, {}
    for subnet, block in zip(scenario.subnets, blocks.tolist(), strict=True):
        first = _NETWORK.network_address + (block << host_bits)
        subnets[subnet] = f"{first}/{_ADDRESS_BITS - host_bits}"
        usable = (1 << host_bits) - 2  # neither the first nor the last of a block
        places = generator.choice(usable, len(names[subnet]), replace=False)
        for host, place in zip(names[subnet], places.tolist(), strict=True):
            hosts[host] = str(first + 1 + place)
    return subnets, hosts
