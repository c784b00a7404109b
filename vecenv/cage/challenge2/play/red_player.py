"""Red as a person plays it in CAGE Challenge 2, against a policy that plays blue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numba import njit

from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge2.network.scenario import Scenario
from vecenv.cage.challenge2.network.state import decode
from vecenv.cage.challenge2.options import read_scenario
from vecenv.cage.challenge2.play.playing import Player
from vecenv.cage.challenge2.play.policies import Policy, find_policy
from vecenv.cage.challenge2.rules.codes import RED_ACTION_NAMES
from vecenv.page.human import Game, Orders
from vecenv.page.names import Part

__all__ = ["red_game"]

_SLEEP, _SWEEP, _SCAN, _EXPLOIT, _ESCALATE, _IMPACT = range(len(RED_ACTION_NAMES))


@njit
def _as_told(state, rng, tables):
    """Do what `red_game` has written into the state."""
    return state.custom[0], state.custom[1]


def red_game(policy: Policy, *, seed: int, **options: Any) -> tuple[Game, Callable[[], None]]:
    """Make a game in which a person plays red; return it, and what closes it.

    Args:
        policy: Of blue, see `find_policy`.
        seed: Of the first episode.
        **options: `episode_length`, `rules`, `scenario`, `green` as for `Cage2VectorEnv`.

    Raises:
        ValueError: See `Cage2VectorEnv` and `find_policy`.
    """
    scenario = read_scenario(options.pop("scenario", None), options.pop("rules", None))
    player = find_policy(policy, scenario, seed=seed)
    envs = Cage2VectorEnv(
        1,
        scenario=scenario,
        red_agent=_as_told,
        observation=getattr(player, "observation", "bits"),
        autoreset_mode=AutoresetMode.DISABLED,
        **options,
    )
    blue = Player(player, envs)
    moves = _moves(scenario)
    next_actions = np.zeros(1, np.int64)

    def to_actions(order: list[int]) -> np.ndarray:
        kind, target = moves[order[0]][1:]
        envs.states["custom"][0, :2] = kind, target
        return next_actions

    def begin(obs: np.ndarray) -> None:
        blue.begin()
        choose(obs)

    def choose(obs: np.ndarray) -> None:
        next_actions[:] = np.asarray(blue.act(obs))

    def possible() -> list[list[bool]]:
        """Whether red knows enough for a move; it may fail all the same."""
        true = {name: rows[0] for name, rows in decode(envs.true_state, scenario).items()}
        is_open = {
            _SLEEP: lambda target: True,
            _SWEEP: lambda target: true["known_subnet"][target],
            _SCAN: lambda target: true["known_ip"][target],
            _EXPLOIT: lambda target: true["table_scanned"][target],
            _ESCALATE: lambda target: true["access"][target] > 0,  # it also shows other subnets
            _IMPACT: lambda target: true["access"][target] == 2,
        }
        return [[bool(is_open[kind](target)) for _, kind, target in moves]]

    parts = (Part("", tuple(name for name, *_ in moves)),)
    game = Game(
        "CAGE Challenge 2, you are red",
        envs,
        Orders(parts, to_actions, possible, [0]),
        lambda: envs.render_env(0, "rgb_array"),
        seed=seed,
        begin=begin,
        after=choose,
        about=f"{policy} plays blue. The reward is blue's: make it small.",
    )
    return game, envs.close


def _moves(scenario: Scenario) -> list[tuple[str, int, int]]:
    """Return red's moves: words, kind, and number of the subnet or host."""
    words = {_SCAN: "Scan", _EXPLOIT: "Exploit", _ESCALATE: "Escalate"}
    moves = [("Sleep", _SLEEP, 0)]
    moves += [(f"Sweep {name}", _SWEEP, k) for k, name in enumerate(scenario.subnets)]
    for k, host in enumerate(scenario.hosts):
        moves += [(f"{word} {host.name}", kind, k) for kind, word in words.items()]
        if host.name == scenario.operational_service.host:
            moves.append((f"Impact {host.name}", _IMPACT, k))
    return moves
