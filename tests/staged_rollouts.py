"""Rollouts on the CPU as they are where envs are on the CPU and tensors on another device."""

from buffers import RolloutBuffer

__all__ = ["make_rollout", "rollout_class"]


class StagedRollout(RolloutBuffer):
    """Keeps host pages apart from the tensors."""

    _is_apart = True


def rollout_class(staged):
    """The one or the other."""
    return StagedRollout if staged else RolloutBuffer


def make_rollout(*arguments, staged=False, **options):
    """A rollout buffer of either class."""
    return rollout_class(staged)(*arguments, **options)
