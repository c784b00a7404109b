"""SharedReplayBuffer: one ring of transitions for all environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from gymnasium import Space

from buffers.replay.base import ReplayBuffer, RowOptions, plan_replay
from buffers.replay.batches import ReplayBatch

__all__ = ["SharedReplayBuffer"]


class SharedReplayBuffer(ReplayBuffer):
    """The newest `capacity` transitions of all environments, in one ring.

    Args:
        capacity: Number of transitions held, exactly, however many environments there are.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments; needed by the three options that follow.
        n_step: Length of the windows that rewards are summed over. A window ends early with its
            episode, and at the newest transition of its environment; `discounts` of the batch has
            the right power of gamma.
        gamma: Discount per step; with it batches have `discounts`.
        store_next: False stores observations once: the next observation is read from the row that
            follows. Those that episodes ended with are kept apart.
        track_env: Keep the env id of each transition; batches have `env_ids`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live and batches are made.
        seed: Of the generator; None takes entropy of the system.
        staged: Do on the CPU what is done on other devices, to test it.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = SharedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), seed=0)
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> buffer.add(**step, terminations=flags, truncations=flags)
    >>> batch = buffer.sample(256)
    >>> len(buffer), tuple(batch.obs.shape)
    (3, (256, 4))
    """

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None = None,
        n_step: int = 1,
        gamma: float | None = None,
        store_next: bool = True,
        track_env: bool = False,
        extra_columns: Mapping[str, Space] | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        staged: bool = False,
    ):
        rows: RowOptions = {
            "n_step": n_step,
            "gamma": gamma,
            "store_next": store_next,
            "track_env": track_env,
            "extra_columns": extra_columns,
        }
        spaces = observation_space, action_space
        options = plan_replay(capacity, *spaces, num_envs=num_envs, **rows)
        super().__init__(options, device=device, seed=seed, staged=staged)
        made = {"device": self.device, "staged": staged, "num_envs": num_envs, **rows}
        self._remember(SharedReplayBuffer, capacity, *spaces, **made)

    @staticmethod
    def nbytes_for(
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int | None = None,
        **options: Unpack[RowOptions],
    ) -> int:
        """Bytes the constructor would allocate with these arguments; allocates nothing.

        >>> from gymnasium.spaces import Box, Discrete
        >>> SharedReplayBuffer.nbytes_for(500_000, Box(-1, 1, (52,)), Discrete(7))
        224000240
        """
        spaces = observation_space, action_space
        plan = plan_replay(capacity, *spaces, num_envs=num_envs, **options)
        return plan.nbytes(plan.capacity)

    def sample(
        self, batch_size: int, out: ReplayBatch | None = None, *, replace: bool = True
    ) -> ReplayBatch:
        """Draw transitions, all equally likely.

        Args:
            batch_size: B.
            out: A batch that `new_batch` or `sample` returned, to be overwritten; else a new one.
            replace: False draws B different ones.

        Raises:
            BufferMisuseError: The buffer is empty, or holds fewer than B and replace is False, or
                an argument does not fit.
        """
        batch = self._batch(batch_size, out)
        draw = "rows" if replace else "distinct"
        if not self._reader.fill_at_once(batch, draw):
            self._fill(batch, draw)
        return batch
