"""Work that several benchmarks do: the same transitions, slots and rollouts.

Nothing is imported before it is needed, as `against.py` measures starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from buffers import RolloutBuffer

__all__ = ["Steps", "make_columns", "make_slot"]


def make_columns(count: int) -> dict[str, Any]:
    """Return `count` transitions of 52 float32 observed."""
    import numpy as np

    rng = np.random.default_rng(count)
    return {
        "obs": rng.standard_normal((count, 52), np.float32),
        "next_obs": rng.standard_normal((count, 52), np.float32),
        "actions": rng.integers(0, 7, count),
        "rewards": rng.standard_normal(count, np.float32),
        "terminations": rng.random(count) < 0.005,
        "truncations": rng.random(count) < 0.005,
    }


def make_slot(envs: Any, rewards: Any = "float32") -> Any:
    """Allocate memory for the results of one step, with rewards of a dtype."""
    from vecenv import StepSlot

    space, count = envs.single_observation_space, (envs.num_envs,)
    return StepSlot(
        envs.allocate((*count, *space.shape), space.dtype),
        envs.allocate(count, rewards),
        envs.allocate(count, bool),
        envs.allocate(count, bool),
    )


class Steps:
    """What environment and policy return in a rollout, the same in every update."""

    def __init__(self, num_steps: int, num_envs: int):
        import numpy as np
        import torch

        rng = np.random.default_rng(0)
        shape = num_steps, num_envs
        self.shape = shape
        self.obs = rng.standard_normal((num_steps + 1, num_envs, 52), np.float32)
        self.rewards = rng.standard_normal(shape, np.float32)
        self.terminations, self.truncations = rng.random((2, *shape)) < 0.005
        self.actions = torch.from_numpy(rng.integers(0, 7, shape))
        self.log_probs, values = torch.from_numpy(rng.standard_normal((2, *shape), np.float32))
        self.values = torch.cat([values, values[-1:]])
        self.zeros = np.zeros(num_envs, np.float32)

    def fill(self, rollout: RolloutBuffer) -> None:
        """Lay in all steps."""
        for t in range(rollout.num_steps):
            rollout.obs_at(t)
            rollout.put(
                t, actions=self.actions[t], log_probs=self.log_probs[t], values=self.values[t]
            )
            slot = rollout.slot(t)
            slot.obs[:] = self.obs[t + 1]
            slot.rewards[:] = self.rewards[t]
            slot.terminations[:] = self.terminations[t]
            slot.truncations[:] = self.truncations[t]
            cut = self.truncations[t]
            if cut.any():
                rollout.set_final_values(t, cut, self.zeros[: cut.sum()])

    def step(self, t: int) -> list[torch.Tensor]:
        """Step t as tensors, field by field."""
        import torch

        arrays = self.rewards[t], self.terminations[t], self.truncations[t]
        policy = self.actions[t], self.log_probs[t], self.values[t]
        return [torch.from_numpy(self.obs[t]), *policy, *map(torch.from_numpy, arrays)]

    def stacked(self) -> list[torch.Tensor]:
        """All steps, each field a tensor of its own."""
        import torch

        columns = zip(*map(self.step, range(self.shape[0])), strict=True)
        return [torch.stack(column) for column in columns]
