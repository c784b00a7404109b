"""Wrappers that write into the slots of a rollout, and the same loop without `out=`."""

import numpy as np
import pytest
import torch
from choices import fast_are, in_turn, product
from equality import assert_same
from wrappers.slides import MODES, make_bare, two, two_space

from buffers import RolloutBuffer
from vecenv import wrappers

WRAPPED = {
    "NormalizeObservation": wrappers.NormalizeObservation,
    "FrameStack": lambda envs: wrappers.FrameStack(envs, 3),
    "TransformObservation": lambda e: wrappers.TransformObservation(e, two, two_space(e)),
    "NormalizeReward": wrappers.NormalizeReward,
    "all": lambda e: wrappers.FrameStack(
        wrappers.NormalizeReward(wrappers.NormalizeObservation(e)), 2
    ),
}


def collect(envs, mode, with_out, num_steps=40, num_rollouts=2):
    """Return the columns of rollouts whose envs write into the slots, or return new memory."""
    spaces = envs.single_observation_space, envs.single_action_space
    rollout = RolloutBuffer(num_steps, envs.num_envs, *spaces, autoreset_mode=mode)
    rng, columns = np.random.default_rng(3), []
    rollout.start(envs.reset(seed=3)[0])
    for _ in range(num_rollouts):
        for t in range(num_steps):
            drawn = rng.standard_normal((4, envs.num_envs)).astype(np.float32)
            actions, slot = drawn[:2].T.copy(), rollout.slot(t)
            rollout.put(t, actions=actions, log_probs=drawn[2], values=drawn[3])
            results = envs.step(actions, **({"out": slot} if with_out else {}))
            if not with_out:
                for name, part in zip(slot._fields, results, strict=False):
                    getattr(slot, name)[...] = part
            over = results[2] | results[3]
            if mode != "NextStep":
                rollout.set_final_values(t, np.flatnonzero(results[3]), drawn[2][results[3]])
            if mode == "Disabled" and over.any():
                rollout.write_obs(t + 1, envs.reset(options={"reset_mask": over})[0])
        rollout.compute_advantages(torch.ones(envs.num_envs))
        names = ["obs", "rewards", "terminations", "truncations", "valid", "advantages", "returns"]
        columns.append({name: getattr(rollout, name).numpy().copy() for name in names})
        rollout.advance()
    envs.close()
    return columns


BACKENDS = ("sync", "async")
CASES = product(WRAPPED, BACKENDS, MODES)
FAST = in_turn(WRAPPED, BACKENDS, MODES) + in_turn(WRAPPED, BACKENDS[::-1], MODES[::-1])


@pytest.mark.parametrize(("name", "backend", "mode"), fast_are(FAST, CASES))
def test_slots_of_rollouts_hold_what_steps_return(name, backend, mode):
    found, expected = (
        collect(WRAPPED[name](make_bare(backend, 3, mode)), mode, with_out)
        for with_out in (True, False)
    )
    assert_same(found, expected)
    for column in found:
        over = column["terminations"] | column["truncations"]
        assert over.any() and np.isfinite(column["advantages"]).all()
        resets = over[:-1] if mode == "NextStep" else np.zeros_like(over[:-1])
        assert_same(column["valid"][1:], ~resets)
