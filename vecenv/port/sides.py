"""The two sides of a proof: the Python env and its kernels, with results in equal arrays."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, Tuple

from vecenv.core.masks import MASK_KEY, METHOD, call_single, can_be_masked, flat_mask, mask_width
from vecenv.core.rows import Outputs
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import COLUMNS, GameLayout
from vecenv.jit.kernels import EnvKernels
from vecenv.port.deadline import StuckError, within
from vecenv.port.tape import Tape, open_tape, taped_constructors

__all__ = [
    "RESET",
    "KernelSide",
    "PythonSide",
    "Seen",
    "call_again",
    "check_spaces",
    "inputs_of",
    "read_kernels",
]

RESET = None  # stands in for an action
# Results of a reset or a step: "observation", "reward", "terminated", "truncated", "mask" and
# "field NAME"; in a game, "observation of AGENT" and so on.
Seen = dict[str, np.ndarray]
_NUM_SEARCHED = 3  # resets after which the search for new generators ends
_COMPILING = 20.0  # how much longer than a call making a side may take
_FIRST = 4.0  # likewise the first call, which may compile a part
_MOST_COPYING = 0.3  # share of all time in which envs may be copied


def read_kernels(given: Any) -> Callable[..., JitVectorEnv]:
    """Return a function that makes the compiled vector env.

    Args:
        given: EnvKernels, or a function or class that makes a JitVectorEnv.

    Raises:
        TypeError: `given` is something else.
    """
    if isinstance(given, EnvKernels):
        return partial(JitVectorEnv, given)
    if not callable(given) or (isinstance(given, type) and issubclass(given, gym.Env)):
        raise TypeError(f"kernels is {given!r}, expected EnvKernels or what makes a JitVectorEnv")
    make: Any = given
    return make


class PythonSide:
    """The Python env: a `gymnasium.Env` (Tuple spaces mean a game), or a PettingZoo parallel env.

    Args:
        make: Makes the env.
        paths: Places of the state's fields in it: a path such as "ball.x" or "agent_pos[0]", or a
            function of the unwrapped env.
        is_taped: Whether it draws from a tape.

    Attributes:
        env: The env as made.
        spaces: Observation and action space by agent; those of a single env under "".
        tape: The tape that it draws from.
        obs: The latest observation in the env's own form.
        can_copy: Whether the env can be copied, as far as is known.
        has_masks: Whether it has given an action mask.

    Raises:
        ValueError: `reset` of the env takes no seed.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        paths: Mapping[str, Any] | None = None,
        *,
        is_taped: bool = True,
    ) -> None:
        with within("making the Python env", _COMPILING):
            self.env: Any = make()
        self._original, self.can_copy = self.env, True
        self._copying, self._began = 0.0, time.perf_counter()
        if not all(hasattr(self.env, name) for name in ("reset", "step", "action_space")):
            told = f"the Python env is {self.env!r}, expected a Gymnasium env or a parallel env"
            raise TypeError(f"{told} with reset, step, observation_space and action_space")
        self.tape, self._is_taped = Tape(), is_taped
        self.paths = paths or {}
        self.is_parallel = hasattr(self.env, "possible_agents")
        self.spaces = _spaces(self.env)
        self.has_masks = False
        self._num_searched = 0
        try:
            with within("reset of the Python env"):
                self.env.reset(seed=0)  # creates its generators
        except TypeError as error:
            if "seed" not in str(error):
                raise
            raise ValueError(
                f"{type(self.inner).__name__} can't be seeded: its reset takes no `seed`; add one, "
                f"and make the env's generator from it ({error})"
            ) from error

    @property
    def inner(self) -> Any:
        """Return the env without wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def save(self) -> Any:
        """Return a copy of the env and its place on the tape; None if it can't be copied.

        Copying stops if it takes too large a share of the time.
        """
        begin = time.perf_counter()
        is_late = self._copying > _MOST_COPYING * (begin - self._began) + 0.1
        if is_late or not self.can_copy:
            return None
        try:
            with within("copying the Python env"):
                return copy.deepcopy(self.env), self.tape.save(), self.obs
        except StuckError:
            raise
        except Exception:  # of whatever it holds: locks, windows, generators
            self.can_copy = False
            return None
        finally:
            self._copying += time.perf_counter() - begin

    def load(self, saved: Any) -> None:
        """Continue from a copy; with None, go back to the env that was made."""
        self.env = self._original
        if saved is not None:
            begin = time.perf_counter()
            self.env, self.obs = copy.deepcopy(saved[0]), saved[2]
            self.tape.load(saved[1])
            self._copying += time.perf_counter() - begin

    def __call__(self, action: Any, seed: int | None = None) -> Seen:
        """Reset, with `RESET`, or take a step with an action of the kernels' action space."""
        with within(f"{'reset' if action is RESET else 'step'} of the Python env"):
            return self._call(action, seed)

    def _call(self, action: Any, seed: int | None) -> Seen:
        if action is not RESET:
            self.tape.begin()
            return self._seen(*self.env.step(self.own(action)))
        if not self._is_taped:
            obs, info = self.env.reset(seed=seed)
            return self._seen(obs, None, False, False, info)
        if seed is not None:
            self.tape.seed(seed)
        if self._num_searched < _NUM_SEARCHED:
            self._num_searched += 1
            open_tape(self.env, self.tape)
        self.tape.begin()
        with taped_constructors(self.tape):
            obs, info = self.env.reset()
        return self._seen(obs, None, False, False, info)

    def own(self, action: Any) -> Any:
        """Return an action in this env's own form."""
        flat, start, own = np.asarray(action).reshape(-1), 0, {}
        for name, (_, space) in self.spaces.items():
            part = flat[start : start + int(np.prod(space.shape or ()))]
            start += len(part)
            own[name] = int(part[0]) if isinstance(space, Discrete) else part.reshape(space.shape)
        if self.is_parallel:
            return {name: own[name] for name in self.env.agents}
        return own[""] if "" in own else tuple(own.values())

    def _seen(self, obs: Any, reward: Any, over: Any, cut: Any, info: Any) -> Seen:
        """Return copies of the env's results and of the fields; `reward` is None for a reset.

        Fields come first: a difference in a field is nearer to its cause than one in a result.
        """
        self.obs, names = obs, list(self.spaces)
        seen = {f"field {k}": np.array(self.field(path)) for k, path in self.paths.items()}
        parts = {"observation": obs}
        if reward is not None:
            parts |= {"reward": reward, "terminated": over, "truncated": cut}
        for what, part in parts.items():
            if names == [""]:
                seen[what] = np.array(part)
                continue
            if not isinstance(part, dict):
                parts_of = [part] * len(names) if np.ndim(part) == 0 else part
                part = dict(zip(names, parts_of, strict=True))
            seen |= {f"{what} of {name}": np.array(one) for name, one in part.items()}
        if names == [""] and not (over or cut) and (mask := self._mask(info)) is not None:
            seen["mask"], self.has_masks = mask, True
        return seen

    def _mask(self, info: Any) -> np.ndarray | None:
        """Return the action mask of infos, or of the env's method, bool (width,); None without."""
        space, mask = self.spaces[""][1], info.get(MASK_KEY)
        if mask is None and getattr(self.env, "has_wrapper_attr", lambda _: False)(METHOD):
            mask = call_single(self.env, METHOD)[0]
        if mask is None or not can_be_masked(space):
            return None
        return flat_mask(mask, mask_width(space), space).astype(bool)

    def field(self, path: Any) -> Any:
        """Return the value at a path; see `paths`."""
        return path(self.inner) if callable(path) else eval(_path_code(path), {"env": self.inner})

    def is_over(self, seen: Seen) -> bool:
        """Return whether a step has ended the episode."""
        return self.has_ended(*(v for k, v in seen.items() if k.startswith(("term", "trunc"))))

    def has_ended(self, *flags: Any) -> bool:
        """Return whether a step with these flags has ended the episode."""
        return not self.env.agents if self.is_parallel else any(map(np.any, flags))

    def row(self, seen: Seen) -> np.ndarray:
        """Return observations in the kernels' form: for a game, those of all agents in a row."""
        if "" in self.spaces:
            return seen["observation"]
        empty = {name: np.zeros(space.shape or ()) for name, (space, _) in self.spaces.items()}
        parts = [seen.get(f"observation of {name}", zeros) for name, zeros in empty.items()]
        return np.concatenate([part.reshape(-1) for part in parts])

    def read_fields(self, dtype: np.dtype, given: Mapping[str, Any] | None) -> None:
        """Set the paths to compare with the fields of a state record.

        Args:
            dtype: Dtype of the record.
            given: Paths by field name; None as a path leaves a field out. Other fields are
                compared with attributes of the same names, if these have the fields' shapes.

        Raises:
            ValueError: A name is not a field, or a path leads nowhere.
        """
        names, asked = list(dtype.names or ()), given or {}
        found = {name: name for name in names if hasattr(self.inner, name)}
        self.paths = {
            name: path for name, path in (found | dict(asked)).items() if path is not None
        }
        for name, path in list(self.paths.items()):
            if name not in names:
                raise ValueError(f"fields has {name!r}, but the state has {', '.join(names)}")
            try:
                value = np.asarray(self.field(path))
            except Exception as error:
                raise ValueError(
                    f"fields has {name!r}: {path!r}, which raises {error!r}"
                ) from error
            if value.shape == dtype[name].shape and value.dtype.kind in "biuf":
                continue
            if name in asked:
                told = f"fields has {name!r}: {path!r}, which is {value!r} of shape {value.shape}"
                raise ValueError(f"{told}; the state has {dtype[name].base} {dtype[name].shape}")
            del self.paths[name]


@functools.cache
def _path_code(path: str) -> Any:
    return compile(f"env.{path}", path, "eval")


def _spaces(env: Any) -> dict[str, tuple[gym.Space, gym.Space]]:
    """Return observation and action space of each agent."""
    if hasattr(env, "possible_agents"):
        names = env.possible_agents
        return {name: (env.observation_space(name), env.action_space(name)) for name in names}
    pairs = [(env.observation_space, env.action_space)]
    if not isinstance(env.action_space, Tuple):
        return {"": pairs[0]}
    pairs = zip(env.observation_space, env.action_space, strict=True)
    return {f"agent_{k}": pair for k, pair in enumerate(pairs)}


class KernelSide:
    """The kernels: a vector env of one env, without autoreset.

    Args:
        make: Makes the vector env.
        limit: Longest episode, or None.
        debug: Whether the kernels run as plain Python.

    Attributes:
        envs: The vector env.
        layout: Layout of a game, else None.
    """

    def __init__(
        self, make: Callable[..., JitVectorEnv], limit: int | None, *, debug: bool
    ) -> None:
        options: dict[str, Any] = {} if limit is None else {"max_episode_steps": limit}
        with within("making the kernels", _COMPILING):
            self.envs = make(1, autoreset_mode="Disabled", num_threads=1, debug=debug, **options)
        self._called, self._first = set[str](), 1.0 if debug else _FIRST
        space: Any = self.envs.observation_space
        self._obs, self._soil = np.empty(space.shape, space.dtype), 0
        groups = self.envs.kernels.groups
        self.layout = None if groups is None else GameLayout.of(groups)
        names = self.envs.kernels.state_dtype.names
        self.field_names = [one for one in names if self.layout is None or one not in COLUMNS]

    def __call__(self, action: Any, seed: int | None = None) -> Seen:
        """Reset, with `RESET`, or take a step."""
        what = f"{'reset' if action is RESET else 'step'} of the kernels"
        times = 1.0 if what in self._called else self._first
        self._called.add(what)
        with within(what, times, inputs=lambda: inputs_of(self.envs, action, seed)):
            if action is RESET:
                _reset(self.envs, seed)
                return self._seen(self.envs.observe(out=self._soiled())[0])
            flags = np.empty((2, 1), np.bool_)
            out = Outputs(self._soiled(), np.empty(1), flags[0], flags[1])
            obs, *rest, _ = self.envs.step(action[None], out=out)
            return self._seen(obs[0], *(column[0] for column in rest))

    def _soiled(self) -> np.ndarray:
        """Return memory for an observation, with other old values in every call."""
        self._soil = 1 - self._soil
        values = (0, 1) if self._obs.dtype.kind == "b" else (0x5B, 0xA4)
        self._obs.view(np.uint8)[:] = values[self._soil]
        return self._obs

    def save(self) -> Any:
        """Return the state."""
        return self.envs.state_dict()

    def load(self, saved: Any) -> None:
        """Continue from a state."""
        self.envs.load_state_dict(saved)

    @property
    def num_words(self) -> int:
        """Return the number of words that the latest reset or step took."""
        return int(self.envs.state_dict()["runs"]["counter"][0]) & 0xFFFF

    def _seen(self, obs: Any, reward: Any = None, over: Any = None, cut: Any = None) -> Seen:
        """Return copies of the kernels' results; results of agents are in the state of a game."""
        state, seen = self.envs.states[0], Seen()
        if self.layout is not None:
            for group in self.layout.groups.values():
                rows = obs[group.obs] if self.layout.is_flat else obs
                rows = rows.reshape(len(group.agents), *group.obs_shape)
                for k, name in enumerate(group.agents, group.agent_ids.start):
                    if state["observes"][k]:
                        seen[f"observation of {name}"] = rows[k - group.agent_ids.start].copy()
                    if reward is not None and state["valid"][k]:
                        seen[f"reward of {name}"] = state["rewards"][k]
                        seen[f"terminated of {name}"] = state["terminations"][k].astype(bool)
                        seen[f"truncated of {name}"] = state["truncations"][k].astype(bool)
        else:
            seen["observation"] = np.array(obs)
            if reward is not None:
                seen |= {"reward": reward, "terminated": over, "truncated": cut}
            if self.envs.has_action_masks and not (over or cut):
                seen["mask"] = self.envs.action_masks()[0].astype(bool)
        return seen | {f"field {name}": np.array(state[name]) for name in self.field_names}


def _reset(envs: JitVectorEnv, seed: int | None) -> np.ndarray:
    """Reset all envs; without a seed their random streams go on."""
    options = None if seed is not None else {"reset_mask": np.ones(envs.num_envs, np.bool_)}
    return envs.reset(seed=seed, options=options)[0]


def inputs_of(envs: JitVectorEnv, action: Any, seed: int | None = None) -> dict[str, Any]:
    """Return what `call_again` needs to repeat a reset or step of kernels."""
    try:
        state = envs.state_dict()
    except Exception:  # before the first reset
        state = None
    mode = envs.autoreset_mode.name
    actions = action if action is RESET or envs.num_envs > 1 else action[None]
    return {"state": state, "actions": actions, "seed": seed, "mode": mode, "count": envs.num_envs}


def call_again(make: Callable[..., JitVectorEnv], limit: int | None, inputs: Any) -> str:
    """Repeat a call of compiled kernels that did not return, as plain Python; return where it is.

    Args:
        make: Makes the vector env.
        limit: Longest episode, or None.
        inputs: From `inputs_of`.
    """
    options: dict[str, Any] = {} if limit is None else {"max_episode_steps": limit}
    mode = {"NEXT_STEP": "NextStep", "SAME_STEP": "SameStep"}.get(inputs["mode"], "Disabled")
    try:
        with within("the same call as plain Python"):
            envs = make(inputs["count"], autoreset_mode=mode, debug=True, **options)
            if inputs["state"] is not None:
                envs.load_state_dict(inputs["state"])
            if inputs["actions"] is RESET:
                _reset(envs, inputs["seed"])
            else:
                envs.step(inputs["actions"])
    except StuckError as error:
        return str(error)
    except Exception as error:
        return f"as plain Python it raises {error!r}"
    return "as plain Python it returns: compiled integers have 64 bits"


def check_spaces(python: PythonSide, kernels: KernelSide) -> None:
    """Raise if the sides have different spaces or agents.

    Raises:
        ValueError: They differ; the message says how.
    """
    envs, own = kernels.envs, {}
    if kernels.layout is None:
        own[""] = (envs.single_observation_space, envs.single_action_space)
    for group in kernels.layout.groups.values() if kernels.layout else ():
        own |= dict.fromkeys(group.agents, (group.observation_space, group.action_space))
    if list(own) != list(python.spaces):
        told = f"the Python env has agents {list(python.spaces)}, the kernels have {list(own)}"
        raise ValueError(told)
    for name, pair in python.spaces.items():
        for what, theirs, ours in zip(("observation", "action"), pair, own[name], strict=True):
            # Discrete spaces may differ in dtype.
            is_same = str(theirs) == str(ours) if isinstance(theirs, Discrete) else theirs == ours
            if not is_same:
                of = f" of {name}" if name else ""
                told = f"{what}_space{of}: the Python env has {theirs}, the kernels have {ours}"
                raise ValueError(f"{told}; wrap the env or change the kernels")
