"""A few random envs in lockstep with Gymnasium's; `make fuzz` takes a minute of new ones."""

import numpy as np
import pytest
from fuzz import envs as random_envs
from fuzz.envs import RUNS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lockstep", "by hand"])
def test_a_few_random_envs(kind):
    """The same ones every time, so that a failure is one of the change that was made."""
    run, count = RUNS[kind], 0
    for number in np.random.default_rng(len(kind)).integers(1 << 40, size=40).tolist():
        if random_envs.Case(number).num_steps <= 40:
            count += run(number)
        if count > 40:
            break
    assert count > 40


def test_a_difference_is_found(monkeypatch):
    """The comparison is one: a vector env that changes something is told from Gymnasium's."""

    class Changed(random_envs.SyncVectorEnv):
        def step(self, actions, **kwargs):
            obs, rewards, *rest = super().step(actions, **kwargs)
            return (obs, rewards + (rewards != 0) * 1e-9, *rest)

    monkeypatch.setattr(random_envs, "SyncVectorEnv", Changed)
    with pytest.raises(AssertionError, match="case 12 "):
        RUNS["lockstep"](12)
