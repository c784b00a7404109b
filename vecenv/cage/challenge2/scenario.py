"""A scenario as named tables: hosts, services, exploits, decoys, red's plans and blue's actions.

These are plain data, followed by the tables of CAGE Challenge 2. `validate` refuses contradictory
tables, and `tables` turns them into the arrays that the kernels read.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.codes import ANALYSE, DECOY, MONITOR, REMOVE, RESTORE, SLEEP
from vecenv.core.arguments import check_choice

PRIVILEGED_USERS = ("root", "SYSTEM")

FIRST_HOST = "@first"
"""Target of a plan step: the user host drawn for the episode."""

NEXT_HOST = "@next"
"""Target of a plan step: the host to which the episode's FIRST_HOST leads."""


class ScenarioError(ValueError):
    """A scenario contradicts itself; the message begins with the field."""


@dataclass(frozen=True, slots=True)
class Service:
    """One listening connection.

    Attributes:
        port: Local port.
        process: Kind of process that red recognises, such as "ssh" or "smb"; "" if none: then no
            exploit works on it.
        user: Account that it runs as; a reverse shell through it runs as this account too.
    """

    port: int
    process: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: Unique name.
        subnet: Name of its subnet.
        os: Operating system; some decoys fit only one.
        value: Blue's cost for each step in which red is privileged here, a multiple of 0.1.
        services: Listening connections, in scan order.
        brute_force_user: User whose password can be guessed, or None: brute force always fails.
        reveals: Other hosts whose address red finds when it escalates here; this host and its
            subnet are always found.
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
    """One exploit. Exploits are listed in red's order of preference, the largest weight first.

    Attributes:
        name: Unique name.
        weight: Red's preference.
        port: Port that it attacks.
        process: Kind of process that must listen there.
        needs_one_of: Ports; red must also know that one of them is open. () for no such condition.
        is_brute_force: It guesses a password: many events, and a session that Remove cannot end.
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
        opens: Port that it listens on.
        checks: Port that must be free on the host.
        process: Kind of process that it imitates.
        os: Operating system that it needs, or None for any.
    """

    name: str
    opens: int
    checks: int
    process: str
    os: str | None = None


@dataclass(frozen=True, slots=True)
class OperationalService:
    """The most valuable service: while it is stopped, blue loses `value` per step."""

    host: str
    value: float


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One red action of a plan.

    Attributes:
        action: "sweep", "scan", "exploit", "escalate" or "impact".
        target: Name of a subnet (sweep) or host; FIRST_HOST is the user host drawn for
            the episode, NEXT_HOST the host to which that one leads.
    """

    action: str
    target: str


@dataclass(frozen=True, slots=True)
class BLinePlan:
    """The scripted red agent that goes straight for the operational service.

    Attributes:
        steps: The script, run from the first step; the last step is repeated.
        on_failure: For each step, the index of the step that follows its failure.
        next_hosts: Pairs (user host, host that it leads to). One pair is drawn uniformly per
            episode.
        verify_step: Step that is skipped the first time if the scan before it returned nothing;
            the plan then restarts at `restart_step`.
        restart_step: See `verify_step`.
    """

    steps: tuple[PlanStep, ...]
    on_failure: tuple[int, ...]
    next_hosts: tuple[tuple[str, str], ...]
    verify_step: int
    restart_step: int


@dataclass(frozen=True, slots=True)
class MeanderPlan:
    """The red agent that takes over every host it can find.

    It sweeps subnets in table order.

    Attributes:
        forget_first: Hosts that a failed exploit makes it give up if it has escalated on one.
        forget_next: Hosts that it gives up otherwise.
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
        remove_reports_last_shell: Remove reports success exactly when it stopped the host's
            last detected shell. If False, it always reports success.
        shell_before_scan: A detected shell counts as an exploit even during a port scan.
    """

    name: str
    charges_user_access: bool = False
    remove_reports_last_shell: bool = False
    shell_before_scan: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """All tables. Observation, actions and states list hosts in the order of `hosts`.

    Attributes:
        name: Name, shown in messages.
        subnets: Names of the subnets.
        hosts: See `Host`.
        traffic: Restrictions of traffic between subnets; all other traffic passes.
        exploits: See `Exploit`.
        decoys: See `Decoy`.
        operational_service: See `OperationalService`.
        foothold: Host on which red has a privileged session that nothing can end.
        b_line: See `BLinePlan`.
        meander: See `MeanderPlan`.
        green_hosts: Hosts that the optional green agent scans.
        rules: See `Rules`.
        restore_cost: Blue's cost of a Restore, a multiple of 0.1.
        top_exploit_probability: Probability that red uses its preferred candidate.
        detection_probability: Probability that a reverse shell is noticed.
        green_sleep_probability: Probability that green does nothing.
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
        """Return the index of a host in `hosts`; ValueError if there is no such host."""
        names = [host.name for host in self.hosts]
        if name not in names:
            raise ValueError(f"there is no host {name!r}; there are {', '.join(names)}")
        return names.index(name)

    def subnet_index(self, name: str) -> int:
        """Return the index of a subnet in `subnets`; ValueError if there is no such subnet."""
        if name not in self.subnets:
            raise ValueError(f"there is no subnet {name!r}; there are {', '.join(self.subnets)}")
        return self.subnets.index(name)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the tables and rules, to be kept with scores and policies.

        Returns:
            "scenario" and "rules": their names; "rules_version": version of the simulator;
            "tables": a hash of all tables. All values are plain JSON values.
        """
        return {
            "scenario": self.name,
            "rules": self.rules.name,
            "rules_version": codes.RULES_VERSION,
            "tables": hashlib.sha256(repr(self).encode()).hexdigest()[:16],
        }


def describe_identity(identity: Mapping[str, Any]) -> str:
    """Return the result of `Scenario.identity` in words.

    Example:
        >>> describe_identity({"scenario": "Harbour", "rules": "harbour", "rules_version": 1})
        "'Harbour' with 'harbour' rules, version 1"
    """
    scenario, rules = identity.get("scenario"), identity.get("rules")
    return f"{scenario!r} with {rules!r} rules, version {identity.get('rules_version')}"


def warn_of_other(what: str, made_for: Any, own: Mapping[str, Any]) -> None:
    """Warn if an object is used with other tables or rules than those it was made for.

    Args:
        what: Name of the object; the warning begins with it.
        made_for: Identity (`Scenario.identity`) of the scenario that it was made for. Without one
            (None, empty, no mapping) there is no warning: old files and envs without a scenario.
        own: Identity of the scenario that it is used with.
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
        stacklevel=3,
    )


class BlueAction(NamedTuple):
    """One blue action.

    Attributes:
        name: "Sleep", "Monitor", "Analyse", "Remove", "Restore" or the name of a decoy.
        kind: SLEEP, MONITOR, ANALYSE, REMOVE, RESTORE, or DECOY + number of the decoy.
        host: Name of its target host; None for Sleep and Monitor.
        host_index: Index of that host; 0 for Sleep and Monitor.
    """

    name: str
    kind: int
    host: str | None
    host_index: int

    def __str__(self) -> str:
        return self.name if self.host is None else f"{self.name} {self.host}"


def blue_actions(scenario: Scenario) -> tuple[BlueAction, ...]:
    """Return all blue actions of a scenario; action i is entry i.

    Example:
        >>> [str(blue_actions(cage2_scenario())[i]) for i in (0, 28, 144)]
        ['Sleep', 'DecoyApache Defender', 'Restore User4']
    """
    families = [("Analyse", ANALYSE), ("Remove", REMOVE)]
    families += [(decoy.name, DECOY + d) for d, decoy in enumerate(scenario.decoys)]
    families += [("Restore", RESTORE)]
    actions = [BlueAction("Sleep", SLEEP, None, 0), BlueAction("Monitor", MONITOR, None, 0)]
    for name, kind in families:
        actions += [BlueAction(name, kind, h.name, i) for i, h in enumerate(scenario.hosts)]
    return tuple(actions)


def action_index(scenario: Scenario, name: str, host: str | None = None) -> int:
    """Return the number of an action, given the names of action and host.

    Raises:
        ValueError: There is no such action.
    """
    for index, action in enumerate(blue_actions(scenario)):
        if (action.name, action.host) == (name, host):
            return index
    raise ValueError(
        f"no action {name!r} on host {host!r}; actions are Sleep and Monitor (on no host), and "
        f"Analyse, Remove, Restore, {', '.join(d.name for d in scenario.decoys)} on each of "
        f"{', '.join(h.name for h in scenario.hosts)}"
    )


LINUX, WINDOWS = "Linux", "Windows"
_SSH, _WEB, _SMB = "ssh", "web server", "smb"

_SSHD = Service(22, _SSH, "root")
_SSHD_WINDOWS = Service(22, _SSH, "sshd_server")

_DEFENDER_SERVICES = (_SSHD, Service(53), Service(53), Service(68))
_ENTERPRISE_SERVICES = (
    _SSHD_WINDOWS,
    Service(135, "", "SYSTEM"),
    Service(3389, "rdp", "SYSTEM"),
    Service(445, "", "SYSTEM"),
    Service(139, "", "SYSTEM"),  # open, but not recognised as smb
    Service(80, _WEB, "NetworkService"),
    Service(443, _WEB, "NetworkService"),
)
_FTP_SERVICES = (_SSHD_WINDOWS, Service(21, "femitter", "SYSTEM"))
_USER2_SERVICES = (
    Service(445, _SMB, "SYSTEM"),
    Service(139, _SMB, "SYSTEM"),
    Service(135, "", "SYSTEM"),
    Service(3389, "rdp", "NetworkService"),
)
_USER3_SERVICES = (
    Service(80, _WEB, "www-data"),
    Service(3389, "mysql", "root"),  # the port of rdp, but another service
    Service(443, _WEB, "www-data"),
    Service(25, "smtp", "root"),
)
_USER4_SERVICES = (
    _SSHD,
    Service(80, _WEB, "www-data"),
    Service(3390, "mysql", "root"),
    Service(443, _WEB, "www-data"),
    Service(25, "smtp", "root"),
)


_GUESSED = {LINUX: "pi", WINDOWS: "vagrant"}  # users with passwords that can be guessed


def _host(name: str, os: str, value: float, services: tuple[Service, ...], *reveals: str) -> Host:
    subnet = {"E": "Enterprise", "O": "Operational", "U": "User"}[name[0]]
    return Host(name, subnet, os, value, services, _GUESSED[os], reveals)


_HOSTS = (
    Host("Defender", "Enterprise", LINUX, 0.1, _DEFENDER_SERVICES),
    _host("Enterprise0", LINUX, 1.0, (_SSHD,)),
    _host("Enterprise1", WINDOWS, 1.0, _ENTERPRISE_SERVICES),
    _host("Enterprise2", WINDOWS, 1.0, _ENTERPRISE_SERVICES, "Op_Server0"),
    _host("Op_Host0", LINUX, 0.1, (_SSHD,)),
    _host("Op_Host1", LINUX, 0.1, (_SSHD,)),
    _host("Op_Host2", LINUX, 0.1, (_SSHD,)),
    _host("Op_Server0", LINUX, 1.0, (_SSHD,)),
    _host("User0", WINDOWS, 0.0, _FTP_SERVICES),
    _host("User1", WINDOWS, 0.1, _FTP_SERVICES, "Enterprise1"),
    _host("User2", WINDOWS, 0.1, _USER2_SERVICES, "Enterprise1"),
    _host("User3", LINUX, 0.1, _USER3_SERVICES, "Enterprise0"),
    _host("User4", LINUX, 0.1, _USER4_SERVICES, "Enterprise0"),
)

_EXPLOITS = (
    Exploit("FTPDirectoryTraversal", 7.0, 21, "femitter"),
    Exploit("HarakaRCE", 6.0, 25, "smtp"),
    Exploit("SQLInjection", 5.0, 3390, "mysql", needs_one_of=(80, 443)),
    Exploit("HTTPSRFI", 4.0, 443, _WEB),
    Exploit("HTTPRFI", 3.0, 80, _WEB),
    Exploit("EternalBlue", 2.0, 139, _SMB),
    Exploit("BlueKeep", 1.0, 3389, "rdp"),
    Exploit("SSHBruteForce", 0.1, 22, _SSH, is_brute_force=True),
)

_DECOYS = (
    Decoy("DecoyApache", 80, 80, _WEB),
    Decoy("DecoyFemitter", 21, 21, "femitter", WINDOWS),
    Decoy("DecoyHarakaSMPT", 25, 25, "smtp", LINUX),
    Decoy("DecoySmss", 139, 139, _SMB, WINDOWS),
    Decoy("DecoySSHD", 22, 22, _SSH),
    Decoy("DecoySvchost", 3389, 3389, "rdp", WINDOWS),
    Decoy("DecoyTomcat", 443, 443, _WEB),
    Decoy("DecoyVsftpd", 80, 21, _WEB, LINUX),  # opens another port than it checks
)

_PLAN = (
    "sweep User, scan @first, exploit @first, escalate @first, scan @next, exploit @next, "
    "escalate @next, sweep Enterprise, scan Enterprise2, exploit Enterprise2, "
    "escalate Enterprise2, scan Op_Server0, exploit Op_Server0, escalate Op_Server0, "
    "impact Op_Server0"
)
_B_LINE = BLinePlan(
    steps=tuple(PlanStep(*words.split()) for words in _PLAN.split(", ")),
    on_failure=(0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13),
    next_hosts=tuple((f"User{k}", f"Enterprise{int(k < 3)}") for k in range(1, 5)),
    verify_step=12,
    restart_step=1,
)

_ENTERPRISE_SERVERS = ("Enterprise0", "Enterprise1", "Enterprise2")
_OPERATIONAL_HOSTS = ("Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0")
_USER_HOSTS = ("User0", "User1", "User2", "User3", "User4")

_FAITHFUL = Scenario(
    name="CAGE Challenge 2",
    subnets=("Enterprise", "Operational", "User"),
    hosts=_HOSTS,
    traffic=(TrafficRule("User", "Operational", via=_ENTERPRISE_SERVERS),),
    exploits=_EXPLOITS,
    decoys=_DECOYS,
    operational_service=OperationalService("Op_Server0", 10.0),
    foothold="User0",
    b_line=_B_LINE,
    meander=MeanderPlan(_OPERATIONAL_HOSTS, _ENTERPRISE_SERVERS),
    green_hosts=_USER_HOSTS + _ENTERPRISE_SERVERS,
    rules=Rules("faithful"),
)


def _debugged(faithful: Scenario) -> Scenario:
    """Return the tables of the corrected simulator."""
    as_smb = {139: "smb"}
    hosts = []
    for host in faithful.hosts:
        services = host.services
        if host.name in ("Enterprise1", "Enterprise2"):
            services = tuple(replace(s, process=as_smb.get(s.port, s.process)) for s in services)
        elif host.name == "User3":
            services = tuple(replace(s, port=3390) if s.port == 3389 else s for s in services)
        hosts.append(replace(host, services=services))
    decoys = tuple(replace(d, opens=d.checks) for d in faithful.decoys)
    rules = Rules(
        "debugged", charges_user_access=True, remove_reports_last_shell=True, shell_before_scan=True
    )
    return replace(faithful, hosts=tuple(hosts), decoys=decoys, rules=rules)


_SCENARIOS = {"faithful": _FAITHFUL, "debugged": _debugged(_FAITHFUL)}
RULE_SETS = tuple(_SCENARIOS)


def cage2_scenario(rules: str = "faithful") -> Scenario:
    """Return the tables of CAGE Challenge 2.

    Args:
        rules: "faithful", the challenge as it was run, or "debugged", the corrected version.

    Raises:
        ValueError: Unknown rule set.
    """
    check_choice("rules", rules, RULE_SETS)
    return _SCENARIOS[rules]


class Choice(NamedTuple):
    """One choice of a blue agent.

    Attributes:
        name: "Sleep", "Analyse", "Remove", "Restore", or "Decoy": place the next decoy.
        host: Name of the host; None for Sleep.
        actions: Indices of its actions in the env: one, or for "Decoy" one per decoy of the host,
            in the order of placement.
    """

    name: str
    host: str | None
    actions: tuple[int, ...]

    def __str__(self) -> str:
        return self.name if self.host is None else f"{self.name} {self.host}"


def blue_choices(scenario: Scenario) -> tuple[Choice, ...]:
    """Return the choices of a blue agent: Sleep, and four on each host that red can take over.

    Decoys are placed in the order of red's preference for the exploits that they catch. Only decoys
    that fit a fresh host count; of two that open the same port, only the first.

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
    """Return whether the host is not red's foothold and some exploit works on it."""
    offered = {(service.port, service.process) for service in host.services}
    return host.name != scenario.foothold and any(
        (exploit.port, exploit.process) in offered
        and not (exploit.is_brute_force and host.brute_force_user is None)
        for exploit in scenario.exploits
    )


def _decoys_in_order(host: Host, scenario: Scenario) -> list[Decoy]:
    """Return the decoys that fit a fresh host, in red's order of preference."""
    in_use, found = {service.port for service in host.services}, dict[int, Decoy]()
    for exploit in scenario.exploits:
        for decoy in scenario.decoys:
            is_caught = (decoy.opens, decoy.process) == (exploit.port, exploit.process)
            is_fit = decoy.os in (None, host.os) and not in_use & {decoy.checks, decoy.opens}
            if is_caught and is_fit:
                found.setdefault(decoy.opens, decoy)
    return list(found.values())


PLAN_ACTIONS = {"sweep": codes.SWEEP, "scan": codes.SCAN, "exploit": codes.EXPLOIT}
PLAN_ACTIONS |= {"escalate": codes.ESCALATE, "impact": codes.IMPACT}
_LARGEST_PORT = 65535
_LARGEST_COST = 1000.0
_MOST_LISTENERS = 100


def validate(scenario: Scenario) -> None:
    """Check that the tables of a scenario are consistent.

    Raises:
        ScenarioError: They are not. The message begins with the field and gives the expected and
            the actual value.
    """
    hosts = [host.name for host in scenario.hosts]
    _check_subnets(scenario)
    _check_hosts(scenario, hosts)
    _check_traffic(scenario, hosts)
    _check_exploits(scenario)
    _check_decoys(scenario)
    _check_b_line(scenario, hosts)
    service, meander = scenario.operational_service, scenario.meander
    _check_names("meander.forget_first", meander.forget_first, hosts)
    _check_names("meander.forget_next", meander.forget_next, hosts)
    _check_names("green_hosts", scenario.green_hosts, hosts)
    _check_names("foothold", [scenario.foothold], hosts)
    _check_names("operational_service.host", [service.host], hosts)
    _check_cost("operational_service.value", service.value)
    _check_cost("restore_cost", scenario.restore_cost)
    for field in ("top_exploit_probability", "detection_probability", "green_sleep_probability"):
        value = getattr(scenario, field)
        _require(0.0 <= value <= 1.0, f"{field} is {value!r}, expected a number in [0, 1]")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ScenarioError(problem)


def _check_size(field: str, rows: Sequence[Any], least: int, most: int) -> None:
    problem = f"{field} has {len(rows)} rows, expected {least} to {most}"
    _require(least <= len(rows) <= most, problem)


def _check_unique(field: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        row, is_name = f"{field}[{index}]", isinstance(name, str) and name != ""
        _require(is_name, f"{row} is named {name!r}, expected a non-empty string")
        _require(name not in names[:index], f"{row} is {name!r} again; names must be unique")


def _check_names(field: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        _require(name in known, f"{field} names {name!r}, expected one of {', '.join(known)}")


def _check_port(field: str, port: Any) -> None:
    is_port = isinstance(port, int) and 1 <= port <= _LARGEST_PORT
    _require(is_port, f"{field} is {port!r}, expected a port number in 1..{_LARGEST_PORT}")


def _check_cost(field: str, value: float) -> None:
    is_cost = 0.0 <= value <= _LARGEST_COST and abs(10 * value - round(10 * value)) <= 1e-9
    expected = f"expected a multiple of 0.1 in [0, {_LARGEST_COST:g}]"
    _require(is_cost, f"{field} is {value!r}, {expected}")


def _check_subnets(scenario: Scenario) -> None:
    _check_size("subnets", scenario.subnets, 1, codes.MAX_SUBNETS)
    _check_unique("subnets", scenario.subnets)
    inhabited = [host.subnet for host in scenario.hosts]
    for index, subnet in enumerate(scenario.subnets):
        problem = f"subnets[{index}] is {subnet!r}, but no host is in it; add one or drop it"
        _require(subnet in inhabited, problem)


def _check_hosts(scenario: Scenario, names: list[str]) -> None:
    _check_size("hosts", scenario.hosts, 1, codes.MAX_HOSTS)
    for index, host in enumerate(scenario.hosts):
        field, first = f"hosts[{index}]", names.index(host.name)
        problem = (
            f"{field} is {host.name!r} again, in subnet {host.subnet!r} after "
            f"{scenario.hosts[first].subnet!r}; a host is in exactly one subnet and has one row"
        )
        _require(first == index, problem)
        problem = f"is {host.subnet!r}, expected one name; a host is in exactly one subnet"
        _require(isinstance(host.subnet, str), f"{field}.subnet {problem}")
        _check_names(f"{field}.subnet", [host.subnet], scenario.subnets)
        _check_names(f"{field}.reveals", host.reveals, names)
        _check_cost(f"{field}.value", host.value)
        _check_size(f"{field}.services", host.services, 0, _MOST_LISTENERS)
        for number, service in enumerate(host.services):
            _check_port(f"{field}.services[{number}].port", service.port)
    _check_unique("hosts", names)


def _check_traffic(scenario: Scenario, hosts: list[str]) -> None:
    pairs = [(rule.source, rule.target) for rule in scenario.traffic]
    for index, rule in enumerate(scenario.traffic):
        field, (source, target) = f"traffic[{index}]", pairs[index]
        _check_names(f"{field}.source", [source], scenario.subnets)
        _check_names(f"{field}.target", [target], scenario.subnets)
        _check_names(f"{field}.via", rule.via, hosts)
        problem = f"{field} is from {source!r} to itself; traffic within a subnet is free"
        _require(source != target, problem)
        problem = f"{field} is a second rule from {source!r} to {target!r}"
        _require(pairs[index] not in pairs[:index], problem)


def _check_exploits(scenario: Scenario) -> None:
    _check_size("exploits", scenario.exploits, 1, codes.MAX_EXPLOITS)
    _check_unique("exploits", [exploit.name for exploit in scenario.exploits])
    weight = float("inf")
    for index, exploit in enumerate(scenario.exploits):
        field = f"exploits[{index}]"
        _check_port(f"{field}.port", exploit.port)
        for port in exploit.needs_one_of:
            _check_port(f"{field}.needs_one_of", port)
        problem = f"{field}.process is empty, expected the kind of process it works on"
        _require(exploit.process != "", problem)
        problem = f"is {exploit.weight}, expected less than {weight} of the row before"
        is_below = exploit.weight < weight
        _require(is_below, f"{field}.weight {problem}; list exploits by falling weight")
        weight = exploit.weight


def _check_decoys(scenario: Scenario) -> None:
    _check_size("decoys", scenario.decoys, 0, codes.MAX_DECOYS)
    _check_unique("decoys", [decoy.name for decoy in scenario.decoys])
    num_stackable = 0
    for index, decoy in enumerate(scenario.decoys):
        field = f"decoys[{index}]"
        _check_port(f"{field}.opens", decoy.opens)
        _check_port(f"{field}.checks", decoy.checks)
        problem = f"{field}.process is empty, expected what it passes for"
        _require(decoy.process != "", problem)
        num_stackable += decoy.opens != decoy.checks
        problem = (
            f"{field} opens another port than it checks, as an earlier one does; at most one may "
            "(only its placements are counted)"
        )
        _require(num_stackable < 2, problem)
    ports = tracked_ports(scenario)
    problem = f"are about {len(ports)} different ports {[*ports]}, at most {codes.MAX_PORTS} fit"
    _require(len(ports) <= codes.MAX_PORTS, f"exploits and decoys {problem}")


def tracked_ports(scenario: Scenario) -> tuple[int, ...]:
    """Return the ports that have a bit in sets of ports: all ports of exploits and decoys."""
    ports = {port for e in scenario.exploits for port in (e.port, *e.needs_one_of)}
    ports |= {port for d in scenario.decoys for port in (d.opens, d.checks)}
    return tuple(sorted(ports))


def _check_b_line(scenario: Scenario, hosts: list[str]) -> None:
    plan = scenario.b_line
    _check_size("b_line.steps", plan.steps, 1, codes.MAX_PLAN_STEPS)
    _check_size("b_line.on_failure", plan.on_failure, len(plan.steps), len(plan.steps))
    _check_size("b_line.next_hosts", plan.next_hosts, 1, codes.MAX_HOSTS)
    _check_unique("b_line.next_hosts", [first for first, _ in plan.next_hosts])
    for pair in plan.next_hosts:
        _check_names("b_line.next_hosts", pair, hosts)
    targets = [step.target for step in plan.steps]
    for index, step in enumerate(plan.steps):
        field = f"b_line.steps[{index}]"
        problem = f"{field}.action is {step.action!r}, expected one of {', '.join(PLAN_ACTIONS)}"
        _require(step.action in PLAN_ACTIONS, problem)
        known = scenario.subnets if step.action == "sweep" else [*hosts, FIRST_HOST, NEXT_HOST]
        _check_names(f"{field}.target", [step.target], known)
        is_led_to = step.target != NEXT_HOST or FIRST_HOST in targets[:index]
        problem = f"{field}.target is {NEXT_HOST!r} before any step has {FIRST_HOST!r}"
        _require(is_led_to, problem)
        after = plan.on_failure[index]
        problem = f"b_line.on_failure[{index}] is {after}, expected this step or an earlier one"
        _require(0 <= after <= index, problem)
    problem = f"b_line.steps never targets {FIRST_HOST!r}, the user host drawn"
    _require(FIRST_HOST in targets, problem)
    verify, restart = plan.verify_step, plan.restart_step
    problem, is_inside = f"b_line.verify_step is {verify}", 1 <= verify < len(plan.steps)
    _require(is_inside, f"{problem}, expected a step after the first")
    is_scanned = plan.steps[verify - 1].action == "scan"
    _require(is_scanned, f"{problem}, but the step before is no scan")
    problem = f"b_line.restart_step is {restart}, expected one before verify_step"
    _require(0 <= restart < verify, problem)
