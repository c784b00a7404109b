"""Checks of a CAGE environment's arguments, and of the actions of a custom red agent.

Error messages name the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from vecenv.cage.challenge2.network.scenario import RULE_SETS, Scenario, cage2_scenario
from vecenv.cage.challenge2.rules import codes
from vecenv.cage.own_red import choice_problem, compiled_red, outside
from vecenv.core.arguments import check_choice, import_object, read_count

__all__ = [
    "MAX_EPISODE_LENGTH", "RED_AGENTS", "STEP_INFOS", "EpisodeLength", "RedAgent",
    "read_episode_lengths", "read_red_agents", "read_scenario", "read_step_infos", "red_problem",
]  # fmt: skip

RedPolicy = Callable[..., Any]
RedAgent = str | RedPolicy | Sequence[str | RedPolicy]
EpisodeLength = int | Collection[int]

RED_AGENTS = {
    "b_line": (codes.B_LINE,),
    "meander": (codes.MEANDER,),
    "sleep": (codes.NO_RED,),
    "mixed": (codes.B_LINE, codes.MEANDER),
}
MAX_EPISODE_LENGTH = 65535  # steps are counted in 16 bits
_STEP_INFOS = (
    "red_agent red_type red_target red_exploit red_detected red_pe_index red_success "
    "blue_success green_target"
)
STEP_INFOS = tuple(_STEP_INFOS.split())


def read_red_agents(red_agent: Any) -> tuple[tuple[int, ...], RedPolicy | None]:
    """Return the codes of the agents that episodes draw from, and the custom policy, if any.

    Args:
        red_agent: A name of RED_AGENTS, a custom policy (see `cage_kernels`; a plain function is
            compiled), its "module:function", or a sequence of these.

    Raises:
        ValueError: An unknown name, an empty sequence, more than one custom policy.
        TypeError: Another type, or a function with other parameters.
        ImportError: The module does not exist.
    """
    given: Any = [red_agent] if isinstance(red_agent, str) or callable(red_agent) else red_agent
    if not isinstance(given, Sequence):
        raise TypeError(f"red_agent is {red_agent!r}, expected {_red_agent_choices()}")
    agents: dict[int, None] = {}  # an ordered set
    policies: list[RedPolicy] = []
    for one in given:
        if isinstance(one, str) and ":" in one:
            one = import_object("red_agent", one)
        if isinstance(one, str) and one in RED_AGENTS:
            agents.update(dict.fromkeys(RED_AGENTS[one]))
        elif callable(one):
            agents[codes.CUSTOM] = None
            policies.append(compiled_red("red_agent", one, ("state", "rng", "tables")))
        else:
            error_type = ValueError if isinstance(one, str) else TypeError
            raise error_type(f"red_agent is {one!r}, expected {_red_agent_choices()}")
    if not agents:
        raise ValueError(f"red_agent is empty, expected {_red_agent_choices()}")
    if len(policies) > 1:
        raise ValueError(f"red_agent has {len(policies)} compiled policies, expected at most one")
    return tuple(agents), policies[0] if policies else None


def _red_agent_choices() -> str:
    names = ", ".join(map(repr, RED_AGENTS))
    return (
        f"one of {names}, a compiled policy or its 'module:function', or a sequence of these to "
        "draw from"
    )


def read_episode_lengths(episode_length: Any, max_episode_steps: Any = None) -> tuple[int, ...]:
    """Return the lengths that episodes draw from; a single one if all are equal.

    Args:
        episode_length: One length, or several.
        max_episode_steps: Upper limit of the lengths; None for no limit.

    Raises:
        ValueError: A length below 1 or too large, no length, or too many.
        TypeError: A length is not an integer.
    """
    lengths: list[Any] = [episode_length]
    if isinstance(episode_length, set | frozenset):
        lengths = sorted(episode_length)
    elif isinstance(episode_length, Sequence | np.ndarray) and not isinstance(episode_length, str):
        lengths = list(episode_length)
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise TypeError(f"episode_length is {length!r}, expected an integer or several")
        if not 1 <= length <= MAX_EPISODE_LENGTH:
            raise ValueError(
                f"episode_length is {length}, expected 1..{MAX_EPISODE_LENGTH} (steps)"
            )
    if not 1 <= len(lengths) <= codes.MAX_LENGTHS:
        raise ValueError(
            f"episode_length has {len(lengths)} entries, expected 1..{codes.MAX_LENGTHS}"
        )
    if max_episode_steps is not None:
        limit = read_count("max_episode_steps", max_episode_steps)
        lengths = [min(length, limit) for length in lengths]
        lengths = lengths[:1] if len(set(lengths)) == 1 else lengths  # nothing is left to draw
    return tuple(map(int, lengths))


def read_scenario(scenario: Any, rules: Any) -> Scenario:
    """Return the given scenario, or the CAGE 2 scenario with the given rules.

    Raises:
        ValueError: Unknown rules, or rules given for a scenario that has its own.
        TypeError: `scenario` is not a `Scenario`.
    """
    if scenario is None:
        rules = "faithful" if rules is None else rules
        check_choice("rules", rules, RULE_SETS)
        return cage2_scenario(rules)
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario is {scenario!r}, expected a vecenv.cage.Scenario or None")
    if rules is not None:
        raise ValueError(
            f"rules is {rules!r}, but the scenario {scenario.name!r} has its own "
            f"({scenario.rules.name!r}); give one of the two"
        )
    return scenario


def read_step_infos(step_infos: Any) -> tuple[str, ...]:
    """Return the names of the facts that infos report about each step.

    Raises:
        ValueError: An unknown name.
    """
    names = (step_infos,) if isinstance(step_infos, str) else tuple(step_infos)
    for name in names:
        if name not in STEP_INFOS:
            raise ValueError(f"step_infos has {name!r}, expected names of {', '.join(STEP_INFOS)}")
    return names


_KINDS = ", ".join(f"{number} {name}" for number, name in enumerate(codes.RED_ACTION_NAMES))


def red_problem(policy: str, choice: Any, state: Any, rng: Any, tables: Any) -> str | None:
    """Return a description of what is wrong with a red policy's choice, or None; see `step_with`.

    Args:
        policy: Name of the policy.
        choice: Its return value.
        state, rng, tables: Its arguments.
    """

    def unknown(kind: int, target: int) -> str | None:
        if not codes.RED_SLEEP <= kind <= codes.IMPACT:
            return f"no kind of action {kind}, expected one of {_KINDS}"
        if kind == codes.RED_SLEEP:
            return None
        if kind == codes.SWEEP:
            return outside("subnet", target, tables.num_subnets)
        return outside("host", target, tables.num_hosts)

    expected = "two integers, a kind of red action and its target"
    return choice_problem(policy, choice, 2, expected, unknown)
