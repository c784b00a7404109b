"""SB3VecEnv: vector envs for stable-baselines3."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv import VecEnv, make_vec
from vecenv.adapters import (
    load_library,
    read_attr,
    require_mode,
    rows_of,
    split_infos,
    write_attr,
)  # fmt: skip

_library = load_library("stable_baselines3.common.vec_env", "sb3")

__all__ = ["SB3VecEnv", "make_sb3_env"]

Indices = int | Sequence[int] | None
_MASKS = "action_masks"
_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")
_MASKABLE = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
_SIMPLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class SB3VecEnv(_library.VecEnv):
    """A Gymnasium vector env as a stable-baselines3 `VecEnv`.

    Where an episode ends, `infos[i]` is its last info plus "terminal_observation",
    "TimeLimit.truncated" and, with `monitor`, "episode"; `reset_infos[i]` is the first info of the
    next episode. Elsewhere `infos[i]` is the env's info, often empty. All infos may be kept.

    Rows of agents (`make_vec_agents` with one group) share one policy. SB3 can't skip rows, so it
    also learns from rows of agents that are not alive: zeros without reward. Such rows form an
    episode, which ends when the agent comes back, and is not reported as "episode".

    Args:
        envs: Vector env in autoreset mode SAME_STEP whose observations the caller may keep. `close`
            closes it.
        monitor: Add "episode" with return "r", length "l" and time "t" of each ended episode, as
            `Monitor` does, for SB3's `ep_rew_mean`. Infos that already have it keep theirs.
        monitor_dir: Folder for files of such episodes, created if missing: `0.monitor.csv` for env
            0 and so on, which SB3's `load_results` reads; earlier files are replaced. Compiled
            envs, which may be thousands, share `0.monitor.csv`.

    Attributes:
        envs: The vector env.

    Raises:
        TypeError: `envs` is not a Gymnasium vector env, or stable-baselines3 does not support its
            spaces.
        ValueError: Another autoreset mode, or `copy=False`; or `monitor_dir` without `monitor`.
        OSError: `monitor_dir` can't be written.

    Example:
        envs = vecenv.make_vec("CartPole-v1", 8, autoreset_mode="SameStep")
        model = PPO("MlpPolicy", SB3VecEnv(envs)).learn(100_000)
    """

    def __init__(
        self, envs: VectorEnv, *, monitor: bool = True, monitor_dir: str | Path | None = None
    ) -> None:
        require_mode(envs, AutoresetMode.SAME_STEP, "stable-baselines3")
        _check_spaces(envs.single_observation_space, envs.single_action_space)
        if monitor_dir is not None and not monitor:
            raise ValueError("monitor_dir is given, but monitor=False: leave one of the two out")
        self.envs = envs
        self.monitor = monitor
        self._returns = np.zeros(envs.num_envs)
        self._lengths = np.zeros(envs.num_envs, np.int64)
        self._started = time.time()
        self._actions: Any = None
        self._is_reset = False
        # Agents only: which acted in the latest step, and which act next; None for other envs.
        self._valid = getattr(envs.unwrapped, "valid", None)
        self._alive = getattr(envs.unwrapped, "alive", None)
        self._is_binary = isinstance(envs.single_action_space, spaces.MultiBinary)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = {**(envs.metadata or {}), **self.metadata}
        self._files = [] if monitor_dir is None else self._open_files(Path(monitor_dir))

    def _open_files(self, folder: Path) -> list[Any]:
        """Return one file per env, or one for all compiled envs, in `Monitor`'s format."""
        writer = load_library("stable_baselines3.common.monitor", "sb3").ResultsWriter
        count = self.num_envs if hasattr(self.envs.unwrapped, "call") else 1
        header = {"t_start": self._started, "env_id": str(self.envs.spec and self.envs.spec.id)}
        return [writer(str(folder / str(number)), header) for number in range(count)]

    # -- stepping ----------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all envs with the values from `seed` and `set_options`; return the observations."""
        count = getattr(self.envs.unwrapped, "num_games", self.num_envs)  # seeds count games
        chosen = self._seeds[:count]
        seeds: Any = None if all(seed is None for seed in chosen) else list(chosen)
        obs, infos = self.envs.reset(seed=seeds, options=self._shared_options())
        self._is_reset = True
        self.reset_infos = split_infos(infos, self.num_envs)
        self._returns[:] = 0
        self._lengths[:] = 0
        self._reset_seeds()
        self._reset_options()
        return obs

    def _shared_options(self) -> dict[str, Any] | None:
        first = self._options[0]
        if any(options != first for options in self._options):
            raise ValueError(
                "set_options was given different options for different envs; vector envs pass one "
                "dict to all: set_options({...})"
            )
        return first or None

    def step_async(self, actions: np.ndarray) -> None:
        """Keep `num_envs` actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all envs with the actions of `step_async`.

        Returns:
            obs (N, *obs_shape), rewards float32 (N,), dones bool (N,), all new arrays, and one info
            per env.
        """
        actions, self._actions = self._actions, None
        if self._is_binary:  # SB3's policies draw floats 0.0 and 1.0
            actions = np.asarray(actions, self.action_space.dtype)
        obs, rewards, terminations, truncations, infos = self.envs.step(actions)
        dones = terminations | truncations
        has_come = None
        if self._valid is not None and self._alive is not None:
            has_come = self._alive & ~self._valid
            dones |= has_come
        if self.monitor:
            self._returns += rewards
            self._lengths += 1 if self._valid is None else self._valid
        going_on = {name: value for name, value in infos.items() if name not in _FINAL}
        rows = split_infos(going_on, self.num_envs) if going_on else [{} for _ in dones]
        ended = np.flatnonzero(dones)
        if len(ended):
            if has_come is None:
                episodes = self._end_episodes(infos, ended, terminations, rows)
            else:
                episodes = self._end_agents(infos, obs, ended, terminations, rows)
            for i, episode in episodes.items() if self._files else ():
                self._files[i % len(self._files)].write_row(episode)
        return obs, rewards.astype(np.float32), dones, rows

    def _end_episodes(
        self,
        infos: dict[str, Any],
        ended: np.ndarray,
        terminations: np.ndarray,
        rows: list[dict[str, Any]],
    ) -> Mapping[int, dict[str, Any]]:
        """Write last infos of ended episodes into `rows`; keep first infos of the next ones apart.

        Args:
            infos: Batched infos.
            ended: int64 (E,), the envs.
            terminations: bool (num_envs,).
            rows: One info per env; those of `ended` are replaced.

        Returns:
            The "episode" entries of `Monitor`, by env.
        """
        final_obs = infos["final_obs"]
        final_infos = split_infos(infos.get("final_info", {}), self.num_envs, ended)
        episodes = self._episodes(ended)
        for i, info, episode in zip(ended.tolist(), final_infos, episodes, strict=True):
            first = self.reset_infos[i] = rows[i]
            # Vector wrappers put "episode" of an ended episode into the next one's first infos.
            if isinstance(first.get("episode"), dict):
                info.setdefault("episode", first.pop("episode"))
            if self.monitor and "episode" not in info:
                info["episode"] = episode
            info["terminal_observation"] = final_obs[i]
            info["TimeLimit.truncated"] = not terminations[i]
            rows[i] = info
        return dict(zip(ended.tolist(), episodes, strict=True))

    def _end_agents(
        self,
        infos: dict[str, Any],
        obs: Any,
        ended: np.ndarray,
        terminations: np.ndarray,
        rows: list[dict[str, Any]],
    ) -> Mapping[int, dict[str, Any]]:
        """Do the work of `_end_episodes` for agents.

        The final observation of an agent is in the infos only if its game was reset in this step.
        If the agent ended before its game, the observation is in `obs` and its last info in `rows`.
        When an agent comes back, the episode of zeros during its absence ends.
        """
        assert self._valid is not None
        num_rows = self.num_envs
        given = infos.get("_final_obs", np.zeros(num_rows, np.bool_))
        has_come = ~self._valid[ended]
        final_obs = np.full(num_rows, None, object)
        for i, is_zero in zip(ended.tolist(), has_come.tolist(), strict=True):
            final_obs[i] = infos["final_obs"][i] if given[i] else _row(obs, i, is_zero=is_zero)
        is_over = terminations.copy()
        is_over[ended[has_come]] = True  # the rows of zeros have no future value
        episodes = dict(self._end_episodes({**infos, "final_obs": final_obs}, ended, is_over, rows))
        for i in ended[has_come].tolist():
            rows[i].pop("episode", None)
            del episodes[i]
        for i in ended[~has_come & ~given[ended]].tolist():
            rows[i] = {**self.reset_infos[i], **rows[i]}
            self.reset_infos[i] = {}
        return episodes

    def _episodes(self, ended: np.ndarray) -> list[dict[str, Any]]:
        """Return the "episode" entries of `Monitor` for ended episodes; start new episodes."""
        returns = self._returns[ended].round(6).tolist()
        lengths = self._lengths[ended].tolist()
        self._returns[ended] = 0
        self._lengths[ended] = 0
        seconds = round(time.time() - self._started, 6)
        return [{"r": r, "l": n, "t": seconds} for r, n in zip(returns, lengths, strict=True)]

    def close(self) -> None:
        """Close the envs and the files of episodes; may be called twice."""
        self.envs.close()
        for file in self._files:
            file.close()

    # -- the envs themselves -----------------------------------------------------------------

    def get_images(self) -> list[np.ndarray | None]:
        """Return a frame of each env, uint8 (height, width, 3); None without "rgb_array"."""
        if self.render_mode != "rgb_array":
            return [None] * self.num_envs
        return list(self.envs.render())  # type: ignore[arg-type]  # one frame per env

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each env.

        Compiled envs share attributes: an array with one row per env is split into rows, any other
        value is the same for all. "action_masks", by which sb3-contrib asks whether there are
        masks, is that of the vector env; masks in the infos of single envs are known after the
        first reset, and assumed to exist before.

        Raises:
            AttributeError: There is no attribute of this name.
        """
        if attr_name == _MASKS and isinstance(whole := self.envs.unwrapped, VecEnv):
            may_be = not self._is_reset and isinstance(self.action_space, _MASKABLE)
            if whole.has_action_masks or may_be:
                return [whole.action_masks for _ in self._chosen(indices)]
            raise AttributeError("the envs give no action masks")
        values = read_attr(self.envs, attr_name)
        return [values[i] for i in self._chosen(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the envs of `indices` to one value.

        Raises:
            TypeError: The envs are compiled, and have no attributes of their own.
        """
        write_attr(self.envs, attr_name, value, self._chosen(indices))

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env and return what the envs of `indices` returned.

        All envs are called. For compiled envs, the method of the vector env is called once, and an
        array with one row per env is split. "action_masks", which sb3-contrib's `MaskablePPO`
        calls, is `VecEnv.action_masks`, wherever the masks come from.
        """
        is_masks = method_name == _MASKS and isinstance(self.envs.unwrapped, VecEnv)
        if not is_masks and hasattr(self.envs.unwrapped, "call"):
            called = self.envs.unwrapped.call  # type: ignore[attr-defined]  # asked for above
            values = called(method_name, *method_args, **method_kwargs)
        else:
            method = getattr(self.envs.unwrapped, method_name)
            values = rows_of(method(*method_args, **method_kwargs), self.num_envs)
        return [values[i] for i in self._chosen(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return which envs are wrapped in `wrapper_class`.

        With `monitor`, all envs count as wrapped in SB3's `Monitor`; wrappers in worker processes
        are not looked for.
        """
        chosen = self._chosen(indices)
        monitors = load_library("stable_baselines3.common.monitor", "sb3").Monitor
        if self.monitor and issubclass(wrapper_class, monitors):
            return [True] * len(chosen)
        envs: Any = self.envs.unwrapped
        if hasattr(envs, "envs"):
            is_wrapped = load_library("stable_baselines3.common.env_util", "sb3").is_wrapped
            return [is_wrapped(envs.envs[i], wrapper_class) for i in chosen]
        return [False] * len(chosen)

    def _chosen(self, indices: Indices) -> list[int]:
        return list(self._get_indices(indices))


def make_sb3_env(
    env: Any,
    num_envs: int | None = None,
    *,
    seed: int | None = None,
    monitor: bool = True,
    monitor_dir: str | Path | None = None,
    **options: Any,
) -> SB3VecEnv:
    """Make a vector env with `make_vec`, in SB3's autoreset mode, and adapt it.

    Args:
        env: A registered id, an `EnvSpec`, a factory or a list of factories, as in `make_vec`.
        num_envs: Number of envs.
        seed: Seed of the first reset: env i gets seed + i, as with `SB3VecEnv.seed(seed)`, and the
            action space gets `seed`. None for random seeds.
        monitor: See `SB3VecEnv`.
        monitor_dir: See `SB3VecEnv`.
        **options: Further arguments of `make_vec`, such as `backend` and the env's own.
    """
    envs = make_vec(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
    try:
        adapted = SB3VecEnv(envs, monitor=monitor, monitor_dir=monitor_dir)
        if seed is not None:
            adapted.seed(seed)
            adapted.action_space.seed(seed)
        return adapted
    except BaseException:
        envs.close()
        raise


def _row(batch: Any, i: int, *, is_zero: bool) -> Any:
    if isinstance(batch, dict):
        return {key: _row(part, i, is_zero=is_zero) for key, part in batch.items()}
    return np.zeros_like(batch[i]) if is_zero else batch[i].copy()


def _check_spaces(observations: spaces.Space, actions: spaces.Space) -> None:
    parts = observations.spaces if isinstance(observations, spaces.Dict) else {"": observations}
    for name, part in parts.items():
        if not isinstance(part, _SIMPLE):
            where = f"observation_space[{name!r}]" if name else "observation_space"
            raise TypeError(
                f"{where} is {part}, but stable-baselines3 takes Box, Discrete, MultiDiscrete, "
                "MultiBinary, or one Dict of these; flatten it, e.g. with "
                "gymnasium.wrappers.FlattenObservation"
            )
    if not isinstance(actions, _SIMPLE):
        raise TypeError(f"action_space is {actions}, but stable-baselines3 takes {_SIMPLE}")
    if np.any(np.asarray(getattr(actions, "start", 0)) != 0):
        raise TypeError(
            f"action_space is {actions}, but stable-baselines3 counts actions from 0; wrap the "
            "envs in gymnasium.wrappers.TransformAction"
        )
