"""Compiled games with several agents are the games that `GameEnv` makes of the same rules."""

import functools

import numpy as np
import pytest
from agents.toy_games import CHASE, WALK, PythonGame

from vecenv import make_vec_agents
from vecenv.agents import AgentRowsVecEnv, AgentSlot

MODES = ("NextStep", "SameStep", "Disabled")
GAMES = 3


def make(kernels, *, max_steps=None, **options):
    return make_vec_agents(kernels, GAMES, max_episode_steps=max_steps, **options)


def make_twin(kernels, mode, max_steps):
    game = functools.partial(PythonGame, kernels, max_steps)
    return make_vec_agents(game, GAMES, backend="sync", autoreset_mode=mode)


def random_actions(envs, rng):
    """Actions by group, nonsense for those that are not alive."""
    chosen = {}
    for name, group in envs.groups.items():
        array = np.array([group.single_action_space.sample() for _ in range(group.num_envs)])
        if array.dtype.kind == "f":
            array = rng.uniform(-1, 1, array.shape).astype(array.dtype)
        else:
            array = rng.integers(0, 2, array.shape)
            array[~group.alive] = 77
        chosen[name] = array
    return chosen


def as_dicts(envs, results):
    """Results by group, of either kind of vector env."""
    *parts, infos = results
    if isinstance(envs, AgentRowsVecEnv):
        (name,) = envs.groups
        return *({name: part} for part in parts), {name: infos}
    return *parts, infos


def act(envs, actions, **options):
    if isinstance(envs, AgentRowsVecEnv):
        (name,) = envs.groups
        options = {key: value[name] for key, value in options.items()}
        return as_dicts(envs, envs.step(actions[name], **options))
    return envs.step(actions, **options)


def assert_same(envs, twin, results, expected):
    for part, own in zip(expected[:4], results[:4], strict=True):
        for name in envs.groups:
            np.testing.assert_array_equal(own[name], part[name])
    for name, group in envs.groups.items():
        np.testing.assert_array_equal(group.alive, twin.groups[name].alive)
        np.testing.assert_array_equal(group.valid, twin.groups[name].valid)
        found, wanted = results[4].get(name, {}), expected[4].get(name, {})
        assert ("final_obs" in found) == ("final_obs" in wanted)
        if "final_obs" in found:
            np.testing.assert_array_equal(found["_final_obs"], wanted["_final_obs"])
            for row in np.flatnonzero(found["_final_obs"]):
                np.testing.assert_array_equal(found["final_obs"][row], wanted["final_obs"][row])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", [CHASE, WALK], ids=["two-groups", "one-group"])
def test_games_go_as_they_do_in_python(kernels, mode):
    envs = make(kernels, max_steps=9, autoreset_mode=mode)
    twin = make_twin(kernels, mode, 9)
    rng = np.random.default_rng(0)
    own, other = envs.reset(seed=5), twin.reset(seed=5)
    is_rows = isinstance(envs, AgentRowsVecEnv)
    for name in envs.groups:
        first, second = (own[0], other[0]) if is_rows else (own[0][name], other[0][name])
        np.testing.assert_array_equal(first, second)
    num_ends = 0
    slots = {name: slot_of(group) for name, group in envs.groups.items()}
    for step in range(60):
        actions = random_actions(envs, rng)
        given = {"out": slots} if step % 2 else {}
        results = act(envs, actions, **given)
        if given:
            for name, slot in slots.items():
                assert results[0][name] is slot.obs
                np.testing.assert_array_equal(slot.valid, envs.groups[name].valid)
        assert_same(envs, twin, results, act(twin, actions))
        over = [~group.alive.reshape(GAMES, -1).any(axis=1) for group in envs.groups.values()]
        over = np.logical_and.reduce(over)
        num_ends += int(over.sum()) if mode != "SameStep" else sum(map(np.sum, results[3].values()))
        if mode == "Disabled" and over.any():
            again = envs.reset(options={"reset_mask": over})[0]
            expected = twin.reset(options={"reset_mask": over})[0]
            for name in envs.groups:
                pair = (again, expected) if is_rows else (again[name], expected[name])
                np.testing.assert_array_equal(*pair)
                np.testing.assert_array_equal(envs.groups[name].alive, twin.groups[name].alive)
    assert num_ends > 5
    envs.close()
    twin.close()


def slot_of(group):
    space, rows = group.single_observation_space, group.num_envs
    return AgentSlot(
        group.allocate((rows, *space.shape), space.dtype),
        np.zeros(rows, np.float32 if group.num_agents == 2 else np.float64),
        np.zeros(rows, bool),
        np.zeros(rows, bool),
        np.zeros(rows, bool),
    )
