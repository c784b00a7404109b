"""Refuse contradictory scenario tables; the error names the field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vecenv.cage.challenge2.network.scenario import FIRST_HOST, NEXT_HOST, Scenario, ScenarioError
from vecenv.cage.challenge2.rules import codes

__all__ = ["tracked_ports", "validate"]

_ACTIONS = ("sweep", "scan", "exploit", "escalate", "impact")
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
    for field, names in {
        "meander.forget_first": meander.forget_first,
        "meander.forget_next": meander.forget_next,
        "green_hosts": scenario.green_hosts,
        "foothold": [scenario.foothold],
        "operational_service.host": [service.host],
    }.items():
        _check_names(field, names, hosts)
    _check_cost("operational_service.value", service.value)
    _check_cost("restore_cost", scenario.restore_cost)
    for field in ("top_exploit_probability", "detection_probability", "green_sleep_probability"):
        value = getattr(scenario, field)
        _require(0.0 <= value <= 1.0, field, f"is {value!r}, expected a number in [0, 1]")


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise ScenarioError(f"{field} {problem}")


def _check_size(field: str, rows: Sequence[Any], least: int, most: int) -> None:
    problem = f"has {len(rows)} rows, expected {least} to {most}"
    _require(least <= len(rows) <= most, field, problem)


def _check_unique(field: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        is_name = isinstance(name, str) and name != ""
        _require(is_name, f"{field}[{index}]", f"is named {name!r}, expected a non-empty string")
        is_new = name not in names[:index]
        _require(is_new, f"{field}[{index}]", f"is {name!r} again; names must be unique")


def _check_names(field: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        _require(name in known, field, f"names {name!r}, expected one of {', '.join(known)}")


def _check_port(field: str, port: Any) -> None:
    is_port = isinstance(port, int) and 1 <= port <= _LARGEST_PORT
    _require(is_port, field, f"is {port!r}, expected a port number in 1..{_LARGEST_PORT}")


def _check_cost(field: str, value: float) -> None:
    is_cost = 0.0 <= value <= _LARGEST_COST and abs(10 * value - round(10 * value)) <= 1e-9
    problem = f"is {value!r}, expected a multiple of 0.1 in [0, {_LARGEST_COST:g}]"
    _require(is_cost, field, problem)


def _check_subnets(scenario: Scenario) -> None:
    _check_size("subnets", scenario.subnets, 1, codes.MAX_SUBNETS)
    _check_unique("subnets", scenario.subnets)
    inhabited = [host.subnet for host in scenario.hosts]
    for index, subnet in enumerate(scenario.subnets):
        problem = f"is {subnet!r}, but no host is in it; add one or drop it"
        _require(subnet in inhabited, f"subnets[{index}]", problem)


def _check_hosts(scenario: Scenario, names: list[str]) -> None:
    _check_size("hosts", scenario.hosts, 1, codes.MAX_HOSTS)
    for index, host in enumerate(scenario.hosts):
        field, first = f"hosts[{index}]", names.index(host.name)
        problem = (
            f"is {host.name!r} again, in subnet {host.subnet!r} after "
            f"{scenario.hosts[first].subnet!r}; a host is in exactly one subnet and has one row"
        )
        _require(first == index, field, problem)
        problem = f"is {host.subnet!r}, expected one name; a host is in exactly one subnet"
        _require(isinstance(host.subnet, str), f"{field}.subnet", problem)
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
        problem = f"is from {source!r} to itself; traffic within a subnet is free"
        _require(source != target, field, problem)
        problem = f"is a second rule from {source!r} to {target!r}"
        _require(pairs[index] not in pairs[:index], field, problem)


def _check_exploits(scenario: Scenario) -> None:
    _check_size("exploits", scenario.exploits, 1, codes.MAX_EXPLOITS)
    _check_unique("exploits", [exploit.name for exploit in scenario.exploits])
    weight = float("inf")
    for index, exploit in enumerate(scenario.exploits):
        field = f"exploits[{index}]"
        _check_port(f"{field}.port", exploit.port)
        for port in exploit.needs_one_of:
            _check_port(f"{field}.needs_one_of", port)
        problem = "is empty, expected the kind of process it works on"
        _require(exploit.process != "", f"{field}.process", problem)
        problem = (
            f"is {exploit.weight}, expected less than {weight} of the row before; "
            "list exploits by falling weight"
        )
        _require(exploit.weight < weight, f"{field}.weight", problem)
        weight = exploit.weight


def _check_decoys(scenario: Scenario) -> None:
    _check_size("decoys", scenario.decoys, 0, codes.MAX_DECOYS)
    _check_unique("decoys", [decoy.name for decoy in scenario.decoys])
    num_stackable = 0
    for index, decoy in enumerate(scenario.decoys):
        field = f"decoys[{index}]"
        _check_port(f"{field}.opens", decoy.opens)
        _check_port(f"{field}.checks", decoy.checks)
        problem = "is empty, expected what it passes for"
        _require(decoy.process != "", f"{field}.process", problem)
        num_stackable += decoy.opens != decoy.checks
        problem = (
            "opens another port than it checks, as an earlier one does; at most one may "
            "(only its placements are counted)"
        )
        _require(num_stackable < 2, field, problem)
    ports = tracked_ports(scenario)
    problem = f"are about {len(ports)} different ports {[*ports]}, at most {codes.MAX_PORTS} fit"
    _require(len(ports) <= codes.MAX_PORTS, "exploits and decoys", problem)


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
        problem = f"is {step.action!r}, expected one of {', '.join(_ACTIONS)}"
        _require(step.action in _ACTIONS, f"{field}.action", problem)
        known = scenario.subnets if step.action == "sweep" else [*hosts, FIRST_HOST, NEXT_HOST]
        _check_names(f"{field}.target", [step.target], known)
        is_led_to = step.target != NEXT_HOST or FIRST_HOST in targets[:index]
        problem = f"is {NEXT_HOST!r} before any step has {FIRST_HOST!r}"
        _require(is_led_to, f"{field}.target", problem)
        after = plan.on_failure[index]
        problem = f"is {after}, expected this step or an earlier one"
        _require(0 <= after <= index, f"b_line.on_failure[{index}]", problem)
    problem = f"never targets {FIRST_HOST!r}, the user host drawn"
    _require(FIRST_HOST in targets, "b_line.steps", problem)
    field, verify, restart = "b_line.verify_step", plan.verify_step, plan.restart_step
    is_inside = 1 <= verify < len(plan.steps)
    _require(is_inside, field, f"is {verify}, expected a step after the first")
    is_scanned = plan.steps[verify - 1].action == "scan"
    _require(is_scanned, field, f"is {verify}, but the step before is no scan")
    problem = f"is {restart}, expected one before verify_step"
    _require(0 <= restart < verify, "b_line.restart_step", problem)
