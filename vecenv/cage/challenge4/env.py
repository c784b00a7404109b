"""CAGE Challenge 4 as Gymnasium envs: one agent controls all five blue agents, or five agents.

First the options of a game, with the record that kernels read, and the kernels.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from numba import njit

from vecenv.cage.challenge4.observations import (
    EVENTS,
    FLAT,
    KINDS,
    MAX_UNITS,
    UNITS,
    mask_agent,
    mask_all,
    row_length,
    rows_space,
)
from vecenv.cage.challenge4.rules import codes, dynamics
from vecenv.cage.challenge4.rules.codes import ZONE_NAMES, action_labels, host_name
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.cage.playing import choice_problem, compiled_red, outside
from vecenv.core.arguments import check_choice, import_object, read_count
from vecenv.jit import AgentsOf, EnvKernels, JitEnv, JitVectorEnv, checked_in_trials, pack_record

_MAX_STEPS = 65535  # steps are counted in 16 bits


@dataclass(frozen=True)
class Cage4Options:
    """Options of a game; the defaults are the challenge's numbers.

    Attributes:
        steps: The constructor argument S of the original. An episode has S - 1 steps.
        red: "fsm" the default red agent, "discovery" its variant, "sleep" one that does nothing; or
            a custom compiled function `(state, agent, rng)`, or its "module:function". It is called
            for an agent that has sessions and is not busy. It returns three integers: an action (a
            code of `rules.codes`), a host (for DISCOVER a subnet), and the id of an available
            session. The agent waits if the action is 255, or if it does not know what was chosen. A
            trial in Python rejects functions that choose what does not exist, but may not reach all
            of their choices; `evaluate_cage4` counts such choices.
        phishing_rate: Probability that a green user's work opens a phishing mail.
        alarm_rate: Probability that a green user's work or access raises a false alarm.
        greens_one_by_one: Whether each green user is drawn separately, as in the original. This is
            slower; the distribution is the same.
        log: Whether games keep what raw observations show; with observation "events" they always
            do. Without it they are 5 % faster.
    """

    steps: int = 500
    red: str | Callable[..., Any] = "fsm"
    phishing_rate: float = codes.PHISHING_RATE
    alarm_rate: float = codes.ALARM_RATE
    greens_one_by_one: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        read_count("steps", self.steps, 2, _MAX_STEPS)
        if isinstance(self.red, str) and ":" in self.red:
            object.__setattr__(self, "red", import_object("red", self.red))
        if not callable(self.red) and self.red not in codes.RED_VARIANTS:
            raise ValueError(
                f"red must be one of {', '.join(codes.RED_VARIANTS)}, a compiled function or its "
                f"'module:function', got {self.red!r}"
            )
        for name in ("phishing_rate", "alarm_rate"):
            rate = getattr(self, name)
            is_number = isinstance(rate, int | float | np.integer | np.floating)
            if not is_number or not 0 <= rate <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {rate!r}")

    @property
    def own_red(self) -> Callable[..., Any] | None:
        """The custom red agent, compiled; None for the challenge's own red agents."""
        parameters = ("state", "agent", "rng")
        return compiled_red("red", self.red, parameters) if callable(self.red) else None


def compile_rules(options: Cage4Options) -> np.record:
    """Return the record that kernels read."""
    steps, alarm, phishing = options.steps, options.alarm_rate, options.phishing_rate
    length, rest = divmod(steps, 3)
    second_phase = length + (rest >= 1)
    # For a user whose work and access always succeed: probabilities of visible events (SPEC 6).
    # A third each: access, work, sleep; `anything` is at most 2/3.
    access = alarm / 3
    alarm_only, both = alarm * (1 - phishing) / 3, alarm * phishing / 3
    phishing_only = (1 - alarm) * phishing / 3
    anything = access + alarm_only + both + phishing_only
    shares = (access, access + alarm_only, access + alarm_only + both)
    share_access, share_phish, share_alarm = (
        [part / anything for part in shares] if anything else [0.0, 0.0, 0.0]
    )
    return pack_record(
        steps=np.int64(steps),
        second_phase=np.int64(second_phase),
        third_phase=np.int64(second_phase + length + (rest == 2)),
        red_variant=np.int64(0 if callable(options.red) else codes.RED_VARIANTS.index(options.red)),
        greens_one_by_one=np.int64(options.greens_one_by_one),
        keeps_log=np.int64(options.log),
        phishing_rate=float(phishing),
        alarm_rate=float(alarm),
        quiet_scale=1 / math.log1p(-anything) if anything else 0.0,
        share_access=share_access,
        share_alarm=share_alarm,
        share_phish=share_phish,
        access_failure=(1 - alarm) / 3 / (1 - anything),
        work_failure=(1 - alarm) * (1 - phishing) / 3 / (1 - anything),
    )


def red_problem(policy: str, choice: Any, state: Any, agent: Any, rng: Any) -> str | None:
    """Return what is wrong with a policy's choice, or None if it is valid; see `Cage4Options`.

    Choosing something that exists but is unknown to the agent is valid.

    Args:
        policy: Name of the policy.
        choice: Value that the policy returned.
        state, agent, rng: Arguments of the policy.
    """
    expected = "three integers: what to do, the host or subnet, and a session on offer"
    return choice_problem(policy, choice, 3, expected, _unknown)


def _unknown(kind: int, target: int, session: int) -> str | None:
    if kind == codes.NONE:
        return None
    if not 0 <= kind < codes.WITHDRAW:
        known = f"a code from 0 to {codes.WITHDRAW - 1}, or {codes.NONE} to wait"
        return f"no action {kind}, expected {known}"
    if kind == codes.DISCOVER:
        return outside("subnet", target, codes.NUM_SUBNETS)
    return outside("host", target, codes.NUM_HOSTS)


NUM_MESSAGES = 1 << codes.MESSAGE_BITS
_SILENCE = (np.int64(0),) * codes.NUM_BLUE  # no messages
# Names of groups, as in `vecenv.agents.group_agents`: agents 0 to 3 (all if padded); agent 4.
ZONES, HEADQUARTERS = "blue_agent", "blue_agent_4"


# --- readers: from an env's action to the actions and messages of five agents ---


@njit
def _five(z, h, last):
    """Return the actions or messages of five agents: 0 to 3 from `z`, 4 from h[last]."""
    return (np.int64(z[0]), np.int64(z[1]), np.int64(z[2]), np.int64(z[3]), np.int64(h[last]))


@njit
def _team(a):
    return _five(a, a, 4) + _SILENCE


@njit
def _team_and_messages(a):
    return _five(a, a, 4) + _five(a[5:], a[5:], 4)


@njit
def _padded_and_messages(a):
    return _five(a[:, 0], a[:, 0], 4) + _five(a[:, 1], a[:, 1], 4)


@njit
def _two_groups(actions):
    return _five(actions[0], actions[1], 0) + _SILENCE


@njit
def _two_groups_and_messages(actions):
    z, h = actions
    return _five(z[:, 0], h[:, 0], 0) + _five(z[:, 1], h[:, 1], 0)


@functools.cache
def _observer(observation: str, units: int) -> Callable[..., None]:
    """Return a kernel that writes an agent's row with room for `units` own zones."""
    write = KINDS[observation].write

    @njit
    def observe(state, agent, out, rules):
        write(state, agent, out, units)

    return observe


def observer_of_all(observation: str) -> Callable[..., None]:
    """Return a kernel that writes the concatenated rows of all agents."""
    ends = np.cumsum([row_length(units, observation) for units in UNITS])
    starts = np.array([0, *ends[:-1]])
    first, last = _observer(observation, 1), _observer(observation, MAX_UNITS)

    @njit
    def observe_all(state, out, rules):
        for agent in range(codes.NUM_BLUE - 1):
            first(state, agent, out[starts[agent] : ends[agent]], rules)
        last(state, codes.NUM_BLUE - 1, out[starts[codes.NUM_BLUE - 1] :], rules)

    return observe_all


def _game_step(read: Any, own_red: Any) -> Any:
    """Return the step kernel; a trial in Python checks the choices of a custom red agent."""
    red = None if own_red is None else checked_in_trials(own_red, red_problem)
    return dynamics.step_kernel(read, red)


@functools.cache
def _masker(num_actions: int) -> Callable[..., None]:
    @njit
    def mask(state, agent, out, rules):
        mask_agent(state, agent, out, num_actions)

    return mask


@functools.cache
def team_kernels(
    messages: bool = False, own_red: Callable[..., Any] | None = None, observation: str = FLAT
) -> EnvKernels:
    """Return the kernels of an env in which one agent plays all of blue.

    Its observation concatenates those of all agents: uint8 (578,) if these are vectors. Its action
    is an index for each agent, followed by an 8-bit number for each if there are messages.
    """
    nvec = [*codes.NUM_ACTIONS, *([NUM_MESSAGES] * codes.NUM_BLUE if messages else [])]
    read = _team_and_messages if messages else _team
    return EnvKernels(
        STATE_DTYPE,
        rows_space(UNITS, observation),
        MultiDiscrete(nvec),
        dynamics.reset,
        _game_step(read, own_red),
        observer_of_all(observation),
        mask_all,
        name="CAGE Challenge 4",
    )


@functools.cache
def game_kernels(
    pad: bool = False,
    messages: bool = False,
    own_red: Callable[..., Any] | None = None,
    observation: str = FLAT,
) -> EnvKernels:
    """Return the kernels of a game of five blue agents.

    Args:
        pad: Whether all agents form one group "blue_agent", padded to the sizes of agent 4. If
            not, agents 0 to 3 form "blue_agent" and agent 4 forms "blue_agent_4".
        messages: Whether an action is an index and an 8-bit message, or an index alone.
        own_red: See `dynamics.step_kernel`.
        observation: See `Cage4VectorEnv`.
    """
    layout = {ZONES: codes.AGENT_NAMES[:4], HEADQUARTERS: codes.AGENT_NAMES[4:]}
    read = _two_groups_and_messages if messages else _two_groups
    if pad:
        layout, read = {ZONES: codes.AGENT_NAMES}, _padded_and_messages if messages else _team
    groups, observers, masks = {}, {}, {}
    for name, agents in layout.items():
        units = 1 if len(agents) == 4 else MAX_UNITS
        num = codes.NUM_ACTIONS[0 if units == 1 else -1]
        actions = MultiDiscrete([num, NUM_MESSAGES]) if messages else Discrete(num)
        groups[name] = AgentsOf(agents, rows_space((units,), observation), actions)
        observers[name], masks[name] = _observer(observation, units), _masker(num)
    return EnvKernels(
        STATE_DTYPE,
        reset=dynamics.reset,
        step=_game_step(read, own_red),
        observe=observers,
        action_mask=masks,
        groups=groups,
        name="CAGE Challenge 4",
    )


METADATA = {"render_modes": ["rgb_array"], "render_fps": 2}


class _Games(JitVectorEnv):
    """Base of the vector envs of CAGE Challenge 4."""

    metadata: dict[str, Any] = METADATA

    def __init__(
        self,
        make: Callable[..., EnvKernels],
        num_envs: int,
        observation: str,
        options: dict[str, Any],
    ) -> None:
        known = inspect.signature(JitVectorEnv).parameters.keys() & options.keys()
        rest = {name: options.pop(name) for name in known}
        chosen = Cage4Options(**options)
        check_choice("observation", observation, tuple(KINDS))
        # Games keep what this kind of observation shows.
        self.options = replace(chosen, log=chosen.log or observation == EVENTS)
        self._observation = observation
        rest.setdefault("params", compile_rules(self.options))
        is_tried = callable(chosen.red) and not rest.get("debug")
        kernels = make(own_red=chosen.own_red, observation=observation)
        super().__init__(kernels, num_envs, dry_run=is_tried, **rest)

    def world(self, **changed: Any) -> np.record:
        """Return the parameter record of these games with some options of `Cage4Options` changed.

        The argument `params` of a vector env takes one record for all games, or one per game.
        To change some games: ``games.set_params([0, 1], games.world(phishing_rate=0.05))``.
        A custom red agent is compiled in and can't be changed.
        """
        if callable(red := changed.get("red")):
            raise TypeError(f"red is {red!r}: a custom one is compiled; make another vector env")
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
        out[:, :, 2] = impact_rewards(states)
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
        make = functools.partial(game_kernels, bool(pad), bool(messages))
        super().__init__(make, num_envs, observation, options)


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
        **options: `steps`, `red`, `phishing_rate`, `alarm_rate`, `greens_one_by_one`, `log`, see
            `Cage4Options`; and options of `JitVectorEnv`, with the `render_mode` "rgb_array".

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
        >>> obs.shape, [vectors.shape for vectors in envs.agent_obs(obs)][3:]
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
        **options: Any,
    ) -> None:
        super().__init__(functools.partial(team_kernels, messages), num_envs, observation, options)

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
        agents = range(codes.NUM_BLUE)
        found = {f"blue {agent}": list(map(_short, action_labels(agent))) for agent in agents}
        if len(self.single_action_space.nvec) > codes.NUM_BLUE:  # type: ignore[attr-defined]  # a MultiDiscrete
            messages = [f"{bits:0{codes.MESSAGE_BITS}b}" for bits in range(1 << codes.MESSAGE_BITS)]
            found |= {f"message of blue {agent}": messages for agent in agents}
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


def _short(label: str) -> str:
    """Return a label with its host names shortened, as "RZA user 4"."""
    for long, short in zip(ZONE_NAMES, codes.SUBNET_NAMES, strict=True):
        label = label.replace(long, short)
    return label.replace("_user_host_", " user ").replace("_server_host_", " server ")


def impact_rewards(states: np.ndarray) -> np.ndarray:
    """Return the rewards of Impact in the latest step, by its target's zone.

    Args:
        states: Records (N,).

    Returns:
        float32 (N, 8), newly allocated; zones as in `Cage4VectorEnv.zone_rewards`.
    """
    out = np.zeros((len(states), codes.NUM_SUBNETS), np.float32)
    games, agents = np.nonzero((states["done_type"] == codes.IMPACT) & (states["active"] > 0))
    zones = states["done_target"][games, agents] // codes.HOSTS_PER_SUBNET
    places: Any = (games, zones)
    np.add.at(out, places, codes.IMPACT_REWARD[states["phase"][games].astype(np.int64), zones])
    return out


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
