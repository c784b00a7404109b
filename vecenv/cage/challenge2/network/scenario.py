"""A scenario as named tables: who is where, what listens, what attacks, what blue can place.

Plain data. `validate` refuses tables that contradict themselves, `tables` turns them into the
arrays that the kernels read, `cage2` holds the tables of CAGE Challenge 2.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FIRST_HOST",
    "NEXT_HOST",
    "RULES_VERSION",
    "BLinePlan",
    "Decoy",
    "Exploit",
    "Host",
    "MeanderPlan",
    "OperationalService",
    "PlanStep",
    "Rules",
    "Scenario",
    "ScenarioError",
    "Service",
    "TrafficRule",
    "describe_identity",
    "warn_of_other",
]

RULES_VERSION = 1
"""Version of the simulator.

It is raised when the same tables, actions and random numbers no longer give the same observations
and rewards: scores of different versions are not comparable.
"""

PRIVILEGED_USERS = ("root", "SYSTEM")

FIRST_HOST = "@first"
"""Target of a plan step: the user host drawn for the episode."""

NEXT_HOST = "@next"
"""Target of a plan step: the host that the one drawn for the episode leads to."""


class ScenarioError(ValueError):
    """A scenario contradicts itself; the message begins with the field."""


@dataclass(frozen=True, slots=True)
class Service:
    """One listening connection.

    Attributes:
        port: Local port.
        process: What kind of process it is recognised as ("ssh", "smb"); "" if as none, then no
            exploit works on it.
        user: Whom it runs as, and so whom a reverse shell through it runs as.
    """

    port: int
    process: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: Unique name.
        subnet: Name of the subnet it is in.
        os: Operating system; some decoys fit only one.
        value: What it costs blue per step that red is privileged here, a multiple of 0.1.
        services: Listening connections, in scan order.
        brute_force_user: User whose password can be guessed, or None: no brute force gets in.
        reveals: Hosts whose address red finds when it escalates here, besides this host and its
            subnet.
    """

    name: str
    subnet: str
    os: str
    value: float
    services: tuple[Service, ...]
    brute_force_user: str | None = None
    reveals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrafficRule:
    """Traffic from `source` gets into `target` only while red has a session on one of `via`."""

    source: str
    target: str
    via: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exploit:
    """One way in. Exploits are listed in red's order of preference, the largest weight first.

    Attributes:
        name: Unique name.
        weight: Red's preference.
        port: Port it goes through.
        process: Kind of process that must listen there.
        needs_one_of: Ports of which red must also know one to be open; () for none.
        is_brute_force: Guesses a password: leaves many events and a session that Remove cannot end.
    """

    name: str
    weight: float
    port: int
    process: str
    needs_one_of: tuple[int, ...] = ()
    is_brute_force: bool = False


@dataclass(frozen=True, slots=True)
class Decoy:
    """A fake service that blue can place.

    Attributes:
        name: Unique name.
        opens: Port it listens on.
        checks: Port that must be free on the host.
        process: Kind of process it passes for.
        os: Operating system it needs, or None for any.
    """

    name: str
    opens: int
    checks: int
    process: str
    os: str | None = None


@dataclass(frozen=True, slots=True)
class OperationalService:
    """The service whose loss hurts most: while stopped it costs `value` per step."""

    host: str
    value: float


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One red action of a plan.

    Attributes:
        action: "sweep", "scan", "exploit", "escalate" or "impact".
        target: Name of a subnet (sweep) or host; FIRST_HOST for the user host drawn for the
            episode, NEXT_HOST for the host that this one leads to.
    """

    action: str
    target: str


@dataclass(frozen=True, slots=True)
class BLinePlan:
    """The scripted red agent that goes straight for the operational service.

    Attributes:
        steps: The script, gone through from the first step; the last one is repeated.
        on_failure: For each step, the step to go on with when it has failed.
        next_hosts: Pairs (user host, host it leads to); the user host is drawn uniformly among
            them, once per episode.
        verify_step: Step that is not taken the first time if the scan before it came back empty;
            then the plan starts again at `restart_step`.
        restart_step: See `verify_step`.
    """

    steps: tuple[PlanStep, ...]
    on_failure: tuple[int, ...]
    next_hosts: tuple[tuple[str, str], ...]
    verify_step: int
    restart_step: int


@dataclass(frozen=True, slots=True)
class MeanderPlan:
    """The red agent that takes over all it can see.

    Subnets are swept in table order.

    Attributes:
        forget_first: Hosts it gives up after a failed exploit if it has escalated on one of them.
        forget_next: Hosts it gives up otherwise.
    """

    forget_first: tuple[str, ...]
    forget_next: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that differ between the original and its corrected version.

    Attributes:
        name: "faithful" or "debugged", or a name of your own.
        charges_user_access: A host costs its value when red has any session on it, not only a
            privileged one.
        remove_reports_last_shell: Remove succeeds iff it stopped the shell detected last on the
            host; else it always reports success.
        shell_before_scan: A detected shell is an exploit even amid a port scan.
    """

    name: str
    charges_user_access: bool = False
    remove_reports_last_shell: bool = False
    shell_before_scan: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """All tables. Observation, actions and states list hosts in the order of `hosts`.

    Attributes:
        name: What messages call it.
        subnets: Names.
        hosts: See `Host`.
        traffic: What does not pass between subnets; everything else does.
        exploits: See `Exploit`.
        decoys: See `Decoy`.
        operational_service: See `OperationalService`.
        foothold: Host on which red holds a privileged session that nothing can end.
        b_line: See `BLinePlan`.
        meander: See `MeanderPlan`.
        green_hosts: Hosts that the optional green agent scans.
        rules: See `Rules`.
        restore_cost: What a Restore costs blue, a multiple of 0.1.
        top_exploit_probability: How often red uses the candidate it prefers.
        detection_probability: How often a reverse shell is noticed.
        green_sleep_probability: How often green does nothing.
    """

    name: str
    subnets: tuple[str, ...]
    hosts: tuple[Host, ...]
    traffic: tuple[TrafficRule, ...]
    exploits: tuple[Exploit, ...]
    decoys: tuple[Decoy, ...]
    operational_service: OperationalService
    foothold: str
    b_line: BLinePlan
    meander: MeanderPlan
    green_hosts: tuple[str, ...]
    rules: Rules
    restore_cost: float = 1.0
    top_exploit_probability: float = 0.75
    detection_probability: float = 0.95
    green_sleep_probability: float = 0.5

    def host_index(self, name: str) -> int:
        """Return the row of a host in `hosts`."""
        return [host.name for host in self.hosts].index(name)

    def subnet_index(self, name: str) -> int:
        """Return the place of a subnet in `subnets`."""
        return self.subnets.index(name)

    def identity(self) -> dict[str, Any]:
        """Return what says by which tables and rules a score or a policy was made.

        Returns:
            "scenario" and "rules", their names; "rules_version", that of the simulator; "tables", a
            hash of all tables. Plain values, as JSON has them.
        """
        text = repr(self)
        if "..." in text:
            # A Ctrl-C in the `repr` of a dataclass may leave a note that this object is being
            # printed, and "..." for it from then on; there is none about a copy.
            text = repr(copy.deepcopy(self))
        return {
            "scenario": self.name,
            "rules": self.rules.name,
            "rules_version": RULES_VERSION,
            "tables": hashlib.sha256(text.encode()).hexdigest()[:16],
        }


def describe_identity(identity: Mapping[str, Any]) -> str:
    """Say in words what `Scenario.identity` has returned.

    Example:
        >>> describe_identity({"scenario": "Harbour", "rules": "harbour", "rules_version": 1})
        "'Harbour' with 'harbour' rules, version 1"
    """
    scenario, rules = identity.get("scenario"), identity.get("rules")
    return f"{scenario!r} with {rules!r} rules, version {identity.get('rules_version')}"


def warn_of_other(what: str, made_for: Any, scenario: Scenario, stacklevel: int = 2) -> None:
    """Warn if something was made for other tables or rules than those it is to be used with.

    Args:
        what: What was made; the sentence begins with it.
        made_for: What `Scenario.identity` returned then. None, or anything else that says nothing,
            is passed over: files from before it was kept, envs without a scenario.
        scenario: What it is to be used with.
        stacklevel: Of the caller, as `warnings.warn` counts.
    """
    own = scenario.identity()
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
