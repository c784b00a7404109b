"""The plan of a pool of workers, read from the arguments of `AsyncVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gymnasium import Env, Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.spaces import BatchedSpaces, ObservationMode, batch_env_spaces, chunk_bounds
from vecenv.machine import usable_cores

__all__ = ["Plan", "read_spaces", "worker_bounds", "worker_variables"]


class Plan(NamedTuple):
    """What a pool of workers is started with: arguments that have been checked.

    Attributes:
        factories: One per env; reopening an env replaces its factory.
        bounds: Worker w has the envs bounds[w], ..., bounds[w + 1] - 1; the envs before bounds[0]
            are the caller's.
        context: Start method, see `why_fresh`.
        restart_envs: Whether envs that raise, die or can't be made are replaced.
        autoreset_mode, publish, observation_mode, shared_memory: As given.
        variables: Environment variables of each worker, then a fresh interpreter; None for none.
        at_once: How many workers make envs at the same time; None for all.
        spaces: (observation space, action space) that all envs must have, if given.
        owner: Name of the vector env's class, for messages.
        shows_progress: Whether a line says how many envs have been made, after a second.
    """

    factories: list[Callable[[], Env]]
    bounds: list[int]
    context: str | None
    restart_envs: bool
    autoreset_mode: AutoresetMode
    publish: Mapping[str, Space] | None
    variables: list[dict[str, str]] | None
    at_once: int | None
    spaces: tuple[Space, Space] | None
    observation_mode: ObservationMode
    shared_memory: bool | None
    owner: str
    shows_progress: bool

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The first env of each chunk and the one after its last; the caller's own chunk first."""
        return [pair for pair in pairwise([0, *self.bounds]) if pair[1]]

    def batch(self, pairs: Sequence[tuple[Space, Space]]) -> BatchedSpaces:
        """Batch the (observation space, action space) of all envs; raise if they don't match."""
        observed, acted = map(list, zip(*pairs, strict=True))
        batched = batch_env_spaces(observed, acted, self.observation_mode, self.owner)
        if self.shared_memory is True:
            try:  # raises for custom spaces, also inside of other spaces
                is_space_dtype_shape_equiv(*[batched.single_observation_space] * 2)
            except NotImplementedError:
                raise ValueError(
                    "shared_memory=True can't hold observations of a custom space, one of "
                    f"{batched.single_observation_space}; leave the argument out, and they travel "
                    "by message while the others stay in shared memory"
                ) from None
        return batched


def worker_bounds(
    num_envs: int, num_workers: Any, max_concurrency: Any, caller_steps: bool
) -> list[int]:
    """Return which envs each worker has, see `Plan.bounds`; arguments as in `AsyncVectorEnv`.

    Raises:
        ValueError: There are no envs, or an argument is invalid; names it.
    """
    if num_envs == 0:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    if num_workers is None or num_workers == "auto":
        num_workers = max(1, usable_cores() - caller_steps)  # one core is the caller's then
    else:
        num_workers = read_count("num_workers", num_workers)
    if max_concurrency is not None:
        num_workers = min(num_workers, read_count("max_concurrency", max_concurrency))
    has_own = caller_steps and num_envs > 1
    num_workers = max(1, min(num_workers, num_envs - has_own))
    return chunk_bounds(num_envs, num_workers + has_own)[has_own:]  # the caller's 0 is left out


def worker_variables(
    worker_env: Any, num_workers: int, context: str | None, caller_steps: bool
) -> list[dict[str, str]] | None:
    """Return the environment variables of each worker; None if no `worker_env` is given.

    Raises:
        TypeError, ValueError: A variable is invalid, the message names it and the worker; or
            `context` or `caller_steps` would let envs start before the variables are set.
    """
    if worker_env is None:
        return None
    refused = "context='fork'" if context == "fork" else "caller_steps=True" if caller_steps else ""
    if refused:
        raise ValueError(
            f"worker_env with {refused}: variables are for fresh interpreters, they come too late "
            f"for what has imported everything; leave {refused.partition('=')[0]} out"
        )
    found: list[Any] = [
        worker_env(k) if callable(worker_env) else worker_env for k in range(num_workers)
    ]
    for worker, variables in enumerate(found):
        if not isinstance(variables, Mapping):
            raise TypeError(
                f"worker_env of worker {worker} is {variables!r}, expected a dict of environment "
                "variables, or a function that returns one for the number of a worker"
            )
        for name, value in variables.items():
            told = f"worker_env of worker {worker} has {name!r}: {value!r}"
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"{told}, expected strings, such as str({value!r})")
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{told}, which can't be an environment variable")
    return [dict(variables) for variables in found]


def read_spaces(spaces: Any, lazy: bool) -> tuple[Space, Space] | str | None:
    """Check and return the argument `spaces` of `AsyncVectorEnv`.

    Raises:
        ValueError: `lazy` is True and no spaces are given.
        TypeError: `spaces` is neither a pair of spaces nor an id.
    """
    if spaces is None and lazy:
        raise ValueError(
            "lazy=True makes no env before the first `reset`: give the spaces of one, as "
            "spaces=(observation_space, action_space), or the id of an env that has these"
        )
    if spaces is None or isinstance(spaces, str):
        return spaces
    is_pair = isinstance(spaces, tuple) and len(spaces) == 2
    if is_pair and all(isinstance(space, Space) for space in spaces):
        return spaces
    expected = "(observation space, action space) of one env, or the id of a registered env"
    raise TypeError(f"spaces is {spaces!r}, expected {expected} that has these")
