"""Every way of stepping counts env steps alike, and resets are none."""

import numpy as np
import pytest
from compare.toy_envs import Counter, Nested

from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.compare.stepping import BatchStepper, FirstReadyStepper, LoopStepper


class Counted(Counter):
    """Notes how often it was stepped."""

    total = 0

    def step(self, action):
        Counted.total += 1
        return super().step(action)


@pytest.mark.parametrize("count", [1, 4, 17])
@pytest.mark.parametrize("kind", ["loop", "batch", "first-ready"])
def test_resets_are_not_counted_as_steps(kind, count, monkeypatch):
    monkeypatch.setattr(Counted, "total", 0)
    envs = Counted(length=3) if kind == "loop" else SyncVectorEnv([lambda: Counted(length=3)] * 5)
    kinds = {"loop": LoopStepper, "batch": BatchStepper, "first-ready": FirstReadyStepper}
    stepper = kinds[kind](envs, seed=0)
    counted, expected = 0, 0
    for _ in range(4):
        before = Counted.total
        stepper.prepare()
        steps, seconds = stepper.run(count)
        assert seconds > 0
        counted += steps
        expected += Counted.total - before
    # First-ready steps envs before its clock starts, to take what had been waiting.
    assert counted == expected if kind != "first-ready" else 0 < counted < expected
    assert stepper.episodes.tolist() == pytest.approx(
        [expected / len(stepper.episodes) / 3] * len(stepper.episodes), abs=1
    )
    stepper.settle()


def test_first_ready_counts_what_it_receives(monkeypatch):
    envs = SyncVectorEnv([lambda: Counter(length=10**6)] * 8)
    stepper = FirstReadyStepper(envs, seed=0)
    stepper.prepare()
    assert stepper.run(10)[0] == 10 * 2  # a quarter of the envs at a time
    stepper.settle()
    stepper.settle()
    envs.step(np.zeros(8, int))  # nothing is in flight any more


@pytest.mark.parametrize("stepper_class", [BatchStepper, FirstReadyStepper])
def test_nested_actions_are_drawn_for_any_number_of_envs(stepper_class):
    envs = AsyncVectorEnv([Nested] * 5, num_workers=2)
    stepper = stepper_class(envs, seed=0)
    stepper.prepare()
    assert stepper.run(12)[0] > 0
    stepper.settle()
    envs.close()


def test_the_policy_is_the_same_for_the_same_seed():
    envs = SyncVectorEnv([Counter] * 4)
    first, again = (BatchStepper(envs, 3) for _ in range(2))
    for _ in range(5):
        np.testing.assert_array_equal(first.act(), again.act())
        np.testing.assert_array_equal(first.act(np.arange(3)), again.act(np.arange(3)))
