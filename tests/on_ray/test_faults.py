"""Envs that raise, hang or take their actor with them; and what is refused before anything runs."""

import functools
import os
import re
import signal
import threading
import time

import pytest
from envs import MODES, mode_id
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from workers.faulty_envs import DIE, FINE, HANG, RAISE, FaultyEnv, actions, opener, wait_until_gone

from vecenv import EnvCreationError, RayVectorEnv, StepTimeoutError, WorkerDiedError
from vecenv.core.errors import RemoteTraceback
from vecenv.jit.cartpole import CartPoleVectorEnv

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def make():
    yield from opener(RayVectorEnv, num_workers=2)


def test_an_exception_names_env_worker_step_and_action(make):
    envs = make()
    envs.reset(seed=0)
    envs.step(actions(0, FINE))
    with pytest.raises(ValueError, match=r"^broken joint 3") as raised:
        envs.step(actions(3, RAISE))
    assert raised.value.env_index == 3
    note = r"Raised by env 3 in worker 1, step 2, action (np.int64\()?1"
    assert re.match(note, raised.value.__notes__[0])
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert 'raise ValueError(f"broken joint' in str(raised.value.__cause__)
    with pytest.raises(ResetNeeded):
        envs.step(actions(0, FINE))
    with pytest.raises(KeyError, match="no such level"):
        envs.reset(options={"raises": 2})
    assert envs.reset(seed=0)[0][:, 1].tolist() == [0] * 4
    envs.send([FINE, RAISE], [0, 3])
    with pytest.raises(ValueError, match="broken joint 3"):
        envs.recv()
    envs.reset(seed=0)
    envs.send([RAISE, FINE], [3, 2])  # in this order
    with pytest.raises(ValueError, match="broken joint 3") as raised:
        envs.recv()
    assert re.search(r"action (np.int64\()?1", raised.value.__notes__[0])
    envs.reset(seed=0)
    with pytest.raises(AttributeError):
        envs.call("no_such_method")
    envs.step(actions(0, FINE))


def test_envs_that_raise_are_replaced(make):
    envs = make(on_error="restart")
    envs.reset(seed=0)
    envs.step(actions(0, FINE))
    obs, rewards, _, truncations, infos = envs.step(actions(3, RAISE))
    assert obs[:, 1].tolist() == [2, 2, 2, 1]
    assert (truncations.tolist(), rewards[3]) == ([False] * 3 + [True], 0.0)
    assert infos["restarts"].tolist() == [0, 0, 0, 1] == envs.restarts.tolist()
    assert "broken joint 3" in infos["restart_reason"][3]
    assert envs.step(actions(0, FINE))[0][:, 1].tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("way", ["step", "recv"])
def test_a_dead_actor_is_reported_at_once(make, way):
    envs = make()
    envs.reset()
    pids = set(envs.call("pid"))
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError) as raised:
        if way == "step":
            envs.step(actions(3, DIE))
        else:
            envs.send(actions(3, DIE))
            envs.recv()
    assert time.monotonic() - begin < 10  # 0.1 on an idle machine
    message = str(raised.value)
    doing = {"step": "step 1", "recv": "`recv`"}[way]
    assert message.startswith(f"worker 1 (envs 2-3) is gone during {doing}: ")
    assert message.endswith("The vector env is closed.")
    assert wait_until_gone(pids, 10) == []
    with pytest.raises(ClosedEnvironmentError):
        envs.step(actions(0, FINE))
    envs.close()


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_a_dead_actor_is_replaced(make, mode):
    envs = make(on_error="restart", autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(actions(0, FINE))
    obs, rewards, terminations, truncations, infos = envs.step(actions(2, DIE))
    is_same_step = mode is AutoresetMode.SAME_STEP
    assert obs[:, 1].tolist() == [4, 4, 0, 0] if is_same_step else [4, 4, 3, 3]
    assert (rewards.tolist(), terminations.any()) == ([1, 1, 0, 0], False)
    assert truncations.tolist() == [False, False, True, True]
    assert envs.restarts.tolist() == [0, 0, 1, 1]
    told = infos["final_info"] if is_same_step else infos
    assert told["restarts"].tolist() == [0, 0, 1, 1]
    assert told["restart_reason"][2].startswith("worker 1 (envs 2-3) is gone during step 4")
    if is_same_step:
        assert [row[1] for row in infos["final_obs"][2:]] == [3, 3]
    if mode is AutoresetMode.DISABLED:
        with pytest.raises(ResetNeeded):
            envs.step(actions(0, FINE))
        envs.reset(options={"reset_mask": truncations})
    for _ in range(2):
        obs = envs.step(actions(0, FINE))[0]
    age = {AutoresetMode.NEXT_STEP: 1}.get(mode, 2)
    assert obs[:, 1].tolist() == [6, 6, age, age]


def test_envs_in_flight_come_back_from_the_successor(make):
    """Env 2's result is there when its actor dies; of env 3's step the loss is reported."""
    envs = make(on_error="restart")
    envs.reset(seed=0)
    envs.send([FINE, FINE], [2, 0])
    time.sleep(0.5)
    envs.send([DIE], [3])
    batches = [envs.recv(min_envs=3)]
    lost = dict(zip(batches[0].env_ids.tolist(), batches[0].truncations.tolist(), strict=True))
    assert lost == {0: False, 2: False, 3: True}
    assert envs.step(actions(0, FINE))[3].tolist() == [False, False, True, False]


def test_compiled_envs_survive_their_actor():
    envs = RayVectorEnv(CartPoleVectorEnv, num_envs=4, num_workers=2, on_error="restart")
    envs.reset(seed=0)
    envs.step([0, 1, 0, 1])
    os.kill(envs._pool.seats[1].pid, signal.SIGKILL)
    _, _, _, truncations, infos = envs.step([0, 1, 0, 1])
    assert truncations.tolist() == [False, False, True, True]
    assert infos["restarts"].tolist() == [0, 0, 1, 1]
    envs.step([0, 1, 0, 1])
    assert envs.step([0, 1, 0, 1])[1].tolist() == [1] * 4
    envs.close()


def test_timeouts_leave_envs_in_flight(make):
    envs = make(timeout=0.25)
    envs._timeout = None
    envs.reset(seed=0)
    envs._timeout = 0.25
    with pytest.raises(StepTimeoutError, match=r"step 1 has timed out .*worker 1 \(envs 2-3\)"):
        envs.step(actions(3, HANG))
    batch = envs.recv(timeout=20)
    assert sorted(batch.env_ids.tolist()) == [0, 1, 2, 3]
    envs.send(actions(3, HANG))
    ready = envs.recv(min_envs=2, timeout=20)
    assert sorted(ready.env_ids.tolist()) == [0, 1]
    with pytest.raises(StepTimeoutError, match="They stay in flight"):
        envs.recv(timeout=0.1)
    assert sorted(envs.recv(timeout=20).env_ids.tolist()) == [2, 3]


def stuck(num_envs, **options):
    """Envs that hang for good, in `step` or in `reset`, and are not to be interrupted."""

    class Stuck(FaultyEnv):
        def reset(self, *, seed=None, options=None):
            if options and options.get("hangs") == self.name:
                time.sleep(600)
            return super().reset(seed=seed)

        def step(self, action):
            if action == HANG:
                time.sleep(600)
            return super().step(action)

    factories = [functools.partial(Stuck, name) for name in range(num_envs)]
    return RayVectorEnv(factories, num_workers=2, timeout=2.0, **options)


def test_reset_replaces_an_actor_that_hangs():
    envs = stuck(4, on_error="restart")
    envs.reset(seed=0)
    pids = [seat.pid for seat in envs._pool.seats]
    with pytest.raises(StepTimeoutError, match="waiting for worker 1"):
        envs.step(actions(3, HANG))
    assert envs.reset(seed=0)[0][:, 1].tolist() == [0] * 4
    assert envs.restarts.tolist() == [0, 0, 1, 1]
    assert envs._pool.seats[0].pid == pids[0]
    assert wait_until_gone([pids[1]], 10) == []
    obs, _, _, truncations, infos = envs.step(actions(0, FINE))
    assert obs[:, 1].tolist() == [1] * 4
    assert not truncations.any() and "restarts" not in infos
    assert envs.step(actions(3, RAISE))[4]["restarts"].tolist() == [0, 0, 0, 2]
    assert envs.restarts.tolist() == [0, 0, 1, 2]
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"worker 1 .*`reset`.*actor number 3 lost over this"):
        envs.reset(options={"hangs": 2})
    assert time.monotonic() - begin < 60  # three times the timeout, and two starts
    assert envs.closed


def test_reset_of_an_actor_that_hangs_times_out_where_nothing_is_to_be_replaced():
    envs = stuck(4)
    envs.reset(seed=0)
    with pytest.raises(StepTimeoutError):
        envs.step(actions(3, HANG))
    for _ in range(2):
        with pytest.raises(StepTimeoutError, match="`reset` has timed out after 2"):
            envs.reset(seed=0)
    envs.close(terminate=True)


def test_close_is_bounded_and_leaves_nothing(make):
    envs = make()
    envs.reset()
    pids = set(envs.call("pid"))
    assert len(pids) == 2
    envs.send(actions(3, HANG))
    begin = time.monotonic()
    envs.close(timeout=0.2)
    assert time.monotonic() - begin < 5
    assert wait_until_gone(pids, 10) == []
    envs.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_failing_factory_is_named(worker):
    env_fns = [FaultyEnv] * 4
    env_fns[2 * worker + 1] = functools.partial(open, "/no/such/file")
    begin = f"Making env {2 * worker + 1} of 4 failed with FileNotFoundError"
    with pytest.raises(EnvCreationError, match=begin) as raised:
        RayVectorEnv(env_fns, num_workers=2)
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_a_factory_that_ends_its_actor_is_reported_with_all_that_ray_says():
    with pytest.raises(
        EnvCreationError, match=r"worker 0 \(envs 0-1\) ended while its env"
    ) as told:
        RayVectorEnv([functools.partial(os._exit, 9)] * 2, num_workers=1)
    whole = told.value.__cause__.__cause__
    assert type(whole).__name__ == "ActorDiedError" and "actor_id:" in str(whole)


def test_a_factory_that_hangs_is_given_up():
    with pytest.raises(EnvCreationError, match="was not ready after 1 seconds"):
        RayVectorEnv([functools.partial(time.sleep, 60)], num_workers=1, start_timeout=1.0)


def test_a_factory_that_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"env_fns\[2\], .* can't be pickled"):
        RayVectorEnv([FaultyEnv, FaultyEnv, lambda: lock], num_workers=2)


def test_more_actors_than_cpus_are_refused_at_once(make):
    with pytest.raises(ValueError, match=r"4 actors of 1 CPUs each don't fit .* room for 3"):
        make(num_workers=4)
    with pytest.raises(ValueError, match=r"1 actors of 64 CPUs each don't fit"):
        make(num_workers=1, cpus_per_worker=64)
    others = make(num_workers=2)
    told = r"worker 1 \(env.* was not ready after 2 seconds .*no place .* now: 0"
    with pytest.raises(EnvCreationError, match=told):
        make(num_workers=2, start_timeout=2.0)
    others.close()
    make(num_workers=4, cpus_per_worker=0.5).reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"num_workers": 5}, "an integer from 1 to 4"),
        ({"cpus_per_worker": 0}, "more than 0"),
        ({"cpus_per_worker": None}, "cpus_per_worker is None, expected more than 0"),
        ({"gpus_per_worker": -1}, "gpus_per_worker is -1"),
        ({"memory_per_worker": 0}, "memory_per_worker is 0, expected more than 0"),
        ({"resources": {"GPU": 1}}, "which is gpus_per_worker here"),
        ({"resources": {"second": 0}}, r"resources\['second'\] is 0"),
        ({"resources": ["second"]}, "expected amounts by name"),
        ({"scheduling_strategy": "PACK"}, "expected one of SPREAD, DEFAULT"),
        ({"runtime_env": "."}, "expected a dict"),
        ({"runtime_env": {"py_modules": ["."]}}, r"connected already.* ray\.init\("),
    ],
)
def test_options_that_make_no_sense_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_options_of_vector_env_factories():
    with pytest.raises(ValueError, match="num_envs is 3, but there are 4 factories"):
        RayVectorEnv([FaultyEnv] * 4, num_envs=3)
    with pytest.raises(ValueError, match="needs num_envs"):
        RayVectorEnv(CartPoleVectorEnv)
    with pytest.raises(ValueError, match="at least one env"):
        RayVectorEnv([])
