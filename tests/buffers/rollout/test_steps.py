"""Writing a rollout: views and memory, and refusals that change nothing."""

import numpy as np
import pytest
import torch
from equality import assert_same
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from staged_rollouts import make_rollout

from buffers import BufferMisuseError

SPACE = Dict({"a": Box(-1, 1, (2,)), "b": Tuple((Discrete(5), Box(0, 9, (1, 2), np.uint8)))})
FLAT = Box(-1, 1, (2,))


def make(num_steps=3, num_envs=2, space=FLAT, actions=None, **options):
    options = {"autoreset_mode": "NextStep", "seed": 0, **options}
    return make_rollout(num_steps, num_envs, space, actions or Discrete(4), **options)


def started(*args, **options):
    rollout = make(*args, **options)
    rollout.start(np.zeros((rollout.num_envs, 2), np.float32))
    return rollout


def put(rollout, t, **changes):
    num_envs = rollout.num_envs
    outputs = {
        "actions": torch.ones(num_envs, dtype=torch.int64),
        "log_probs": torch.full((num_envs,), -0.5),
        "values": torch.full((num_envs,), 2.0),
    }
    return rollout.put(t, **{**outputs, **changes})


def contents(rollout):
    columns = rollout._storage.columns.items()
    return {name: column.tensor.numpy().copy() for name, column in columns}


# Memory.


def test_slots_are_views_of_the_tensors():
    rollout = make(space=SPACE)
    rollout.start({"a": np.zeros((2, 2), "f4"), "b": (np.zeros(2, int), np.zeros((2, 1, 2), "u1"))})
    for t in range(3):
        slot = rollout.slot(t)
        pairs = [
            (slot.obs["a"], rollout.obs["a"][t + 1]),
            (slot.obs["b"][0], rollout.obs["b"][0][t + 1]),
            (slot.obs["b"][1], rollout.obs["b"][1][t + 1]),
            (slot.obs["a"], rollout.obs_at(t + 1)["a"]),
            (slot.rewards, rollout.rewards[t]),
            (slot.terminations, rollout.terminations[t]),
            (slot.truncations, rollout.truncations[t]),
            (rollout.env_actions(t), rollout.actions[t]),
        ]
        for array, tensor in pairs:
            assert isinstance(array, np.ndarray)
            assert array.shape == tuple(tensor.shape)
            assert array.ctypes.data == tensor.data_ptr()
            assert np.shares_memory(array, tensor.numpy())
            assert array.flags.c_contiguous
        assert slot is rollout.slot(t), "made once"


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (lambda shape, dtype: None, "allocate returned NoneType for obs, expected a NumPy array"),
        (lambda shape, dtype: np.zeros(shape, "f8"), "ndarray float64 .* for obs, expected"),
        (lambda shape, dtype: np.zeros(shape, dtype, order="F"), "C-contiguous and writeable"),
    ],
)
def test_bad_allocate_is_refused(allocate, message):
    with pytest.raises(BufferMisuseError, match=message):
        make(allocate=allocate)


# Writing.


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a positive integer, got 0"),
        ({"num_steps": 2**20, "num_envs": 2**12}, "expected at most 2147483647"),
        ({"observation_space": Text(5)}, "obs is the space Text.* expected Box, Discrete"),
        ({"observation_space": Dict({})}, "holds no array at all"),
        ({"observation_space": Box(-1, 1, (2,), np.longdouble)}, "which torch does not have"),
        ({"action_space": SPACE}, "action_space is Dict.* expected Box, Discrete"),
        (
            {"autoreset_mode": "Sometimes"},
            "autoreset_mode is 'Sometimes', expected one of 'NextStep",
        ),
        ({"gamma": 1.1}, "gamma is 1.1, expected a number from 0 to 1"),
        ({"gae_lambda": -0.1}, "gae_lambda is -0.1, expected"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    good = {
        "num_steps": 2,
        "num_envs": 2,
        "observation_space": FLAT,
        "action_space": Discrete(2),
        "autoreset_mode": "NextStep",
    }
    with pytest.raises(BufferMisuseError, match=message):
        make_rollout(**{**good, **changes})


GOOD_OBS = {"a": np.ones((2, 2), "f4"), "b": (np.ones(2, int), np.ones((2, 1, 2), "u1"))}


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ([1], r"obs must be a dict with the keys \['a', 'b'\], got list"),
        ({**GOOD_OBS, "b": 1}, r"obs\['b'\] must be a tuple of 2 items, got int"),
        ({**GOOD_OBS, "a": np.ones((3, 2))}, r"obs\['a'\] has shape \(3, 2\), expected \(2, 2\)"),
        ({**GOOD_OBS, "b": (np.ones(2), GOOD_OBS["b"][1])}, r"obs\['b'\]\[0\] has dtype float64"),
        ({**GOOD_OBS, "b": (GOOD_OBS["b"][0], np.ones((2, 1, 2)))}, "float64, expected uint8"),
    ],
)
def test_bad_observations_change_nothing(obs, message):
    rollout = make(space=SPACE)
    rollout.start(GOOD_OBS)
    before = contents(rollout)
    for call in (lambda: rollout.start(obs), lambda: rollout.write_obs(1, obs)):
        with pytest.raises(BufferMisuseError, match=message):
            call()
        assert_same(contents(rollout), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": torch.ones(2)}, "actions has dtype float32, expected int64"),
        (
            {"actions": torch.ones(3, dtype=torch.int64)},
            r"actions has shape \(3,\), expected \(2,\)",
        ),
        ({"values": torch.ones(2, 1)}, r"values has shape \(2, 1\), expected \(2,\)"),
        ({"values": "high"}, "values must be a tensor or an array, got str"),
        ({"log_probs": None}, "was given no log_probs; expected"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_bad_policy_outputs_change_nothing(changes, message, staged):
    rollout = started(staged=staged)
    before = contents(rollout)
    with pytest.raises(BufferMisuseError, match=message):
        put(rollout, 0, **changes)
    assert_same(contents(rollout), before)


def fill(rollout, **outputs):
    for t in range(rollout.num_steps):
        put(rollout, t, **outputs)
        write(rollout.slot(t), t)


def go_through(rollout):
    """Fill a rollout and begin the next one."""
    fill(rollout)
    rollout.compute_advantages([0.0, 0.0])
    rollout.advance()


def write(slot, t):
    """What an environment does."""
    slot.obs[:], slot.rewards[:] = t + 1, t
    slot.terminations[:] = slot.truncations[:] = False


@pytest.mark.parametrize("staged", [False, True])
def test_what_no_environment_wrote_is_never_learned_from(staged):
    """An env raises between `slot` and the end of the step, in a rollout after one that worked."""
    rollout = started(3, 2, staged=staged)
    go_through(rollout)
    go_through(rollout)
    for t in range(3):
        put(rollout, t)
        slot = rollout.slot(t)
        if t != 1:
            write(slot, t)
    calls = [lambda: rollout.compute_advantages([0.0, 0.0]), rollout.episodes, rollout.advance]
    for call in calls:
        with pytest.raises(BufferMisuseError, match="env 0 in step 1 had no results; step"):
            call()
    rollout.slot(1).rewards[0] = 0
    for call in calls:
        with pytest.raises(BufferMisuseError, match="env 1 in step 1 had no results"):
            call()
    assert rollout.valid_pages.all(), "flags that nobody wrote clear nothing"
    write(rollout.slot(1), 1)
    assert rollout.slot(1).rewards.tolist() == [1, 1], "asking again does not take back"
    rollout.compute_advantages([0.0, 0.0])
    assert rollout.num_valid == 6


# Extra columns.

EXTRAS = {"costs": Box(0, 9, ()), "options": Discrete(7), "plan": Box(-1, 1, (2, 3), np.float64)}


def extra_values(t, num_envs=2):
    return {
        "costs": np.full(num_envs, t / 2, np.float32),
        "options": torch.full((num_envs,), t),
        "plan": np.full((num_envs, 2, 3), -t, np.float64),
    }


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("when", ["with the rest", "after the step", "directly"])
def test_extra_columns_reach_the_minibatches(when, staged):
    rollout = started(4, 2, extra_columns=EXTRAS, staged=staged)
    for _ in range(2):
        for t in range(4):
            put(rollout, t, **(extra_values(t) if when == "with the rest" else {}))
            write(rollout.slot(t), t)
            if when == "after the step":
                rollout.put(t, costs=extra_values(t)["costs"])
                rollout.put(t, **{k: v for k, v in extra_values(t).items() if k != "costs"})
            elif when == "directly":
                for name, column in extra_values(t).items():
                    rollout.extras[name][t] = torch.as_tensor(column)
        rollout.compute_advantages([0.0, 0.0])
        for batch in rollout.minibatches(3):
            t = batch.indices // 2
            assert batch.extras["costs"].equal(t / 2)
            assert batch.extras["options"].equal(t)
            assert batch.extras["plan"].equal(-t.double()[:, None, None].expand(-1, 2, 3))
            assert rollout.rewards.flatten()[batch.indices].equal(t.float())
        rollout.advance()
    sizes = rollout.memory()
    assert (sizes["costs"], sizes["options"], sizes["plan"]) == (4 * 8, 8 * 8, 8 * 48)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"cost": np.zeros(2)}, r"no extra column 'cost', only \['costs', 'options', 'plan'\]"),
        ({"costs": np.zeros(3)}, r"costs has shape \(3,\), expected \(2,\)"),
        ({"options": np.zeros(2)}, "options has dtype float64, expected int64"),
        ({"costs": np.zeros(2), "plan": "x"}, "plan must be a tensor or an array, got str"),
    ],
)
def test_bad_extra_columns_change_nothing(extras, message):
    rollout = started(extra_columns=EXTRAS)
    before = contents(rollout)
    for call in (lambda: put(rollout, 0, **extras), lambda: rollout.put(0, **extras)):
        with pytest.raises(BufferMisuseError, match=message):
            call()
        assert_same(contents(rollout), before)
    with pytest.raises(BufferMisuseError, match="no extra column 'costs', only "):
        started().put(0, costs=np.zeros(2))


def test_an_extra_column_of_some_steps_only_is_an_error():
    rollout = started(3, 2, extra_columns=EXTRAS)
    fill(rollout)
    rollout.put(1, costs=[1.0, 2.0])
    with pytest.raises(BufferMisuseError, match="steps 0, 2 have no costs, but others have"):
        rollout.compute_advantages([0.0, 0.0])


@pytest.mark.parametrize(
    ("env_ids", "values", "message"),
    [
        ([0, 2], [1.0, 1.0], r"env_ids has 2, expected different numbers from 0 to 1"),
        ([0.0], [1.0], "env_ids has dtype float64"),
        ([[0]], [1.0], r"shape \(1, 1\), expected different numbers .* or a mask bool \(2,\)"),
        ([0], [1.0, 2.0], r"values has shape \(2,\), expected \(1,\)"),
    ],
)
def test_bad_final_values_change_nothing(env_ids, values, message):
    rollout = started(autoreset_mode="SameStep")
    before = contents(rollout)
    with pytest.raises(BufferMisuseError, match=message):
        rollout.set_final_values(0, env_ids, values)
    assert_same(contents(rollout), before)
