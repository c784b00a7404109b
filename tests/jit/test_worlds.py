"""Parameters of compiled envs that differ between envs: given, set, drawn, saved, told of."""

import numpy as np
import pytest
from choices import needs_jit
from envs import begun
from gymnasium.vector import AutoresetMode
from jit.toy_env import PARAMS, TOY, observe_x, small_kernels
from jit.toy_rolls import assert_same

from vecenv import make_vec
from vecenv.cage.challenge2.env import Cage2VectorEnv
from vecenv.cage.challenge4.env import Cage4VectorEnv
from vecenv.core.compiling import is_jit_off
from vecenv.jit import JitEnv, JitVectorEnv, KernelCompileError, KernelResultError, pack_record
from vecenv.jit.cartpole import CARTPOLE, CartPoleVectorEnv
from vecenv.jit.envs.acrobot import AcrobotVectorEnv
from vecenv.jit.envs.pendulum import PendulumVectorEnv
from vecenv.jit.envs.quadrotor import Quadrotor2DVectorEnv
from vecenv.jit.envs.tables import FrozenLakeVectorEnv
from vecenv.jit.random import integers, normal, uniform

NUM_ENVS = 6
OWN = TOY.having(params=PARAMS)
COSTS = np.linspace(0.05, 0.9, NUM_ENVS)
JUMPS = np.arange(3 * NUM_ENVS, dtype=np.int16).reshape(NUM_ENVS, 3) - 7


def play(envs, *, steps=40, seed=3):
    """All that `steps` steps of random actions return, by name (steps + 1, num_envs, ...)."""
    envs.action_space.seed(seed)
    results = [(envs.reset(seed=seed)[0], *(np.zeros(envs.num_envs),) * 3)]
    results += [envs.step(envs.action_space.sample())[:4] for _ in range(steps)]
    return [np.stack(columns) for columns in zip(*results, strict=True)]


def actions_of(envs, seed=3, steps=40):
    envs.action_space.seed(seed)
    return np.stack([envs.action_space.sample() for _ in range(steps)])


def one_by_one(make, actions, seed=3):
    """What single vector envs make of the columns of actions, with seeds as rows have them."""
    found = []
    for row in range(actions.shape[1]):
        envs = make(row)
        results = [(envs.reset(seed=seed + row)[0], *(np.zeros(1),) * 3)]
        results += [envs.step(actions[k, row : row + 1])[:4] for k in range(len(actions))]
        found.append([np.stack(columns)[:, 0] for columns in zip(*results, strict=True)])
    return [np.stack(columns, 1) for columns in zip(*found, strict=True)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode", list(AutoresetMode)[:2])
def test_a_row_does_what_an_env_with_its_parameters_does(mode, num_threads):
    options = {"autoreset_mode": mode, "max_episode_steps": 9}
    envs = JitVectorEnv(
        OWN, NUM_ENVS, params={"cost": COSTS, "jumps": JUMPS}, num_threads=num_threads, **options
    )
    singles = one_by_one(
        lambda row: JitVectorEnv(
            TOY, params=pack_record(cost=COSTS[row], jumps=JUMPS[row]), **options
        ),
        actions_of(envs),
    )
    assert_same(play(envs), singles)
    records = np.zeros(NUM_ENVS, PARAMS.dtype)
    records["cost"], records["jumps"] = COSTS, JUMPS
    given = JitVectorEnv(TOY, NUM_ENVS, params=records, **options)
    records["cost"] = -1.0  # which were copied
    assert_same(play(given), singles)


VARIED = {
    CartPoleVectorEnv: {
        "gravity": (5.0, 15.0), "pole_length": (0.3, 1.5), "cart_mass": (0.5, 2.0),
        "pole_mass": (0.05, 0.5), "force": (5.0, 15.0),
    },
    PendulumVectorEnv: {"g": (5.0, 15.0), "mass": (0.5, 2.0), "length": (0.5, 1.5)},
    AcrobotVectorEnv: {"gravity": (8.0, 11.0), "mass_2": (0.5, 2.0), "length_1": (0.5, 1.5)},
    Quadrotor2DVectorEnv: {"mass": (0.4, 0.6), "arm": (0.1, 0.2), "inertia": (0.003, 0.005)},
}  # fmt: skip


@pytest.mark.parametrize("make", VARIED, ids=lambda kind: kind.__name__)
def test_bundled_envs_name_what_may_differ(make):
    debug = make is not CartPoleVectorEnv  # each is compiled for itself
    envs = begun(make(NUM_ENVS, sampler=VARIED[make], debug=debug), seed=1)
    first = envs.params_of()
    names = envs.params.dtype.names
    assert first.shape == (NUM_ENVS, len(names)) and first.dtype == np.float32
    for name, (low, high) in VARIED[make].items():
        drawn = envs.params[name]
        assert len(np.unique(drawn)) == NUM_ENVS and ((low <= drawn) & (drawn <= high)).all()
    envs.reset()
    assert (envs.params_of() != first)[:, [name in VARIED[make] for name in names]].all()
    rows = np.array([4, 1])
    np.testing.assert_array_equal(envs.params_of(rows), envs.params_of()[rows])
    given = {name: envs.params[name].copy() for name in names}
    usual = make(NUM_ENVS, debug=debug)
    other = make(NUM_ENVS, params=given, debug=debug)
    actions = actions_of(usual, steps=5)
    usual.reset(seed=2), other.reset(seed=2)
    for row in actions:
        ours, theirs = usual.step(row)[0], other.step(row)[0]
    assert (ours != theirs).any(axis=1).all()


def test_a_sampler_draws_before_each_reset_and_keeps_what_it_leaves():
    def sampler(params, rng):
        params.cost = 0.1 + uniform(rng)

    def expected(mode):
        envs = JitVectorEnv(
            TOY, 2, params=PARAMS, sampler=sampler, max_episode_steps=3, autoreset_mode=mode
        )
        envs.reset(seed=0)
        costs = [envs.params["cost"].copy()]
        for _ in range(8):
            envs.step(np.zeros(2, np.int64))
            costs.append(envs.params["cost"].copy())
        assert (envs.params["jumps"] == PARAMS.jumps).all()
        return np.array(costs)

    same, following = expected("SameStep"), expected("NextStep")
    assert len(np.unique(same[:, 0])) >= 3 and (same[0] == following[0]).all()
    assert (same[0] == same[1]).all() and same[0, 0] != same[0, 1]


def test_integers_are_drawn_with_both_ends():
    def reset(state, rng, params):
        state.x = params.k

    def step(state, action, rng, params):
        return 0.0, True, False

    def observe(state, out, params):
        out[0] = state.x

    kernels = small_kernels([("x", np.int64)], reset, step, observe, params=pack_record(k=0))
    envs = JitVectorEnv(kernels, 200, sampler={"k": (-1, 2)})
    assert set(envs.reset(seed=1)[0][:, 0]) == {-1.0, 0.0, 1.0, 2.0}
    with pytest.raises(ValueError, match=r"sampler\['k'\] is \(0.5, 2\).*two finite integers"):
        JitVectorEnv(kernels, sampler={"k": (0.5, 2)})


def test_parameters_are_set_by_rows_and_count_from_the_next_step_on():
    envs, other = (JitVectorEnv(OWN, NUM_ENVS) for _ in range(2))
    envs.reset(seed=1), other.reset(seed=1)
    assert envs.params.shape == (1,) and not envs.has_own_params
    assert "params" not in envs.state_dict()
    envs.set_params([1, 4], {"jumps": [[1, 2, 3], [5, 6, 7]], "cost": 9.0})
    actions = np.full(NUM_ENVS, -1)
    moved = envs.step(actions)[0][:, 0] - other.step(actions)[0][:, 0]
    np.testing.assert_array_equal(moved != 0, [False, True, False, False, True, False])
    is_set = np.arange(NUM_ENVS) == 2
    envs.set_params(is_set, envs.params[[1]])
    np.testing.assert_array_equal(envs.params.cost, [0.3, 9, 9, 0.3, 9, 0.3])
    envs.set_params(None, {"cost": np.arange(6.0)})
    np.testing.assert_array_equal(envs.params.cost, np.arange(6.0))
    single = begun(JitEnv(lambda **options: JitVectorEnv(OWN, **options)), seed=1)
    single._envs.set_params(0, {"cost": 5.0})
    assert "params" in single.state_dict()


def test_states_have_the_parameters_of_each_env():
    ranges = {"cost": (0.1, 0.9)}
    envs = JitVectorEnv(OWN, 3, sampler=ranges, max_episode_steps=5)
    actions = actions_of(envs, steps=30)
    envs.reset(seed=1)
    for row in actions[:7]:
        envs.step(row)
    state = envs.state_dict()
    other = JitVectorEnv(OWN, 3, sampler=ranges, max_episode_steps=5)
    other.load_state_dict(state)
    for row in actions[7:]:
        assert_same(envs.step(row)[:4], other.step(row)[:4])
    shared = JitVectorEnv(OWN, 3, max_episode_steps=5)
    shared.load_state_dict(state)
    np.testing.assert_array_equal(shared.params, state["params"])
    del state["params"]
    with pytest.raises(KeyError, match="'params'"):
        envs.load_state_dict(state)


def test_ends_of_episodes_are_told_for_curricula():
    told = []

    def harder(envs, env_ids):
        told.append(env_ids.tolist())
        envs.set_params(env_ids, {"cost": envs.params.cost[env_ids] + 1.0})

    envs = JitVectorEnv(
        OWN, 3, params={"cost": np.zeros(3)}, max_episode_steps=4, on_episode_end=harder
    )
    envs.reset(seed=[5, 6, 7])
    ends = np.zeros(3)
    for _ in range(12):
        _, _, terminations, truncations, _ = envs.step(np.zeros(3, np.int64))
        ends += terminations | truncations
    assert ends.sum() == sum(map(len, told)) > 3
    np.testing.assert_array_equal(envs.params.cost, ends)
    envs.reset(seed=1)
    told.clear()
    while not told:
        envs.send(np.zeros(2, np.int64), [2, 0])
        batch = envs.recv(2)
        over = batch.env_ids[batch.terminations | batch.truncations]
    assert told == [over.tolist()]


@pytest.mark.timeout(600)  # it compiles both challenges
def test_maps_reds_and_rates_may_differ_between_envs():
    maps = [["SFFF", "FHFF", "FFFF", "HFFG"], ["SFFF", "FFFF", "FFHH", "FFFG"]]
    world = FrozenLakeVectorEnv.world
    lakes = [{"desc": maps[row % 2], "is_slippery": row < 2} for row in range(4)]
    envs = FrozenLakeVectorEnv(4, params=[world(**lake) for lake in lakes])
    singles = one_by_one(lambda row: FrozenLakeVectorEnv(1, **lakes[row]), actions_of(envs))
    assert_same(play(envs), singles)
    for make, changed in (
        (
            lambda **options: Cage2VectorEnv(4, episode_length=12, **options),
            {"red_agent": "meander"},
        ),
        (
            lambda **options: Cage4VectorEnv(4, messages=True, steps=12, **options),
            {"phishing_rate": 0.3},
        ),
    ):
        usual, other, mixed = make(), make(**changed), make()
        mixed.set_params([1, 3], mixed.world(**changed))
        chosen = np.array([False, True, False, True])
        for a, b, found in zip(*map(play, (usual, other, mixed)), strict=True):
            np.testing.assert_array_equal(found[:, ~chosen], a[:, ~chosen])
            np.testing.assert_array_equal(found[:, chosen], b[:, chosen])
        assert any((a != b).any() for a, b in zip(play(usual), play(other), strict=True))


def test_envs_are_made_with_parameters_by_id():
    envs = make_vec("JitCartPole-v1", 3, debug=True, params={"pole_length": [0.3, 1.0, 1.5]})
    np.testing.assert_array_equal(envs.params.pole_length, [0.3, 1.0, 1.5])
    drawn = begun(
        make_vec("JitCartPole-v1", 3, debug=True, sampler={"pole_length": (0.3, 1.5)}), seed=1
    )
    assert len(np.unique(drawn.params.pole_length)) == 3


def test_what_does_not_fit_is_refused_with_what_there_is():
    fields = "gravity, cart_mass, pole_mass, pole_length, force"
    make = CartPoleVectorEnv
    for given, error, message in (
        ({"params": {"mass": 1.0}}, ValueError, f"no parameter 'mass'; it has {fields}"),
        (
            {"params": {"force": [1.0, 2.0]}},
            ValueError,
            r"'force' of CartPole-v1 has shape \(2,\).*\(3,\)",
        ),
        ({"params": {"force": "strong"}}, TypeError, "parameter 'force' of CartPole-v1 is <U6"),
        ({"params": {"force": np.nan}}, ValueError, "parameter 'force' of CartPole-v1 is NaN"),
        ({"params": np.zeros(2, CARTPOLE.params.dtype)}, ValueError, r"shape \(2,\).*\(3,\)"),
        ({"params": PARAMS}, TypeError, r"fields cost .*, jumps .*, expected.*: gravity float"),
        ({"sampler": {"mass": (1, 2)}}, ValueError, f"no number 'mass'.*it has {fields}"),
        ({"sampler": {"force": (2, 1)}}, ValueError, r"\(2, 1\).*\(lowest, highest\)"),
        ({"sampler": {"force": 2.0}}, ValueError, r"is 2.0, expected \(lowest, highest\)"),
        ({"sampler": 3}, TypeError, "sampler is 3, expected a kernel"),
    ):
        with pytest.raises(error, match=message):
            make(3, **given)
    envs = make(3)
    for rows, values, error, message in (
        (3, {"force": 1.0}, ValueError, "rows has 3, expected env ids from 0 to 2"),
        ([0.5], {"force": 1.0}, TypeError, "rows is float64"),
        ([0, 1], {"force": [1.0, 2.0, 3.0]}, ValueError, r"shape \(3,\).*\(2,\): one per env"),
        ([0], PARAMS, TypeError, "expected a dict, or records with the fields gravity"),
    ):
        before = envs.params_of()
        with pytest.raises(error, match=message):
            envs.set_params(rows, values)
        np.testing.assert_array_equal(envs.params_of(), before)

    def without(params):
        params.cost = 1.0

    with pytest.raises(TypeError, match=r"kernel sampler\(params\) must take \(params, rng\)"):
        JitVectorEnv(OWN, sampler=without)
    with pytest.raises(TypeError, match="has a sampler, but no params"):
        JitVectorEnv(small_kernels(
            [("x", np.int64)], lambda s, r: None, lambda s, a, r: (0.0, True, False),
            lambda s, o: None, sampler=lambda p, r: None,
        ))  # fmt: skip

    if is_jit_off():
        return

    def unknown(params, rng):
        params.speed = integers(rng, 2)

    with pytest.raises(KernelCompileError, match="no field 'speed'"):
        JitVectorEnv(OWN, sampler=unknown)


def test_parameters_that_are_given_are_not_drawn():
    def sampler(params, rng):
        params.cost = uniform(rng)

    drawn = OWN.having(sampler=sampler)
    for options in ({"params": {"cost": 0.5}}, {"params": PARAMS}, {"sampler": False}):
        envs = begun(JitVectorEnv(drawn, 2, debug=True, **options), seed=1)
        assert len(np.unique(envs.params.cost)) == 1
    kept = begun(JitVectorEnv(drawn, 2, debug=True, params=PARAMS, sampler=sampler), seed=1)
    assert len(np.unique(kept.params.cost)) == 2
    kept.set_params(None, {"cost": 0.25})
    assert (kept.params.cost == 0.25).all()
    kept.reset(seed=1)
    assert (kept.params.cost != 0.25).all()


def test_kernels_that_write_parameters_are_refused():
    def step(state, action, rng, params):
        params.speed += 1.0
        return 0.0, False, False

    def reset(state, rng, params):
        state.x = 0.0

    def observe(state, out, params):
        out[0] = state.x

    params = pack_record(speed=1.0)
    kernels = small_kernels([("x", np.float64)], reset, step, observe, params=params)
    with pytest.raises(KernelResultError, match=r"(?s)in step.*only a sampler may"):
        JitVectorEnv(kernels)


@needs_jit
def test_habits_of_numpy_in_draws_are_answered():
    def reset(state, rng):
        state.x = normal(rng, 0.0, 0.3)

    def step(state, action, rng):
        return 0.0, False, False

    kernels = small_kernels([("x", np.float64)], reset, step, observe_x)
    with pytest.raises(KernelCompileError, match=r"normal of vecenv.jit.random takes \(rng\)"):
        JitVectorEnv(kernels)
