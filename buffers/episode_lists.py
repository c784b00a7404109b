"""Steps of running environments put together to episodes, for buffers that take only these."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from buffers.core.spaces import build_tree, tree_leaves

__all__ = ["EpisodeLists"]


class _Step(NamedTuple):
    obs: list[np.ndarray]  # by leaf
    next_obs: list[np.ndarray]
    columns: dict[str, np.ndarray]  # the others, those that the user added too


class EpisodeLists:
    """Gives `add` and `cut_episodes` to a buffer that has `add_episode` alone.

    One Python list per environment: for buffers of other makes. `EpisodicReplayBuffer` keeps open
    episodes itself, without an object per step.

    Args:
        buffer: Has `add_episode(episode)`, with `obs` of T + 1 rows and the other columns of T.
        num_envs: N.
        observation_space: Of a single environment.
    """

    def __init__(self, buffer: Any, num_envs: int, observation_space: Space):
        self._buffer, self._space = buffer, observation_space
        self._steps: list[list[_Step]] = [[] for _ in range(num_envs)]

    def add(self, *, obs: Any, next_obs: Any, env_ids: np.ndarray, **columns: np.ndarray) -> None:
        """Append one step per environment; hand over the episodes that end."""
        before = tree_leaves(self._space, obs, "obs")
        following = tree_leaves(self._space, next_obs, "next_obs")
        for row, env_id in enumerate(env_ids.tolist()):
            step = _Step(
                [leaf[row].copy() for leaf in before],
                [leaf[row].copy() for leaf in following],
                {name: column[row].copy() for name, column in columns.items()},
            )
            self._steps[env_id].append(step)
            if columns["terminations"][row] or columns["truncations"][row]:
                self.cut_episodes(np.array([env_id]))

    def cut_episodes(self, env_ids: np.ndarray) -> None:
        """Hand over the open episodes of some environments as they are."""
        for env_id in env_ids.tolist():
            steps, self._steps[env_id] = self._steps[env_id], []
            if steps:
                self._buffer.add_episode(self._episode(steps))

    def _episode(self, steps: list[_Step]) -> dict[str, Any]:
        rows = [step.obs for step in steps] + [steps[-1].next_obs]
        obs = [np.stack(leaf) for leaf in zip(*rows, strict=True)]
        columns = {name: np.stack([s.columns[name] for s in steps]) for name in steps[0].columns}
        return {"obs": build_tree(self._space, obs), **columns}
