"""One environment's state in words, and as text tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.cage.challenge2.network.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.network.state import decode
from vecenv.cage.challenge2.rules import codes
from vecenv.cage.evaluation import as_text

__all__ = ["Deed", "HostView", "Snapshot", "take_snapshot", "to_text"]

ACCESS_NAMES = ("None", "User", "Privileged")
ACTIVITY_NAMES = {0: "None", codes.ACTIVITY_SCAN: "Scan", codes.ACTIVITY_EXPLOIT: "Exploit"}
BELIEF_NAMES = {
    0: "No",
    codes.BELIEF_UNKNOWN: "Unknown",
    codes.BELIEF_USER: "User",
    codes.BELIEF_PRIVILEGED: "Privileged",
}
_OUTCOMES = {"true": ", succeeded", "false": ", failed", "unknown": ""}


@dataclass(frozen=True, slots=True)
class HostView:
    """One host.

    Attributes:
        name, subnet, os: As in the scenario.
        activity: Activity that blue saw in this step: "None", "Scan" or "Exploit".
        compromised: Blue's belief: "No", "Unknown", "User" or "Privileged".
        access: Red's highest access: "None", "User" or "Privileged".
        is_known: Whether red knows its address.
        is_scanned: Whether red has seen its ports.
        decoys: Names of the decoys in place.
    """

    name: str
    subnet: str
    os: str
    activity: str
    compromised: str
    access: str
    is_known: bool
    is_scanned: bool
    decoys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deed:
    """The action of one side in the latest step.

    Attributes:
        action: Name of the action.
        target: Its target, a host or subnet, or None.
        success: "true", "false" or "unknown".
        exploit: Name of the exploit that red used, or "".
    """

    action: str
    target: str | None
    success: str
    exploit: str = ""

    def __str__(self) -> str:
        words = self.action if self.target is None else f"{self.action} {self.target}"
        return f"{words} ({self.exploit})" if self.exploit else words

    def with_outcome(self) -> str:
        """Return the action in words, with its outcome if known."""
        return f"{self}{_OUTCOMES[self.success]}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One environment after a step.

    Attributes:
        scenario: Its tables.
        length: Number of steps after which its episode is truncated.
        total: Sum of the rewards so far.
        step: Steps made in this episode.
        reward: Reward of the latest step.
        red_agent: Name of red's agent.
        blue, red: Their actions in the latest step; None at the start of an episode.
        green_target: Host that green scanned in the latest step, or None.
        is_service_running: Whether the operational service is running.
        known_subnets: Names of the subnets that red knows.
        hosts: The hosts, in the order of the scenario.
    """

    scenario: Scenario = field(repr=False)
    length: int
    total: float
    step: int
    reward: float
    red_agent: str
    blue: Deed | None
    red: Deed | None
    green_target: str | None
    is_service_running: bool
    known_subnets: tuple[str, ...]
    hosts: tuple[HostView, ...]


def take_snapshot(state: Any, scenario: Scenario, length: int, total: float) -> Snapshot:
    """Describe one environment in words.

    Args:
        state: STATE_DTYPE record; its values are copied.
        scenario: Scenario of the state.
        length, total: See `Snapshot`.
    """
    has_begun, green = int(state["step"]) > 0, int(state["green_target"])
    action, outcome = blue_actions(scenario)[int(state["blue_action"])], int(state["blue_success"])
    blue = Deed(action.name, action.host, codes.SUCCESS_NAMES[outcome])
    return Snapshot(
        scenario=scenario,
        length=length,
        total=total,
        step=int(state["step"]),
        reward=int(state["reward10"]) / 10,
        red_agent=codes.RED_AGENT_NAMES[int(state["red_agent"])],
        blue=blue if has_begun else None,
        red=_red_deed(state, scenario) if has_begun else None,
        green_target=scenario.hosts[green].name if has_begun and green >= 0 else None,
        is_service_running=bool(state["ot_running"]),
        known_subnets=tuple(
            name for k, name in enumerate(scenario.subnets) if int(state["known_subnet"]) >> k & 1
        ),
        hosts=tuple(_host_views(state, scenario)),
    )


def _host_views(state: Any, scenario: Scenario) -> Iterator[HostView]:
    true = decode(np.asarray(state), scenario)
    for index, host in enumerate(scenario.hosts):
        seen = int(state["obs_bits"]) >> codes.BITS_PER_HOST * index
        decoys = int(true["decoys"][index])
        yield HostView(
            name=host.name,
            subnet=host.subnet,
            os=host.os,
            activity=ACTIVITY_NAMES.get(seen & codes.ACTIVITY_BITS, "None"),
            compromised=BELIEF_NAMES[seen & codes.BELIEF_BITS],
            access=ACCESS_NAMES[true["access"][index]],
            is_known=bool(true["known_ip"][index]),
            is_scanned=bool(true["table_scanned"][index]),
            decoys=tuple(d.name for k, d in enumerate(scenario.decoys) if decoys >> k & 1),
        )


def _red_deed(state: Any, scenario: Scenario) -> Deed:
    kind, target = int(state["red_type"]), int(state["red_target"])
    names = scenario.subnets if kind == codes.SWEEP else [host.name for host in scenario.hosts]
    has_target = kind != codes.RED_SLEEP and 0 <= target < len(names)
    exploit = int(state["red_exploit"])
    return Deed(
        codes.RED_ACTION_NAMES[kind],
        names[target] if has_target else None,
        codes.SUCCESS_NAMES[int(state["red_success"])],
        scenario.exploits[exploit].name if exploit >= 0 else "",
    )


_STYLES = {
    **dict.fromkeys(("Scan", "User"), "yellow"),
    **dict.fromkeys(("Exploit", "Privileged"), "bold red"),
    **dict.fromkeys(("None", "No"), "dim"),
    "Unknown": "magenta",
}


def to_text(snapshot: Snapshot) -> str:
    """Return truth beside blue's view, and the latest actions; 80 columns wide, in colours."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("Host", "Access", "Red knows", "Activity", "Compromised", "Decoys"):
        table.add_column(name, no_wrap=name != "Decoys")
    scenario = snapshot.scenario
    for subnet in scenario.subnets:
        table.add_row(Text(subnet, style="bold"))
        for host in snapshot.hosts:
            if host.subnet == subnet:
                knows = "ports" if host.is_scanned else "address" if host.is_known else ""
                words = (host.access, knows, host.activity, host.compromised)
                cells = [Text(word, style=_STYLES.get(word, "")) for word in words]
                decoys = ", ".join(name.removeprefix("Decoy") for name in host.decoys)
                table.add_row(Text(f"  {host.name}"), *cells, Text(decoys))
        table.add_section()
    lines = [
        Text.assemble((f"{side}: ", f"bold {side.lower()}"), deed.with_outcome() if deed else "")
        for side, deed in (("Blue", snapshot.blue), ("Red", snapshot.red))
    ]
    if snapshot.green_target is not None:
        lines.append(Text(f"Green: scanned {snapshot.green_target}"))
    if not snapshot.is_service_running:
        service = scenario.operational_service.host
        lines.append(Text(f"The operational service on {service} is stopped", style="bold red"))
    facts = (
        f"red agent {snapshot.red_agent}, step {snapshot.step}/{snapshot.length}, "
        f"reward {snapshot.reward:.1f}, total {snapshot.total:.1f}"
    )
    title = Text(f"{scenario.name}, {scenario.rules.name} rules", "bold")
    return as_text(Group(title, Text(facts), table, *lines), "standard")
