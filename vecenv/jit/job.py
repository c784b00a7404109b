"""The records that Python and compiled code share: one run per env, one job per vector env.

A *job* says what to do (`op`) to which envs and where the arrays are, as addresses, so that a
thread that never touches a Python object can do it. The *control* words say how far threads are.
"""

from typing import Any, NamedTuple

import numpy as np

from vecenv.jit.random import RNG_DTYPE

# What a job does.
STEP, RESET, OBSERVE, MASK = 0, 1, 2, 3

# The three modes of `gymnasium.vector.AutoresetMode`, as numbers.
NEXT_STEP, SAME_STEP, DISABLED = 0, 1, 2

NO_LIMIT = 2**62

RUN_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        *((name, RNG_DTYPE[name]) for name in ("key", "counter")),  # the env's random stream
        ("episode_return", np.float64),  # of the episode under way
        ("last_return", np.float64),  # of the episode that ended last; NaN before
        ("episode_length", np.int64),
        ("last_length", np.int64),  # 0 before the first episode has ended
        ("num_episodes", np.int32),  # that have ended
        ("episode_over", np.bool_),  # ended, and not been reset since
    ],
    align=True,
)

ADDRESSES = (
    "states",
    "runs",
    "params",
    "env_ids",
    "actions",
    "own_actions",
    "obs",
    "rewards32",
    "rewards64",
    "terminations",
    "truncations",
    "final_obs",
    "masks",
)

JOB_DTYPE = np.dtype(
    [
        ("op", np.int64),
        ("autoreset_mode", np.int64),
        ("max_episode_steps", np.int64),  # NO_LIMIT: none
        ("num_envs", np.int64),
        ("num_rows", np.int64),
        ("num_ids", np.int64),  # 0: row i is env i
        ("num_parts", np.int64),  # threads that may take part
        ("chunk_rows", np.int64),  # rows that a thread claims at a time
        ("may_wake", np.int64),  # 1: sleeping threads shall be woken to take part
        *((name, np.int64) for name in ADDRESSES),
    ]
)

# Control words, each on a cache line of its own.
LINE = 8
TICKET = 0 * LINE  # number of the latest job offered to helper threads
OPEN = 1 * LINE  # 1 while helper threads may join it
ACTIVE = 2 * LINE  # helper threads that are inside it
ENDED = 3 * LINE  # episodes that ended in it
STOP = 4 * LINE  # 1: helper threads shall leave
CALLER = 5 * LINE  # 1 while the calling thread does its share; it stays so if a kernel raises
FIRST_PART = 6 * LINE  # then one line per part: next row to claim
# ... then one line per helper thread: 1 while it sleeps.


def control_words(num_threads: int) -> int:
    """Length of the control array for this many threads."""
    return FIRST_PART + 2 * num_threads * LINE


class Batch(NamedTuple):
    """The arrays of one job with R rows, of N envs.

    Outputs that the op does not write may be anything; `obs` and `actions` have the shape of their
    single space after the first axis.
    """

    op: Any
    autoreset_mode: Any
    max_episode_steps: Any
    states: Any  # (N,) state records
    runs: Any  # (N,) RUN_DTYPE
    params: Any  # (1,) parameter record; not read if the kernels take none
    env_ids: Any  # int64 (R,), or (0,): row i is env i
    actions: Any  # (R, ...)
    obs: Any  # (R, ...)
    rewards32: Any  # float32 (R,) or (0,): unused
    rewards64: Any  # float64 (R,) or (0,): unused
    terminations: Any  # bool (R,)
    truncations: Any  # bool (R,)
    final_obs: Any  # (N, ...), by env; written in SAME_STEP mode only
    masks: Any  # bool (R, A)
