"""What authors of kernels are told: lossy stores, wrong names of fields, padding, parameters."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from vecenv import SyncVectorEnv, check_vector_env, make_vec
from vecenv.check import VectorEnvCheckError
from vecenv.core.compiling import is_jit_off
from vecenv.jit import EnvKernels, JitEnv, JitVectorEnv, KernelCompileError, pack_record

needs_jit = pytest.mark.skipif(is_jit_off(), reason="there are no trials, and nothing is compiled")


def reset(state, rng, params):
    state.t = 0
    state.battery = 20.0
    state.draws[0] = 0.0


def step(state, action, rng, params):
    state.t += 1
    state.battery -= params.drain
    if params.is_bad:
        state.draws[state.t // 10] = 1.0
    return 1.0, state.t >= 150, False


def observe(state, out, params):
    out[0] = state.battery


PATROL = EnvKernels(
    name="Patrol",
    state_dtype=[
        ("t", np.int32),
        ("battery", np.float64),
        ("draws", np.float64, (8,)),
        ("end", np.int32),  # padding follows
    ],
    observation_space=Box(-1e3, 1e3, (1,), np.float32),
    action_space=Discrete(2),
    reset=reset,
    step=step,
    observe=observe,
)


def params(drain=0.2, is_bad=False):
    return pack_record(drain=drain, is_bad=is_bad)


def make_annotated(num_envs: int, *, is_bad: bool = False, **options) -> JitVectorEnv:
    return JitVectorEnv(PATROL, num_envs, params=params(is_bad=is_bad), **options)


def make_single(**options) -> JitEnv:
    return JitEnv(make_annotated, **options)


@pytest.fixture
def patrol_id():
    points = {"entry_point": make_single, "vector_entry_point": make_annotated}
    gym.register("ToldPatrol-v0", **points)
    yield "ToldPatrol-v0"
    del gym.registry["ToldPatrol-v0"]


def test_an_annotated_entry_point_is_taken_beside_one_of_single_envs(patrol_id):
    envs = make_vec(patrol_id, 2)
    assert type(envs) is JitVectorEnv
    envs.close()


def test_compiled_envs_that_are_stepped_one_by_one_are_checked_in_python(patrol_id):
    envs = make_vec(patrol_id, 2, backend="sync", is_bad=True)
    assert type(envs) is SyncVectorEnv
    with pytest.raises(VectorEnvCheckError, match="index 8 is out of bounds"):
        check_vector_env(envs)


def test_parameters_are_a_live_view():
    envs = make_annotated(3, debug=True)
    envs.reset(seed=0)
    envs.params.drain = 5.0
    obs, *_ = envs.step(np.zeros(3, np.int64))
    assert obs[:, 0].tolist() == [15.0] * 3


@needs_jit
@pytest.mark.parametrize(
    ("field", "told"), [("battery", "stores 19.8 as int"), ("t", "200 as int8")]
)
def test_stores_that_lose_something_are_told_with_their_line(field, told, caplog):
    dtype = {"t": np.int64, "battery": np.float64} | {field: np.int8}
    fields = [*((name, kind) for name, kind in dtype.items()), ("draws", np.float64, (8,))]

    def own_step(state, action, rng, params):  # a line of its own, as each is told once
        state.t += 200
        state.battery -= params.drain
        return 1.0, False, False

    kernels = dataclasses.replace(PATROL, state_dtype=fields, step=own_step)
    JitVectorEnv(kernels, params=params(), max_episode_steps=1)
    found = [record.getMessage() for record in caplog.records if "stores" in record.getMessage()]
    assert len(found) == 1
    assert told in found[0]
    assert "test_told.py" in found[0]
    assert found[0].endswith("can't hold it: use another dtype, or int(...) if it is meant")


@needs_jit
@pytest.mark.parametrize(
    ("dtype", "value", "is_told"),
    [
        (np.int64, 2.0**63, True),
        (np.uint8, -1.0, True),
        (np.uint8, 255.0, False),
        (np.int8, -128.0, False),
    ],
)
def test_whole_floats_out_of_range_are_told(dtype, value, is_told, caplog, monkeypatch):
    monkeypatch.setattr("vecenv.jit.interpreted._lossy", set())

    def own_step(state, action, rng):
        state.k = value
        return 1.0, True, False

    def own_reset(state, rng):
        state.k = 0

    own = dataclasses.replace(
        PATROL, state_dtype=[("k", dtype)], reset=own_reset, step=own_step, observe=zero
    )
    JitVectorEnv(own)
    assert ("which can't hold it" in caplog.text) == is_told


def zero(state, out):
    out[0] = 0.0


def test_what_only_foreign_numbers_in_memory_lose_is_not_told(caplog):
    def own_reset(state, rng):
        state.k = 0

    def own_step(state, action, rng):
        state.k = state.wide  # 0, but in a trial that finds what is left unwritten
        return 1.0, True, False

    fields = [("k", np.int8), ("wide", np.int32)]
    own = dataclasses.replace(
        PATROL, state_dtype=fields, reset=own_reset, step=own_step, observe=zero
    )
    JitVectorEnv(own)
    assert "which can't hold it" not in caplog.text


def with_params(state, rng, params):
    state.t = params.drein
    state.draws[0] = state.battery = 0.0


def with_rng(state, rng, params):
    state.t = rng.random()
    state.draws[0] = state.battery = 0.0


@needs_jit
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (with_params, "no field 'drein'; state has t, battery, draws, end; params has drain"),
        (with_rng, "rng has no 'random': .* vecenv.jit.random"),
    ],
)
def test_the_record_that_lacks_a_field_is_named(function, told):
    with pytest.raises(KernelCompileError, match=told):
        JitVectorEnv(dataclasses.replace(PATROL, reset=function), params=params(), dry_run=False)


def test_fields_of_another_record_can_be_taken_over():
    fields = [*PATROL.state_dtype.descr, ("more", np.int8)]
    assert any(name == "" for name, *_ in fields)
    longer = dataclasses.replace(PATROL, state_dtype=fields)
    assert longer.state_dtype.names == ("t", "battery", "draws", "end", "more")


def test_params_that_were_not_given_are_missed():
    with pytest.raises(TypeError, match=r"must take \(state, rng\) \(no `params` was given\)"):
        JitVectorEnv(PATROL)
