"""CAGE Challenge 4 as Gymnasium's envs, in which one agent plays all of blue."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.cage.challenge4.graph import FLAT, UNITS, check_observation
from vecenv.cage.challenge4.kernels import game_kernels, row_length, team_kernels
from vecenv.cage.challenge4.options import Cage4Options, compile_rules
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import ZONE_NAMES, action_labels, host_name
from vecenv.core.arguments import take_options
from vecenv.jit import EnvKernels, JitEnv, JitVectorEnv

__all__ = [
    "Cage4AgentsVectorEnv",
    "Cage4Env",
    "Cage4VectorEnv",
    "impossible_turns",
    "overflows",
    "vectors_of",
]

METADATA = {"render_modes": ["rgb_array"], "render_fps": 2}


class _Games(JitVectorEnv):
    """Games of CAGE Challenge 4, whoever plays."""

    metadata: dict[str, Any] = METADATA

    def __init__(self, kernels: EnvKernels, num_envs: int, options: Cage4Options, **rest: Any):
        self.options = options
        rest.setdefault("params", compile_rules(options))
        super().__init__(kernels, num_envs, dry_run=callable(options.red), **rest)

    def world(self, **changed: Any) -> np.record:
        """Return the parameter record of these games with other options of `Cage4Options`.

        A vector env takes one for all games or one per game as `params`, and `set_params` one for
        some of them: ``games.set_params([0, 1], games.world(phishing_rate=0.05))``. A red of one's
        own is compiled, and can't be changed.
        """
        if callable(red := changed.get("red")):
            raise TypeError(
                f"red is {red!r}: one of one's own is compiled; make another vector env"
            )
        return compile_rules(replace(self.options, **changed))

    def zone_rewards(self) -> np.ndarray:
        """Return what red and blocks cost in the latest step, by zone and cause.

        Returns:
            float32 (num_envs, 8, 3), the caller's: zones RZA, OZA, RZB, OZB, CON, PUB, ADM, OFF (of
            the green user, or of Impact's target); LocalWork, AccessService, Impact. The reward is
            their sum and the cost of Restore.
        """
        states = self.states
        phase = states["phase"].astype(np.int64)
        out = np.zeros((self.num_envs, codes.NUM_SUBNETS, 3), np.float32)
        out[:, :, 0] = codes.WORK_REWARD[phase] * np.bitwise_count(states["work_failed"])
        out[:, :, 1] = codes.ACCESS_REWARD[phase] * np.bitwise_count(states["access_failed"])
        games, agents = np.nonzero((states["done_type"] == codes.IMPACT) & (states["active"] > 0))
        zones = states["done_target"][games, agents] // codes.HOSTS_PER_SUBNET
        impacts: np.ndarray = out[:, :, 2]
        places: Any = (games, zones)
        np.add.at(impacts, places, codes.IMPACT_REWARD[phase[games], zones])
        return out

    def render(self) -> tuple[Any, ...]:
        """Return a picture of each game, uint8 (height, width, 3)."""
        from vecenv.cage.challenge4.picture import draw_state

        return tuple(draw_state(state, self.options.steps).to_array() for state in self.states)


class Cage4AgentsVectorEnv(_Games):
    """The same games with five agents, whose rows `vecenv.make_vec_agents` makes of it.

    Its observations are those of all agents of a game, one after the other, its actions likewise;
    its reward is the sum of what the agents get, so five times the game's.

    Args:
        num_envs: How many games.
        pad: Whether all agents are in one group, with vectors of 210 values and 242 actions.
        messages: Whether an action is an index and a message of 8 bits, or an index alone.
        observation: See `Cage4VectorEnv`. Padded graphs and events are of agent 4's size.
        **options: Those of `Cage4Options` and of `JitVectorEnv`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        pad: bool = False,
        messages: bool = False,
        observation: str = FLAT,
        **options: Any,
    ) -> None:
        names = [field.name for field in fields(Cage4Options)]
        chosen = take_options(Cage4Options, names, options)
        check_observation(observation)
        kernels = game_kernels(bool(pad), bool(messages), chosen.own_red, observation)
        super().__init__(kernels, num_envs, chosen, **options)


class Cage4VectorEnv(_Games):
    """Many games of CAGE Challenge 4, with one agent for all of blue.

    For one agent per row, see `vecenv.make_vec_agents`: ``make_vec_agents("Cage4-v0", 64)``. What a
    game does depends on its seed and its actions only. The true state is `states`, live records.

    Args:
        num_envs: How many games.
        messages: Whether actions have a message of 8 bits for each agent, too. Without, none is
            sent, as in the challenge's own evaluation.
        observation: What agents see. "flat" is the original's vectors; "graph" the same and the
            agent's own decoys and action under way as rows of a `Cage4Graph`; "events" is the
            vectors and what the original's raw observations tell, as rows of a `Cage4Events`.
        steps, red, phishing_rate, alarm_rate, greens_one_by_one: See `Cage4Options`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: At most so many threads; None for one per processor.
        episode_infos: Whether infos["episode"] reports returns and lengths of ended episodes.
        mask_infos: Whether infos["action_mask"] has what `action_masks` returns.
        render_mode: "rgb_array" or None.
        debug: Whether kernels run as plain Python, with every index checked: slowly.

    What `states` say of the latest step, as numbers:

    | field | |
    |---|---|
    | blue_family | 0 Sleep, 1 Monitor, 2 Analyse, 3 Remove, 4 Restore, 5 AllowTraffic |
    | | 6 BlockTraffic, 7 DeployDecoy: under way, or done in this step |
    | blue_success | 0 failed, 1 succeeded, 2 unknown: of Sleep, 3 in progress |
    | blue_left | steps until the action takes effect |
    | choice_type, busy_type, done_type | what red chose, what is under way, what took effect |
    | | 0 DiscoverRemoteSystems, 1 AggressiveServiceDiscovery, 2 StealthServiceDiscovery |
    | | 3 DiscoverDeception, 4 ExploitRemoteService, 5 PrivilegeEscalate, 6 Impact |
    | | 7 DegradeServices; 254 it is not active, 255 nothing |
    | done_success | 0 failed, 1 succeeded, 4 dropped, as its session was gone; 255 nothing |
    | red_exploit | 0 HTTP, 1 HTTPS, 2 SSH, 3 SQL, 4 mail; -1 none |

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.

    Example:
        >>> envs = Cage4VectorEnv(2, debug=True)
        >>> obs, _ = envs.reset(seed=0)
        >>> obs.shape, [vectors.shape for vectors in vectors_of(obs)][3:]
        ((2, 578), [(2, 92), (2, 210)])
        >>> obs, rewards, *_ = envs.step([[49, 49, 49, 49, 145]] * 2)
        >>> rewards.shape, envs.states["phase"]
        ((2,), array([0, 0], dtype=uint8))
        >>> envs.close()
    """

    agents_class: ClassVar[type[JitVectorEnv] | None] = Cage4AgentsVectorEnv

    def __init__(
        self,
        num_envs: int = 1,
        *,
        messages: bool = False,
        observation: str = FLAT,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        episode_infos: bool = False,
        mask_infos: bool = False,
        render_mode: str | None = None,
        debug: bool = False,
        **options: Any,
    ) -> None:
        check_observation(observation)
        chosen = Cage4Options(**options)
        self._observation = observation
        super().__init__(
            team_kernels(messages, chosen.own_red, observation),
            num_envs,
            chosen,
            autoreset_mode=autoreset_mode,
            num_threads=num_threads,
            episode_infos=episode_infos,
            mask_infos=mask_infos,
            render_mode=render_mode,
            debug=debug,
        )

    def agent_masks(self) -> list[np.ndarray]:
        """Return which actions do something, of each agent bool (num_envs, 82) or (.., 242).

        They stay the same through an episode.
        """
        masks = self.action_masks().view(np.bool_)
        stops = np.cumsum(codes.NUM_ACTIONS)
        return np.split(masks[:, : stops[-1]], stops[:-1], axis=1)

    def agent_obs(self, obs: np.ndarray) -> list[np.ndarray]:
        """Return what each agent sees, views of obs: (num_envs, 92) or (.., 210) of vectors."""
        stops = np.cumsum([row_length(units, self._observation) for units in UNITS])
        return np.split(obs, stops[:-1], axis=1)

    def get_action_meanings(self) -> dict[str, list[str]]:
        """Return what each action of each agent is called; messages are "00000000" and so on."""
        found = {f"blue {agent}": _short_labels(agent) for agent in range(codes.NUM_BLUE)}
        if len(self.single_action_space.nvec) > codes.NUM_BLUE:  # type: ignore[attr-defined]  # a MultiDiscrete
            messages = [f"{bits:0{codes.MESSAGE_BITS}b}" for bits in range(1 << codes.MESSAGE_BITS)]
            found |= {f"message of blue {agent}": messages for agent in range(codes.NUM_BLUE)}
        return found

    def get_busy_parts(self) -> dict[str, str]:
        """Return what agents of the first game do that are busy, and so ignore their next action.

        Example:
            >>> envs = Cage4VectorEnv(1, debug=True)
            >>> _ = envs.reset(seed=0)
            >>> _ = envs.step([[49, 33, 49, 49, 145]])  # the others sleep
            >>> envs.get_busy_parts()
            {'blue 1': 'busy with Restore OZA server 0, 3 more'}
        """
        state, found = self.states[0], {}
        for agent in range(codes.NUM_BLUE):
            left = int(state["blue_left"][agent])
            if left:
                what = _short(host_name(int(state["blue_target"][agent])))
                what = f"{codes.FAMILY_NAMES[int(state['blue_family'][agent])]} {what}"
                found[f"blue {agent}"] = (
                    f"busy with {what}, {left - 1} more" if left > 1 else f"finishes {what}"
                )
        return found

    def get_red_deeds(self) -> dict[str, str]:
        """Return which actions of red took effect in the latest step of the first game."""
        state, found = self.states[0], {}
        for agent in np.flatnonzero(state["done_type"] != codes.NONE).tolist():
            kind, target = int(state["done_type"][agent]), int(state["done_target"][agent])
            where = (
                codes.SUBNET_NAMES[target] if kind == codes.DISCOVER else _short(host_name(target))
            )
            outcome = "succeeded" if state["done_success"][agent] == codes.SUCCEEDED else "failed"
            found[f"red {agent}"] = f"{codes.RED_ACTION_NAMES[kind]} {where}, {outcome}"
        return found


class Cage4Env(JitEnv):
    """One game of CAGE Challenge 4, with one agent for all of blue; see `Cage4VectorEnv`.

    Infos have "action_mask", int8 (570,): which actions do something, of one agent after the other.

    Args:
        render_mode: "rgb_array" or None.
        **options: `messages` and the rest, as for `Cage4VectorEnv`.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        options.setdefault("mask_infos", True)
        super().__init__(Cage4VectorEnv, render_mode=render_mode, **options)

    @property
    def state(self) -> np.record:
        """The true state: a live record."""
        return self._envs.states[0]


def _short_labels(agent: int) -> list[str]:
    """Return the labels of an agent's actions with "RZA user 4" for the host's whole name."""
    return [_short(label) for label in action_labels(agent)]


def _short(label: str) -> str:
    for long, short in zip(ZONE_NAMES, codes.SUBNET_NAMES, strict=True):
        label = label.replace(long, short)
    return label.replace("_user_host_", " user ").replace("_server_host_", " server ")


def vectors_of(obs: np.ndarray) -> list[np.ndarray]:
    """Return what each agent sees, views (N, 92) or (N, 210) of obs (N, 578)."""
    return np.split(obs, codes.OBS_STARTS[1:], axis=1)


def impossible_turns(states: np.ndarray) -> np.ndarray:
    """Return where a red agent of one's own chose what does not exist in the latest step.

    Args:
        states: Records (N,).

    Returns:
        bool (N, 6); fresh memory.
    """
    return (states["choice_type"] == codes.NONE) & (states["choice_session"] == codes.IMPOSSIBLE)


def overflows(states: np.ndarray) -> dict[str, int]:
    """Count games that have outgrown a capacity in this episode; such a game is not exact.

    Args:
        states: `Cage4VectorEnv.states`.

    Returns:
        Numbers of games by capacity; empty if there is none.
    """
    flags = states["overflow"]
    counts = {name: int((flags >> bit & 1).sum()) for bit, name in enumerate(codes.OVERFLOW_NAMES)}
    return {name: count for name, count in counts.items() if count}
