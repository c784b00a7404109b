"""CAGE Challenge 4 as Gymnasium envs: one agent controls all five blue agents."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.cage.challenge4.graph import EVENTS, FLAT, UNITS, check_observation
from vecenv.cage.challenge4.kernels import game_kernels, row_length, team_kernels
from vecenv.cage.challenge4.options import Cage4Options, compile_rules
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import ZONE_NAMES, action_labels, host_name
from vecenv.core.arguments import take_options
from vecenv.jit import EnvKernels, JitEnv, JitVectorEnv

__all__ = [
    "Cage4AgentsVectorEnv", "Cage4Env", "Cage4VectorEnv", "impossible_turns", "overflows",
    "vectors_of",
]  # fmt: skip

METADATA = {"render_modes": ["rgb_array"], "render_fps": 2}


class _Games(JitVectorEnv):
    """Base of the vector envs of CAGE Challenge 4."""

    metadata: dict[str, Any] = METADATA

    def __init__(self, kernels: EnvKernels, num_envs: int, options: Cage4Options, **rest: Any):
        self.options = options
        rest.setdefault("params", compile_rules(options))
        is_tried = callable(options.red) and not rest.get("debug")
        super().__init__(kernels, num_envs, dry_run=is_tried, **rest)

    def world(self, **changed: Any) -> np.record:
        """Return the parameter record of these games with some options of `Cage4Options` changed.

        The argument `params` of a vector env takes one record for all games, or one per game.
        To change some games: ``games.set_params([0, 1], games.world(phishing_rate=0.05))``.
        A custom red agent is compiled in and can't be changed.
        """
        if callable(red := changed.get("red")):
            raise TypeError(
                f"red is {red!r}: one of one's own is compiled; make another vector env"
            )
        return compile_rules(replace(self.options, **changed))

    def check_state(self, state: Any, states: np.ndarray) -> None:
        """Refuse games without a log if the envs keep one."""
        if self.options.log and not states["keeps_log"].all():
            raise ValueError("the state is of games without a log; make their env with log=True")

    def zone_rewards(self) -> np.ndarray:
        """Return the rewards from red and from blocks in the latest step, by zone and cause.

        Returns:
            float32 (num_envs, 8, 3), owned by the caller. Axis 1 is the zone of the green user or
            of Impact's target: RZA, OZA, RZB, OZB, CON, PUB, ADM, OFF. Axis 2 is the cause:
            LocalWork, AccessService, Impact. The reward is their sum plus the cost of Restore.
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
    """Games with five agents; `vecenv.make_vec_agents` turns it into one row per agent.

    Observations and actions of a game's agents are concatenated. The reward is the sum over the
    five agents, and so five times the game's reward.

    Args:
        num_envs: Number of games.
        pad: Whether all agents form one group, with vectors of 210 values and 242 actions.
        messages: Whether an action is an index and an 8-bit message, or an index alone.
        observation: See `Cage4VectorEnv`. Padded graphs and events have the size of agent 4's.
        **options: Options of `Cage4Options` and of `JitVectorEnv`.
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
        super().__init__(kernels, num_envs, _with_log(chosen, observation), **options)


class Cage4VectorEnv(_Games):
    """Many games of CAGE Challenge 4; one agent controls all five blue agents.

    For one agent per row, use `vecenv.make_vec_agents`: ``make_vec_agents("Cage4-v0", 64)``. A game
    depends only on its seed and its actions. `states` is the true state, as live records.

    Args:
        num_envs: Number of games.
        messages: Whether an action also has an 8-bit message for each agent. If not, no messages
            are sent, as in the challenge's own evaluation.
        observation: Kind of observation. "flat": the original's vectors. "graph": these plus the
            agent's own decoys and its pending action, as rows of a `Cage4Graph`. "events": the
            vectors plus the content of the original's raw observations, as rows of a `Cage4Events`.
        steps, red, phishing_rate, alarm_rate, greens_one_by_one, log: See `Cage4Options`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: Maximum number of threads; None for one per processor.
        episode_infos: Whether infos["episode"] has the return and length of each ended episode.
        mask_infos: Whether infos["action_mask"] has the result of `action_masks`.
        render_mode: "rgb_array" or None.
        debug: Whether kernels run as plain Python with every index checked, which is slow.

    Fields of `states` about the latest step, and their codes:

    | field | |
    |---|---|
    | blue_family | 0 Sleep, 1 Monitor, 2 Analyse, 3 Remove, 4 Restore, 5 AllowTraffic |
    | | 6 BlockTraffic, 7 DeployDecoy; the action is pending, or took effect in this step |
    | blue_success | 0 failed, 1 succeeded, 2 unknown (Sleep), 3 in progress |
    | blue_left | steps until the action takes effect |
    | choice_type, busy_type, done_type | red's chosen, pending and completed action |
    | | 0 DiscoverRemoteSystems, 1 AggressiveServiceDiscovery, 2 StealthServiceDiscovery |
    | | 3 DiscoverDeception, 4 ExploitRemoteService, 5 PrivilegeEscalate, 6 Impact |
    | | 7 DegradeServices, 254 agent is not active, 255 nothing |
    | done_success | 0 failed, 1 succeeded, 4 dropped because its session was gone, 255 nothing |
    | red_exploit | 0 HTTP, 1 HTTPS, 2 SSH, 3 SQL, 4 mail; -1 none |

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.

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
            _with_log(chosen, observation),
            autoreset_mode=autoreset_mode,
            num_threads=num_threads,
            episode_infos=episode_infos,
            mask_infos=mask_infos,
            render_mode=render_mode,
            debug=debug,
        )

    def agent_masks(self) -> list[np.ndarray]:
        """Return masks of actions that have an effect, by agent: bool (num_envs, 82) or (.., 242).

        Masks stay the same throughout an episode.
        """
        masks = self.action_masks().view(np.bool_)
        stops = np.cumsum(codes.NUM_ACTIONS)
        return np.split(masks[:, : stops[-1]], stops[:-1], axis=1)

    def agent_obs(self, obs: np.ndarray) -> list[np.ndarray]:
        """Return views of obs, one per agent; vectors are (num_envs, 92) or (num_envs, 210)."""
        stops = np.cumsum([row_length(units, self._observation) for units in UNITS])
        return np.split(obs, stops[:-1], axis=1)

    def get_action_meanings(self) -> dict[str, list[str]]:
        """Return the names of each agent's actions; messages are named "00000000" and so on."""
        found = {f"blue {agent}": _short_labels(agent) for agent in range(codes.NUM_BLUE)}
        if len(self.single_action_space.nvec) > codes.NUM_BLUE:  # type: ignore[attr-defined]  # a MultiDiscrete
            messages = [f"{bits:0{codes.MESSAGE_BITS}b}" for bits in range(1 << codes.MESSAGE_BITS)]
            found |= {f"message of blue {agent}": messages for agent in range(codes.NUM_BLUE)}
        return found

    def get_busy_parts(self) -> dict[str, str]:
        """Return pending actions of game 0's busy agents; a busy agent ignores its next action.

        Example:
            >>> envs = Cage4VectorEnv(1, debug=True)
            >>> _ = envs.reset(seed=0)
            >>> _ = envs.step([[49, 33, 49, 49, 145]])  # the others sleep
            >>> envs.get_busy_parts()
            {'blue 1': 'busy with Restore OZA server 0, 3 more'}
        """
        state, found = self.states[0], {}
        for agent in range(codes.NUM_BLUE):
            if left := int(state["blue_left"][agent]):
                what = _short(host_name(int(state["blue_target"][agent])))
                what = f"{codes.FAMILY_NAMES[int(state['blue_family'][agent])]} {what}"
                busy = f"busy with {what}, {left - 1} more"
                found[f"blue {agent}"] = busy if left > 1 else f"finishes {what}"
        return found

    def get_red_deeds(self) -> dict[str, str]:
        """Return the red actions that took effect in the latest step of the first game."""
        state, found = self.states[0], {}
        for agent in np.flatnonzero(state["done_type"] != codes.NONE).tolist():
            kind, target = int(state["done_type"][agent]), int(state["done_target"][agent])
            is_zone = kind == codes.DISCOVER
            where = codes.SUBNET_NAMES[target] if is_zone else _short(host_name(target))
            outcome = "succeeded" if state["done_success"][agent] == codes.SUCCEEDED else "failed"
            found[f"red {agent}"] = f"{codes.RED_ACTION_NAMES[kind]} {where}, {outcome}"
        return found


class Cage4Env(JitEnv):
    """One game of CAGE Challenge 4; one agent controls all blue agents. See `Cage4VectorEnv`.

    infos["action_mask"], int8 (570,), marks actions that have an effect, agent by agent.

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
        """The true state, as a live record."""
        return self._envs.states[0]


def _with_log(options: Cage4Options, observation: str) -> Cage4Options:
    """Return options under which games keep what this kind of observation shows."""
    return replace(options, log=True) if observation == EVENTS else options


def _short_labels(agent: int) -> list[str]:
    """Return the labels of an agent's actions, with host names shortened, as "RZA user 4"."""
    return [_short(label) for label in action_labels(agent)]


def _short(label: str) -> str:
    for long, short in zip(ZONE_NAMES, codes.SUBNET_NAMES, strict=True):
        label = label.replace(long, short)
    return label.replace("_user_host_", " user ").replace("_server_host_", " server ")


def vectors_of(obs: np.ndarray) -> list[np.ndarray]:
    """Split obs (N, 578) into one view per agent: (N, 92) or (N, 210)."""
    return np.split(obs, codes.OBS_STARTS[1:], axis=1)


def impossible_turns(states: np.ndarray) -> np.ndarray:
    """Return where a custom red agent made an impossible choice in the latest step.

    Args:
        states: Records (N,).

    Returns:
        bool (N, 6), newly allocated.
    """
    return (states["choice_type"] == codes.NONE) & (states["choice_session"] == codes.IMPOSSIBLE)


def overflows(states: np.ndarray) -> dict[str, int]:
    """Count games that have exceeded a capacity in this episode; such games are not exact.

    Args:
        states: `Cage4VectorEnv.states`.

    Returns:
        Number of games by capacity; empty if no game has exceeded one.
    """
    flags = states["overflow"]
    counts = {name: int((flags >> bit & 1).sum()) for bit, name in enumerate(codes.OVERFLOW_NAMES)}
    return {name: count for name, count in counts.items() if count}
