"""The driver on a device: one thread does one row of a job, by the rules in `jit.episodes`.

`run_thread` is a template, like `episodes.run_rows`: `compiler` copies it for each kind of env and
binds the global names below. All arguments are int64, by value: settings, counts and addresses. So
a launch copies nothing else to the device, and a CUDA graph keeps all of it.

A device can't raise errors. A row that can't be stepped (its action is out of bounds, or its
episode is over while autoreset is disabled) is left unchanged and noted in the word `faults`, which
lies in host memory; the env raises the error at the next call.
"""

from __future__ import annotations

from typing import Any

from vecenv.jit.episodes import DISABLED, MASK, OBSERVE, RESET, STEP, Batch

__all__ = ["ARGUMENTS", "BAD_ACTION", "BAD_MASK", "CHECKS", "FAULT_SHIFT", "IS_OVER", "run_thread"]

ARGUMENTS = (
    "op",
    "autoreset_mode",
    "max_episode_steps",
    "num_envs",
    "num_rows",
    "states",
    "runs",
    "params",
    "num_params",  # 1: all envs share one record
    "env_ids",  # int64 (num_rows,), or 0: row i is env i
    "chosen",  # bool (num_rows,), or 0: rows that RESET resets; it only observes the others
    "actions",
    "bounds",  # int64 (2, NUM_BOUNDS), see `arrays.element_bounds`
    "obs",
    "rewards32",
    "rewards64",  # one of the two is 0
    "terminations",
    "truncations",
    "final_obs",
    "masks",
    "faults",  # int64 (1,)
    "over",  # bool (num_rows,), or 0: where a STEP ended the episode
    "over_returns",  # float64 (num_rows,), or 0: its return there, else 0
    "over_lengths",  # int64 (num_rows,), or 0: its length there, else 0
)

# Values of `faults`: one of these, shifted, plus the number of the env.
BAD_ACTION, IS_OVER, BAD_MASK = 1, 2, 3
FAULT_SHIFT = 56

# Bound by `compiler`; the views turn an address and a number of rows into an array.
cuda: Any = None
run_rows: Any = None
states_at: Any = None
runs_at: Any = None
params_at: Any = None
ids_at: Any = None
actions_at: Any = None
obs_at: Any = None
floats_at: Any = None
doubles_at: Any = None
bools_at: Any = None
masks_at: Any = None
is_allowed: Any = None
NUM_BOUNDS = 0


def run_thread(
    op,
    autoreset_mode,
    max_episode_steps,
    num_envs,
    num_rows,
    states,
    runs,
    params,
    num_params,
    env_ids,
    chosen,
    actions,
    bounds,
    obs,
    rewards32,
    rewards64,
    terminations,
    truncations,
    final_obs,
    masks,
    faults,
    over,
    over_returns,
    over_lengths,
):
    """Do one row of a job; see ARGUMENTS."""
    row = cuda.grid(1)
    if row >= num_rows:  # the last block has spare threads
        return
    env = row if env_ids == 0 else ids_at(env_ids, num_rows)[row]
    row_op, fault = op, 0
    if op == STEP:
        if not is_allowed(actions_at(actions, num_rows), row, ids_at(bounds, 2 * NUM_BOUNDS)):
            fault = BAD_ACTION
        if autoreset_mode == DISABLED and runs_at(runs, num_envs)[env]["episode_over"]:
            fault = IS_OVER
        if fault != 0:
            row_op = OBSERVE  # the env is not stepped
            if rewards32 != 0:
                floats_at(rewards32, num_rows)[row] = 0.0
            else:
                doubles_at(rewards64, num_rows)[row] = 0.0
            bools_at(terminations, num_rows)[row] = False
            bools_at(truncations, num_rows)[row] = False
    if op == RESET and chosen != 0 and not bools_at(chosen, num_rows)[row]:
        row_op = OBSERVE
    batch = Batch(
        row_op,
        autoreset_mode,
        max_episode_steps,
        states_at(states, num_envs),
        runs_at(runs, num_envs),
        params_at(params, num_params),
        ids_at(env_ids, 0 if env_ids == 0 else num_rows),
        actions_at(actions, num_rows),
        obs_at(obs, num_rows),
        floats_at(rewards32, 0 if rewards32 == 0 else num_rows),
        doubles_at(rewards64, 0 if rewards64 == 0 else num_rows),
        bools_at(terminations, num_rows),
        bools_at(truncations, num_rows),
        obs_at(final_obs, num_envs),
        masks_at(masks, num_rows),
    )
    count = run_rows(batch, row, row + 1)
    if row_op == MASK and count != 0:
        fault = BAD_MASK
    if op == STEP and over != 0:
        is_over = bools_at(terminations, num_rows)[row] or bools_at(truncations, num_rows)[row]
        bools_at(over, num_rows)[row] = is_over
        if over_returns != 0:
            run = runs_at(runs, num_envs)[env]
            doubles_at(over_returns, num_rows)[row] = run["last_return"] if is_over else 0.0
            ids_at(over_lengths, num_rows)[row] = run["last_length"] if is_over else 0
    if fault != 0:
        ids_at(faults, 1)[0] = fault << FAULT_SHIFT | env  # threads may race: one fault stays


def any_is_allowed(actions, row, bounds):
    """Replace the check of actions, if any value is allowed."""
    return True


def number_is_allowed(actions, row, bounds):
    """Return whether the action of a row is within bounds int64 (2,)."""
    return bounds[0] <= actions[row] <= bounds[1]


def array_is_allowed(actions, row, bounds):
    """Return whether all elements of a row's action are within bounds int64 (2 * NUM_BOUNDS,)."""
    elements = actions.reshape(actions.size)
    for k in range(NUM_BOUNDS):
        element = elements[row * NUM_BOUNDS + k]
        if element < bounds[k] or element > bounds[NUM_BOUNDS + k]:
            return False
    return True


def has_no_nan(actions, row, bounds):
    """Return whether a row's action, of floats, has no NaN."""
    elements = actions.reshape(actions.size)
    width = elements.size // actions.shape[0]
    for k in range(width):  # noqa: SIM110 - generators can't be compiled for devices
        if elements[row * width + k] != elements[row * width + k]:
            return False
    return True


CHECKS = (any_is_allowed, number_is_allowed, array_is_allowed, has_no_nan)  # for `is_allowed`
