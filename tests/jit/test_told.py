"""What authors of kernels are told: lossy stores, wrong names of fields, padding, parameters."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
from choices import needs_jit
from envs import begun
from jit.toy_env import small_kernels

from vecenv import SyncVectorEnv, check_vector_env, make_vec
from vecenv.check import VectorEnvCheckError
from vecenv.jit import JitEnv, JitVectorEnv, KernelCompileError, pack_record


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


FIELDS = [("t", np.int32), ("battery", np.float64), ("draws", np.float64, (8,))]
FIELDS += [("end", np.int32)]  # padding follows
PATROL = small_kernels(FIELDS, reset, step, observe, name="Patrol")


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


def test_compiled_envs_that_are_stepped_one_by_one_are_checked_in_python(patrol_id):
    envs = make_vec(patrol_id, 2, backend="sync", is_bad=True)
    assert type(envs) is SyncVectorEnv
    with pytest.raises(VectorEnvCheckError, match="index 8 is out of bounds"):
        check_vector_env(envs)


def test_parameters_are_a_live_view():
    envs = begun(make_annotated(3, debug=True))
    envs.params.drain = 5.0
    obs, *_ = envs.step(np.zeros(3, np.int64))
    assert obs[:, 0].tolist() == [15.0] * 3


def zero(state, out):
    out[0] = 0.0


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


def count_up(state, action, rng, params):
    while state.t < 300_000:
        state.t += 1
    return 1.0, True, False


@needs_jit
def test_where_a_trial_was_stopped_is_told(monkeypatch, caplog):
    monkeypatch.setattr("vecenv.jit.interpreted._LIMIT_SECONDS", 0.05)
    envs = begun(JitVectorEnv(dataclasses.replace(PATROL, step=count_up), 1, params=params()))
    assert "test_told.py" in caplog.text and "in count_up" in caplog.text
    assert envs.step(np.zeros(1, int))[2].all()
