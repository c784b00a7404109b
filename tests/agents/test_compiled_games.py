"""Compiled games with several agents are the games that `GameEnv` makes of the same rules."""

import dataclasses
import functools

import numpy as np
import pytest
from agents.toy_games import CHASE, NUM_CATS, WALK, PythonGame, mask
from choices import fast_are, product
from gymnasium.spaces import Box, Discrete

from vecenv import ActionError, ObservationError, make_vec_agents
from vecenv.agents import AgentRowsVecEnv, AgentSlot
from vecenv.jit import AgentsOf, KernelCompileError

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


@pytest.mark.parametrize(
    ("kernels", "mode"),
    fast_are([*zip((CHASE, WALK, CHASE), MODES, strict=True)], product([CHASE, WALK], MODES)),
)
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


def test_games_sent_one_by_one_go_as_those_stepped_together():
    rng = np.random.default_rng(1)
    batches = [
        {"cat": rng.integers(0, 3, GAMES * 2), "mouse": rng.integers(0, [3, 2], (GAMES * 3, 2))}
        for _ in range(30)
    ]
    together, alone = make(CHASE, max_steps=8), make(CHASE, max_steps=8)
    together.reset(seed=2)
    alone.reset(seed=2)
    for batch in batches:
        expected = together.step(batch)
        for game in (2, 0, 1):
            ids = np.array([game])
            rows = {name: group.rows(ids) for name, group in alone.groups.items()}
            alone.send({name: batch[name][own] for name, own in rows.items()}, ids)
        for game in (2, 0, 1):
            received = alone.recv(1, max_games=1)
            assert received.game_ids.tolist() == [game]
            for name, own in received.env_ids.items():
                for part, whole in zip(received[:4], expected[:4], strict=True):
                    np.testing.assert_array_equal(part[name], whole[name][own])
                np.testing.assert_array_equal(received.valid[name], together.valid[name][own])
    for name in together.groups:
        np.testing.assert_array_equal(alone.alive[name], together.alive[name])


@pytest.mark.parametrize(
    "debug", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_masks_are_those_of_the_agents(debug):
    kernels = dataclasses.replace(CHASE, action_mask=mask)
    envs = make(kernels, mask_infos=True, vector_kwargs={"debug": debug})
    _, infos = envs.reset(seed=2)
    for _ in range(30):
        masks = {name: group.action_masks() for name, group in envs.groups.items()}
        assert masks["cat"].shape == (GAMES * 2, 3)
        assert masks["mouse"].shape == (GAMES * 3, 5)
        np.testing.assert_array_equal(infos["cat"]["action_mask"], masks["cat"])
        cells = envs.games.envs.states.cell[:, :NUM_CATS].reshape(-1)
        expected = ~((cells == 0) & envs.alive["cat"])
        np.testing.assert_array_equal(masks["cat"][:, 0], expected)
        assert masks["mouse"].all()
        *_, infos = envs.step({"cat": np.zeros(6, int), "mouse": np.ones((9, 2), int)})


def test_an_impossible_action_names_game_and_agent_and_steps_nothing():
    envs = make(CHASE)
    envs.reset(seed=2)
    before = envs.games.envs.states.copy()
    cats, mice = np.zeros(6, int), np.ones((9, 2), int)
    mice[7, 1] = 5
    with pytest.raises(ActionError, match=r"'mouse_1' \(group 'mouse'\) of game 2 is \[1 5\]"):
        envs.step({"cat": cats, "mouse": mice})
    np.testing.assert_array_equal(before, envs.games.envs.states)


def test_a_game_without_agents_after_reset_is_refused():
    def leave_all(state, rng):
        for k in range(3):
            state.alive[k] = 0

    envs = make(dataclasses.replace(WALK, reset=leave_all), vector_kwargs={"debug": True})
    with pytest.raises(ObservationError, match="game 0 of Walk has no agents after reset"):
        envs.reset(seed=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"groups": {"a": 3}}, TypeError, "group 'a' must be AgentsOf"),
        (
            {"observation_space": Discrete(3)},
            ValueError,
            "is given beside groups",
        ),
        ({"observe": {"walkers": len}}, TypeError, "one for each of the groups"),
        ({"state_dtype": [("alive", np.int8)]}, ValueError, "state_dtype has fields"),
        (
            {
                "groups": {
                    "a": AgentsOf(1, Box(0, 1, (2,), np.float32), Discrete(2)),
                    "b": AgentsOf(1, Box(0, 1, (2,), np.float64), Discrete(2)),
                },
                "observation_space": None,
                "action_space": None,
                "state_dtype": [("place", np.float64)],
            },
            ValueError,
            "give all groups Box spaces of one dtype",
        ),
        (
            {
                "groups": {
                    "a": AgentsOf(["x"], Discrete(2), Discrete(2)),
                    "b": AgentsOf(["x"], Discrete(2), Discrete(2)),
                }
            },
            ValueError,
            "agent 'x' is in 'a' and in 'b'",
        ),
    ],
)
def test_wrong_kinds_of_game_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(WALK, **changes)


def reset_a_misspelt_field(state, rng):
    state.plce[0, 0] = 0.0


def observe_a_misspelt_field(state, agent, out):
    out[0, 0] = state.plce[agent, 0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reset": reset_a_misspelt_field}, marks=pytest.mark.slow),
        pytest.param({"observe": observe_a_misspelt_field}, marks=pytest.mark.slow),
    ],
    ids=["reset", "observe"],
)
def test_a_kernel_that_cannot_be_compiled_is_named_with_its_line(changes):
    with pytest.raises(KernelCompileError, match="no field 'plce'; the state has place") as caught:
        make(dataclasses.replace(WALK, **changes))
    assert "plce" in str(caught.value).splitlines()[1]
