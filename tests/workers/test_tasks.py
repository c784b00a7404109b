"""Envs that load for long: variables of workers, lazy starts, tasks that fail, rows reopened."""

import functools
import logging
import os
import re
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.spaces import Box, Discrete
from workers import faulty_envs
from workers.faulty_envs import FINE, FaultyEnv
from workers.started_envs import Loading, Task, fail_to_load

from vecenv import AsyncVectorEnv, EnvCreationError, SyncVectorEnv, make_vec
from vecenv.wrappers import RecordEpisodeStatistics

SPACES = FaultyEnv.observation_space, FaultyEnv.action_space
LAZY = {"lazy": True, "spaces": SPACES}
WORKERS = {"num_workers": 2, "context": "spawn"}
BACKENDS = {
    "sync": SyncVectorEnv,
    "async": functools.partial(AsyncVectorEnv, num_workers=2, context="fork"),
    "with the caller": functools.partial(AsyncVectorEnv, num_workers=1, caller_steps=True),
    "restarting": functools.partial(AsyncVectorEnv, num_workers=2, on_error="restart"),
}
fails = functools.partial(fail_to_load, "no assets for pick-and-place")


others = set()  # processes that tests before have left, such as multiprocessing's own


@pytest.fixture(autouse=True)
def _note_others():
    others.clear()
    others.update(faulty_envs.children())


def children():
    return set(faulty_envs.children()) - others


def tasks(*names):
    return [functools.partial(Task, name) for name in names]


def mask(*rows, num_envs=4):
    return {"reset_mask": np.isin(np.arange(num_envs), rows)}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def envs(backend):
    made = BACKENDS[backend](tasks(0, 1, 2, 3))
    yield made
    made.close()


# -- variables of workers -----------------------------------------------------------------------


def test_workers_have_variables_before_anything_of_an_env_is_imported():
    envs = make_vec(
        tasks(0, 1, 2),
        vector_kwargs={"num_workers": 2, "worker_env": lambda w: {"VECENV_TEST": f"gpu {w}"}},
    )
    assert envs.call("imported_with") == ("gpu 0", "gpu 0", "gpu 1")
    assert "VECENV_TEST" not in os.environ
    envs.close()


def test_a_worker_that_replaces_another_has_its_variables():
    asked = []

    def variables(worker):
        asked.append(worker)
        return {"VECENV_TEST": str(worker)}

    envs = AsyncVectorEnv(tasks(0, 1), num_workers=2, worker_env=variables, on_error="restart")
    envs.reset()
    before = envs.call("pid")
    os.kill(before[1], signal.SIGKILL)
    truncations = envs.step([FINE, FINE])[3]
    assert truncations.tolist() == [False, True]
    after = envs.call("pid")
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert envs.call("imported_with") == ("0", "1")
    assert asked == [0, 1]
    envs.close()


@pytest.mark.parametrize(
    ("worker_env", "error", "told"),
    [
        ({"GPU": 1}, TypeError, r"worker_env of worker 0 has 'GPU': 1, expected strings.*str\(1\)"),
        ({3: "x"}, TypeError, "worker 0 has 3: 'x', expected strings"),
        (
            lambda worker: {"GPU": "0" if worker == 0 else worker},
            TypeError,
            "worker 1 has 'GPU': 1",
        ),
        (lambda worker: ["GPU"], TypeError, r"worker 0 is \['GPU'\], expected a dict"),
        ("GPU=1", TypeError, "worker 0 is 'GPU=1', expected a dict .* or a function"),
        ({"A=B": "1"}, ValueError, "worker 0 has 'A=B': '1', which can't be"),
        ({"A": "\0"}, ValueError, "which can't be an environment variable"),
    ],
)
def test_variables_that_are_none_are_named_with_the_worker(worker_env, error, told):
    with pytest.raises(error, match=told):
        AsyncVectorEnv(tasks(0, 1), num_workers=2, worker_env=worker_env)
    assert not children()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"context": "fork"}, "worker_env with context='fork'.*leave context out"),
        ({"caller_steps": True}, "worker_env with caller_steps=True.*leave caller_steps out"),
    ],
)
def test_variables_are_refused_where_they_would_come_too_late(options, told):
    with pytest.raises(ValueError, match=told):
        AsyncVectorEnv(tasks(0, 1), worker_env={"A": "1"}, **options)


@pytest.mark.parametrize("name", ["worker_env", "lazy", "start_concurrency"])
@pytest.mark.parametrize("backend", ["sync", "jit"])
def test_options_of_workers_are_refused_by_backends_without_workers(backend, name):
    env_id = "vecenv:JitCartPole-v1" if backend == "jit" else "CartPole-v1"
    told = f"vector_kwargs has {name}, which backend '{backend}' does not take: only AsyncVectorEnv"
    with pytest.raises(TypeError, match=told):
        make_vec(env_id, 2, backend=backend, vector_kwargs={name: 1})


# -- lazy starts --------------------------------------------------------------------------------


def test_a_lazy_vector_env_starts_its_processes_at_the_first_reset():
    envs = make_vec(tasks(0, 1, 2, 3), vector_kwargs={**LAZY, "num_workers": 2})
    assert not children()
    assert envs.num_envs == 4
    assert envs.num_workers == 2
    assert envs.single_observation_space == SPACES[0]
    assert envs.action_space.shape == (4,)
    assert envs.restarts.tolist() == [0] * 4
    obs, _ = envs.reset(seed=3)
    assert len(children()) >= 2
    assert obs.tolist() == [[k, 0] for k in range(4)]
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    assert envs.metadata["render_modes"] == []
    envs.close()
    assert not children()


def test_calls_before_the_first_reset_say_what_to_do():
    envs = AsyncVectorEnv(tasks(0, 1), **LAZY)
    refuses = functools.partial(pytest.raises, ResetNeeded, match=r"first `reset`|first full")
    calls = ("step", [FINE] * 2), ("step_async", [FINE] * 2), ("send", [FINE], [0]), ("render",)
    others = ("call", "pid"), ("set_attr", "name", 1), ("state_dict",), ("load_state_dict", {})
    for name, *args in (*calls, *others):
        with refuses():
            getattr(envs, name)(*args)
    with refuses():
        envs.timing.enable()
    with refuses():
        envs.reset(options=mask(0, num_envs=2))
    assert not children()
    envs.close()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("spaces", "told"),
    [
        ((Box(-1, 1, (2,)), SPACES[1]), r"observation space of env 0 is Box\(-1.0, 1000.0"),
        (
            (SPACES[0], Discrete(3)),
            r"action space of env 0 is Discrete\(7\), expected Discrete\(3\)",
        ),
    ],
)
def test_envs_that_contradict_the_spaces_given_are_named(lazy, spaces, told):
    def make():
        return AsyncVectorEnv(tasks(0, 1), num_workers=1, lazy=lazy, spaces=spaces)

    if not lazy:
        with pytest.raises(RuntimeError, match=told):
            make()
    else:
        envs = make()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=told):
                envs.reset()
        envs.close()
    assert not children()


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"lazy": True}, ValueError, r"lazy=True makes no env .* spaces=\(observation_space"),
        ({"spaces": SPACES[0]}, TypeError, "expected \\(observation space, action space\\)"),
        ({"spaces": (SPACES[0], 7)}, TypeError, "or the id of a registered env"),
        ({"spaces": "NoSuchRobot-v0"}, EnvCreationError, "NoSuchRobot"),
        ({"start_concurrency": 1.5}, ValueError, "start_concurrency is 1.5, expected an integer"),
    ],
)
def test_what_is_wrong_with_a_start_is_told_by_the_constructor(options, error, told):
    with pytest.raises(error, match=told):
        AsyncVectorEnv(tasks(0, 1), **options)
    assert not children()


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (2, 2), (None, 3)])
@pytest.mark.parametrize("lazy", [True, False])
def test_so_many_workers_make_envs_at_once(tmp_path, at_once, most, lazy):
    factories = [functools.partial(Loading, k, tmp_path, most) for k in range(3)]
    options = LAZY if lazy else {}
    envs = AsyncVectorEnv(factories, num_workers=3, start_concurrency=at_once, **options)
    envs.reset()
    assert max(envs.call("seen")) == most
    envs.close()


@pytest.mark.parametrize("lazy", [True, False])
def test_a_start_that_takes_long_is_told(lazy, capfd, caplog, monkeypatch):
    """By the log, or on standard error if it is in the middle of a program."""
    monkeypatch.setattr("vecenv.workers.pool._FIRST_NOTE_S", 0.2)
    slow = [functools.partial(Task, k, load_s=1.1) for k in range(2)]
    options = {"num_workers": 2, "start_concurrency": 1, **(LAZY if lazy else {})}
    envs = AsyncVectorEnv(slow, **options)
    envs.reset()
    envs.close()
    told = capfd.readouterr().err.splitlines() if lazy else caplog.messages
    waits = r"0 of 2 envs are made \(\d+ s\), still waiting for worker 0 to make env 0"
    assert re.fullmatch(f"vecenv: {waits}" if lazy else waits, told[0])
    assert not lazy or told[-1].startswith("vecenv: 2 of 2 envs are made (")


# -- tasks that can't be loaded -----------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_a_task_that_fails_to_load_is_named(lazy):
    factories = [*tasks(0, 1), fails, *tasks(3)]
    options = LAZY if lazy else {}

    def begin():
        envs = AsyncVectorEnv(factories, num_workers=2, **options)
        envs.reset()

    with pytest.raises(
        EnvCreationError, match=r"env 2 of 4 .*no assets for pick-and-place"
    ) as told:
        begin()
    assert isinstance(told.value.__cause__, OSError)
    assert "raise OSError(told)" in str(told.value.__cause__.__cause__)
    assert not children()


def test_a_lazy_start_that_failed_is_tried_again_by_the_next_reset(tmp_path):
    here = tmp_path / "assets"
    factories = [*tasks(0), functools.partial(Task, 1, assets=here)]
    envs = AsyncVectorEnv(factories, num_workers=2, **LAZY)
    with pytest.raises(EnvCreationError, match="env 1 of 2"):
        envs.reset()
    with pytest.raises(ResetNeeded):
        envs.step([FINE] * 2)
    here.touch()
    assert envs.reset()[0].tolist() == [[0, 0], [1, 0]]
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("where", [0, 2])
def test_with_restarts_other_tasks_go_on_without_one_that_fails_to_load(caplog, mode, where):
    factories = tasks(0, 1, 2, 3)
    factories[where] = fails
    with caplog.at_level(logging.WARNING, "vecenv"):
        envs = AsyncVectorEnv(factories, num_workers=2, on_error="restart", autoreset_mode=mode)
    assert f"Making env {where} of 4 failed" in caplog.text
    obs, infos = envs.reset(seed=1)
    names = [0 if k == where else k for k in range(4)]
    assert obs.tolist() == [[name, 0] for name in names]
    assert "no assets" in infos["restart_reason"][where]
    obs, rewards, terminations, truncations, infos = envs.step([FINE] * 4)
    is_empty = [k == where for k in range(4)]
    assert obs[:, 1].tolist() == [1 - empty for empty in is_empty]
    assert rewards.tolist() == [1.0 - empty for empty in is_empty]
    assert truncations.tolist() == is_empty
    assert not terminations.any()
    assert "no assets" in infos["restart_reason"][where]
    assert envs.call("name") == tuple(None if empty else k for k, empty in enumerate(is_empty))
    envs.reopen(where, functools.partial(Task, where))
    obs, _ = envs.reset(options=mask(where))
    assert obs[where].tolist() == [where, 0]
    obs, _, _, truncations, _ = envs.step([FINE] * 4)
    assert obs[:, 1].tolist() == [2 - empty for empty in is_empty]
    assert not truncations.any()
    envs.close()


# -- rows reopened ------------------------------------------------------------------------------


def test_rows_are_reopened_without_touching_the_others(envs):
    envs.reset(seed=1)
    envs.step([FINE] * 4)
    old = envs.call("number")
    envs.reopen([3, 1], tasks(13, 11))
    with pytest.raises(ResetNeeded, match=r"envs \[1, 3\] were reopened.*reset_mask"):
        envs.step([FINE] * 4)
    with pytest.raises(ResetNeeded, match=r"envs \[1, 3\] were reopened"):
        envs.send([FINE] * 2, [0, 1])
    obs, _ = envs.reset(options=mask(1))
    with pytest.raises(ResetNeeded, match=r"envs \[3\] were reopened"):
        envs.step([FINE] * 4)
    obs, _ = envs.reset(options=mask(3))
    assert obs.tolist() == [[0, 1], [11, 0], [2, 1], [13, 0]]
    new = envs.call("number")
    assert [new[0], new[2]] == [old[0], old[2]]
    assert envs.call("name") == (0, 11, 2, 13)
    assert envs.step([FINE] * 4)[0].tolist() == [[0, 2], [11, 1], [2, 2], [13, 1]]


def test_a_closed_env_is_closed_before_the_new_one_is_made(envs, tmp_path):
    path = tmp_path / "open"
    envs.reopen(2, functools.partial(Task, 2, only_one=path))
    envs.reset()
    envs.reopen(2, functools.partial(Task, 22, only_one=path))
    assert envs.reset()[0][2].tolist() == [22, 0]
    assert path.exists()


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
def test_wrappers_pass_rows_on_that_are_reopened(make):
    envs = RecordEpisodeStatistics(make(tasks(0, 1)))
    envs.reset()
    envs.step([FINE] * 2)
    envs.reopen(1, functools.partial(Task, 11))
    envs.reset(options=mask(1, num_envs=2))
    assert envs.step([FINE] * 2)[0].tolist() == [[0, 2], [11, 1]]
    assert envs.episode_returns.shape == (2,)
    envs.reset()
    envs.send([FINE] * 2)
    with pytest.raises(AlreadyPendingCallError):
        envs.reopen(1, fails)
    envs.close()


@pytest.mark.parametrize("start", ["step_async", "send"])
def test_rows_are_not_reopened_while_a_step_is_pending(envs, start):
    if isinstance(envs, SyncVectorEnv) and start == "step_async":
        pytest.skip("its steps are never pending")
    envs.reset()
    getattr(envs, start)([FINE] * 4)
    with pytest.raises(AlreadyPendingCallError, match="reopen"):
        envs.reopen(0, fails)
    results = envs.step_wait() if start == "step_async" else envs.recv()
    assert results[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("rows", "factories", "error", "told"),
    [
        (4, [fails], ValueError, "rows has 4, expected ids from 0 to 3"),
        ([1, 1], fails, ValueError, "rows has repeated ids"),
        ([], [], ValueError, "rows must be a non-empty"),
        ([0, 1], [fails], ValueError, "rows has 2 envs, but factories is .* one factory for all"),
        (
            [0],
            [FaultyEnv()],
            TypeError,
            "the factory of env 0 is .*, expected a function that makes",
        ),
    ],
)
def test_rows_and_factories_that_are_none_are_refused(envs, rows, factories, error, told):
    envs.reset()
    with pytest.raises(error, match=told):
        envs.reopen(rows, factories)
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4


@pytest.mark.parametrize("what", ["observation", "action"])
def test_a_new_env_of_other_spaces_is_refused_and_named(envs, what):
    envs.reset()
    other = {f"{what}_space": Box(0, 1, (5,)) if what == "observation" else Discrete(9)}
    with pytest.raises(
        EnvCreationError, match=rf"The {what} space of env 2 is .* expected"
    ) as told:
        envs.reopen([1, 2], [functools.partial(Task, 11), functools.partial(Task, 2, **other)])
    assert any("until it is reopened" in note for note in told.value.__notes__)
    envs.reopen(2, functools.partial(Task, 22))
    assert envs.reset(options=mask(1, 2))[0][:, 0].tolist() == [0, 11, 22, 3]


def test_a_row_whose_new_env_can_not_be_made_is_none_until_it_is_reopened(envs, backend):
    envs.reset()
    with pytest.raises(EnvCreationError, match=r"Making env 2 of 4 failed with .*no assets"):
        envs.reopen(2, fails)
    with pytest.raises(ResetNeeded, match=r"envs \[2\] were reopened"):
        envs.step([FINE] * 4)
    if backend == "restarting":
        _, infos = envs.reset(options=mask(2))
        assert "no assets" in infos["restart_reason"][2]
        assert envs.step([FINE] * 4)[3].tolist() == [False, False, True, False]
    else:
        with pytest.raises(EnvCreationError, match=r"no env until it is reopened.*no assets"):
            envs.reset()
    envs.reopen(2, functools.partial(Task, 22))
    assert envs.reset()[0][:, 0].tolist() == [0, 1, 22, 3]
    envs.step([FINE] * 4)


def test_backends_that_make_all_envs_at_once_reopen_none():
    envs = make_vec("vecenv:JitCartPole-v1", 2, vector_kwargs={"debug": True})
    with pytest.raises(NotImplementedError, match="can't reopen rows; make the envs with backend"):
        envs.reopen(0, fails)
    envs.close()


def test_a_lazy_vector_env_goes_on_as_any_other():
    lazy, eager = (
        AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, num_workers=2, **options)
        for options in ({"lazy": True, "spaces": "CartPole-v1"}, {})
    )
    assert lazy.single_observation_space == eager.single_observation_space
    for envs in (lazy, eager):
        envs.reset_async(seed=1)
        envs.reset_wait()
    for _ in range(40):
        one, two = lazy.step([1, 0, 1]), eager.step([1, 0, 1])
        for mine, other in zip(one[:4], two[:4], strict=True):
            np.testing.assert_array_equal(mine, other)
    assert lazy.call("spec")[0].id == "CartPole-v1"
    for envs in (lazy, eager):
        envs.close()


def test_if_no_task_can_be_loaded_there_is_nothing_to_go_on_with():
    with pytest.raises(EnvCreationError, match="Making env 0 of 2"):
        AsyncVectorEnv([fails] * 2, num_workers=2, on_error="restart")
    assert not children()
