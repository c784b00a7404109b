"""CAGE Challenge 2 as Gymnasium envs: a vector env of many networks, and an env of one.

First the checks of their arguments, whose messages name the argument, and the kernels.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from vecenv.cage.challenge2.remembering import (
    feature_columns,
    memory_space,
    observation_labels,
    with_memory,
)
from vecenv.cage.challenge2.rules import codes, dynamics
from vecenv.cage.challenge2.rules.actions import observe
from vecenv.cage.challenge2.scenario import (
    Scenario,
    blue_actions,
    blue_choices,
    cage2_scenario,
    describe_identity,
    warn_of_other,
)
from vecenv.cage.challenge2.snapshot import Snapshot, draw_snapshot, take_snapshot, to_text
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables, decode
from vecenv.cage.playing import choice_problem, compiled_red, outside
from vecenv.core.arguments import check_choice, import_object, read_count
from vecenv.core.rows import StepSlot
from vecenv.files import read_entry
from vecenv.jit import EnvKernels, JitEnv, JitVectorEnv, checked_in_trials

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
STEP_INFOS = (
    "red_agent", "red_type", "red_target", "red_exploit", "red_detected", "red_pe_index",
    "red_success", "blue_success", "green_target",
)  # fmt: skip


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
        return cage2_scenario("faithful" if rules is None else rules)
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario is {scenario!r}, expected a vecenv.cage.Scenario or None")
    if rules is not None:
        raise ValueError(
            f"rules is {rules!r}, but the scenario {scenario.name!r} has its own "
            f"({scenario.rules.name!r}); give one of the two"
        )
    return scenario


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


OBSERVATIONS = ("bits", "memory")


@functools.cache  # equal envs share their compiled code
def _step_kernel(red_policy: Callable[..., Any] | None) -> Callable[..., Any]:
    if red_policy is None:
        return dynamics.step
    return dynamics.step_with(checked_in_trials(red_policy, red_problem))


def observation_space(
    scenario: Scenario, observation: str = "bits", dtype: Any = np.float32
) -> Box:
    """Return the space of one observation.

    Args:
        scenario: Tables with H hosts.
        observation: "bits", the original's 4 * H values 0 and 1; or "memory": a row of
            `BlueMemory.features`.
        dtype: Dtype of the arrays.

    Raises:
        ValueError: Unknown observation, or a dtype that can't represent it.
    """
    check_choice("observation", observation, OBSERVATIONS)
    if observation == "memory":
        return memory_space(scenario, dtype)
    high = np.ones(codes.BITS_PER_HOST * len(scenario.hosts), dtype)
    return Box(np.zeros_like(high), high, dtype=dtype)


def cage_kernels(
    scenario: Scenario,
    *,
    observation: str = "bits",
    dtype: Any = np.float32,
    red_policy: Callable[..., Any] | None = None,
) -> EnvKernels:
    """Return the kernels of the simulator; their `params` come from `compile_tables`.

    With observation "memory", actions are indices of `blue_choices`.

    Args:
        scenario: The tables, the ones that `compile_tables` is called with.
        observation: See `observation_space`.
        dtype: Dtype of the observations.
        red_policy: Policy of red in envs whose agent is CUSTOM: an `njit` function `(state, rng,
            tables) -> (kind of red action, target)`. It should read only the fields that red knows:
            `known_*`, `scanned`, `red_ports`, `red_success`, and its own memory `custom`.

    Raises:
        ValueError: Unknown observation.
        TypeError: `red_policy` is not a function.
    """
    if red_policy is not None and not callable(red_policy):
        raise TypeError(f"red_policy must be an njit function or None, got {red_policy!r}")
    kernels = EnvKernels(
        STATE_DTYPE,
        observation_space(scenario, observation, dtype),
        Discrete(len(blue_actions(scenario))),
        dynamics.reset,
        _step_kernel(red_policy),
        observe,
        dynamics.action_mask,
        name=scenario.name,
    )
    return with_memory(kernels, scenario) if observation == "memory" else kernels


RENDER_MODES = ("ansi", "rgb_array")
METADATA = {"render_modes": list(RENDER_MODES), "render_fps": 2}


class Cage2VectorEnv(JitVectorEnv):
    """Many copies of the CAGE Challenge 2 simulator.

    The actions are blue's: blue defends a network against a red agent that is part of the env. The
    course of an env depends on its seed and its actions only. Everything of `JitVectorEnv` is
    available: `step` with `out=`, `send` and `recv`, `action_masks`, `state_dict`, `last_returns`.

    Args:
        num_envs: Number of envs.
        red_agent: "b_line", "meander" or "sleep"; "mixed": each episode draws B_line or Meander;
            a compiled policy (see `cage_kernels`) or its "module:function"; or a sequence of
            these: each episode draws one of them uniformly.
        episode_length: Steps after which an episode is truncated, or several such numbers: each
            episode draws one of them uniformly. (No episode ends otherwise.)
        max_episode_steps: Upper limit of all episode lengths, or None. `gymnasium.make`,
            `gymnasium.make_vec` and registered ids use this name.
        rules: "faithful", the challenge as it was run (the default), or "debugged", the corrected
            version. Scores under different rules are not comparable.
        scenario: Other tables, which include their own rules.
        observation: "bits": the original's 52 values 0 and 1; "memory": the 152 features of a
            `BlueMemory`, whose 44 choices are then the actions.
        green: Whether a green agent scans hosts at random; the challenge has none.
        obs_dtype: Dtype of the observations.
        step_infos: Names out of STEP_INFOS, reported as arrays in the infos of every step.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: Largest number of threads; None for one per processor.
        episode_infos: Whether infos["episode"] reports returns and lengths of ended episodes.
        mask_infos: Whether infos["action_mask"] holds the result of `action_masks`.
        render_mode: What `render` returns: "ansi" or "rgb_array".
        params: Records of `world`, one per env, for reds or networks that differ between envs.
        sampler: See `JitVectorEnv`.

    Fields of step infos and of `true_state` that describe the latest step, as numbers:

    | field | |
    |---|---|
    | red_agent | 0 sleep, 1 b_line, 2 meander, 3 one of your own |
    | red_type | 0 Sleep, 1 DiscoverRemoteSystems, 2 DiscoverNetworkServices |
    | | 3 ExploitRemoteService, 4 PrivilegeEscalate, 5 Impact |
    | red_target | index of the host (for type 1: of the subnet) in the scenario; -1 none |
    | red_success, blue_success | 0 failed, 1 succeeded, 2 unknown (Sleep) |
    | red_exploit | index of the exploit that red used in the scenario's exploits; -1 none |
    | red_detected | whether blue's monitor noticed a reverse shell, 1 or 0; -1 if none was opened |
    | red_pe_index | escalated session, counted from the oldest on the host (0); -1 none |
    | green_target | the host that green scanned; -1 none |

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
        self.step_infos = (step_infos,) if isinstance(step_infos, str) else tuple(step_infos)
        for name in self.step_infos:
            check_choice("step_infos", name, STEP_INFOS)
        if not isinstance(green, bool | np.bool_):
            raise TypeError(f"green is {green!r}, expected True or False")
        _, self._red_policy = read_red_agents(red_agent)
        self._options = {"red_agent": red_agent, "green": green, "scenario": self.scenario}
        self._observation = observation
        super().__init__(
            cage_kernels(
                self.scenario, observation=observation, dtype=obs_dtype, red_policy=self._red_policy
            ),
            num_envs,
            params=self.world() if params is None else params,
            sampler=sampler,
            autoreset_mode=autoreset_mode,
            num_threads=num_threads,
            episode_infos=episode_infos,
            mask_infos=mask_infos,
            render_mode=render_mode,
        )
        self._true_state = self._states.view()
        self._true_state.flags.writeable = False

    def world(self, **changed: Any) -> np.record:
        """Return these envs' parameter record with `red_agent`, `green` or `scenario` changed.

        A vector env takes one record for all envs, or one per env, as `params`. `set_params` sets
        it for some envs: ``envs.set_params([0, 1], envs.world(red_agent="meander"))``. A custom red
        is compiled and can't be changed. A new scenario must have the same number of hosts.
        """
        if other := changed.keys() - self._options.keys():
            known = ", ".join(sorted(self._options))
            raise TypeError(f"world has no {', '.join(sorted(other))}; it has {known}")
        chosen = {**self._options, **changed}
        agents, red_policy = read_red_agents(chosen["red_agent"])
        if red_policy is not self._red_policy:
            raise TypeError("a red of one's own is compiled: make another vector env for it")
        return compile_tables(
            chosen["scenario"],
            red_agents=agents,
            green=bool(chosen["green"]),
            lengths=self._lengths,
        )

    @property
    def true_state(self) -> np.ndarray:
        """The true states: STATE_DTYPE (num_envs,), a live read-only view without a copy.

        Sets of hosts are bit masks; `decoded_state` returns them as arrays. To change a state,
        write to `states` and call `observe`.
        """
        return self._true_state

    def decoded_state(self, env_ids: Any = None) -> dict[str, np.ndarray]:
        """Return the true states, or those of `env_ids`, per host; see `vecenv.cage.decode`."""
        states = self._true_state if env_ids is None else self._true_state[env_ids]
        return decode(states, self.scenario)

    def described_state(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of a state, and a text that identifies their scenario."""
        facts = {"made_for": self.scenario.identity(), "hosts": _host_names(self.scenario)}
        return {**arrays, "scenario": np.array(json.dumps(facts))}

    def check_state(self, state: Mapping[str, np.ndarray], states: np.ndarray) -> None:
        """Raise ValueError if a state has invalid records, or its scenario has other hosts.

        Warns if its scenario has the same hosts but other tables or rules.
        """
        try:
            text = read_entry(
                state, "scenario", lambda dtype, shape: dtype.kind == "U" and not shape
            )
            facts = json.loads(text.item())
            made_for, hosts = dict(facts["made_for"]), list(map(str, facts["hosts"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            told = "state['scenario'] says nothing of a scenario; it was changed"
            raise ValueError(told) from error
        if hosts != (own := _host_names(self.scenario)):
            raise ValueError(
                f"state is of {describe_identity(made_for)}, with the hosts {', '.join(hosts)}; "
                f"expected {', '.join(own)}"
            )
        warn_of_other("state", made_for, self.scenario.identity())
        ends = {
            "red_agent": len(codes.RED_AGENT_NAMES),
            "blue_action": len(blue_actions(self.scenario)),
            "blue_success": len(codes.SUCCESS_NAMES),
            "red_type": len(codes.RED_ACTION_NAMES),
            "red_success": len(codes.SUCCESS_NAMES),
            "red_target": codes.MAX_HOSTS,
            "red_exploit": len(self.scenario.exploits),
            "green_target": len(self.scenario.hosts),
            "length_index": len(self._lengths),
            "first_host": codes.MAX_HOSTS + 1,
        }
        for name, end in ends.items():
            found = states[name]
            if found.min() < (codes.NONE if found.dtype.kind == "i" else 0) or found.max() >= end:
                raise ValueError(
                    f"state['states'] has {name} from {found.min()} to {found.max()}, expected "
                    f"numbers below {end}; it was changed after it was made"
                )

    def shell_alerts(self) -> np.ndarray:
        """Return bool (N, H): whether blue's monitor saw a reverse shell there in the latest step.

        Blue is allowed to know this, as the remote port reveals a shell; the observation shows only
        a part of it.
        """
        states, hosts = self._true_state, np.arange(len(self.scenario.hosts))
        is_detected = (states["red_detected"] == 1)[:, None]
        return is_detected & (states["red_target"][:, None] == hosts)

    def episode_length_of(self, env_id: int) -> int:
        """Return the length of the current episode of an env, in steps."""
        return self._lengths[int(self._true_state["length_index"][env_id])]

    def in_words(self, env_id: int = 0) -> Snapshot:
        """Return the state of one env in words."""
        self._calls.require_ready("in_words")
        if not 0 <= env_id < self.num_envs:
            raise IndexError(f"env_id is {env_id}, expected 0..{self.num_envs - 1}")
        total = float(self._runs[env_id]["episode_return"])
        length = self.episode_length_of(env_id)
        return take_snapshot(self._true_state[env_id], self.scenario, length, total)

    def get_action_meanings(self) -> list[str]:
        """Return the name of each action, as Atari envs do."""
        listed = blue_choices if self._observation == "memory" else blue_actions
        return [str(action) for action in listed(self.scenario)]

    def observation_labels(self) -> list[str]:
        """Return the name of each column of the observation: a host and what is told of it."""
        listed = feature_columns if self._observation == "memory" else observation_labels
        return list(listed(self.scenario))

    def _frames(self) -> Iterator[Any]:
        return map(self.render_env, range(self.num_envs))

    def render_env(self, env_id: int = 0, mode: str | None = None) -> Any:
        """Return a text (str) or a picture (uint8, height x width x 3) of one env.

        Args:
            env_id: Index of the env.
            mode: "ansi" or "rgb_array"; None for `render_mode`, or for "ansi" if that is None.

        Raises:
            ValueError: Unknown mode.
            ImportError: "rgb_array" needs the extra `plots`.
        """
        mode = mode or self.render_mode or "ansi"
        check_choice("mode", mode, RENDER_MODES)
        snapshot = self.in_words(env_id)
        return to_text(snapshot) if mode == "ansi" else draw_snapshot(snapshot).to_array()

    def _step_rows(self, actions: Any, outputs: StepSlot, env_ids: np.ndarray | None) -> dict:
        """Add the step infos; their masks are False where no step was made."""
        infos = super()._step_rows(actions, outputs, env_ids)
        if not self.step_infos:
            return infos
        states = self._true_state if env_ids is None else self._true_state[env_ids]
        has_stepped = states["step"] > 0
        facts = {name: states[name].copy() for name in self.step_infos}
        return {**infos, **facts, **{f"_{name}": has_stepped.copy() for name in facts}}


class Cage2Env(JitEnv):
    """One copy of the CAGE Challenge 2 simulator.

    With seed s it behaves as env i of a `Cage2VectorEnv` does with seed s - i.

    Args:
        render_mode: What `render` returns: "ansi" or "rgb_array".
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
        """The scenario's tables."""
        return self._envs.scenario

    @property
    def true_state(self) -> Any:
        """The true state: a live read-only STATE_DTYPE record."""
        return self._envs.true_state[0]

    def decoded_state(self) -> dict[str, np.ndarray]:
        """Return the true state per host, see `vecenv.cage.decode`."""
        return {name: rows[0] for name, rows in self._envs.decoded_state().items()}

    def get_action_meanings(self) -> list[str]:
        """Return the name of each action, as Atari envs do."""
        return self._envs.get_action_meanings()

    def observation_labels(self) -> list[str]:
        """Return the name of each column of the observation: a host and what is told of it."""
        return self._envs.observation_labels()


def _host_names(scenario: Scenario) -> list[str]:
    return [host.name for host in scenario.hosts]
