"""The records that the kernels read and write: a scenario's compiled tables, and an env's state.

Sets of hosts, ports, decoys and exploits are bit masks (bit h is host h). Exploits are in red's
order of preference: the lowest bit of a set of candidates is red's preferred exploit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.codes import CUSTOM, FAILED, MAX_HOSTS, RED_SLEEP
from vecenv.cage.challenge2.scenario import (
    FIRST_HOST,
    NEXT_HOST,
    PLAN_ACTIONS,
    PRIVILEGED_USERS,
    Exploit,
    Host,
    Scenario,
    blue_actions,
    blue_choices,
    tracked_ports,
    validate,
)

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
    choices = blue_choices(scenario)
    tables.num_choices = len(choices)
    for number, choice in enumerate(choices):
        first, num_actions = choice.actions[0], len(choice.actions)
        host = tables.choice_host[number] = tables.action_host[first]
        tables.choice_kind[number] = min(tables.action_kind[first], codes.DECOY)
        tables.choice_actions[number, :num_actions] = choice.actions
        if choice.name == "Decoy":
            tables.num_placeable[host] = num_actions


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
        tables.plan_type[index] = PLAN_ACTIONS[step.action]
        tables.plan_on_failure[index] = plan.on_failure[index]
        for row in range(codes.MAX_HOSTS):  # by host drawn; other rows are read where all agree
            first = scenario.hosts[row].name if row < len(scenario.hosts) else ""
            drawn = {FIRST_HOST: first, NEXT_HOST: next_hosts.get(first, "")}
            name = drawn.get(step.target, step.target)
            if step.action == "sweep":
                tables.plan_target[row, index] = scenario.subnet_index(name)
            elif name:
                tables.plan_target[row, index] = scenario.host_index(name)


SCANNED_BIT = 256  # of `red_ports`: set once the host has been scanned

STATE_DTYPE = np.dtype(
    [
        # --- first cache line: fields that every step reads ---
        ("obs_bits", np.uint64),  # the observation: bit i is value i; blue's belief persists here
        ("known_ip", np.uint16),  # hosts whose address red knows
        ("known_host", np.uint16),  # hosts whose name red knows
        ("scanned", np.uint16),  # hosts whose ports red has seen
        ("has_removable", np.uint16),  # hosts with a red session of this kind
        ("has_stuck", np.uint16),
        ("has_priv", np.uint16),
        ("malware", np.uint16),  # hosts with a dropped tool on disk
        ("scanned_ips", np.uint16),  # meander: hosts it has scanned,
        ("exploited_ips", np.uint16),  # attacked and not given up,
        ("escalated_hosts", np.uint16),  # escalated and not given up,
        ("mapped", np.uint16),  # entered at least once;
        ("last_exploited", np.uint16),  # the host that its previous action exploited,
        ("last_escalated", np.uint16),  # or escalated or impacted; empty if it did neither
        ("known_subnet", np.uint8),  # subnets that red knows
        ("scanned_subnets", np.uint8),  # meander: subnets it has swept
        ("plan_step", np.uint8),  # b_line: its latest step
        ("first_host", np.uint8),  # b_line: the drawn user host; MAX_HOSTS before the draw
        ("has_verified", np.uint8),  # b_line: whether it has ever reached `verify_step`
        ("scan_was_empty", np.uint8),  # whether red's latest scan returned nothing
        ("red_agent", np.uint8),  # NO_RED, B_LINE, MEANDER or CUSTOM
        ("ot_running", np.uint8),
        ("ot_stoppable", np.uint8),
        ("ot_known", np.uint8),
        # events of the latest step
        ("blue_action", np.uint8),
        ("blue_success", np.uint8),
        ("red_type", np.uint8),
        ("red_success", np.uint8),
        ("red_target", np.int8),
        ("red_exploit", np.int8),
        ("red_detected", np.int8),
        ("green_target", np.int8),
        ("red_pe_index", np.int16),
        ("reward10", np.int16),
        ("step", np.uint16),  # steps made in this episode; saturates
        ("removable_first", np.uint16),  # hosts with a removable session older than any privileged
        ("stuck_first", np.uint16),  # hosts with a stuck session older than any privileged
        ("length_index", np.uint16),  # index of the length that the episode has drawn
        # --- second: ports and decoys ---
        ("red_ports", np.uint8, (MAX_HOSTS,)),  # ports that red saw at its last scan
        ("decoys", np.uint8, (MAX_HOSTS,)),  # set of decoys in place
        ("n_stacked", np.uint8, (MAX_HOSTS,)),  # placements of the repeatable decoy
        ("last_shell", np.uint16),  # hosts where the shell detected last is still removable
        ("custom", np.uint16, (4,)),  # a custom red policy's own memory
        ("padding", np.uint16, (3,)),  # up to a whole cache line
        # --- third: sessions ---
        ("n_removable", np.uint8, (MAX_HOSTS,)),
        ("n_stuck", np.uint8, (MAX_HOSTS,)),
        # While no session on the host is privileged, bit i says that the i-th oldest is removable.
        # Otherwise the order has no meaning, and this is the number of privileged sessions.
        ("order_or_n_priv", np.uint16, (MAX_HOSTS,)),
    ],
    align=True,
)


def host_bits(masks: np.ndarray, num_hosts: int) -> np.ndarray:
    """Unpack sets of hosts.

    Args:
        masks: Unsigned integers, any shape.
        num_hosts: Number of bits to unpack.

    Returns:
        uint8, shape of `masks` + (num_hosts,), of 0 and 1; fresh memory.
    """
    bits = np.arange(num_hosts, dtype=np.uint16)
    return (masks[..., None] >> bits & 1).astype(np.uint8)


def decode(states: np.ndarray, scenario: Scenario) -> dict[str, np.ndarray]:
    """Decode the true state of some environments into arrays.

    Args:
        states: STATE_DTYPE, any shape S.
        scenario: Scenario of the states, with H hosts and s subnets.

    Returns:
        By name, uint8 (*S, H), but `red_ports` uint16 (*S, H), `known_subnet` (*S, s)
        and `ot_*` (*S); fresh memory. Hosts and subnets are in the order of the scenario. Fields
        without a number below are 0 or 1.

        - `access`: red's highest access on the host: 0 none, 1 user, 2 privileged.
        - `table_access`: the access of red's oldest session there, with the same numbers.
        - `n_removable`, `n_stuck`: numbers of red's user sessions that Remove can end, and cannot.
        - `n_priv`: number of red's privileged sessions.
        - `decoys`: decoys in place: bit i is decoy i of `scenario.decoys`.
        - `n_vsftpd`: placements of the decoy that can be placed again and again.
        - `red_ports`: 0 before red's first scan of the host, else 256 and the bits of the ports
          that its latest scan found.
        - `table_scanned`: whether red has seen the ports of the host.
        - `malware`: whether a tool that red dropped is on the disk.
        - `known_ip`, `known_host`: whether red knows the address, and the name.
        - `known_subnet`: whether red knows the subnet.
        - `ot_running`: whether the operational service runs.
        - `ot_stoppable`: whether red's Impact can still stop it.
        - `ot_known`: whether red knows the service.
    """
    num_hosts, num_subnets = len(scenario.hosts), len(scenario.subnets)

    def unpack(masks: np.ndarray) -> np.ndarray:
        return host_bits(masks, num_hosts)

    def per_host(field: str) -> np.ndarray:
        return states[field][..., :num_hosts]

    has_priv = unpack(states["has_priv"])
    has_any = unpack(states["has_removable"] | states["has_stuck"] | states["has_priv"])
    is_oldest_user = unpack(states["removable_first"] | states["stuck_first"])
    scanned = unpack(states["scanned"])
    ports = per_host("red_ports").astype(np.uint16)
    return {
        "access": has_any + has_priv,
        "table_access": has_any + (has_priv & (1 - is_oldest_user)),
        **{name: per_host(name).copy() for name in ("n_removable", "n_stuck", "decoys")},
        "n_priv": (per_host("order_or_n_priv") * has_priv).astype(np.uint8),
        "n_vsftpd": _num_stacked(states, scenario),
        "red_ports": np.where(scanned == 1, SCANNED_BIT + ports, 0).astype(np.uint16),
        **{name: unpack(states[name]) for name in ("malware", "known_ip", "known_host")},
        "known_subnet": host_bits(states["known_subnet"], num_subnets),
        "table_scanned": scanned,
        **{name: states[name].copy() for name in ("ot_running", "ot_stoppable", "ot_known")},
    }


def _num_stacked(states: np.ndarray, scenario: Scenario) -> np.ndarray:
    """Return placements per host of the repeatable decoy (or of Vsftpd if none is repeatable)."""
    num_hosts = len(scenario.hosts)
    if any(decoy.opens != decoy.checks for decoy in scenario.decoys):
        return states["n_stacked"][..., :num_hosts].copy()
    names = [decoy.name for decoy in scenario.decoys]
    if "DecoyVsftpd" not in names:
        return np.zeros((*states.shape, num_hosts), np.uint8)
    decoys = states["decoys"][..., :num_hosts]
    return decoys >> np.uint8(names.index("DecoyVsftpd")) & np.uint8(1)


def impossible_turns(states: np.ndarray) -> np.ndarray:
    """Return whether a custom red policy returned an invalid action in the latest step.

    It was played as Sleep, and only such a Sleep fails.

    Args:
        states: STATE_DTYPE (N,).

    Returns:
        bool (N,); fresh memory.
    """
    is_sleep = (states["red_type"] == RED_SLEEP) & (states["red_success"] == FAILED)
    return is_sleep & (states["red_agent"] == CUSTOM)
