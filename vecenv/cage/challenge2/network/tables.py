"""Compile a scenario into the arrays that the kernels read: one record of at most a few KiB.

Sets of hosts, ports, decoys and exploits are bit masks (bit h is host h). Exploits are in red's
order of preference: the lowest bit of a set of candidates is red's preferred exploit.
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
    blue_choices,
)
from vecenv.cage.challenge2.network.validate import tracked_ports, validate
from vecenv.cage.challenge2.rules import codes

__all__ = ["TABLES_DTYPE", "compile_tables"]

_PLAN_ACTIONS = {"sweep": codes.SWEEP, "scan": codes.SCAN, "exploit": codes.EXPLOIT}
_PLAN_ACTIONS |= {"escalate": codes.ESCALATE, "impact": codes.IMPACT}
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
        ("action_kind", np.uint8, (codes.MAX_ACTIONS,)),
        ("action_host", np.uint8, (codes.MAX_ACTIONS,)),
        ("action_success", np.uint8, (codes.MAX_ACTIONS,)),  # flag if nothing prevents it
        # hosts
        ("subnet_of", np.uint8, (codes.MAX_HOSTS,)),
        ("genuine_ports", np.uint8, (codes.MAX_HOSTS,)),  # tracked ports that listen without decoys
        ("genuine_listeners", np.uint8, (codes.MAX_HOSTS,)),  # listening connections, on any port
        ("other_ports", np.uint8, (codes.MAX_HOSTS,)),  # number of other distinct ports that listen
        ("allowed_decoys", np.uint8, (codes.MAX_HOSTS,)),  # decoys that fit the operating system
        ("reveals_ip", np.uint16, (codes.MAX_HOSTS,)),  # hosts that escalating here reveals
        ("exploit_result", np.uint8, (codes.MAX_HOSTS, codes.MAX_EXPLOITS)),
        # subnets
        ("subnet_hosts", np.uint16, (codes.MAX_SUBNETS,)),
        ("gate", np.uint16, (codes.MAX_SUBNETS,)),  # a session on one of these hosts lets red in
        # ports, decoys, exploits
        ("decoy_ports", np.uint8, (_BYTE_VALUES,)),  # by set of decoys: ports they open
        ("refused_decoys", np.uint8, (_BYTE_VALUES,)),  # by set of ports in use: unfit decoys
        ("candidates", np.uint8, (_BYTE_VALUES,)),  # by set of known ports: exploits to try
        ("catching_decoys", np.uint8, (codes.MAX_EXPLOITS,)),
        ("brute_force", np.uint8),  # set of exploits
        ("stackable_decoys", np.uint8),  # that may be placed repeatedly: at most one
        # costs, times ten
        ("host_costs", np.uint16, (2, _BYTE_VALUES)),  # by low, by high byte of the set of hosts
        ("service_cost", np.uint16),
        ("restore_cost", np.uint16),
        # the operational service, red's foothold
        ("service_host", np.uint16),
        ("service_hosts", np.uint16),  # `service_host` as a set
        ("footholds", np.uint16),
        ("foothold_subnets", np.uint16),
        # rules
        ("activity", np.uint8, (2 * codes.DECOY_PLACED,)),
        ("charges_user_access", np.uint8),
        ("remove_reports_last_shell", np.uint8),
        # probabilities in units of 2**-32
        ("top_exploit_odds", np.uint64),
        ("detection_odds", np.uint64),
        ("green_sleep_odds", np.uint64),
        # b_line
        ("plan_type", np.uint8, (codes.MAX_PLAN_STEPS,)),
        ("plan_target", np.uint8, (codes.MAX_HOSTS, codes.MAX_PLAN_STEPS)),  # by user host drawn
        ("plan_on_failure", np.uint8, (codes.MAX_PLAN_STEPS,)),
        ("plan_last", np.uint16),
        ("plan_draw_step", np.uint16),
        ("plan_verify_step", np.uint16),
        ("plan_restart_step", np.uint16),
        ("plan_first_hosts", np.uint16),
        ("plan_hosts", np.uint16),  # all hosts that it ever touches
        # meander
        ("forget_first", np.uint16),
        ("forget_next", np.uint16),
        # choices of a blue agent with memory, see `blue_choices`
        ("num_choices", np.uint16),
        ("choice_kind", np.uint8, (codes.MAX_ACTIONS,)),  # DECOY stands for all decoys
        ("choice_host", np.uint8, (codes.MAX_ACTIONS,)),
        ("choice_actions", np.uint8, (codes.MAX_ACTIONS, codes.MAX_DECOYS + 1)),  # 0: none
        ("num_placeable", np.uint8, (codes.MAX_HOSTS,)),  # number of decoys that fit a host
        # options
        ("num_lengths", np.uint16),  # number of lengths; each episode draws one at its reset
        ("lengths", np.uint16, (codes.MAX_LENGTHS,)),
        ("green_hosts", np.uint16),  # empty: no green agent
        ("red_agents", np.uint16),  # set of agents to draw from at reset; empty: keep the env's own
    ],
    align=True,
)


def compile_tables(
    scenario: Scenario,
    *,
    red_agents: Sequence[int] = (codes.B_LINE,),
    green: bool = False,
    lengths: Sequence[int] = (100,),
) -> np.record:
    """Return the record that kernels read, from a scenario and the options of an environment.

    Args:
        scenario: The tables; validated first.
        red_agents: Agents (NO_RED, B_LINE, MEANDER, CUSTOM) of which each episode draws one
            uniformly; empty: each env keeps the agent in its state.
        green: Whether the green agent takes part.
        lengths: Episode lengths in steps; each episode draws one of them uniformly.

    Returns:
        Read-only record of dtype TABLES_DTYPE, to be given to kernels as their last argument; for
        equal arguments the same one.

    Raises:
        ScenarioError: The tables contradict themselves; the message names the field.
    """
    options = tuple(map(int, red_agents)), bool(green), tuple(map(int, lengths))
    try:
        return _compiled(scenario, *options)
    except TypeError:  # not hashable: the scenario has lists instead of tuples
        return _compiled.__wrapped__(scenario, *options)


@functools.lru_cache(maxsize=64)
def _compiled(
    scenario: Scenario, red_agents: tuple[int, ...], green: bool, lengths: tuple[int, ...]
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
    tables.green_hosts = _host_set(scenario, scenario.green_hosts) if green else 0
    tables.red_agents = _bits(red_agents)
    tables.num_lengths = len(lengths)
    tables.lengths[: len(lengths)] = lengths
    _fill_choices(tables, scenario)
    array.flags.writeable = False
    return array[0]


def _fill_choices(tables: np.record, scenario: Scenario) -> None:
    kinds = {"Sleep": codes.SLEEP, "Analyse": codes.ANALYSE, "Remove": codes.REMOVE}
    kinds |= {"Restore": codes.RESTORE, "Decoy": codes.DECOY}
    choices = blue_choices(scenario)
    tables.num_choices = len(choices)
    for number, choice in enumerate(choices):
        tables.choice_kind[number] = kinds[choice.name]
        tables.choice_actions[number, : len(choice.actions)] = choice.actions
        if choice.host is not None:
            host = tables.choice_host[number] = scenario.host_index(choice.host)
            if choice.name == "Decoy":
                tables.num_placeable[host] = len(choice.actions)


def _bits(indices: Iterable[int]) -> int:
    return sum(1 << index for index in {*indices})


def _members(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]


def _host_set(scenario: Scenario, names: Iterable[str]) -> int:
    return _bits(scenario.host_index(name) for name in names)


def _fill_actions(tables: np.record, scenario: Scenario) -> None:
    actions = blue_actions(scenario)
    tables.num_actions = len(actions)
    for index, action in enumerate(actions):
        tables.action_kind[index] = action.kind
        tables.action_host[index] = action.host_index
    tables.action_success[: len(actions)] = codes.SUCCEEDED
    tables.action_success[0] = codes.UNKNOWN  # Sleep


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
        own = (h for h, host in enumerate(scenario.hosts) if host.subnet == subnet)
        tables.subnet_hosts[index] = _bits(own)
        gate = (1 << len(scenario.hosts)) - 1
        for rule in scenario.traffic:  # all red traffic starts at the foothold
            if (rule.source, rule.target) == (foothold.subnet, subnet):
                gate &= _host_set(scenario, rule.via)
        tables.gate[index] = gate


def _exploit_result(host: Host, exploit: Exploit) -> int:
    """Return the result code of the exploit on the host without decoys."""
    for service in host.services:
        if service.port == exploit.port and service.process == exploit.process:
            if exploit.is_brute_force:
                return codes.ALWAYS_FAILS if host.brute_force_user is None else codes.SSH_SESSION
            return codes.PRIVILEGED_SHELL if service.user in PRIVILEGED_USERS else codes.USER_SHELL
    return codes.NO_SERVICE


def _fill_ports(tables: np.record, scenario: Scenario) -> None:
    ports = tracked_ports(scenario)
    decoys, exploits = scenario.decoys, scenario.exploits
    tables.num_decoys = len(decoys)
    for members in range(1 << codes.MAX_DECOYS):
        placed = [decoys[d] for d in _members(members) if d < len(decoys)]
        tables.decoy_ports[members] = _bits(ports.index(decoy.opens) for decoy in placed)
    for members in range(_BYTE_VALUES):
        known = {ports[bit] for bit in _members(members) if bit < len(ports)}
        tables.refused_decoys[members] = _bits(d for d, x in enumerate(decoys) if x.checks in known)
        tables.candidates[members] = _bits(
            number
            for number, exploit in enumerate(exploits)
            if exploit.port in known
            and (not exploit.needs_one_of or known.intersection(exploit.needs_one_of))
        )
    imitated = [(decoy.opens, decoy.process) for decoy in decoys]
    for number, exploit in enumerate(exploits):
        attacked = exploit.port, exploit.process
        tables.catching_decoys[number] = _bits(d for d, x in enumerate(imitated) if x == attacked)
    tables.brute_force = _bits(n for n, exploit in enumerate(exploits) if exploit.is_brute_force)
    tables.stackable_decoys = _bits(d for d, x in enumerate(decoys) if x.opens != x.checks)
    tables.top_exploit_odds = round(scenario.top_exploit_probability * _PROBABILITY_ONE)
    tables.detection_odds = round(scenario.detection_probability * _PROBABILITY_ONE)
    tables.green_sleep_odds = round(scenario.green_sleep_probability * _PROBABILITY_ONE)


def _fill_costs(tables: np.record, scenario: Scenario) -> None:
    values = [round(10 * host.value) for host in scenario.hosts]
    values += [0] * (codes.MAX_HOSTS - len(values))
    for half in range(2):
        for members in range(_BYTE_VALUES):
            tables.host_costs[half, members] = sum(values[8 * half + h] for h in _members(members))
    tables.service_cost = round(10 * scenario.operational_service.value)
    tables.restore_cost = round(10 * scenario.restore_cost)
    tables.charges_user_access = scenario.rules.charges_user_access
    tables.remove_reports_last_shell = scenario.rules.remove_reports_last_shell


def _fill_activity(tables: np.record, scenario: Scenario) -> None:
    for index in range(len(tables.activity)):
        num_ports = index & codes.MANY
        is_many, is_shell = bool(index & codes.MANY_EVENTS), bool(index & codes.SHELL_SEEN)
        if num_ports == 0:
            continue
        if is_shell and scenario.rules.shell_before_scan:
            tables.activity[index] = codes.ACTIVITY_EXPLOIT
        elif is_many and num_ports == codes.MANY:
            tables.activity[index] = codes.ACTIVITY_SCAN
        elif is_shell or (is_many and num_ports == 1):
            tables.activity[index] = codes.ACTIVITY_EXPLOIT
        elif not index & codes.DECOY_PLACED:
            tables.activity[index] = codes.ACTIVITY_SCAN


def _fill_b_line(tables: np.record, scenario: Scenario) -> None:
    plan = scenario.b_line
    next_hosts = dict(plan.next_hosts)
    tables.plan_last = len(plan.steps) - 1
    tables.plan_verify_step = plan.verify_step
    tables.plan_restart_step = plan.restart_step
    tables.plan_first_hosts = _host_set(scenario, next_hosts)
    targets = [step.target for step in plan.steps]
    tables.plan_draw_step = targets.index(FIRST_HOST)
    touched = {*targets} & {host.name for host in scenario.hosts}
    touched |= {*next_hosts, *next_hosts.values()}
    tables.plan_hosts = _host_set(scenario, touched)
    for index, step in enumerate(plan.steps):
        tables.plan_type[index] = _PLAN_ACTIONS[step.action]
        tables.plan_on_failure[index] = plan.on_failure[index]
        for row in range(codes.MAX_HOSTS):  # by host drawn; other rows are read where all agree
            first = scenario.hosts[row].name if row < len(scenario.hosts) else ""
            drawn = {FIRST_HOST: first, NEXT_HOST: next_hosts.get(first, "")}
            name = drawn.get(step.target, step.target)
            if step.action == "sweep":
                tables.plan_target[row, index] = scenario.subnet_index(name)
            elif name:
                tables.plan_target[row, index] = scenario.host_index(name)
