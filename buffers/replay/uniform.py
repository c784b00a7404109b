"""Replay buffers whose transitions are drawn alike: in one ring, or in one for each environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np
from gymnasium import Space

from buffers.core.errors import BufferMisuseError
from buffers.core.sequences import SequenceBatch, read_sequences
from buffers.replay.batches import ReplayBatch
from buffers.replay.buffer import ReplayBuffer
from buffers.replay.draws import Draw
from buffers.replay.plan import ReplayOptions
from buffers.replay.sequences import SequenceIndex

__all__ = ["PerEnvReplayBuffer", "SharedReplayBuffer"]

_DRAWS: dict[str, Draw] = {"transitions": "rows", "envs": "rings"}


class UniformReplayBuffer(ReplayBuffer):
    """Draws transitions with equal probability; see the classes below."""

    _draws: Draw = "rows"

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        replace: bool = True,
        columns: Iterable[str] | None = None,
    ) -> ReplayBatch:
        """Draw transitions, all equally likely, or as `over` of a `PerEnvReplayBuffer` says.

        Args:
            batch_size: B.
            out: A batch that `new_batch` or `sample` returned, to be overwritten; else a new one.
            replace: False draws B different ones; only over transitions.
            columns: Names of the columns to draw, such as ("obs", "actions"); None for all. The
                same rows are drawn, and copied in part; `indices` are always there.

        Raises:
            BufferMisuseError: The buffer is empty, or holds fewer than B and replace is False, or
                an argument does not fit.
        """
        draw: Draw = self._draws
        if not replace:
            if draw != "rows":
                raise BufferMisuseError("replace=False needs over='transitions'")
            draw = "distinct"
        batch = self._batch(batch_size, out, columns)
        self._fill(batch, draw)
        return batch

    def sample_sequences(
        self,
        batch_size: int,
        sequence_length: int,
        *,
        burn_in: int = 0,
        overlap: int | None = None,
        pad: bool = False,
        initial_states: Sequence[str] | str = (),
        columns: Iterable[str] | None = None,
    ) -> SequenceBatch:
        """Draw sequences of steps of one episode each, all that there are equally likely.

        As of priorities that are all the same: the b-th of a batch comes from the b-th of B equal
        parts of the rows. Steps of episodes that are not over count as well. The first call, and
        each with other options than the one before, goes through all rows once.

        Args:
            batch_size: B.
            sequence_length: L.
            burn_in: Number of steps at the start of a sequence that only bring a recurrent state up
                to date; False in `learn_mask`. Sequences that begin with their episode have none.
            overlap: Number of steps that a sequence shares with the next of its episode; they
                begin at every (L - overlap)-th step. None lets them begin at any step.
            pad: Let sequences run out with the episode, or at the newest step; the rest is zero and
                False in `mask`. At least one step is left to learn from. Otherwise all are full.
            initial_states: Names of extra columns with the state of the policy before each step: a
                batch has those of the first steps only, (B, ...), in `initial_states` instead of
                `extras`.
            columns: Names of the columns to draw, such as ("obs", "rewards"); None for all. The
                sequences are the same; what says which steps they are (`mask`, `steps`, `indices`
                and the like) is always there.

        Raises:
            BufferMisuseError: An argument does not fit, there is no such sequence, or the buffer
                has track_episodes=False or over="envs".
        """
        options = read_sequences(sequence_length, burn_in, overlap, pad)
        return self._sample_sequences(batch_size, options, initial_states, columns)


class SharedReplayBuffer(UniformReplayBuffer):
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
        frame_stack: Number of frames an observation, a Box, is a stack of, or a `FrameStack`. Each
            frame is stored once then; `add` takes stacks, or the newest frame of each alone.
        track_env: Keep the env id of each transition; batches have `env_ids`.
        track_episodes: Keep what follows on what, for `sample_sequences`; batches have `env_ids`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live and batches are made.
        seed: Of the generator; None takes entropy of the system.
        staged: Do on the CPU what is done on other devices, to test it.
        storage: Where the rows are: "memory", or "memmap", files that may be larger than memory.
        folder: Of "memmap"; made if it is not there, else the buffer goes on where it was.
        read_only: Draw from a folder that another process may write to.

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


class PerEnvReplayBuffer(UniformReplayBuffer):
    """The newest `capacity` transitions of each environment, in a ring of its own.

    Args:
        capacity: Number of transitions held of each environment.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: Number of environments.
        over: "transitions" draws all transitions with equal probability, so that an environment
            counts by what it has; "envs" an environment that has some first, then one of its.
        n_step: As in `SharedReplayBuffer`, like all that follow.
        gamma: Discount per step.
        store_next: Whether next observations are stored besides.
        frame_stack: Number of frames of an observation, each of which is stored once.
        track_env: Batches have `env_ids`.
        track_episodes: Keep what follows on what, for `sample_sequences`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live and batches are made.
        seed: Of the generator.
        staged: Do on the CPU what is done on other devices, to test it.
        storage: Where the rows are: "memory", or "memmap", files that may be larger than memory.
        folder: Of "memmap"; made if it is not there, else the buffer goes on where it was.
        read_only: Draw from a folder that another process may write to.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = PerEnvReplayBuffer(100, Box(-1, 1, (4,)), Discrete(2), num_envs=3, seed=0)
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> buffer.add(**step, terminations=flags, truncations=flags)
    >>> buffer.counts.tolist(), tuple(buffer.sample(256).obs.shape)
    ([1, 1, 1], (256, 4))
    """

    _is_per_env = True

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int,
        over: str = "transitions",
        **options: Unpack[ReplayOptions],
    ):
        if not isinstance(over, str) or over not in _DRAWS:
            raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_DRAWS)}")
        self.over = over
        super().__init__(capacity, observation_space, action_space, num_envs=num_envs, **options)

    @property
    def _draws(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _DRAWS[self.over]

    def _own_settings(self) -> dict[str, Any]:
        return {"over": self.over}

    _own_arguments = _own_settings

    def _require_sequences(self) -> SequenceIndex:
        if self.over != "transitions":
            raise BufferMisuseError("sample_sequences needs over='transitions'")
        return super()._require_sequences()

    @property
    def counts(self) -> np.ndarray:
        """int64 (num_envs,), transitions held of each environment; a copy."""
        begin, end = self._table.live()
        return end - begin
