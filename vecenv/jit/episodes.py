"""The rules of episodes: what a call does to a batch of envs, with the kernels of one kind of env.

`run_rows` holds all rules: autoreset, the episode limit, which results are written. It calls the
kernels by the global names below. `binding` copies it for each kind of env and binds these names;
the copy is compiled as part of `driver.attend`, and also runs uncompiled.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from numba import njit

from vecenv.jit.random import RNG_DTYPE, open_block

# Values of `op`: what a call does.
STEP, RESET, OBSERVE, MASK = 0, 1, 2, 3

# The three modes of `gymnasium.vector.AutoresetMode`, as numbers.
NEXT_STEP, SAME_STEP, DISABLED = 0, 1, 2

NO_LIMIT = 2**62

RUN_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        *((name, RNG_DTYPE[name]) for name in ("key", "counter")),  # the env's random stream
        ("episode_return", np.float64),  # of the current episode
        ("last_return", np.float64),  # of the last episode that ended; NaN before
        ("episode_length", np.int64),
        ("last_length", np.int64),  # 0 before the first episode has ended
        ("num_episodes", np.int32),  # number of ended episodes
        ("episode_over", np.bool_),  # whether the episode ended and no reset followed
    ],
    align=True,
)


class Batch(NamedTuple):
    """The arrays of one call with R rows, of N envs.

    Outputs that the op does not write may have any length; behind the first axis, `obs` and
    `actions` have the shape of their single space.
    """

    op: Any
    autoreset_mode: Any
    max_episode_steps: Any
    states: Any  # (N,) state records
    runs: Any  # (N,) RUN_DTYPE
    params: Any  # (1,) parameter record, or (N,), one per env; unused if the kernels take none
    env_ids: Any  # int64 (R,), or (0,): row i is env i
    actions: Any  # (R, ...)
    obs: Any  # (R, ...)
    rewards32: Any  # float32 (R,) or (0,): unused
    rewards64: Any  # float64 (R,) or (0,): unused
    terminations: Any  # bool (R,)
    truncations: Any  # bool (R,)
    final_obs: Any  # (N, ...), by env; written in SAME_STEP mode only
    masks: Any  # bool (R, A)


# `binding` puts kernels here.
env_reset = env_step = env_observe = env_mask = env_sampler = kernel = cast("Any", None)
obs_row = action_row = allows_something = cast("Any", None)
MASK_STARTS = (0, 0)  # where the parts of a mask begin, and its width


@njit
def run_rows(batch, start, stop):
    """Do `batch.op` for rows start <= row < stop; return how many episodes ended.

    For MASK, return the number of rows whose episode goes on, though some part of the action has no
    valid value.
    """
    op, mode, params = batch.op, batch.autoreset_mode, batch.params
    num_ended = 0
    # Unsigned: signed indices might count from the end, which needs a test.
    for row in range(np.uint64(start), np.uint64(stop)):
        env = row
        if batch.env_ids.shape[0] > 0:
            env = np.uint64(batch.env_ids[row])
        state, run = batch.states[env], batch.runs[env]
        if op == MASK:
            mask = batch.masks[row]
            env_mask(state, mask, params, env)
            if not allows_something(mask):
                if run.episode_over:  # the action does not matter
                    mask[:] = True
                else:
                    num_ended += 1
            continue
        begins = op == RESET
        if op == STEP:
            reward, terminated, truncated = 0.0, False, False
            begins = mode == NEXT_STEP and run.episode_over
            if not begins:
                open_block(run)  # so draws depend only on the number of steps and resets
                action = action_row(batch.actions, row)
                reward, is_terminal, is_cut = env_step(state, action, run, params, env)
                terminated, truncated = bool(is_terminal), bool(is_cut)
                run.episode_return += reward
                run.episode_length += 1
                if run.episode_length >= batch.max_episode_steps:
                    truncated = True
                if terminated or truncated:
                    num_ended += 1
                    run.num_episodes += 1
                    run.last_return = run.episode_return
                    run.last_length = run.episode_length
                    run.episode_over = True
                    if mode == SAME_STEP:
                        env_observe(state, obs_row(batch.final_obs, env), params, env)
                        begins = True
            if batch.rewards32.shape[0] > 0:
                batch.rewards32[row] = reward
            else:
                batch.rewards64[row] = reward
            batch.terminations[row] = terminated
            batch.truncations[row] = truncated
        if begins:
            open_block(run)
            env_sampler(run, params, env)  # first: the reset may read the parameters
            env_reset(state, run, params, env)
            run.episode_return = 0.0
            run.episode_length = 0
            run.episode_over = False
        env_observe(state, obs_row(batch.obs, row), params, env)
    return num_ended


@njit(inline="always")  # device functions return no arrays
def scalar_row(array, row):
    """Return the row of a batch of numbers as a view of length 1, for `observe` to write into."""
    return array[row : row + 1]


@njit(inline="always")
def array_row(array, row):
    """Return the row of a batch: a view of arrays, a number of numbers."""
    return array[row]


@njit
def own_params(params, env):
    """Return the parameter record of an env, from (1,) or (N,) records."""
    return params[env if params.shape[0] > 1 else env - env]


@njit
def step_with_params(state, action, rng, params, env):
    """Call a step kernel that takes a parameter record."""
    return kernel(state, action, rng, own_params(params, env))


@njit
def step_without_params(state, action, rng, params, env):
    """Call a step kernel that takes no parameter record."""
    return kernel(state, action, rng)


@njit
def pair_with_params(state, other, params, env):
    """Call any other kernel that takes a parameter record."""
    return kernel(state, other, own_params(params, env))


@njit
def pair_without_params(state, other, params, env):
    """Call any other kernel that takes no parameter record."""
    return kernel(state, other)


@njit
def sample_params(rng, params, env):
    """Call a sampler, which writes the parameter record."""
    kernel(own_params(params, env), rng)


@njit
def keep_params(rng, params, env):
    """Replace the sampler of an env that has none; do nothing."""


@njit
def any_in_each_part(mask):
    """Return whether a mask, bool (A,), has a True in each part; it becomes `allows_something`."""
    for part in range(len(MASK_STARTS) - 1):
        has_any = False
        for k in range(MASK_STARTS[part], MASK_STARTS[part + 1]):
            if mask[k]:
                has_any = True
                break
        if not has_any:
            return False
    return True


@njit
def no_mask(state, out, *params):
    """Replace the action mask of an env that has none; do nothing."""
