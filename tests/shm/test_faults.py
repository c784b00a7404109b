"""Envs that raise, hang, return nonsense or take their process with them."""

import functools
import multiprocessing
import os
import re
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
from envs import MODES, mode_id
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from shm.faulty_envs import (
    DIE,
    EXIT,
    FINE,
    HANG,
    RAISE,
    WRONG_REWARD,
    WRONG_SHAPE,
    FaultyEnv,
    faulty,
    wait_until_gone,
)

from vecenv import EnvCreationError, ObservationError
from vecenv.shm.env import AsyncVectorEnv
from vecenv.shm.faults import (
    EnvFault,
    EnvStepError,
    RemoteTraceback,
    StepTimeoutError,
    WorkerDiedError,
    describe_exit,
)

WAYS = {"2 workers": {"num_workers": 2}, "caller and 1": {"num_workers": 1, "caller_steps": True}}


@pytest.fixture
def make():
    pools = []

    def make_pool(num_envs=4, *, length=1000, **options):
        options.setdefault("num_workers", 2)
        pools.append(AsyncVectorEnv(faulty(num_envs, length=length), **options))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close(terminate=True)


def actions(env_id, action, num_envs=4):
    chosen = np.full(num_envs, FINE)
    chosen[env_id] = action
    return chosen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("env_id", [0, 1, 3])
def test_an_exception_names_env_worker_step_and_action(make, way, env_id):
    pool = make(**WAYS[way])
    pool.reset(seed=0)
    pool.step(actions(0, FINE))
    with pytest.raises(ValueError, match=f"^broken joint {env_id}") as raised:
        pool.step(actions(env_id, RAISE))
    assert raised.value.env_index == env_id
    worker = {"2 workers": env_id // 2, "caller and 1": env_id // 2 - 1}[way]
    note = f"Raised by env {env_id} in worker {worker}, step 2, action (np.int64\\()?1"
    assert re.match(note, raised.value.__notes__[-1])
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert 'raise ValueError(f"broken joint' in str(raised.value.__cause__)
    with pytest.raises(ResetNeeded):
        pool.send([0], [0])
    obs, _ = pool.reset(seed=0)
    assert obs[:, 1].tolist() == [0] * 4
    pool.step(actions(0, FINE))


def test_the_other_envs_have_been_stepped(make):
    pool = make()
    pool.reset()
    with pytest.raises(ValueError, match="broken joint"):
        pool.step([RAISE, FINE, RAISE, FINE])
    assert pool.get_attr("count") == (1, 1, 1, 1)


@pytest.mark.parametrize("action", [WRONG_SHAPE, WRONG_REWARD])
def test_wrong_results_are_refused_naming_the_env(make, action):
    pool = make()
    pool.reset()
    with pytest.raises(ObservationError) as raised:
        pool.step(actions(2, action))
    assert "Raised by env 2 in worker 1" in raised.value.__notes__[-1]


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_reset_names_the_env(make, way):
    pool = make(**WAYS[way])
    for env_id in (0, 3):
        with pytest.raises(KeyError, match="no such level") as raised:
            pool.reset(options={"raises": env_id})
        assert f"env {env_id} " in raised.value.__notes__[-1]
    pool.reset()
    pool.step(actions(0, FINE))


def test_an_exception_after_send_comes_with_recv(make):
    pool = make()
    pool.reset()
    pool.send([FINE, RAISE], [0, 3])
    with pytest.raises(ValueError, match="broken joint 3") as raised:
        pool.recv()
    assert "env 3 in worker 1" in raised.value.__notes__[-1]


def test_an_exception_in_a_call_names_the_env(make):
    pool = make()
    with pytest.raises(AttributeError) as raised:
        pool.call("no_such_method")
    assert "Raised by env" in raised.value.__notes__[-1]
    with pytest.raises(ValueError, match="use `step` directly"):
        pool.call("step", 0)
    assert pool.call("nap", 0) == (0, 1, 2, 3)


class StubbornError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_exceptions_that_cannot_be_pickled_keep_their_text():
    try:
        raise StubbornError(1, 2)
    except StubbornError as error:
        fault = EnvFault.of(error, 3, 1, "step", 7)
    error = fault.exception(9)
    assert isinstance(error, EnvStepError)
    assert "1 and 2" in str(error)
    assert error.__notes__ == ["Raised by env 3 in worker 1, step 9, action 7."]


def raise_error(text):
    raise OSError(text)


@pytest.mark.parametrize("env_id", [0, 2, 4])
def test_a_failing_factory_is_named(env_id):
    env_fns = [FaultyEnv] * 5
    env_fns[env_id] = functools.partial(raise_error, "no licence")
    with pytest.raises(EnvCreationError, match=f"Making env {env_id} of 5") as raised:
        AsyncVectorEnv(env_fns, num_workers=2)
    assert isinstance(raised.value.__cause__, OSError)
    assert "raise OSError(text)" in str(raised.value.__cause__.__cause__)
    assert multiprocessing.active_children() == []


def test_a_factory_that_kills_its_process_is_reported():
    with pytest.raises(EnvCreationError, match=r"worker 1 \(envs 3-4, .* exited with code 9"):
        AsyncVectorEnv([FaultyEnv] * 3 + [functools.partial(os._exit, 9)] * 2, num_workers=2)


def test_no_env_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one env"):
        AsyncVectorEnv([])


@pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"threads_per_worker": 0}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ValueError, match="|".join(options)):
        AsyncVectorEnv(faulty(2), **options)


@pytest.mark.parametrize(
    ("action", "how"), [(DIE, "was killed by signal SIGKILL"), (EXIT, "exited with code 3")]
)
def test_a_dead_worker_is_reported_at_once(make, action, how):
    pool = make()
    pool.reset()
    pids = set(pool.call("pid"))
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError) as raised:
        pool.step(actions(3, action))
    assert time.monotonic() - begin < 5  # 0.2 on an idle machine
    message = str(raised.value)
    assert re.match(rf"worker 1 \(envs 2-3, pid \d+\) {how} during step 1\.", message)
    assert f"It was at env 3, action {action}." in message
    assert message.endswith("The vector env is closed.")
    assert wait_until_gone(pids, 2) == []
    with pytest.raises(ClosedEnvironmentError):
        pool.step(actions(0, FINE))
    pool.close()


def test_a_dead_worker_is_reported_by_recv(make):
    pool = make()
    pool.reset()
    pool.send([FINE, DIE], [0, 3])
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* SIGKILL .*It was at env 3, action 2"):
        pool.recv()


def test_a_worker_that_died_while_nobody_waited_is_reported(make):
    pool = make()
    pool.reset()
    os.kill(pool.call("pid")[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="worker 0"):
        pool.reset()


@pytest.mark.parametrize("way", ["2 workers", "threads"])
def test_a_hanging_env_is_named_and_its_late_result_stays_where_it_belongs(make, way):
    options = {"threads_per_worker": 2} if way == "threads" else {}
    pool = make(**options)
    pool.reset()
    pool.step_async(actions(1, HANG))
    for kind in (StepTimeoutError, multiprocessing.TimeoutError, TimeoutError):
        with pytest.raises(kind, match=r"step 1 has timed out .* worker 0 at env 1\. It stays"):
            pool.step_wait(timeout=0.1)
    obs, *_ = pool.step_wait(timeout=10)
    assert obs[:, 1].tolist() == [1, 1, 1, 1]
    assert pool.step(actions(0, FINE))[0][:, 1].tolist() == [2, 2, 2, 2]


def test_a_timeout_of_the_constructor_holds_for_every_wait(make):
    pool = make(timeout=0.15)
    pool.reset()
    with pytest.raises(StepTimeoutError, match="env 2"):
        pool.step(actions(2, HANG))
    pool.step_wait(timeout=10)
    with pytest.raises(StepTimeoutError, match=r"call has timed out"):
        pool.call("nap", 0.3)
    assert pool.call_wait(timeout=10) == (0, 1, 2, 3)


def test_steps_before_a_reset(make):
    """Refused; by `step` with an error that is also an env's own, as Gymnasium's tests want."""
    pool = make()
    for step in (pool.step_async, pool.send):
        with pytest.raises(ResetNeeded, match="before the first `reset`"):
            step(actions(0, FINE))
    for error in (ValueError, ResetNeeded):
        with pytest.raises(error, match=r"before the first `reset`.*env 1 raised .*broken joint 1"):
            pool.step([FINE, RAISE, FINE, FINE])
    with pytest.raises(ResetNeeded, match="before the first `reset`"):
        pool.step(actions(0, FINE))
    pool.reset()
    assert pool.step(actions(0, FINE))[0][:, 1].tolist() == [1] * 4
    with pytest.raises(ValueError, match="broken joint 1"):
        pool.step([FINE, RAISE, FINE, FINE])
    with pytest.raises(ResetNeeded):  # nobody knows in what state the envs are
        pool.step(actions(0, FINE))


def test_recv_names_the_envs_it_has_waited_for(make):
    pool = make()
    pool.reset()
    pool.send(actions(3, HANG))
    with pytest.raises(StepTimeoutError, match=r"with 3 of 4 results: waiting for envs 3\."):
        pool.recv(timeout=0.2)
    assert sorted(pool.recv(3).env_ids) == [0, 1, 2]
    assert pool.recv(timeout=10).obs.tolist() == [[3, 1]]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reset_gives_up_what_was_sent(make, threads):
    pool = make(threads_per_worker=threads)
    pool.reset()
    pool.send(actions(2, HANG))
    assert pool.reset()[0][:, 1].tolist() == [0] * 4
    pool.send([FINE], [1])
    assert pool.recv().obs.tolist() == [[1, 1]]
    assert pool.step(actions(0, FINE))[0][:, 1].tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("action", [RAISE, DIE])
def test_restarted_envs_report_truncation_and_go_on(make, action, mode):
    pool = make(on_error="restart", autoreset_mode=mode)
    pool.reset(seed=1)
    pool.step(actions(0, FINE))
    obs, rewards, terminations, truncations, infos = pool.step(actions(3, action))
    lost = [3] if action == RAISE else [2, 3]  # a dead worker takes all of its envs with it
    is_lost = np.isin(np.arange(4), lost)
    assert truncations.tolist() == is_lost.tolist()
    assert not terminations.any()
    assert rewards.tolist() == (~is_lost).astype(float).tolist()
    told = infos["final_info"] if mode.value == "SameStep" else infos
    reasons = told["restart_reason"]
    assert told["restarts"].tolist() == is_lost.astype(int).tolist()
    expected = "ValueError: broken joint 3" if action == RAISE else "SIGKILL"
    assert expected in reasons[3]
    last = infos["final_obs"][3] if mode.value == "SameStep" else obs[3]
    assert last.tolist() == [3, 1]
    assert pool.restarts.tolist() == is_lost.astype(int).tolist()
    if mode.value == "Disabled":
        obs, _ = pool.reset(options={"reset_mask": is_lost})
    elif mode.value == "NextStep":
        obs, *_ = pool.step(actions(0, FINE))
    assert obs[is_lost, 1].tolist() == [0] * len(lost)
    for _ in range(3):
        obs, _, terminations, truncations, _ = pool.step(actions(0, FINE))
        assert not truncations.any()
    assert obs[is_lost, 1].tolist() == [3] * len(lost)


def test_threads_of_a_new_worker_step_nothing_before_the_episodes_are_lost(make):
    pool = make(num_workers=1, threads_per_worker=4, on_error="restart")
    pool.reset(seed=1)
    for _ in range(5):
        pool.send(actions(1, DIE))
        truncated = np.zeros(4, np.int64)
        restarts = pool.restarts.copy()
        while pool._calls.num_in_flight:
            batch = pool.recv(1, timeout=30)
            truncated[batch.env_ids] += batch.truncations
            assert np.isfinite(batch.rewards).all()
        # An env whose result was there before the worker died tells of the loss a step later.
        pool.send(actions(0, FINE))
        batch = pool.recv(timeout=30)
        truncated[batch.env_ids] += batch.truncations
        assert truncated.tolist() == [1, 1, 1, 1]
        assert (pool.restarts == restarts + 1).all()
        pool.send(actions(0, FINE))  # episodes begin anew
        pool.recv(timeout=30)


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("action", [RAISE, DIE])
def test_restarts_in_first_ready_stepping(make, action, most):
    pool = make(on_error="restart")
    pool.reset(seed=1)
    pool.send(actions(2, action))
    rows = {}
    while len(rows) < 4:
        batch = pool.recv(1, timeout=20, max_envs=most)
        assert len(batch.env_ids) <= (most or 4)
        for row, env_id in enumerate(batch.env_ids.tolist()):
            assert env_id not in rows
            rows[env_id] = (batch.truncations[row], batch.rewards[row])
    assert rows[0] == rows[1] == (False, 1.0)
    assert rows[2] == (True, 0.0)
    pool.send(actions(0, FINE))
    batch = pool.recv(timeout=20)
    order = np.argsort(batch.env_ids)
    assert batch.obs[order][:, 1].tolist()[:3] == [2, 2, 0]
    assert pool.restarts[2] == 1


@pytest.mark.parametrize("code", [(-9, "SIGKILL"), (-11, "SIGSEGV"), (5, "5"), (None, "gone")])
def test_exits_are_described(code):
    assert code[1] in describe_exit(code[0])


@pytest.mark.slow
def test_two_hundred_killed_workers(make):
    """kill -9 at random points: always reported or survived, never a hang."""
    rng = np.random.default_rng(0)
    _kill_rounds(make, rng, 200)


def test_some_killed_workers(make):
    _kill_rounds(make, np.random.default_rng(1), 8)


def _kill_rounds(make, rng, rounds):
    import threading

    pool = make(num_envs=6, num_workers=3, on_error="restart", length=20)
    pool.reset(seed=0)
    for number in range(rounds):
        pid = int(rng.choice(pool.call("pid")))
        timer = threading.Timer(rng.random() * 0.02, os.kill, (pid, signal.SIGKILL))
        timer.start()
        for _ in range(40):
            if number % 2:
                pool.send(np.zeros(6, np.int64))
                received = 0
                while received < 6:
                    received += len(pool.recv(1, timeout=30).env_ids)
            else:
                result = pool.step(np.zeros(6, np.int64))
                assert (result[0][:, 0] == np.arange(6)).all()
        timer.join()
    pool.step(np.zeros(6, np.int64))
    assert pool.restarts.sum() >= 2 * (rounds - 1)
    assert (pool.restarts.reshape(3, 2) == pool.restarts.reshape(3, 2)[:, :1]).all()


def test_a_killed_worker_at_random_points_is_reported(make):
    rng = np.random.default_rng(3)
    import threading

    for _ in range(4):
        pool = make()
        pool.reset()
        pid = pool.call("pid")[2]
        threading.Timer(rng.random() * 0.02, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerDiedError, match="worker 1"):
            while True:
                pool.step(actions(0, FINE))


def test_gymnasium_envs_ask_for_a_reset(make):
    pool = AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=1)
    with pytest.raises(ResetNeeded):
        pool.step([0, 0])
    pool.close()
