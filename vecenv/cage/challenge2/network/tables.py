"""From a scenario to the arrays that the kernels read: one record of at most a few KiB.

Sets of hosts are bit masks (bit h is host h), sets of ports, decoys and exploits too. Red's
exploits are in order of preference: the lowest bit of a set of candidates is the one it likes best.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from vecenv.cage.challenge2.network.scenario import (
    FIRST_HOST,
    NEXT_HOST,
    PRIVILEGED_USERS,
    Exploit,
    Host,
    Scenario,
    blue_actions,
)
from vecenv.cage.challenge2.network.validate import validate
from vecenv.cage.challenge2.rules.codes import (
    ACTIVITY_EXPLOIT,
    ACTIVITY_SCAN,
    ALWAYS_FAILS,
    B_LINE,
    DECOY_PLACED,
    ESCALATE,
    EXPLOIT,
    IMPACT,
    MANY,
    MANY_EVENTS,
    MAX_ACTIONS,
    MAX_DECOYS,
    MAX_EXPLOITS,
    MAX_HOSTS,
    MAX_PLAN_STEPS,
    MAX_SUBNETS,
    NO_SERVICE,
    PRIVILEGED_SHELL,
    RED_AGENT_NAMES,
    SCAN,
    SHELL_SEEN,
    SLEEP,
    SSH_SESSION,
    SUCCEEDED,
    SWEEP,
    UNKNOWN,
    USER_SHELL,
)

__all__ = ["TABLES_DTYPE", "compile_tables", "tracked_ports"]

_PLAN_ACTIONS = {
    "sweep": SWEEP,
    "scan": SCAN,
    "exploit": EXPLOIT,
    "escalate": ESCALATE,
    "impact": IMPACT,
}
_BYTE_VALUES = 256
_PROBABILITY_ONE = 1 << 32

TABLES_DTYPE = np.dtype(
    [
        # sizes
        ("num_hosts", np.uint16),
        ("num_subnets", np.uint16),
        ("num_decoys", np.uint16),
        ("num_actions", np.uint16),
        # blue's actions
        ("action_kind", np.uint8, (MAX_ACTIONS,)),
        ("action_host", np.uint8, (MAX_ACTIONS,)),
        ("action_success", np.uint8, (MAX_ACTIONS,)),  # the flag unless something is in the way
        # hosts
        ("subnet_of", np.uint8, (MAX_HOSTS,)),
        ("genuine_ports", np.uint8, (MAX_HOSTS,)),  # tracked ports that listen by themselves
        ("genuine_listeners", np.uint8, (MAX_HOSTS,)),  # listening connections, on any port
        ("other_ports", np.uint8, (MAX_HOSTS,)),  # how many more distinct ports listen
        ("allowed_decoys", np.uint8, (MAX_HOSTS,)),  # that fit the operating system
        ("reveals_ip", np.uint16, (MAX_HOSTS,)),  # hosts whose address escalating here reveals
        ("exploit_result", np.uint8, (MAX_HOSTS, MAX_EXPLOITS)),
        # subnets
        ("subnet_hosts", np.uint16, (MAX_SUBNETS,)),
        ("gate", np.uint16, (MAX_SUBNETS,)),  # a session on one of these hosts lets red in
        # ports, decoys, exploits
        ("decoy_ports", np.uint8, (_BYTE_VALUES,)),  # by set of decoys: ports they open
        ("refused_decoys", np.uint8, (_BYTE_VALUES,)),  # by set of ports in use
        ("candidates", np.uint8, (_BYTE_VALUES,)),  # by set of known ports: exploits to try
        ("catching_decoys", np.uint8, (MAX_EXPLOITS,)),
        ("brute_force", np.uint8),  # set of exploits
        ("stackable_decoys", np.uint8),  # that may be placed again and again: at most one
        # costs, times ten
        ("host_costs", np.uint16, (2, _BYTE_VALUES)),  # by low, by high byte of the set of hosts
        ("service_cost", np.uint16),
        ("restore_cost", np.uint16),
        # the operational service, red's foothold
        ("service_host", np.uint16),
        ("service_hosts", np.uint16),  # the same as a set
        ("footholds", np.uint16),
        ("foothold_subnets", np.uint16),
        # rules
        ("activity", np.uint8, (2 * DECOY_PLACED,)),
        ("charges_user_access", np.uint8),
        ("remove_reports_last_shell", np.uint8),
        # probabilities in units of 2**-32
        ("top_exploit_odds", np.uint64),
        ("detection_odds", np.uint64),
        ("green_sleep_odds", np.uint64),
        # b_line
        ("plan_type", np.uint8, (MAX_PLAN_STEPS,)),
        ("plan_target", np.uint8, (MAX_HOSTS, MAX_PLAN_STEPS)),  # by user host drawn
        ("plan_on_failure", np.uint8, (MAX_PLAN_STEPS,)),
        ("plan_last", np.uint16),
        ("plan_draw_step", np.uint16),
        ("plan_verify_step", np.uint16),
        ("plan_restart_step", np.uint16),
        ("plan_first_hosts", np.uint16),
        ("plan_hosts", np.uint16),  # all hosts that it ever touches
        ("plan_scan_step", np.uint16),  # step in which it scans a first host for sure, or 0
        # meander
        ("forget_first", np.uint16),
        ("forget_next", np.uint16),
        ("meander_scans", np.uint16),  # steps from step 1 on in which it scans for sure
        # options
        ("green_hosts", np.uint16),  # empty: no green agent
        ("red_agents", np.uint16),  # set of agents to draw from at reset; empty: keep the env's own
        ("tracks_scans", np.uint16),  # keep what the extended observation shows
    ],
    align=True,
)


def compile_tables(
    scenario: Scenario,
    *,
    red_agents: Sequence[int] = (B_LINE,),
    green: bool = False,
    tracks_scans: bool = False,
) -> np.record:
    """Turn a scenario and the options of an environment into the record that kernels read.

    Args:
        scenario: The tables; validated first.
        red_agents: Agents (NO_RED, B_LINE, MEANDER, CUSTOM) of which each episode draws one,
            uniformly; empty to leave each env the one in its state.
        green: Whether the green agent is there.
        tracks_scans: Whether to keep what the extended observation needs.

    Returns:
        Read-only record of dtype TABLES_DTYPE, to be given to kernels as their last argument; for
        equal arguments the same one.

    Raises:
        ScenarioError: The tables contradict themselves; the message names the field.
        ValueError: Unknown red agent.
    """
    for agent in red_agents:
        if agent not in range(len(RED_AGENT_NAMES)):
            raise ValueError(f"red_agents has {agent!r}, expected numbers of {RED_AGENT_NAMES}")
    compiled = _compiled
    try:
        hash(scenario)
    except TypeError:  # it has lists in the place of tuples
        compiled = _compiled.__wrapped__
    return compiled(scenario, tuple(map(int, red_agents)), bool(green), bool(tracks_scans))


@functools.lru_cache(maxsize=64)
def _compiled(
    scenario: Scenario, red_agents: tuple[int, ...], green: bool, tracks_scans: bool
) -> np.record:
    validate(scenario)
    array = np.zeros(1, TABLES_DTYPE).view(np.recarray)
    tables = array[0]
    _fill_actions(tables, scenario)
    _fill_hosts(tables, scenario)
    _fill_ports(tables, scenario)
    _fill_costs(tables, scenario)
    _fill_activity(tables, scenario)
    _fill_b_line(tables, scenario)
    tables.forget_first = _host_set(scenario, scenario.meander.forget_first)
    tables.forget_next = _host_set(scenario, scenario.meander.forget_next)
    tables.meander_scans = _num_sure_scans(scenario)
    tables.green_hosts = _host_set(scenario, scenario.green_hosts) if green else 0
    tables.red_agents = _bits(red_agents)
    tables.tracks_scans = tracks_scans
    array.flags.writeable = False
    return array[0]


def tracked_ports(scenario: Scenario) -> tuple[int, ...]:
    """Return the ports that have a bit in sets of ports: those of exploits and decoys."""
    ports = {port for e in scenario.exploits for port in (e.port, *e.needs_one_of)}
    ports |= {port for d in scenario.decoys for port in (d.opens, d.checks)}
    return tuple(sorted(ports))


def _bits(indices: Iterable[int]) -> int:
    result = 0
    for index in indices:
        result |= 1 << index
    return result


def _members(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]


def _foothold_subnet(scenario: Scenario) -> str:
    return scenario.hosts[scenario.host_index(scenario.foothold)].subnet


def _num_sure_scans(scenario: Scenario) -> int:
    """Meander first sweeps the foothold's subnet and scans each host there, which blue sees."""
    first = [host for host in scenario.hosts if host.subnet == _foothold_subnet(scenario)]
    return len(first) if all(host.services for host in first) else 0


def _host_set(scenario: Scenario, names: Iterable[str]) -> int:
    return _bits(scenario.host_index(name) for name in names)


def _fill_actions(tables: np.record, scenario: Scenario) -> None:
    actions = blue_actions(scenario)
    tables.num_actions = len(actions)
    for index, action in enumerate(actions):
        tables.action_kind[index] = action.kind
        tables.action_host[index] = action.host_index
        tables.action_success[index] = UNKNOWN if action.kind == SLEEP else SUCCEEDED


def _fill_hosts(tables: np.record, scenario: Scenario) -> None:
    ports = tracked_ports(scenario)
    tables.num_hosts = len(scenario.hosts)
    tables.num_subnets = len(scenario.subnets)
    for index, host in enumerate(scenario.hosts):
        listening = {service.port for service in host.services}
        tables.subnet_of[index] = scenario.subnet_index(host.subnet)
        tables.genuine_ports[index] = _bits(ports.index(port) for port in listening & {*ports})
        tables.genuine_listeners[index] = len(host.services)
        tables.other_ports[index] = len(listening - {*ports})
        tables.allowed_decoys[index] = _bits(
            d for d, decoy in enumerate(scenario.decoys) if decoy.os in (None, host.os)
        )
        tables.reveals_ip[index] = _host_set(scenario, (host.name, *host.reveals))
        for number, exploit in enumerate(scenario.exploits):
            tables.exploit_result[index, number] = _exploit_result(host, exploit)
    foothold = scenario.hosts[scenario.host_index(scenario.foothold)]
    tables.footholds = _host_set(scenario, [foothold.name])
    tables.foothold_subnets = 1 << scenario.subnet_index(foothold.subnet)
    tables.service_host = scenario.host_index(scenario.operational_service.host)
    tables.service_hosts = 1 << int(tables.service_host)
    for index, subnet in enumerate(scenario.subnets):
        tables.subnet_hosts[index] = _host_set(
            scenario, [host.name for host in scenario.hosts if host.subnet == subnet]
        )
        gate = _host_set(scenario, [host.name for host in scenario.hosts])
        for rule in scenario.traffic:  # all red traffic starts at the foothold
            if (rule.source, rule.target) == (foothold.subnet, subnet):
                gate &= _host_set(scenario, rule.via)
        tables.gate[index] = gate


def _exploit_result(host: Host, exploit: Exploit) -> int:
    """What the exploit does on the host if there are no decoys."""
    for service in host.services:
        if service.port == exploit.port and service.process == exploit.process:
            if exploit.is_brute_force:
                return ALWAYS_FAILS if host.brute_force_user is None else SSH_SESSION
            return PRIVILEGED_SHELL if service.user in PRIVILEGED_USERS else USER_SHELL
    return NO_SERVICE


def _fill_ports(tables: np.record, scenario: Scenario) -> None:
    ports = tracked_ports(scenario)
    decoys, exploits = scenario.decoys, scenario.exploits
    tables.num_decoys = len(decoys)
    for members in range(1 << MAX_DECOYS):
        placed = [decoys[d] for d in _members(members) if d < len(decoys)]
        tables.decoy_ports[members] = _bits(ports.index(decoy.opens) for decoy in placed)
    for members in range(_BYTE_VALUES):
        known = {ports[bit] for bit in _members(members) if bit < len(ports)}
        tables.refused_decoys[members] = _bits(
            d for d, decoy in enumerate(decoys) if decoy.checks in known
        )
        tables.candidates[members] = _bits(
            number
            for number, exploit in enumerate(exploits)
            if exploit.port in known
            and (not exploit.needs_one_of or known.intersection(exploit.needs_one_of))
        )
    for number, exploit in enumerate(exploits):
        tables.catching_decoys[number] = _bits(
            d
            for d, decoy in enumerate(decoys)
            if decoy.opens == exploit.port and decoy.process == exploit.process
        )
    tables.brute_force = _bits(n for n, exploit in enumerate(exploits) if exploit.is_brute_force)
    tables.stackable_decoys = _bits(d for d, x in enumerate(decoys) if x.opens != x.checks)
    tables.top_exploit_odds = round(scenario.top_exploit_probability * _PROBABILITY_ONE)
    tables.detection_odds = round(scenario.detection_probability * _PROBABILITY_ONE)
    tables.green_sleep_odds = round(scenario.green_sleep_probability * _PROBABILITY_ONE)


def _fill_costs(tables: np.record, scenario: Scenario) -> None:
    values = [round(10 * host.value) for host in scenario.hosts]
    values += [0] * (MAX_HOSTS - len(values))
    for half in range(2):
        for members in range(_BYTE_VALUES):
            tables.host_costs[half, members] = sum(values[8 * half + h] for h in _members(members))
    tables.service_cost = round(10 * scenario.operational_service.value)
    tables.restore_cost = round(10 * scenario.restore_cost)
    tables.charges_user_access = scenario.rules.charges_user_access
    tables.remove_reports_last_shell = scenario.rules.remove_reports_last_shell


def _fill_activity(tables: np.record, scenario: Scenario) -> None:
    for index in range(len(tables.activity)):
        num_ports = index & MANY
        is_many, is_shell = bool(index & MANY_EVENTS), bool(index & SHELL_SEEN)
        activity = 0
        if num_ports > 0:
            if is_shell and scenario.rules.shell_before_scan:
                activity = ACTIVITY_EXPLOIT
            elif is_many and num_ports == MANY:
                activity = ACTIVITY_SCAN
            elif is_shell or (is_many and num_ports == 1):
                activity = ACTIVITY_EXPLOIT
            elif not index & DECOY_PLACED:
                activity = ACTIVITY_SCAN
        tables.activity[index] = activity


def _fill_b_line(tables: np.record, scenario: Scenario) -> None:
    plan = scenario.b_line
    next_hosts = dict(plan.next_hosts)
    tables.plan_last = len(plan.steps) - 1
    tables.plan_verify_step = plan.verify_step
    tables.plan_restart_step = plan.restart_step
    tables.plan_first_hosts = _host_set(scenario, next_hosts)
    targets = [step.target for step in plan.steps]
    tables.plan_draw_step = targets.index(FIRST_HOST)
    has_sure_scan = [step.action for step in plan.steps[:2]] == ["sweep", "scan"]
    has_sure_scan &= targets[:2] == [_foothold_subnet(scenario), FIRST_HOST]
    has_sure_scan &= all(scenario.hosts[scenario.host_index(h)].services for h in next_hosts)
    tables.plan_scan_step = 1 if has_sure_scan else 0
    touched = {*targets} & {host.name for host in scenario.hosts}
    touched |= {*next_hosts, *next_hosts.values()}
    tables.plan_hosts = _host_set(scenario, touched)
    for index, step in enumerate(plan.steps):
        tables.plan_type[index] = _PLAN_ACTIONS[step.action]
        tables.plan_on_failure[index] = plan.on_failure[index]
        for row in range(MAX_HOSTS):  # rows of other hosts are never read at steps that name one
            first = scenario.hosts[row].name if row < len(scenario.hosts) else ""
            name = {FIRST_HOST: first, NEXT_HOST: next_hosts.get(first, "")}.get(
                step.target, step.target
            )
            if step.action == "sweep":
                tables.plan_target[row, index] = scenario.subnet_index(name)
            elif name:
                tables.plan_target[row, index] = scenario.host_index(name)
