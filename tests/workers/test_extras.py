"""Halves, published arrays, numeric infos, waiting envs, the choice of a backend, both links."""

import functools
import inspect
import os
import time
import types

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are
from envs import SPACES, RandomEnv, counters
from equality import assert_same
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from programs import printed
from workers.faulty_envs import FINE, RAISE, NapEnv, faulty
from workers.twins import assert_steps_alike, twins

from vecenv import EnvCreationError, SyncVectorEnv, choose, make_vec
from vecenv.choose import choose_backend
from vecenv.workers.env import AsyncVectorEnv
from vecenv.workers.probe import Probe, ProbeError, ProbeTimeout, probe_env


@pytest.mark.parametrize("copy", [True, False])
def test_halves_stepped_in_turn_give_what_all_give(copy):
    pool, sync = twins(SPACES["nested"], num_workers=3, copy=copy)
    pool.reset(seed=1)
    sync.reset(seed=1)
    halves = pool.halves()
    assert [half.env_ids.tolist() for half in halves] == [[0, 1, 2, 3], [4]]
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (10, 5))
    for half in halves:
        half.step_async(actions[0, half.env_ids])
    with pytest.raises(AlreadyPendingCallError):
        halves[0].step_async(actions[0, :4])
    with pytest.raises(AlreadyPendingCallError, match="call `step_wait` of each half first"):
        pool.step(actions[0])
    for step in range(10):
        expected = sync.step(actions[step])
        for half in halves:
            result = half.step_wait(timeout=20)
            for part, full in zip(result[1:4], expected[1:4], strict=True):
                assert_same(part, full[half.env_ids])
            ids = half.env_ids
            assert_same(result[0]["b"][0], expected[0]["b"][0][ids])
            assert_same(result[0]["a"]["y"], expected[0]["a"]["y"][ids])
            if step < 9:
                half.step_async(actions[step + 1, ids])
    with pytest.raises(NoAsyncCallError):
        halves[1].step_wait()
    assert_same(pool.step(actions[0]), sync.step(actions[0]))
    pool.close()


def test_a_fault_in_a_half_leaves_the_pool_usable():
    pool = AsyncVectorEnv(faulty(4), num_workers=2)
    pool.reset()
    first, second = pool.halves()
    first.step_async([RAISE, FINE])
    second.step_async([FINE, FINE])
    with pytest.raises(ValueError, match="broken joint 0"):
        first.step_wait()
    pool.reset()
    assert pool.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    pool.close()


def test_halves_need_two_workers():
    pool = AsyncVectorEnv(faulty(4), num_workers=1)
    with pytest.raises(ValueError, match="at least two workers"):
        pool.halves()
    pool.close()


def test_halves_need_actions_in_the_byte_order_of_the_machine():
    action_space = Box(-9, 9, (2,), np.dtype(">i4"))
    pool = AsyncVectorEnv(
        [functools.partial(RandomEnv, SPACES["float32(3,)"], action_space)] * 2, num_workers=2
    )
    with pytest.raises(ValueError, match="byte order of this machine; got Box"):
        pool.halves()
    pool.close()


class StatefulEnv(gym.Env):
    """Publishes its state; the info has fields of fixed shape."""

    observation_space = Box(-1, 99, (1,), np.float32)
    action_space = Discrete(2)
    publish = {"true_state": Box(-1, 99, (3,), np.float64)}

    def __init__(self, name):
        self.name = name
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        info = {"height": 0.5 * self.count, "joints": np.arange(2) + self.name}
        if self.count % 2:
            info["odd"] = {"depth": self.count}
        return np.zeros(1, np.float32), 0.0, False, False, info

    @property
    def true_state(self):
        return np.array([self.name, self.count, 7.0])


@pytest.mark.parametrize("caller_steps", [False, True])
def test_published_arrays_are_shared_memory_and_always_the_latest(caller_steps):
    fns = [functools.partial(StatefulEnv, name) for name in range(3)]
    pool = AsyncVectorEnv(fns, num_workers=2, caller_steps=caller_steps)
    state = pool.published["true_state"]
    for count in range(3):
        if count == 0:
            pool.reset()
        else:
            pool.step([0] * 3)
        assert state.tolist() == [[name, count, 7] for name in range(3)]
    pool.send([0], [1])
    pool.recv()
    assert state[:, 1].tolist() == [2, 3, 2]
    pool.close()
    other = AsyncVectorEnv(fns, num_workers=2, publish={"count": Box(0, 99, (), np.int64)})
    other.reset()
    other.step([0] * 3)
    assert set(other.published) == {"count"}
    assert other.published["count"].tolist() == [1, 1, 1]
    other.close()


def test_numeric_infos_stop_being_messages():
    """Once every form of infos has been seen nothing is pickled, and they stay the same."""
    fns = [functools.partial(StatefulEnv, name) for name in range(3)]
    pool = AsyncVectorEnv(fns, num_workers=2)
    pool.reset()
    received = []
    receive = pool._exchange.pool.receive
    pool._exchange.pool.receive = lambda *args: received.append(args) or receive(*args)
    for count in range(1, 7):
        infos = pool.step([0] * 3)[4]
        assert infos["height"].tolist() == [0.5 * count] * 3
        assert infos["joints"].tolist() == [[0, 1], [1, 2], [2, 3]]
        assert ("odd" in infos) == bool(count % 2)
        assert len(received) == min(4, 2 * count)
    for _ in range(6):
        pool.send([0] * 3)
        while pool._calls.num_in_flight:
            batch = pool.recv(1)
            expected = [[name, name + 1] for name in batch.env_ids]
            assert batch.infos["joints"].tolist() == expected
    assert len(received) == 4
    pool.close()


class RegularEnv(RandomEnv):
    def _info(self, action):
        return {"count": 3, "nested": {"depth": np.int16(4), "empty": {}}, "pair": (1, 0.5)}


@pytest.mark.parametrize("name", fast_are(["nested"], ["float32(3,)", "nested", "discrete"]))
def test_final_observations_stop_being_messages(name):
    fns = [functools.partial(RegularEnv, SPACES[name])] * 5
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    pool, sync = AsyncVectorEnv(fns, num_workers=2, **options), SyncVectorEnv(fns, **options)
    assert_same(pool.reset(seed=2), sync.reset(seed=2))
    assert_steps_alike(pool, sync, 40)
    pool._exchange.pool.receive = None  # nothing is received any more
    assert_steps_alike(pool, sync, 40)
    pool.close()


class InfoEnv(gym.Env):
    """Every env has other keys, in another order, and values that change their kind."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), self.some_info()

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, self.some_info()

    def some_info(self):
        rng = self.rng
        values = {
            "pair": (rng.integers(5), {"x": float(rng.random())}),
            "text": str(rng.integers(9)),
            "number": int(rng.integers(9)),
            "nested": {"z": rng.random(2)} if rng.random() < 0.5 else {},
            "sometimes": None if rng.random() < 0.5 else (1, True),
            "big": (int(2 ** int(rng.integers(50, 70))),),
        }
        keys = [key for key in values if rng.random() < 0.8]
        return {key: values[key] for key in rng.permutation(keys).tolist()}


@pytest.mark.parametrize("caller_steps", [False, True])
def test_any_infos_come_in_the_order_in_which_one_process_has_them(caller_steps):
    fns = [functools.partial(InfoEnv, seed) for seed in range(5)]
    pool, sync = AsyncVectorEnv(fns, num_workers=2, caller_steps=caller_steps), SyncVectorEnv(fns)
    assert_same(pool.reset(), sync.reset())
    assert_steps_alike(pool, sync, 60)
    for step in range(60):
        pool.send([step % 2], [step % 5])
        sync.send([step % 2], [step % 5])
        assert_same(pool.recv().infos, sync.recv().infos)
    pool.close()


class QuickEnv(NapEnv):
    def wait(self):
        pass


@pytest.mark.linux
@pytest.mark.parametrize(("env", "num_steps", "threads"), [(NapEnv, 12, 7), (QuickEnv, 40, 1)])
def test_envs_that_wait_get_threads_and_those_that_compute_none(
    monkeypatch, env, num_steps, threads
):
    monkeypatch.undo()  # one of them is tried out
    pool = AsyncVectorEnv([env] * 12, num_workers=2, context="fork")
    pool.reset()
    for _ in range(num_steps):
        pool.step([0] * 12)
    assert pool.call("num_threads")[::6] == (threads, threads)
    pool.send([0] * 12)
    assert len(pool.recv(12, timeout=20).env_ids) == 12
    pool.close()


def test_rows_received_stay_for_three_rounds_without_copy():
    pool = AsyncVectorEnv(counters([50] * 4), num_workers=2, copy=False)
    pool.reset()
    pool.send([0] * 4)
    kept = []
    for _ in range(3):
        batch = pool.recv(4)
        kept.append((batch.obs, batch.obs.copy()))
        pool.send([0] * 4)
    pool.recv(4)
    for view, copied in kept:
        assert_same(view, copied)
    pool.close()


def test_cheap_envs_are_stepped_here_and_waiting_ones_elsewhere():
    choice = choose_backend(counters([9] * 2))
    assert (choice.backend, choice.options) == ("sync", {})
    choice = choose_backend([NapEnv] * 8)
    assert choice.backend == "async"
    assert "overlap" in choice.reason
    AsyncVectorEnv([NapEnv] * 8, **choice.options).close()


@pytest.mark.slow
def test_the_choice_names_what_it_measured():
    choice = choose_backend(counters([9] * 64))
    assert "one process" in choice.reason


def trial(probe, times=None):
    """Return the choice for 8 envs, given what their trial has found."""

    def run(function, *args, **kwargs):
        result = probe if function is probe_env else times
        if isinstance(result, Exception):
            raise result
        return result

    return choose_backend(counters([9] * 8), run=run)


@pytest.mark.linux
@pytest.mark.parametrize(
    ("here", "workers", "backend"),
    [
        ([3e-4, 3e-4, 3e-4], [2e-4, 2e-4, 2e-4], "async"),
        ([3e-4, 3e-4, 3e-4], [4e-4, 4e-4, 4e-4], "sync"),
        ([3e-4, 3e-4, 3e-4], [2.9e-4, 2.9e-4, 2.9e-4], "sync"),
        ([3e-4, 3e-4, 3e-4], [2e-4, 4e-4, 2e-4], "too noisy"),
        ([3e-4, 1e-4, 3e-4], [2e-4, 2e-4, 2e-4], "too noisy"),
        ([3e-4], [2e-4], "async"),
    ],
)
def test_rounds_that_disagree_are_too_noisy_and_the_choice_is_safe(
    here, workers, backend, monkeypatch
):
    monkeypatch.setattr(choose, "usable_cores", lambda: 2)
    slower = [2 * seconds for seconds in workers]
    times = {"2 workers": workers, "this process and 1 workers": slower, "one process": here}
    choice = trial(Probe(1e-4, 4e-5, False), times)
    if backend == "too noisy":
        assert choice.backend == "sync"
        assert choice.reason.startswith("too noisy to tell, as rounds disagree; microseconds")
    else:
        assert choice.backend == backend and "noisy" not in choice.reason
        assert choice.options == ({"threads_per_worker": 1} if backend == "async" else {})


@pytest.mark.linux
def test_single_rounds_may_go_to_one_or_the_other_of_those_with_workers(monkeypatch):
    monkeypatch.setattr(choose, "usable_cores", lambda: 2)
    times = {
        "2 workers": [2e-4, 1e-4],
        "this process and 1 workers": [1.5e-4, 2e-4],
        "one process": [3e-4, 3e-4],
    }
    choice = trial(Probe(1e-4, 4e-5, False), times)
    assert (choice.backend, choice.options) == ("async", {"threads_per_worker": 1})
    assert choice.reason.startswith("2 workers; microseconds per step of all 8 envs: 2 workers 100")


@pytest.mark.linux
def test_who_was_hopeless_in_a_round_is_not_chosen(monkeypatch):
    monkeypatch.setattr(choose, "usable_cores", lambda: 2)
    times = {
        "2 workers": [5e-5, 3e-4],
        "this process and 1 workers": [6e-5] * 3,
        "one process": [2e-4] * 3,
    }
    choice = trial(Probe(1e-4, 4e-5, False), times)
    assert choice.options == {"threads_per_worker": 1, "caller_steps": True}
    assert choice.reason.startswith("this process and 1 workers; ")


@pytest.mark.parametrize(
    ("times", "rounds"),
    [
        ({"2 workers": 1.9, "this process and 1 workers": 1, "one process": 3}, (3, 3, 3)),
        ({"2 workers": 4, "this process and 1 workers": 1, "one process": 3}, (1, 3, 3)),
        ({"2 workers": 2, "this process and 1 workers": 5, "one process": 3}, (3, 1, 3)),
        ({"2 workers": 1.9, "this process and 1 workers": 5, "one process": 2}, (1, 1, 1)),
        ({"2 workers": 9, "this process and 1 workers": 5, "one process": 2}, (1, 1, 1)),
    ],
)
def test_a_trial_goes_on_for_what_can_still_change_the_choice(times, rounds, monkeypatch):
    def pool(name):
        return types.SimpleNamespace(name=name, reset=lambda: None, close=lambda: None)

    def workers(env_fns, *, caller_steps=False, **options):
        return pool("this process and 1 workers" if caller_steps else "2 workers")

    monkeypatch.setattr(choose, "AsyncVectorEnv", workers)
    monkeypatch.setattr(choose, "SyncVectorEnv", lambda *_, **__: pool("one process"))
    monkeypatch.setattr(choose, "_time_steps", lambda envs: times[envs.name])
    found = choose._measure(counters([9] * 8), 2, "same")
    assert found == {name: [times[name]] * k for name, k in zip(times, rounds, strict=True)}


def test_a_trial_that_comes_to_no_result(caplog):
    choice = trial(ProbeTimeout("it has not ended after 10 s"))
    assert choice == ("sync", {}, "the trial failed: it has not ended after 10 s")
    assert "not ended after 10 s" in caplog.text
    choice = trial(ProbeError("its process exited with code 3", has_died=True))
    assert (choice.backend, choice.options) == ("async", {"threads_per_worker": 1})
    assert "exited with code 3" in choice.reason and "exited with code 3" in caplog.text


def test_envs_that_need_a_process_each_get_one():
    class Only(QuickEnv):
        count = 0

        def __init__(self):
            if Only.count:
                raise RuntimeError("cannot create multiple emulators per process")
            Only.count += 1

        def close(self):
            Only.count -= 1

    envs = make_vec(Only, 4)
    assert type(envs) is AsyncVectorEnv and envs.num_workers == 4
    envs.close()


class HangsElsewhere(QuickEnv):
    def __init__(self, pid):
        self.pid = pid

    def step(self, action):
        if os.getpid() != self.pid:
            time.sleep(60)
        return super().step(action)


def test_an_env_that_hangs_in_the_trial_is_stepped_here(caplog, monkeypatch):
    monkeypatch.setattr(choose, "_PROBE_S", 0.3)
    envs = make_vec(functools.partial(HangsElsewhere, os.getpid()), 4)
    assert type(envs) is SyncVectorEnv
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "has not ended after 0.3 s" in record.getMessage()
    envs.reset()
    envs.step([0] * 4)
    envs.close()


def test_an_env_that_ends_its_process_in_the_trial_does_not_end_this_one(caplog):
    with pytest.raises(EnvCreationError, match="exited with code 3 during the creation"):
        make_vec(lambda: os._exit(3), 4)
    assert "exited with code 3" in caplog.text


@pytest.mark.slow
def test_everything_works_without_a_compiler():
    """The link of semaphores, in a run with the JIT switched off."""
    code = (
        "import sys\n"
        "from envs import SPACES, MODES\n"
        "from workers.twins import twins, assert_steps_alike, assert_same\n"
        "import numpy as np\n"
        "pool, sync = twins(SPACES['nested'], num_workers=2)\n"
        "pool._exchange.link._lock.acquire(0)  # Ctrl-C came before the caller let go of it\n"
        "assert_same(pool.reset(seed=2), sync.reset(seed=2))\n"
        "assert_steps_alike(pool, sync, 8)\n"
        "pool.send(np.zeros(5, int)); sync.send(np.zeros(5, int))\n"
        "a, b = pool.recv(), sync.recv()\n"
        "assert (a.rewards[np.argsort(a.env_ids)] == b.rewards).all()\n"
        "pool.close()\n"
        "print(type(pool._exchange.link).__name__, 'numba' in sys.modules)\n"
    )
    assert printed(code, kind="interpreted") == ["PortableLink", "False"]


_HOLDER = """
import os, signal, sys
import gymnasium as gym
import numpy as np
from vecenv import AsyncVectorEnv
from vecenv.workers.links import PortableLink

how, restart, path = sys.argv[1:]
publish = PortableLink._publish

def stop_once(self, command, leaves, env_id, status, form):
    if env_id == 1 and not os.path.exists(path):
        open(path, "w").close()
        self._lock.__enter__()
        os.kill(os.getpid(), signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
    return publish(self, command, leaves, env_id, status, form)

PortableLink._publish = stop_once
envs = AsyncVectorEnv(
    [lambda: gym.make("CartPole-v1")] * 4, num_workers=2, context="fork",
    **({"on_error": "restart", "timeout": 1.0} if restart == "restart" else {}),
)
assert type(envs._exchange.link) is PortableLink
envs.reset(seed=1)
found, error = [], ""
try:
    for _ in range(3):
        envs.send(np.zeros(4, int))
        left = 4
        while left:
            batch = envs.recv(1, timeout=None if restart == "restart" else 1)
            found += batch.env_ids.tolist()
            left -= len(batch.env_ids)
except Exception as caught:
    error = type(caught).__name__
envs.close(timeout=0.2)
print(error or (sorted(found) == sorted([0, 1, 2, 3] * 3), *envs.restarts.tolist()))
"""


@pytest.mark.parametrize(
    ("how", "restart", "expected"),
    [
        pytest.param("killed", "raise", "WorkerDiedError", marks=pytest.mark.slow),
        ("killed", "restart", "(True, 1, 1, 0, 0)"),
        pytest.param("frozen", "raise", "StepTimeoutError", marks=pytest.mark.slow),
        pytest.param("frozen", "restart", "(True, 1, 1, 0, 0)", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_ends_or_stops_with_the_portable_link_locked_stops_nobody(
    how, restart, expected, tmp_path
):
    told = printed(_HOLDER, how, restart, tmp_path / "stopped", kind="interpreted")
    assert " ".join(told) == expected


def test_envs_with_a_worker_function_are_gymnasiums():
    worker = gym.vector.async_vector_env._async_worker
    fns = [lambda: gym.make("CartPole-v1")] * 2
    envs = AsyncVectorEnv(fns, worker=worker, autoreset_mode="same_step")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert type(envs) is gym.vector.AsyncVectorEnv
    obs, _ = envs.reset(seed=1)
    assert obs.shape[0] == 2
    envs.close()
    with pytest.raises(TypeError, match="num_workers"):
        AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, worker=worker, num_workers=1)


def test_the_signature_is_that_of_gymnasiums_class_and_more():
    ours = list(inspect.signature(AsyncVectorEnv).parameters)
    theirs = list(inspect.signature(gym.vector.AsyncVectorEnv).parameters)
    assert ours[: len(theirs)] == theirs
