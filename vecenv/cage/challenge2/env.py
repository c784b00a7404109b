"""CAGE Challenge 2 as Gymnasium's envs: thousands of networks with a defender each, or one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from rich.table import Table

from vecenv.cage.challenge2.kernels import (
    LENGTH_FIELD,
    OBSERVATIONS,
    add_lengths,
    cage_kernels,
    with_drawn_lengths,
)
from vecenv.cage.challenge2.network.choices import blue_choices
from vecenv.cage.challenge2.network.scenario import Scenario, blue_actions
from vecenv.cage.challenge2.network.state import decode, shell_alerts
from vecenv.cage.challenge2.network.tables import compile_tables
from vecenv.cage.challenge2.options import (
    EpisodeLength,
    RedAgent,
    read_episode_lengths,
    read_red_agents,
    read_scenario,
    read_step_infos,
)
from vecenv.cage.challenge2.remembering import add_choices
from vecenv.cage.challenge2.rules.codes import (
    MAX_HOSTS,
    NONE,
    RED_ACTION_NAMES,
    RED_AGENT_NAMES,
    SUCCESS_NAMES,
)
from vecenv.cage.challenge2.view import text
from vecenv.cage.challenge2.view.snapshot import Episode, Snapshot, take_snapshot
from vecenv.cage.identity import describe_identity, warn_of_other
from vecenv.core.arguments import check_choice
from vecenv.core.base import StepBatch, StepResult
from vecenv.files import read_entry
from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.random import BLOCK_SIZE
from vecenv.jit.single import JitEnv

__all__ = ["Cage2Env", "Cage2VectorEnv"]

RENDER_MODES = ("ansi", "rgb_array")
METADATA = {"render_modes": list(RENDER_MODES), "render_fps": 2}
_MAX_FACTS = 1 << 20  # bytes of the text that says what a state is of


class Cage2VectorEnv(JitVectorEnv):
    """Many copies of the CAGE Challenge 2 simulator.

    Blue, who acts, defends a network against a red agent that is part of the env. What an env does
    depends on its seed and its actions only. Everything that `JitVectorEnv` has is there: `step`
    with `out=`, `send` and `recv`, `action_masks`, `state_dict`, `last_returns`.

    Args:
        num_envs: How many.
        red_agent: "b_line", "meander" or "sleep"; "mixed": each episode draws B_line or Meander;
            a compiled policy (see `cage_kernels`) or its "module:function"; or a sequence of
            these, of which each episode draws one, uniformly.
        episode_length: Steps after which an episode is truncated, or several numbers of which each
            episode draws one, uniformly. (No episode ends otherwise.)
        max_episode_steps: No episode is longer than this, whatever `episode_length` says; what
            `gymnasium.make`, `gymnasium.make_vec` and registered ids call it.
        rules: "faithful", the challenge as it was run (the default), or "debugged", the corrected
            version. Scores under different rules are not comparable.
        scenario: Other tables, with rules of their own.
        observation: "bits": the original's 52 values 0 and 1; "extended": these, and what blue may
            remember, see `kernels.observation_space`; "memory": what a `BlueMemory` remembers, 152
            values, with its 44 choices for actions.
        green: Whether a green agent scans hosts at random; the challenge has none.
        obs_dtype: Of the observations.
        step_infos: Names of STEP_INFOS that infos report for every step, as arrays.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: At most so many threads; None for one per processor.
        episode_infos: Whether infos["episode"] reports returns and lengths of ended episodes.
        mask_infos: Whether infos["action_mask"] has what `action_masks` returns.
        render_mode: "ansi" or "rgb_array", what `render` returns.
        params: Records of `world`, one per env, for reds or networks that differ between envs.
        sampler: See `JitVectorEnv`.

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.

    Example:
        >>> envs = Cage2VectorEnv(3, red_agent="meander", episode_length=30)
        >>> obs, infos = envs.reset(seed=1)
        >>> obs.shape, envs.single_action_space
        ((3, 52), Discrete(145))
        >>> obs, rewards, terminations, truncations, infos = envs.step([0, 1, 144])
        >>> rewards
        array([ 0.,  0., -1.])
        >>> envs.true_state["known_subnet"], envs.decoded_state()["known_subnet"][0]
        (array([4, 4, 4], dtype=uint8), array([0, 0, 1], dtype=uint8))
        >>> envs.close()
    """

    metadata: dict[str, Any] = METADATA

    def __init__(
        self,
        num_envs: int = 1,
        *,
        red_agent: RedAgent = "b_line",
        episode_length: EpisodeLength = 100,
        max_episode_steps: int | None = None,
        rules: str | None = None,
        scenario: Scenario | None = None,
        observation: str = "bits",
        green: bool = False,
        obs_dtype: Any = np.float32,
        step_infos: str | tuple[str, ...] | list[str] = (),
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        episode_infos: bool = False,
        mask_infos: bool = False,
        render_mode: str | None = None,
        params: Any = None,
        sampler: Any = None,
    ) -> None:
        check_choice("render_mode", render_mode, (None, *RENDER_MODES))
        self._lengths = read_episode_lengths(episode_length, max_episode_steps)
        self.scenario = read_scenario(scenario, rules)
        self.step_infos = read_step_infos(step_infos)
        kernels, tables = self._simulator(red_agent, observation, green, obs_dtype)
        super().__init__(
            kernels,
            num_envs,
            params=tables if params is None else params,
            sampler=sampler,
            max_episode_steps=self._lengths[0] if len(self._lengths) == 1 else None,
            autoreset_mode=autoreset_mode,
            num_threads=num_threads,
            episode_infos=episode_infos,
            mask_infos=mask_infos,
            metadata=METADATA,
            render_mode=render_mode,
        )
        self._true_state = self._states.view()
        self._true_state.flags.writeable = False

    def _simulator(
        self, red_agent: Any, observation: Any, green: Any, obs_dtype: Any
    ) -> tuple[EnvKernels, Any]:
        """Check the arguments and return the kernels with their parameter record."""
        check_choice("observation", observation, OBSERVATIONS)
        if not isinstance(green, bool | np.bool_):
            raise TypeError(f"green is {green!r}, expected True or False")
        _, self._red_policy = read_red_agents(red_agent)
        kernels = cage_kernels(
            self.scenario, observation=observation, dtype=obs_dtype, red_policy=self._red_policy
        )
        self._options = {"red_agent": red_agent, "green": green, "scenario": self.scenario}
        self._observation = observation
        is_drawn = len(self._lengths) > 1
        return with_drawn_lengths(kernels) if is_drawn else kernels, self.world()

    def world(self, **changed: Any) -> np.record:
        """Return the parameter record of these envs with another `red_agent`, `green`, `scenario`.

        A vector env takes one for all envs or one per env as `params`, and `set_params` one for
        some of them: ``envs.set_params([0, 1], envs.world(red_agent="meander"))``. A red of one's
        own is compiled, and can't be changed; a scenario must have as many hosts.
        """
        names = {"red_agent", "green", "scenario"}
        if other := changed.keys() - names:
            raise TypeError(
                f"world has no {', '.join(sorted(other))}; it has {', '.join(sorted(names))}"
            )
        chosen = {**self._options, **changed}
        agents, red_policy = read_red_agents(chosen["red_agent"])
        if red_policy is not self._red_policy:
            raise TypeError("a red of one's own is compiled: make another vector env for it")
        tables = compile_tables(
            chosen["scenario"],
            red_agents=agents,
            green=bool(chosen["green"]),
            tracks_scans=self._observation != "bits",
        )
        if self._observation == "memory":
            tables = add_choices(tables, chosen["scenario"])
        return tables if len(self._lengths) == 1 else add_lengths(tables, self._lengths)

    @property
    def true_state(self) -> np.ndarray:
        """The true states: STATE_DTYPE (num_envs,), a live read-only view that costs nothing.

        Sets of hosts are bit masks; `decoded_state` spells them out. To change a state, write to
        `states` and call `observe`.
        """
        return self._true_state

    def decoded_state(self, env_ids: Any = None) -> dict[str, np.ndarray]:
        """Return the true state of all envs, or of `env_ids`, per host; see `state.decode`."""
        states = self._true_state if env_ids is None else self._true_state[env_ids]
        return decode(states, self.scenario)

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state with a text that says of which scenario they are."""
        facts = {"made_for": self.scenario.identity(), "hosts": _host_names(self.scenario)}
        return {**arrays, "scenario": np.array(json.dumps(facts))}

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state is of a scenario with other hosts, or has invalid records.

        Warns if it is of a scenario with the same hosts and other tables or rules. Older states
        have no entry "scenario".
        """
        facts = _read_facts(state) if "scenario" in state else {}
        hosts = facts.get("hosts", _host_names(self.scenario))
        if hosts != _host_names(self.scenario):
            raise ValueError(
                f"state is of {describe_identity(facts.get('made_for') or {})}, with the hosts "
                f"{', '.join(hosts)}; expected {', '.join(_host_names(self.scenario))}"
            )
        warn_of_other("state", facts.get("made_for"), self.scenario.identity())
        super().check_state(state, states)

    def _check_states(self, states: np.ndarray) -> None:
        ends = {
            "red_agent": len(RED_AGENT_NAMES),
            "blue_action": len(blue_actions(self.scenario)),
            "blue_success": len(SUCCESS_NAMES),
            "red_type": len(RED_ACTION_NAMES),
            "red_success": len(SUCCESS_NAMES),
            "red_target": MAX_HOSTS,
            "red_exploit": len(self.scenario.exploits),
            "green_target": len(self.scenario.hosts),
            "length_index": len(self._lengths),
            "first_host": MAX_HOSTS + 1,
        }
        for name, end in ends.items():
            found = states[name]
            if found.min() < (NONE if found.dtype.kind == "i" else 0) or found.max() >= end:
                raise ValueError(
                    f"state['states'] has {name} from {found.min()} to {found.max()}, expected "
                    f"numbers below {end}; it was changed after it was made"
                )

    def shell_alerts(self) -> np.ndarray:
        """Return on which hosts blue's monitor saw a reverse shell in the latest step, bool (N, H).

        Blue may know this; the observation shows it only in part.
        """
        return shell_alerts(self._true_state, self.scenario)

    def episode_length_of(self, env_id: int) -> int:
        """Return how long the episode under way in an env will be."""
        drawn = 0 if len(self._lengths) == 1 else int(self._true_state[LENGTH_FIELD][env_id])
        return self._lengths[drawn]

    def in_words(self, env_id: int = 0) -> Snapshot:
        """Return one env spelled out in words."""
        self._calls.require_ready("in_words")
        if not 0 <= env_id < self.num_envs:
            raise IndexError(f"env_id is {env_id}, expected 0..{self.num_envs - 1}")
        state, run = self._true_state[env_id], self._runs[env_id]
        # Every reset and every step opens a block of the random stream.
        begun_at = int(run["counter"]) // BLOCK_SIZE - int(state["step"])
        episode = Episode(
            self.episode_length_of(env_id),
            float(run["episode_return"]),
            (int(run["seed"]), max(0, begun_at)),
        )
        return take_snapshot(state, self.scenario, episode)

    def get_action_meanings(self) -> list[str]:
        """Return what each action is called, as Atari's envs do."""
        if self.single_action_space == Discrete(len(actions := blue_actions(self.scenario))):
            return [str(action) for action in actions]
        choices = blue_choices(self.scenario)
        return [c.name if c.host is None else f"{c.name} {c.host}" for c in choices]

    def blue_table(self, env_id: int = 0) -> Table:
        """Return what blue sees of one env, for people: print it with `rich`."""
        return text.blue_table(self.in_words(env_id))

    def true_table(self, env_id: int = 0) -> Table:
        """Return what is true in one env, for people: print it with `rich`."""
        return text.true_table(self.in_words(env_id))

    def render(self) -> tuple[Any, ...] | None:
        """Return a text or a picture of every env, as `render_mode` says."""
        if self.render_mode is None:
            logger.warn(f"render_mode is None: make the env with one of {', '.join(RENDER_MODES)}")
            return None
        return tuple(self.render_env(env_id) for env_id in range(self.num_envs))

    def render_env(self, env_id: int = 0, mode: str | None = None) -> Any:
        """Return a text (str) or a picture (uint8, height x width x 3) of one env.

        Args:
            env_id: Which.
            mode: "ansi" or "rgb_array"; None for the env's `render_mode`, or "ansi".

        Raises:
            ValueError: Unknown mode.
            ImportError: "rgb_array" needs the extra `plots`.
        """
        mode = mode or self.render_mode or "ansi"
        check_choice("mode", mode, RENDER_MODES)
        snapshot = self.in_words(env_id)
        if mode == "ansi":
            return text.to_text(text.overview(snapshot))
        from vecenv.cage.challenge2.view.picture import draw_snapshot

        return draw_snapshot(snapshot).to_array()

    def _step(self, actions: Any, out: Any) -> StepResult:
        result = super()._step(actions, out)
        if self.step_infos:
            return *result[:4], self._with_facts(result[4], self._true_state)
        return result

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        batch = super()._recv(count, most, timeout)
        if self.step_infos:
            rows = self._true_state[batch.env_ids]
            return batch._replace(infos=self._with_facts(batch.infos, rows))
        return batch

    def _with_facts(self, infos: dict[str, Any], states: np.ndarray) -> dict[str, Any]:
        """Return infos with what happened in the step, where there was one."""
        has_stepped = states["step"] > 0
        facts = {name: states[name].copy() for name in self.step_infos}
        return {**infos, **facts, **{f"_{name}": has_stepped.copy() for name in facts}}


class Cage2Env(JitEnv):
    """One copy of the CAGE Challenge 2 simulator.

    With seed s it does what env i of a `Cage2VectorEnv` does with seed s - i.

    Args:
        render_mode: "ansi" or "rgb_array", what `render` returns.
        **options: `red_agent`, `episode_length`, `rules`, `scenario`, `observation`, `green`,
            `obs_dtype`, `step_infos` and `mask_infos` as for `Cage2VectorEnv`.

    Raises:
        TypeError, ValueError: An argument is not what it should be; the message names it.

    Example:
        >>> env = Cage2Env(red_agent="meander", episode_length=30, step_infos=["red_type"])
        >>> obs, info = env.reset(seed=1)
        >>> obs, reward, terminated, truncated, info = env.step(0)
        >>> reward, truncated, info
        (0.0, False, {'red_type': 1})
        >>> env.close()
    """

    metadata: dict[str, Any] = METADATA

    def __init__(self, *, render_mode: str | None = None, **options: Any) -> None:
        super().__init__(Cage2VectorEnv, render_mode=render_mode, **options)

    @property
    def scenario(self) -> Any:
        """The tables."""
        return self._envs.scenario

    @property
    def true_state(self) -> Any:
        """The true state: a live read-only STATE_DTYPE record."""
        return self._envs.true_state[0]

    def decoded_state(self) -> dict[str, np.ndarray]:
        """Return the true state per host, see `state.decode`."""
        return {name: rows[0] for name, rows in self._envs.decoded_state().items()}

    def blue_table(self) -> Table:
        """Return what blue sees, for people: print it with `rich`."""
        return self._envs.blue_table()

    def true_table(self) -> Table:
        """Return what is true, for people: print it with `rich`."""
        return self._envs.true_table()


def _host_names(scenario: Scenario) -> list[str]:
    return [host.name for host in scenario.hosts]


def _read_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state says of the scenario it is of."""

    def accepts(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
        return dtype.kind == "U" and shape == () and dtype.itemsize <= _MAX_FACTS

    facts: Any = None
    try:
        # Not `str` of the array: after a Ctrl-C in that of another one it may be "...".
        facts = json.loads(read_entry(state, "scenario", accepts).item())
        is_known = (
            isinstance(facts, dict)
            and isinstance(facts.get("made_for", {}), dict)
            and isinstance(facts.get("hosts", []), list)
            and all(isinstance(name, str) for name in facts.get("hosts", []))
        )
    except (ValueError, RecursionError):
        is_known = False
    if not is_known:
        raise ValueError("state['scenario'] says nothing of a scenario; it was changed")
    return facts
