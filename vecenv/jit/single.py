"""JitEnv: one compiled env, as a `gymnasium.Env`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from vecenv.core.errors import ActionError
from vecenv.jit.env import JitVectorEnv

_PACKAGE = __name__.partition(".")[0]
_OF_VECTORS = ("num_envs", "autoreset_mode", "num_threads")
_SAVED = "_saved_state"  # key in a pickled env, in place of its vector env


class JitEnv(Env[Any, Any]):
    """One env of a compiled kind as a `gymnasium.Env`: a vector env of one, without autoreset.

    With seed s it acts like env i of the vector env with seed s - i. A step costs some microseconds
    of Python, however short the kernels are: for training, use the vector env.

    Args:
        make: Makes the vector env: a subclass of `JitVectorEnv`, or a function that passes
            `num_envs`, `autoreset_mode` and `num_threads` on to one.
        render_mode: Form of the frames of `render`, as for the vector env.
        **options: For `make`; `mask_infos=True` puts the mask into every info, as "action_mask".

    Raises:
        TypeError: An option that only vector envs have, or one that `make` rejects.

    Example:
        >>> from vecenv.jit.cartpole import CartPoleVectorEnv
        >>> env = JitEnv(CartPoleVectorEnv, debug=True)
        >>> obs, info = env.reset(seed=1)
        >>> obs, reward, terminated, truncated, info = env.step(0)
        >>> obs.shape, reward, terminated, truncated, info
        ((4,), 1.0, False, False, {})
        >>> env.close()
    """

    def __init__(
        self, make: Callable[..., JitVectorEnv], *, render_mode: str | None = None, **options: Any
    ) -> None:
        for name in _OF_VECTORS:
            if name in options:
                raise TypeError(f"{name} is for vector envs; a single env takes none")
        self._make = make
        self._options = options if render_mode is None else {**options, "render_mode": render_mode}
        self._envs = self._make_envs()
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.metadata = {"render_modes": [], **self._envs.metadata}
        del self.metadata["autoreset_mode"]  # belongs to vector envs
        self.render_mode = render_mode

    def _make_envs(self) -> Any:
        return self._make(
            num_envs=1, autoreset_mode=AutoresetMode.DISABLED, num_threads=1, **self._options
        )

    @property
    def action_masks(self) -> Callable[[], np.ndarray]:
        """A function that returns which actions are valid, int8 (width,), a copy.

        Only for kinds with masks. `action_space.sample(mask=...)` of a Discrete space takes this
        array; `mask.view(bool)` is the same as bool.
        """
        if not self._envs.has_action_masks:
            raise AttributeError(f"{self._envs.kernels.name} has no action masks")
        return self._masks

    def _masks(self) -> np.ndarray:
        return self._envs.action_masks()[0].copy()

    def observe(self) -> Any:
        """Return the observation of the current state; nothing is stepped."""
        return self._envs.observe()[0]

    def play_in_python(self, seconds: float) -> int | None:
        """Play episodes in plain Python, see `JitVectorEnv.play_in_python`."""
        return self._envs.play_in_python(seconds)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays (copies), the random stream included.

        After `load_state_dict`, an env made with the same arguments continues from it bit for bit.
        The arrays can be stored with `numpy.savez`. Copies (`copy.deepcopy`) and pickles of an env,
        wrapped or not, continue likewise. The stream of `action_space.sample` is not part of the
        state, but copies and pickles include it.
        """
        return self._envs.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state that `state_dict` returned; then `observe` gives its observation.

        Raises:
            KeyError: An entry is missing.
            ValueError: The state is of another kind, or of a vector env of several envs.
        """
        self._envs.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_envs"}
        try:
            return {**kept, _SAVED: self.state_dict()}
        except ResetNeeded:
            return {**kept, _SAVED: None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept.pop(_SAVED)
        vars(self).update(kept)
        self._envs = self._make_envs()
        if state is not None:
            self._envs.load_state_dict(state)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed the random stream continues. There are no options."""
        if options:
            raise ValueError(f"options has {sorted(options)}, but this env knows none")
        super().reset(seed=seed)
        obs, infos = self._envs.reset(seed=seed)
        return obs[0], _of_first(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step.

        Raises:
            ActionError: The action is not one of `action_space`. Nothing was stepped.
            ResetNeeded: Before the first `reset`, or the episode is over.
        """
        space, row = self.action_space, np.asarray(action)
        if isinstance(space, Discrete) and not space.contains(row):  # vector envs tell of rows
            low, high = space.start, space.start + space.n - 1
            raise ActionError(f"action is {action!r}, expected an integer from {low} to {high}")
        if self._envs._over[0]:
            raise ResetNeeded("the episode is over; call reset() before the next step")
        obs, rewards, terminations, truncations, infos = self._envs.step(row[None])
        ended = bool(terminations[0]), bool(truncations[0])
        return obs[0], float(rewards[0]), *ended, _of_first(infos)

    def render(self) -> Any:
        """Return a picture or a text, as `render_mode` says; None without one."""
        frames = self._envs.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the env; may be called twice."""
        self._envs.close()


def _of_first(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return the info of the first env from batched infos."""
    info: dict[str, Any] = {}
    for name, values in infos.items():
        if isinstance(values, dict):
            inner = _of_first(values)
            if infos.get(f"_{name}", (True,))[0]:
                info[name] = inner
        elif not name.startswith("_") and infos.get(f"_{name}", (True,))[0]:
            info[name] = values[0].item() if values.ndim == 1 else values[0]
    return info


def __getattr__(name: str) -> Any:
    """Return the single-env version of a vector class of this package: "jit.envs.NAME.CLASS".

    Ids of bundled envs have such entry points. Gymnasium passes one set of arguments to an entry
    point and to a vector entry point, so the vector class can't be one of them.
    """
    module, _, class_name = name.rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = getattr(import_module(f"{_PACKAGE}.{module}"), class_name)
    make: Any = functools.partial(JitEnv, kind)
    make.metadata = kind.metadata  # Gymnasium looks here for the render modes
    return make
