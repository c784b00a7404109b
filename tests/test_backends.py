"""Every backend of the registry keeps the same rules: backend × autoreset mode × space × envs.

What is right is what `SyncVectorEnv` does in `step`, which tests/test_against_gymnasium.py compares
with Gymnasium; for compiled envs, what it does with their slow twins. A backend that joins the
registry is tested here without further ado; VARIANTS are options that must change nothing.
"""

import functools
import importlib
import re
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    ARRAY_SPACES,
    MODES,
    NUM_ENVS,
    SPACES,
    CounterEnv,
    RandomEnv,
    arrays_in,
    counters,
    mode_id,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv as GymnasiumSyncVectorEnv
from gymnasium.vector.utils import create_empty_array
from jit.toy_env import PARAMS, TOY, LimitedSlowToy
from masked_envs import Minefield, kernels, mask_of

from buffers import RolloutBuffer
from vecenv import (
    ObservationError,
    SlotError,
    StepBatch,
    StepSlot,
    SyncVectorEnv,
    check_vector_env,
    make_vec,
    sample_actions,
)
from vecenv.backends import BACKENDS, COMPARED, MADE, Backend
from vecenv.core.infos import take_infos
from vecenv.core.spaces import take_rows

DOCS = Path(__file__).parents[1] / "docs"
NEXT_STEP, SAME_STEP, DISABLED = MODES
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "async": {
        "2 workers": {"num_workers": 2},
        "1 worker": {"num_workers": 1},
        "a worker per env": {"num_workers": 5},
        "caller and 2": {"num_workers": 2, "caller_steps": True},
        "restarting": {"num_workers": 2, "on_error": "restart"},
    },
    "ray": {
        "2 actors": {"num_workers": 2},
        "restarting": {"num_workers": 2, "on_error": "restart"},
    },
}


# Tested fast in the matrix below only.
SELDOM = ("1 worker", "a worker per env", "restarting")
# As others are, but for the space.
SELDOM_SPACES = ("multi-discrete from 5", "tuple", "sequence")


class Case(NamedTuple):
    backend: Backend
    variant: str
    options: dict[str, Any]

    @property
    def is_compiled(self):
        return self.backend.takes == "compiled"

    def __call__(self, env_fns, **options):
        """Batch single envs with this backend."""
        options = {**self.options, **options}
        if "num_workers" in options:
            options["num_workers"] = min(options["num_workers"], len(env_fns))
        return self.backend.load()(env_fns, **options)

    def counters(self, lengths, **options):
        """Counting envs of these lengths; of a compiled backend, as many toys."""
        if self.is_compiled:
            return self.backend.load()(TOY, len(lengths), params=PARAMS, **options)
        return self(counters(lengths), **options)

    def twins(self, space, mode=NEXT_STEP, num_envs=NUM_ENVS):
        """Random envs of this backend, and the same ones in SyncVectorEnv; both reset alike."""
        twins = Twins(self, space, mode, num_envs)
        twins.reset(seed=2)
        return twins


class Twins:
    """Random envs of a backend, and the same ones in SyncVectorEnv; all calls go to both."""

    def __init__(self, case, space, mode=NEXT_STEP, num_envs=NUM_ENVS):
        self.is_compiled = case.backend.takes == "compiled"
        fns = [functools.partial(RandomEnv, space)] * num_envs
        if self.is_compiled:
            fns = [LimitedSlowToy] * num_envs
            options = {"params": PARAMS, "max_episode_steps": 9, "autoreset_mode": mode}
            self.envs = case.backend.load()(TOY, num_envs, **options)
        else:
            self.envs = case(fns, autoreset_mode=mode)
        self.twin = SyncVectorEnv(fns, autoreset_mode=mode)
        self.space = self.envs.single_observation_space
        self.rng = np.random.default_rng(8)

    def assert_alike(self, result, expected, path):
        """Require equal results; compiled envs have infos of their own but for final_obs."""
        if not self.is_compiled:
            assert_same(result, expected, path)
            return
        assert_same(result[:-1], expected[:-1], path)
        self.assert_final_obs(result[-1], expected[-1], path)

    def assert_final_obs(self, infos, expected, path):
        for row in np.flatnonzero(expected.get("_final_obs", [])):
            final_obs = infos["final_obs"][row], expected["final_obs"][row]
            assert_same(*map(np.asarray, final_obs), path)

    def reset(self, **arguments):
        self.assert_alike(self.envs.reset(**arguments), self.twin.reset(**arguments), "reset")

    def actions(self):
        space = self.envs.single_action_space
        return self.rng.integers(space.start, space.start + space.n, self.envs.num_envs)

    def restart(self, expected):
        """With autoreset disabled, reset what has ended."""
        over = expected[2] | expected[3]
        if self.envs.autoreset_mode is DISABLED and over.any():
            self.reset(options={"reset_mask": over})

    def step(self, count, path=""):
        for step in range(count):
            actions = self.actions()
            expected = self.twin.step(actions)
            self.assert_alike(self.envs.step(actions), expected, f"{path} step {step}")
            self.restart(expected)

    def send(self, count, path=""):
        """Steps in random parts; rows come back in any order."""
        num_envs = self.envs.num_envs
        for step in range(count):
            actions = self.actions()
            expected = self.twin.step(actions)
            cuts = np.sort(self.rng.integers(0, num_envs + 1, size=2))
            for ids in np.split(self.rng.permutation(num_envs), cuts):
                if len(ids):
                    self.envs.send(actions[ids], ids)
            received = []
            while len(received) < num_envs:
                least = int(self.rng.integers(1, num_envs - len(received) + 1))
                batch = self.envs.recv(min_envs=least, timeout=30)
                received += batch.env_ids.tolist()
                self.assert_rows(batch, expected, f"{path} sends of step {step}")
            assert sorted(received) == list(range(num_envs))
            self.restart(expected)

    def assert_rows(self, batch, expected, path):
        """Require that a received batch holds the rows of a step."""
        ids = batch.env_ids
        assert isinstance(batch, StepBatch)
        assert ids.dtype == np.int64
        assert_same(batch.obs, take_rows(self.space, expected[0], ids), path)
        for came, full in zip(batch[1:4], expected[1:4], strict=True):
            assert_same(came, full[ids], path)
        infos = take_infos(expected[4], ids)
        if self.is_compiled:
            self.assert_final_obs(batch.infos, infos, path)
        else:
            assert_infos(batch.infos, infos)

    def step_into_slots(self, count):
        """Memory that the envs write into, float32 rewards, and memory of the caller's own."""
        slots = [make_slot(self.envs), make_slot(self.envs, np.float32), foreign_slot(self.envs)]
        for step in range(count):
            actions, slot = self.actions(), slots[step % 3]
            for array in (*arrays_in(slot.obs), slot.rewards):
                array[...] = 77  # shows any row left unwritten
            slot.terminations[:] = slot.truncations[:] = True
            expected = self.twin.step(actions)
            result = self.envs.step(actions, out=slot)
            for came, name in zip(result[:4], StepSlot._fields, strict=True):
                assert came is getattr(slot, name)
            rewards = expected[1].astype(slot.rewards.dtype)
            expected = (expected[0], rewards, *expected[2:])
            self.assert_alike(result, expected, f"slot, step {step}")
            self.restart(expected)


def assert_infos(infos, expected):
    """Require the infos of some rows: fields that none of them has may be missing."""
    assert set(infos) <= set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_infos(infos.get(key, {}), value)
        elif not value.any() if key.startswith("_") else not expected[f"_{key}"].any():
            assert not np.any(infos.get(f"_{key.lstrip('_')}", False)), key
        else:
            assert_same(infos[key], value, key)


# Actors take long to start, and hold vector envs that are tested here.
SPACES_ON_RAY = ("text", "uint8 image")


def cases(
    *, takes=("factories", "compiled", "either"), variants=None, on_ray=1, spaces=None, modes=None
):
    """Parametrize a test by backends that take this, in all variants or in so many.

    With modes, the first variant of a backend is tested in each of them, the others in one; without
    them some variants are not tested. What is left out are slow tests.
    """
    found = []
    # What steps on a GPU returns tensors there: see tests/jit/on_device.
    chosen = [name for name in MADE if BACKENDS[name].takes in takes and name != "cuda"]
    for backend in map(BACKENDS.__getitem__, chosen):
        options = VARIANTS.get(backend.name, {"": {}})
        marks = [pytest.mark.ray] if backend.name == "ray" else []
        for variant in [*options][: on_ray if marks else variants]:
            label = f"{backend.name}, {variant}" if variant else backend.name
            case = Case(backend, variant, options[variant])
            if modes is not None:
                number = [*options].index(variant)
                for k, mode in enumerate(modes):
                    slow = [pytest.mark.slow] if number and k != number % len(modes) else []
                    params = {"marks": [*marks, *slow], "id": f"{label}, {mode_id(mode)}"}
                    found.append(pytest.param(case, mode, **params))
            elif spaces is None:
                slow = [pytest.mark.slow] if variant in SELDOM and not marks else []
                found.append(pytest.param(case, marks=[*marks, *slow], id=label))
            else:
                names = SPACES_ON_RAY if marks else spaces
                for name in names:
                    slow = [pytest.mark.slow] if variant and name in SELDOM_SPACES else []
                    params = {"marks": [*marks, *slow], "id": f"{label}, {name}"}
                    found.append(pytest.param(case, name, **params))
    names = ["case", *(["mode"] if modes else []), *(["name"] if spaces else [])]
    return pytest.mark.parametrize(names, found, indirect=["case"])


@pytest.fixture
def case(request):
    if request.param.backend.name == "ray":
        request.getfixturevalue("local_ray")
        request.getfixturevalue("no_actors_stay")
    return request.param


modes = pytest.mark.parametrize("mode", MODES, ids=mode_id)
SINGLE = ("factories", "either")  # backends of single envs


def make_slot(envs, reward_dtype=np.float64):
    obs = create_empty_array(envs.single_observation_space, envs.num_envs, envs.allocate)
    rewards = envs.allocate((envs.num_envs,), reward_dtype)
    flags = [envs.allocate((envs.num_envs,), np.bool_) for _ in range(2)]
    return StepSlot(obs, rewards, *flags)


def foreign_slot(envs):
    """Memory that is the caller's alone, in any object that has the arrays."""
    own = make_slot(envs)._asdict()
    obs = create_empty_array(envs.single_observation_space, envs.num_envs)
    return SimpleNamespace(**{name: own[name].copy() for name in StepSlot._fields[1:]}, obs=obs)


# -- the matrix -----------------------------------------------------------------------------------


@cases(on_ray=None, modes=MODES)
def test_the_same_seeds_give_the_same_however_envs_are_stepped(case, mode):
    """With step, after partial resets, in any split into sends, into memory of three kinds."""
    index = [*VARIANTS.get(case.backend.name, {"": {}})].index(case.variant) + MODES.index(mode)
    name = ["float32(3,)", "dict with objects", "nested"][index % 3]
    twins = case.twins(SPACES[name], mode)
    twins.step(10, "at first")
    mask = np.array([True, False, False, True, False])
    twins.reset(seed=[7, None, 8, 9, 1], options={"reset_mask": mask})
    twins.step(4, "after a partial reset")
    twins.send(8)
    twins.step(2, "after sends")
    if twins.is_compiled or name != "dict with objects":
        twins.step_into_slots(9)
        twins.reset(options={"reset_mask": mask})
        twins.step(2, "after slots")
    twins.envs.close()


# Of every kind of rows one; the three of the matrix above, and what they contain, are left out.
ANY_SPACES = ["every dtype", "big-endian", "multi-discrete from 5", "tuple", "sequence"]
ANY_SPACES += ["stacked sequence", "graph", "one of", "tuple with objects"]


@cases(takes=SINGLE, variants=1, spaces=ANY_SPACES)
def test_any_space(case, name):
    twins = case.twins(SPACES[name])
    twins.step(3)
    twins.send(3)
    if name in ARRAY_SPACES:
        twins.step_into_slots(3)
    else:  # of no fixed shape
        with pytest.raises(SlotError, match="step without `out`"):
            twins.envs.step(twins.actions(), out=make_slot(twins.envs))
    twins.envs.close()


@cases(variants=1)
@modes
def test_one_env(case, mode):
    twins = case.twins(SPACES["nested"], mode, num_envs=1)
    twins.step(20)
    twins.envs.close()


@cases()
def test_batches_of_one_size(case):
    """Also when more are ready: the others come first at the next recv, none twice or never."""
    twins = case.twins(SPACES["float32(3,)"], num_envs=6)
    envs, actions, counts = twins.envs, np.zeros(6, np.int64), np.zeros(6, int)
    expected = [twins.twin.step(actions) for _ in range(12)]
    envs.send(actions)
    for _ in range(12):
        batch = envs.recv(min_envs=4, max_envs=4)
        assert len(batch.env_ids) == len(batch.rewards) == 4
        for row, env_id in enumerate(batch.env_ids.tolist()):
            step = expected[counts[env_id]]
            assert_same(batch.obs[row], step[0][env_id])
            assert batch.rewards[row] == step[1][env_id]
            counts[env_id] += 1
        envs.send(actions[batch.env_ids], batch.env_ids)
    assert len(envs.recv(max_envs=5).env_ids) == 5
    assert len(envs.recv(max_envs=5).env_ids) == 1  # all that are left
    envs.close()


@cases(variants=1)
def test_the_checker_finds_nothing(case):
    report = check_vector_env(Twins(case, SPACES["float32(3,)"]).envs, num_steps=30)
    assert "send and recv give what step gives" in report.passed
    assert not [line for line in report.skipped if "ResetNeeded" in line]


# -- action masks ---------------------------------------------------------------------------------


class MaskedRun:
    """A masked random policy in minefields, and what the masks must be: those of what is seen."""

    def __init__(self, case, mode, form, num_envs=NUM_ENVS):
        if case.is_compiled:
            options = {"mask_infos": form == "info", "autoreset_mode": mode}
            self.envs = case.backend.load()(kernels(), num_envs, **options)
        else:
            fns = [functools.partial(Minefield, form)] * num_envs
            self.envs = case(fns, autoreset_mode=mode)
        self.has_infos = form == "info"
        self.every = np.arange(num_envs)
        self.over = np.zeros(num_envs, bool)
        self.rng = np.random.default_rng(3)
        self.num_dead = self.num_cut = 0

    def saw(self, obs, over, infos, ids):
        """Require that the masks of the envs `ids` are those of their observations."""
        keys = (obs["observation"] if isinstance(obs, dict) else obs)[:, 0]
        np.testing.assert_array_equal(keys == 0, over & (self.envs.autoreset_mode is not SAME_STEP))
        self.over[ids] = keys == 0
        if self.has_infos:
            given = infos["action_mask"], infos["_action_mask"]
            assert given[1].all()
            if not isinstance(self.envs.unwrapped, BACKENDS["jit"].load()):
                np.testing.assert_array_equal(given[0], mask_of(keys))
        expected = mask_of(np.where(keys == 0, 31, keys))
        if len(ids) < len(self.every):
            masks = self.envs.action_masks(ids)
        else:
            into = np.full(expected.shape, 7, bool)
            self.envs.action_masks(out=into)
            masks = self.envs.action_masks()[ids]
            np.testing.assert_array_equal(into, self.envs.action_masks())
        assert_same(masks, expected)
        return masks

    def reset(self, mask=None, **arguments):
        options = None if mask is None else {"reset_mask": mask}
        obs, infos = self.envs.reset(options=options, **arguments)
        if mask is None:
            return self.saw(obs, self.over & False, infos, self.every)
        infos = take_infos(infos, np.flatnonzero(mask))
        obs = take_rows(self.envs.single_observation_space, obs, np.flatnonzero(mask))
        ids = np.flatnonzero(mask)
        self.saw(obs, np.zeros(len(ids), bool), infos, ids)
        return self.envs.action_masks()

    def actions(self, masks):
        return sample_actions(self.envs.single_action_space, masks, self.rng)

    def restart(self, masks):
        if self.envs.autoreset_mode is DISABLED and self.over.any():
            return self.reset(self.over.copy())
        return masks

    def step(self, masks, count, slots=(None,)):
        for slot in (slots[k % len(slots)] for k in range(count)):
            obs, _, dead, cut, infos = self.envs.step(self.actions(masks), out=slot)
            self.num_dead += dead.sum()
            self.num_cut += cut.sum()
            masks = self.restart(self.saw(obs, dead | cut, infos, self.every))
        return masks

    def send(self, masks, count):
        """First-ready: who is received is asked for, masked and sent while others are in flight."""
        envs = self.envs
        envs.send(self.actions(masks))
        for _ in range(count):
            batch = envs.recv(min_envs=2)
            over = batch.terminations | batch.truncations
            masks = self.saw(batch.obs, over, batch.infos, batch.env_ids)
            self.num_dead += batch.terminations.sum()
            self.num_cut += batch.truncations.sum()
            if envs.autoreset_mode is DISABLED and over.any():
                self.reset_some(batch.env_ids[over])
                masks = envs.action_masks(batch.env_ids)
            envs.send(self.actions(masks), batch.env_ids)
        batch = envs.recv()
        self.saw(batch.obs, batch.terminations | batch.truncations, batch.infos, batch.env_ids)
        return self.restart(envs.action_masks())

    def reset_some(self, ids):
        self.envs.reset(options={"reset_mask": np.isin(self.every, ids)})
        self.over[ids] = False


@cases(on_ray=None)
def test_masks_are_those_of_the_latest_observations_and_nobody_dies_of_them(case):
    """In infos, in observations, by a method; after steps, slots, sends and resets of all kinds."""
    index = [*VARIANTS.get(case.backend.name, {"": {}})].index(case.variant)
    is_cheap = case.backend.name in ("sync", "jit")
    forms = ("info", "by request") if case.is_compiled else ("info", "obs", "action_masks")
    chosen = range(3) if is_cheap else [index]
    for mode, form in [(MODES[k % 3], forms[(k + 1) % len(forms)]) for k in chosen]:
        run = MaskedRun(case, mode, form)
        masks = run.reset(seed=1)
        masks = run.step(masks, 12)
        masks = run.step(masks, 12, [make_slot(run.envs), foreign_slot(run.envs)])
        masks = run.reset(np.array([True, False, False, True, False]))
        masks = run.step(masks, 3)
        if case.is_compiled or form != "action_masks":
            masks = run.send(masks, 30)
            run.step(masks, 8)
        assert run.num_dead == 0
        assert run.num_cut >= NUM_ENVS
        for _ in range(9):
            run.step(np.ones_like(masks), 1)
        assert run.num_dead > 0
        run.envs.close()


# -- memory of the caller -------------------------------------------------------------------------


@cases(takes=SINGLE)
def test_a_rollout_is_written_without_a_copy(case):
    """Rows of a [T + 1, N, ...] buffer as slots: what step returns is the buffer's memory."""
    envs = case.counters([3, 4])
    rollout = envs.allocate((6, 2, 3))
    rewards, flags = envs.allocate((5, 2)), envs.allocate((2, 5, 2), bool)
    rollout[0] = envs.reset()[0]
    slots = [StepSlot(rollout[t + 1], rewards[t], flags[0, t], flags[1, t]) for t in range(5)]
    for slot in slots:
        result = envs.step([0, 0], out=slot)
        assert np.shares_memory(result[0], rollout)
        assert np.shares_memory(result[1], rewards)
    envs.close()
    expected = [[0, 0], [1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]
    assert rollout[:, :, 2].tolist() == expected  # the memory outlives the envs
    assert rewards.tolist() == [[1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]
    assert flags[0].tolist() == [[False, False]] * 2 + [[True, False], [False, True], [False] * 2]


class Honest(np.ndarray):
    pass


def broken_slots(slot):
    """Yield slots that differ from a right one of two envs, and what is said of them."""

    def other(**changes):
        return SimpleNamespace(**{**slot._asdict(), **changes})

    read_only = np.zeros(2)
    read_only.flags.writeable = False
    no_rewards = other()
    del no_rewards.rewards
    yield other(obs=np.zeros((3, 3), np.float32)), "obs"
    yield other(obs=np.zeros((2, 3))), "obs"
    yield other(obs=np.zeros((3, 2), np.float32).T), "obs"
    yield other(obs=[[0, 0, 0]] * 2), "obs"
    yield other(obs=None), "obs"
    yield other(rewards=np.zeros((2, 1))), "rewards"
    yield other(rewards=np.zeros(2, int)), "rewards"
    yield other(rewards=np.zeros(4)[::2]), "rewards"
    yield other(rewards=np.zeros(17, np.uint8)[1:].view(np.float64)), "aligned"
    yield other(rewards=read_only), "rewards"
    yield other(terminations=np.zeros(2, np.uint8)), "terminations"
    yield other(truncations=np.zeros(3, bool)), "truncations"
    yield other(truncations=np.frombuffer(bytes(2), bool)), "truncations"
    yield no_rewards, "rewards"
    yield (np.zeros((2, 3), np.float32),), "obs, rewards, terminations, truncations"


@cases(variants=1)
def test_wrong_slots_are_refused_and_nothing_is_stepped(case):
    twins = case.twins(SPACES["float32(3,)"], num_envs=2)
    envs = twins.envs
    for slot, message in broken_slots(make_slot(envs)):
        with pytest.raises(SlotError, match=message):
            envs.step([0, 0], out=slot)
    flags = np.zeros(3, bool)
    shared = {"terminations": flags[:2], "truncations": flags[1:]}
    with pytest.raises(SlotError, match="share memory"):
        envs.step([0, 0], out=make_slot(envs)._replace(**shared))
    honest = StepSlot(*(array.view(Honest) for array in make_slot(envs)))
    result, expected = envs.step([0, 0], out=honest), twins.twin.step([0, 0])
    assert result[0] is honest.obs
    assert_same([*map(np.asarray, honest)], [*expected[:4]])
    envs.close()


@cases(variants=1)
def test_a_slot_of_a_buffer_for_another_autoreset_mode_is_refused(case):
    envs = case.counters([9, 9], autoreset_mode="SameStep")
    sizes = 2, 2, envs.single_observation_space, envs.single_action_space
    right, wrong = (RolloutBuffer(*sizes, autoreset_mode=mode) for mode in ("SameStep", "NextStep"))
    obs, _ = envs.reset(seed=0)
    actions = np.zeros(2, np.int64)
    for rollout in (right, wrong):
        rollout.start(obs)
    for _ in range(2):  # also once the right one is known
        with pytest.raises(SlotError, match="mode 'NextStep', but the envs have 'SameStep'; make"):
            envs.step(actions, out=wrong.slot(0))
        envs.step(actions, out=right.slot(0))
        envs.step(actions)
    named = SimpleNamespace(**right.slot(1)._asdict(), autoreset_mode=wrong.autoreset_mode)
    with pytest.raises(SlotError, match="mode 'NextStep', but the envs have 'SameStep'; make"):
        envs.step(actions, out=named)
    for mode in (right.autoreset_mode, "SameStep", "same_step"):
        named.autoreset_mode = mode
        envs.step(actions, out=named)
    envs.close()


@cases(variants=1)
def test_allocate_refuses_what_is_no_memory_and_keeps_names_of_fields(case):
    envs = case.counters([9, 9])
    for shape, dtype, error, message in [
        ((-1,), "S0", ValueError, "dimensions of at least 0"),
        ((-1,), np.float32, ValueError, r"shape is \(-1,\)"),
        ((3,), "S0", ValueError, "a given length"),
        ((3,), "V0", ValueError, "a given length"),
        ((3,), [], ValueError, "a given length"),
        ((3,), object, TypeError, "dtype is object"),
        ((3,), [("a", int), ("b", object)], TypeError, "Python objects"),
        ((2.5,), np.float32, TypeError, "integer"),
        ((1 << 62, 1 << 62), np.float32, MemoryError, "allocate"),
        ((1 << 32, 1 << 32), np.int8, MemoryError, "allocate"),
    ]:
        with pytest.raises(error, match=message):
            envs.allocate(shape, dtype)
    for shape, dtype in (((3, 2), np.float32), ((), np.bool_), ((0, 3), np.int64)):
        assert_same(np.asarray(envs.allocate(shape, dtype)), np.zeros(shape, dtype))
    assert envs.allocate((2,)).dtype == np.float32
    named = envs.allocate((3,), [("step", np.int32), ("reward", np.float64, (2,))])
    named["reward"] = 4
    assert named.dtype.names == ("step", "reward")
    assert named["step"].tolist() == [0, 0, 0]
    assert envs.allocate((2,), np.dtype((np.int8, (3,)))).shape == (2, 3)
    assert envs.allocate(4, "S5").tolist() == [b""] * 4
    envs.close()


# -- what single envs are given, and give ---------------------------------------------------------


@cases(takes=SINGLE, variants=1)
def test_actions_keep_their_dtype(case):
    """The envs echo them in their infos."""
    twins = case.twins(SPACES["float32(3,)"])
    envs, twin = twins.envs, twins.twin
    for dtype in (np.int8, np.int32, np.int64, np.uint16):
        actions = np.arange(NUM_ENVS).astype(dtype) % 4
        for _ in range(3):
            assert_same(envs.step(actions), twin.step(actions), str(dtype))
            envs.send(actions, None)
            twin.send(actions, None)
            received, expected = envs.recv(), twin.recv()
            assert_same(received.obs[np.argsort(received.env_ids)], expected.obs, str(dtype))
    envs.close()


class Lenient(gym.Env):
    """Returns lists for tuples and odd numbers, all of which Gymnasium takes."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, reward, obs, flag):
        self.obs, self.reward, self.flag = obs, reward, flag

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return [self.obs, {"a": 2}]

    def step(self, action):
        return [self.obs, self.reward, self.flag, self.flag, {"a": 1}]


OBS = [[1, 2], (0.5, 1.5), np.ones(2), np.ones(2, np.float16), np.arange(2)]
REWARDS = [10**30, 2**70, True, np.int8(3), np.array(1.5), Fraction(1, 4), np.float16(2)]
FLAGS = [False, 0, 1, np.bool_(True), np.array(False), None]


@cases(takes=("factories",))
def test_steps_that_gymnasium_takes_are_taken_and_rewards_that_are_no_number_refused(case):
    """Lists for tuples, any number as a reward, any truth as a flag."""
    num_envs = max(len(OBS), len(REWARDS), len(FLAGS))
    choices = [cycle(values) for values in (REWARDS, OBS, FLAGS)]
    fns = [functools.partial(Lenient, *map(next, choices)) for _ in range(num_envs)]
    ours, theirs = case(fns), GymnasiumSyncVectorEnv(fns)
    assert_same(ours.reset(), theirs.reset())
    for _ in range(4):
        assert_same(ours.step([0] * num_envs), theirs.step([0] * num_envs))
    ours.close()
    envs = case([functools.partial(Lenient, 0.0, np.zeros(2), False)] * 3)
    for reward in (None, "1.5", [1, 2], 10**400, 1j):
        envs.reset()
        envs.set_attr("reward", [reward] * 3)
        # Who raises first depends on the workers.
        with pytest.raises(ObservationError, match=r"env [012] returned the reward"):
            envs.step([0] * 3)
    envs.close()


class Greedy(gym.Env):
    """Takes what it is interested in out of its options."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = repr(options)
        if options:
            options.pop("level", None)
            options["nested"]["list"].append(1)
            options["nested"]["array"] += 1
        return np.zeros(2, np.float32), {}


@cases(takes=SINGLE)
def test_options_of_a_reset_are_each_envs_own(case):
    envs = case([Greedy] * 4)
    options = {"level": 3, "nested": {"list": [], "array": np.zeros(1)}}
    before = repr(options)
    for more in ({}, {"reset_mask": np.ones(4, np.bool_)}):
        envs.reset(options=options | more)
        assert envs.get_attr("seen") == (before,) * 4
        assert repr(options) == before
    envs.reset(options=None)
    assert envs.get_attr("seen") == ("None",) * 4
    envs.close()


@cases(takes=SINGLE, variants=1)
def test_a_first_reset_by_mask_and_steps_of_ended_envs_are_refused(case):
    """Gymnasium's AsyncVectorEnv lets both pass: rows of envs that are in no episode."""
    envs = case(counters([1, 3, 1]), autoreset_mode="Disabled")
    mask = {"reset_mask": np.array([True, False, True])}
    with pytest.raises(ResetNeeded, match="reset all envs first"):
        envs.reset(options=mask)
    envs.reset()
    envs.step([0] * 3)
    for call in (envs.step, envs.send):
        with pytest.raises(ResetNeeded, match=r"envs \[0, 2\] have ended"):
            call([0] * 3)
    envs.reset(options=mask)
    assert envs.step([0] * 3)[0][:, 2].tolist() == [1, 2, 1]
    envs.close()


@cases(takes=SINGLE, variants=1)
def test_methods_and_attributes_of_envs(case):
    envs = case(counters([3, 4, 5]))
    envs.reset(seed=4)
    assert envs.call("double", 10, offset=1) == (21, 22, 23)
    assert envs.call("length") == envs.get_attr("length") == (3, 4, 5)
    envs.set_attr("name", 7)
    assert envs.get_attr("name") == (7, 7, 7)
    envs.set_attr("name", (1, 2, 3))
    envs.set_attr("color", ["red", "green", "blue"])
    assert envs.get_attr("color") == ("red", "green", "blue")
    with pytest.raises(ValueError, match="Got `2` values for 3 environments"):
        envs.set_attr("name", [1, 2])
    assert envs.get_attr("name") == (1, 2, 3)
    assert envs.render() == ("frame of 1", "frame of 2", "frame of 3")
    assert envs.np_random_seed == (4, 5, 6)
    assert [generator.random() for generator in envs.np_random]
    with pytest.raises(Exception, match="weather"):
        envs.get_attr("weather")
    envs.close()


@cases(takes=SINGLE, variants=1)
def test_what_a_method_raises_names_the_env(case):
    envs = case(counters([3, 4, 5]))
    envs.set_attr("read", [str, int, str])
    with pytest.raises(ValueError, match="invalid literal") as raised:
        envs.call("read", "x")
    assert re.search(r"env 1 .*call", raised.value.__notes__[-1])
    with pytest.raises(AttributeError, match="no_such_method"):
        envs.call("no_such_method")
    if case.backend.name == "async":
        with pytest.raises(ValueError, match="use `step` directly"):
            envs.call("step", 0)
    assert vars(raised.value)["env_index"] == 1
    assert envs.call("read", "7") == ("7", 7, "7")
    envs.close()


# -- the registry ---------------------------------------------------------------------------------


def test_every_backend_is_in_the_docs_and_the_command_names_those_with_timing():
    """The tables are written by hand."""
    made = re.findall(
        r"^\| `\"(.+?)\"` \| `vecenv\.(.+?)` ", (DOCS / "interface.md").read_text(), re.M
    )
    named = [(name, BACKENDS[name].makes.rpartition(":")[2]) for name in MADE]
    assert [(name, path.rpartition(".")[2]) for name, path in made] == named
    for name, path in made:  # as a user imports it
        module, _, attribute = f"vecenv.{path}".rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is BACKENDS[name].load()
    compare = (DOCS / "compare.md").read_text()
    assert f"[--backends {','.join(COMPARED)}]" in compare


def test_make_vec_knows_the_registry():
    with pytest.raises(ValueError, match=f"expected one of auto, {', '.join(MADE)}"):
        make_vec("CartPole-v1", backend="loop")
    for name in MADE:
        if BACKENDS[name].takes == "factories":
            envs = make_vec(CounterEnv, 2, backend=name)
            assert type(envs) is BACKENDS[name].load()
            envs.close()
