"""Refuse scenario tables that contradict themselves, naming the field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vecenv.cage.challenge2.network.scenario import FIRST_HOST, NEXT_HOST, Scenario, ScenarioError
from vecenv.cage.challenge2.rules.codes import (
    MAX_DECOYS,
    MAX_EXPLOITS,
    MAX_HOSTS,
    MAX_PLAN_STEPS,
    MAX_PORTS,
    MAX_SUBNETS,
)

__all__ = ["validate"]

_HOST_ACTIONS = ("scan", "exploit", "escalate", "impact")
_LARGEST_PORT = 65535
_LARGEST_COST = 1000.0
_MOST_LISTENERS = 100


def validate(scenario: Scenario) -> None:
    """Check that the tables of a scenario fit together.

    Raises:
        ScenarioError: They don't. The message begins with the field, says what was expected and
            what is there.
    """
    _check_subnets(scenario)
    _check_hosts(scenario)
    _check_traffic(scenario)
    _check_exploits(scenario)
    _check_decoys(scenario)
    _check_b_line(scenario)
    _check_names("meander.forget_first", scenario.meander.forget_first, _hosts(scenario))
    _check_names("meander.forget_next", scenario.meander.forget_next, _hosts(scenario))
    _check_names("green_hosts", scenario.green_hosts, _hosts(scenario))
    _check_names("foothold", [scenario.foothold], _hosts(scenario))
    service = scenario.operational_service
    _check_names("operational_service.host", [service.host], _hosts(scenario))
    _check_cost("operational_service.value", service.value)
    _check_cost("restore_cost", scenario.restore_cost)
    for field in ("top_exploit_probability", "detection_probability", "green_sleep_probability"):
        if not 0.0 <= getattr(scenario, field) <= 1.0:
            _refuse(field, f"is {getattr(scenario, field)!r}, expected a number in [0, 1]")


def _refuse(field: str, problem: str) -> None:
    raise ScenarioError(f"{field} {problem}")


def _hosts(scenario: Scenario) -> list[str]:
    return [host.name for host in scenario.hosts]


def _check_size(field: str, rows: Sequence[Any], least: int, most: int) -> None:
    if not least <= len(rows) <= most:
        _refuse(field, f"has {len(rows)} rows, expected {least} to {most}")


def _check_unique(field: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            _refuse(f"{field}[{index}]", f"is named {name!r}, expected a non-empty string")
        if name in names[:index]:
            _refuse(f"{field}[{index}]", f"is {name!r} again; names must be unique")


def _check_names(field: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            _refuse(field, f"names {name!r}, expected one of {', '.join(known)}")


def _check_port(field: str, port: Any) -> None:
    if not isinstance(port, int) or not 1 <= port <= _LARGEST_PORT:
        _refuse(field, f"is {port!r}, expected a port number in 1..{_LARGEST_PORT}")


def _check_cost(field: str, value: float) -> None:
    if not 0.0 <= value <= _LARGEST_COST or abs(10 * value - round(10 * value)) > 1e-9:
        _refuse(field, f"is {value!r}, expected a multiple of 0.1 in [0, {_LARGEST_COST:g}]")


def _check_subnets(scenario: Scenario) -> None:
    _check_size("subnets", scenario.subnets, 1, MAX_SUBNETS)
    _check_unique("subnets", scenario.subnets)
    inhabited = [host.subnet for host in scenario.hosts]
    for index, subnet in enumerate(scenario.subnets):
        if subnet not in inhabited:
            _refuse(f"subnets[{index}]", f"is {subnet!r}, but no host is in it; add one or drop it")


def _check_hosts(scenario: Scenario) -> None:
    _check_size("hosts", scenario.hosts, 1, MAX_HOSTS)
    first_row: dict[str, int] = {}
    for index, host in enumerate(scenario.hosts):
        field = f"hosts[{index}]"
        if host.name in first_row:
            other = scenario.hosts[first_row[host.name]].subnet
            _refuse(
                field,
                f"is {host.name!r} again, in subnet {host.subnet!r} after {other!r}; "
                "a host is in exactly one subnet and has one row",
            )
        first_row[host.name] = index
        if not isinstance(host.subnet, str):
            _refuse(
                f"{field}.subnet",
                f"is {host.subnet!r}, expected one name; a host is in exactly one subnet",
            )
        _check_names(f"{field}.subnet", [host.subnet], scenario.subnets)
        _check_names(f"{field}.reveals", host.reveals, _hosts(scenario))
        _check_cost(f"{field}.value", host.value)
        _check_size(f"{field}.services", host.services, 0, _MOST_LISTENERS)
        for number, service in enumerate(host.services):
            _check_port(f"{field}.services[{number}].port", service.port)
    _check_unique("hosts", _hosts(scenario))


def _check_traffic(scenario: Scenario) -> None:
    pairs = []
    for index, rule in enumerate(scenario.traffic):
        field = f"traffic[{index}]"
        _check_names(f"{field}.source", [rule.source], scenario.subnets)
        _check_names(f"{field}.target", [rule.target], scenario.subnets)
        _check_names(f"{field}.via", rule.via, _hosts(scenario))
        if rule.source == rule.target:
            _refuse(field, f"is from {rule.source!r} to itself; traffic within a subnet is free")
        if (rule.source, rule.target) in pairs:
            _refuse(field, f"is a second rule from {rule.source!r} to {rule.target!r}")
        pairs.append((rule.source, rule.target))


def _check_exploits(scenario: Scenario) -> None:
    _check_size("exploits", scenario.exploits, 1, MAX_EXPLOITS)
    _check_unique("exploits", [exploit.name for exploit in scenario.exploits])
    weight = float("inf")
    for index, exploit in enumerate(scenario.exploits):
        field = f"exploits[{index}]"
        _check_port(f"{field}.port", exploit.port)
        for port in exploit.needs_one_of:
            _check_port(f"{field}.needs_one_of", port)
        if not exploit.process:
            _refuse(f"{field}.process", "is empty, expected the kind of process it works on")
        if not exploit.weight < weight:
            _refuse(
                f"{field}.weight",
                f"is {exploit.weight}, expected less than {weight} of the row before; "
                "list exploits by falling weight",
            )
        weight = exploit.weight


def _check_decoys(scenario: Scenario) -> None:
    _check_size("decoys", scenario.decoys, 0, MAX_DECOYS)
    _check_unique("decoys", [decoy.name for decoy in scenario.decoys])
    stackable = [d for d, decoy in enumerate(scenario.decoys) if decoy.opens != decoy.checks]
    for index, decoy in enumerate(scenario.decoys):
        _check_port(f"decoys[{index}].opens", decoy.opens)
        _check_port(f"decoys[{index}].checks", decoy.checks)
        if not decoy.process:
            _refuse(f"decoys[{index}].process", "is empty, expected what it passes for")
    if len(stackable) > 1:
        _refuse(
            f"decoys[{stackable[1]}]",
            "opens another port than it checks, as an earlier one does; at most one may "
            "(only its placements are counted)",
        )
    ports = {port for e in scenario.exploits for port in (e.port, *e.needs_one_of)}
    ports |= {port for d in scenario.decoys for port in (d.opens, d.checks)}
    if len(ports) > MAX_PORTS:
        _refuse(
            "exploits and decoys",
            f"are about {len(ports)} different ports {sorted(ports)}, at most {MAX_PORTS} fit",
        )


def _check_b_line(scenario: Scenario) -> None:
    plan = scenario.b_line
    hosts = _hosts(scenario)
    _check_size("b_line.steps", plan.steps, 1, MAX_PLAN_STEPS)
    _check_size("b_line.on_failure", plan.on_failure, len(plan.steps), len(plan.steps))
    _check_size("b_line.next_hosts", plan.next_hosts, 1, MAX_HOSTS)
    _check_unique("b_line.next_hosts", [first for first, _ in plan.next_hosts])
    for pair in plan.next_hosts:
        _check_names("b_line.next_hosts", pair, hosts)
    targets = [step.target for step in plan.steps]
    for index, step in enumerate(plan.steps):
        field = f"b_line.steps[{index}]"
        if step.action == "sweep":
            _check_names(f"{field}.target", [step.target], scenario.subnets)
        elif step.action in _HOST_ACTIONS:
            _check_names(f"{field}.target", [step.target], [*hosts, FIRST_HOST, NEXT_HOST])
        else:
            known = ", ".join(("sweep", *_HOST_ACTIONS))
            _refuse(f"{field}.action", f"is {step.action!r}, expected one of {known}")
        if step.target == NEXT_HOST and FIRST_HOST not in targets[:index]:
            _refuse(f"{field}.target", f"is {NEXT_HOST!r} before any step has {FIRST_HOST!r}")
        if not 0 <= plan.on_failure[index] <= index:
            _refuse(
                f"b_line.on_failure[{index}]",
                f"is {plan.on_failure[index]}, expected this step or an earlier one",
            )
    if FIRST_HOST not in targets:
        _refuse("b_line.steps", f"never targets {FIRST_HOST!r}, the user host drawn")
    if not 1 <= plan.verify_step < len(plan.steps):
        _refuse("b_line.verify_step", f"is {plan.verify_step}, expected a step after the first")
    if plan.steps[plan.verify_step - 1].action != "scan":
        _refuse("b_line.verify_step", f"is {plan.verify_step}, but the step before is no scan")
    if not 0 <= plan.restart_step < plan.verify_step:
        _refuse("b_line.restart_step", f"is {plan.restart_step}, expected one before verify_step")
