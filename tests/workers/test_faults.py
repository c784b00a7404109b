"""Envs that raise, hang, return nonsense or take their process with them."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are, product
from envs import MODES
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Box, Discrete
from programs import printed
from workers.faulty_envs import (
    DIE,
    EXIT,
    FINE,
    HANG,
    HANG_S,
    RAISE,
    WRONG_REWARD,
    FaultyEnv,
    OnlyEnv,
    actions,
    faulty,
    open_files,
    opener,
    wait_until_gone,
)

from vecenv import EnvCreationError, ObservationError, SyncVectorEnv
from vecenv.core.errors import (
    EnvStepError,
    InfoError,
    RemoteTraceback,
    StepTimeoutError,
    WorkerDiedError,
)
from vecenv.workers.env import AsyncVectorEnv

TWO = {"num_workers": 2}
NEXT_STEP, SAME_STEP, DISABLED = MODES
WAYS = {"2 workers": TWO, "caller and 1": {"num_workers": 1, "caller_steps": True}}


@pytest.fixture
def make():
    yield from opener(AsyncVectorEnv, num_workers=2)


@pytest.mark.parametrize(
    ("way", "env_id"), [("2 workers", 3), *(("caller and 1", k) for k in (1, 2))]
)
def test_an_exception_names_env_worker_step_and_action(make, way, env_id):
    pool = make(**WAYS[way])
    pool.reset(seed=0)
    pool.step(actions(0, FINE))
    with pytest.raises(ValueError, match=f"^broken joint {env_id}") as raised:
        pool.step(actions(env_id, RAISE))
    assert raised.value.env_index == env_id
    worker = {"2 workers": env_id // 2, "caller and 1": env_id // 2 - 1}[way]
    where = f"worker {worker}" if worker >= 0 else "this process"
    note = f"Raised by env {env_id} in {where}, step 2, action (np.int64\\()?1"
    assert re.match(note, raised.value.__notes__[-1])
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    trace = str(raised.value.__cause__)
    assert 'raise ValueError(f"broken joint' in trace
    assert "autoreset.py" not in trace  # frames of this package are left out


def test_every_fault_is_logged(make, monkeypatch):
    lines = []
    monkeypatch.setattr(gym.logger, "error", lines.append)
    pool = make(4)
    pool.reset(seed=0)
    with pytest.raises(ValueError, match="broken joint 3"):
        pool.step([RAISE, FINE, FINE, RAISE])
    told = [(line.splitlines()[0], line.splitlines()[-1]) for line in lines]
    assert told == [
        ("envs 0 raised, in step:", "ValueError: broken joint 0"),
        ("envs 3 raised, in step:", "ValueError: broken joint 3"),
    ]
    with pytest.raises(ResetNeeded):
        pool.send([0], [0])
    obs, _ = pool.reset(seed=0)
    assert obs[:, 1].tolist() == [0] * 4
    pool.step(actions(0, FINE))
    del lines[:]
    with pytest.raises(AttributeError):
        pool.get_attr("nothing")
    assert [line.splitlines()[0] for line in lines] == ["envs 0, 1, 2, 3 raised, in call:"]


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_reset_names_the_env(make, way):
    pool = make(**WAYS[way])
    for env_id in (0, 3):
        with pytest.raises(KeyError, match="no such level") as raised:
            pool.reset(options={"raises": env_id})
        assert f"env {env_id} " in raised.value.__notes__[-1]
    pool.reset()
    pool.step(actions(0, FINE))


def raise_error(text):
    raise OSError(text)


def test_a_factory_that_kills_its_process_is_reported():
    with pytest.raises(EnvCreationError, match=r"worker 1 \(envs 3-4, .* exited with code 9"):
        AsyncVectorEnv([FaultyEnv] * 3 + [functools.partial(os._exit, 9)] * 2, num_workers=2)


def test_unknown_options_are_refused():
    no_time = {"timeout": 0, "on_error": "restart"}
    for options in ({"on_error": "ignore"}, {"num_workers": 0}, {"num_workers": 2.5}, no_time):
        with pytest.raises(ValueError, match=next(iter(options))):
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
    assert time.monotonic() - begin < 30  # 0.2 on an idle machine
    message = str(raised.value)
    assert re.match(rf"worker 1 \(envs 2-3, pid \d+\) {how} during step 1\.", message)
    assert f"It was at env 3, action {action}." in message
    assert "The vector env is closed: make a new one" in message
    assert wait_until_gone(pids) == []
    for call in (lambda: pool.step([FINE] * 4), pool.reset, pool.recv, lambda: pool.call("pid")):
        with pytest.raises(ClosedEnvironmentError, match=rf"{how[-9:]}.*env 3, action") as refused:
            call()
        assert "WorkerDiedError" in str(refused.value)
    pool.close()


def test_a_hanging_env_is_named_and_its_late_result_stays_where_it_belongs(make):
    pool = make()
    pool.reset()
    pool.step_async(actions(1, HANG))
    text = r"step 1 has timed out .* worker 0 at env 1\. It stays"
    with pytest.raises(StepTimeoutError, match=text) as raised:
        pool.step_wait(timeout=HANG_S / 2)
    assert isinstance(raised.value, multiprocessing.TimeoutError)
    assert isinstance(raised.value, TimeoutError)
    with pytest.raises(StepTimeoutError):
        pool.step_wait(timeout=0)
    obs, *_ = pool.step_wait(timeout=10)
    assert obs[:, 1].tolist() == [1, 1, 1, 1]
    assert pool.step(actions(0, FINE))[0][:, 1].tolist() == [2, 2, 2, 2]


def test_recv_names_the_envs_it_has_waited_for(make):
    pool = make()
    pool.reset()
    pool.send(actions(3, HANG))
    with pytest.raises(StepTimeoutError, match=r"waiting for envs 3\..*`recv`"):
        pool.recv(timeout=HANG_S / 2)
    assert sorted(pool.recv(3).env_ids) == [0, 1, 2]
    assert pool.recv(timeout=10).obs.tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("action", "mode"),
    fast_are([(RAISE, NEXT_STEP), (DIE, SAME_STEP)], product([RAISE, DIE], MODES)),
)
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


@pytest.mark.parametrize(
    ("action", "most"), fast_are([(RAISE, None), (DIE, 1)], product([RAISE, DIE], [None, 1]))
)
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


@pytest.mark.slow
def test_killed_workers(make, rounds=60):
    """kill -9 at random points: always survived, never a hang."""
    rng = np.random.default_rng(1)
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


def test_envs_of_which_a_process_can_have_one_ask_for_a_worker_each():
    env_fns = [functools.partial(OnlyEnv, name) for name in range(4)]
    with pytest.raises(EnvCreationError, match=r"env 1 of 4 .*multiple emulator") as raised:
        AsyncVectorEnv(env_fns, num_workers=2)
    assert "num_workers=4" in raised.value.__notes__[-1]
    pool = AsyncVectorEnv(env_fns, num_workers=4)
    pool.reset()
    assert len(set(pool.call("pid"))) == 4
    pool.close()


def test_sync_envs_of_which_a_process_can_have_one_say_what_to_do():
    with pytest.raises(EnvCreationError, match="multiple emulator") as raised:
        SyncVectorEnv([OnlyEnv] * 2)
    assert "num_workers=2: a worker for each" in raised.value.__notes__[-1]


class LateEnv(FaultyEnv):
    """Hangs in the step or reset whose number is asked for, once per folder."""

    def __init__(self, name, folder, call, number):
        super().__init__(name)
        self.where, self.calls = (folder / "hung", call, number), {"reset": 0, "step": 0}

    def hang(self, call):
        file, wanted, number = self.where
        self.calls[call] += 1
        if (call, self.calls[call]) == (wanted, number) and not file.exists():
            file.touch()
            time.sleep(60)

    def reset(self, **kwargs):
        self.hang("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.hang("step")
        return super().step(action)


LATE_S = 2.0  # longer than others may take on a busy machine


def late(folder, call, number, num_envs=4, env_id=3):
    return [
        functools.partial(LateEnv, name, folder, call if name == env_id else "", number)
        for name in range(num_envs)
    ]


@pytest.mark.parametrize("mode", fast_are([SAME_STEP], MODES))
def test_an_env_that_is_late_is_restarted_with_its_worker(tmp_path, mode):
    pool = AsyncVectorEnv(
        late(tmp_path, "step", 2),
        num_workers=2,
        on_error="restart",
        timeout=LATE_S,
        autoreset_mode=mode,
    )
    pool.reset(seed=1)
    pool.step([FINE] * 4)
    _, rewards, terminations, truncations, infos = pool.step([FINE] * 4)
    assert truncations.tolist() == [False, False, True, True]
    assert not terminations.any()
    assert rewards.tolist() == [1, 1, 0, 0]
    told = infos["final_info"] if mode.value == "SameStep" else infos
    reason = told["restart_reason"][3]
    assert f"was killed after step 2 had taken more than {LATE_S} second(s)" in reason
    assert "at env 3, action 0" in reason
    assert pool.restarts.tolist() == [0, 0, 1, 1]
    if mode.value == "Disabled":
        pool.reset(options={"reset_mask": truncations})
    for _ in range(3):
        assert not pool.step([FINE] * 4)[3].any()
    pool.close()


@pytest.mark.parametrize(
    ("caller_steps", "restarts"),
    fast_are([(True, [0, 0, 0, 1])], [(False, [0, 0, 1, 1]), (True, [0, 0, 0, 1])]),
)
def test_a_late_env_is_restarted_though_others_satisfy_recv(tmp_path, caller_steps, restarts):
    options = {"num_workers": 2, "on_error": "restart", "timeout": LATE_S}
    pool = AsyncVectorEnv(late(tmp_path, "step", 2), caller_steps=caller_steps, **options)
    pool.reset(seed=1)
    pool.send([FINE] * 4)
    truncated = np.zeros(4, bool)
    give_up = time.monotonic() + 30
    while not truncated[3] and time.monotonic() < give_up:
        batch = pool.recv(1)
        truncated[batch.env_ids] |= batch.truncations
        pool.send([FINE] * len(batch.env_ids), batch.env_ids)
    assert truncated[3]
    assert pool.restarts.tolist() == restarts
    pool.close()


def test_a_timeout_given_to_a_call_restarts_nobody(make):
    pool = make(on_error="restart", timeout=30)
    pool.reset()
    pool.send(actions(3, HANG))
    with pytest.raises(StepTimeoutError, match="It stays pending"):
        pool.recv(timeout=0.05)
    assert len(pool.recv().env_ids) == 4
    pool.step_async(actions(1, HANG))
    with pytest.raises(StepTimeoutError):
        pool.step_wait(timeout=0.05)
    pool.step_wait()
    assert pool.restarts.tolist() == [0] * 4


class WrongResetEnv(FaultyEnv):
    """Returns what its options say, and a reset must not return; counts its resets."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        obs, info = super().reset(seed=seed)
        kind = options.get("kind") if options else None
        if kind == "shape":
            return np.zeros(5, np.float32), info
        if kind == "info":
            return obs, [self.name]
        if kind == "one thing":
            return obs[0]
        if kind == "exit":
            raise SystemExit(3)
        return obs, info


WRONG_RESETS = {
    "shape": (ObservationError, r"^env 3 returned an observation of shape \(5,\)"),
    "info": (InfoError, "^env 2 returned the infos .* of type list"),
    "one thing": (ObservationError, r"^env 3 returned .* from reset, expected \(obs, info\)"),
    "exit": (EnvStepError, r"env 3 raised SystemExit\(3\)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_reset_names_the_env_and_resets_each_env_once(way):
    kinds = [FaultyEnv, FaultyEnv, WrongResetEnv, WrongResetEnv]
    env_fns = [functools.partial(kind, name) for name, kind in enumerate(kinds)]
    pool = AsyncVectorEnv(env_fns, timeout=30, **WAYS[way])
    pool.reset()
    for kind, (error, message) in WRONG_RESETS.items():
        with pytest.raises(error, match=message) as raised:
            pool.reset(options={"kind": kind})
        assert kind == "info" or "Raised by env 3 in worker" in raised.value.__notes__[-1]
        assert pool.get_attr("name") == (0, 1, 2, 3)
        pool.reset()
        assert pool.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    pool.close()


class BadlyError(Exception):
    def __str__(self):
        raise ValueError("no text")

    def __repr__(self):
        raise ValueError("no text either")

    def __reduce__(self):
        raise TypeError("not to be pickled")


class NastyEnv(FaultyEnv):
    """Its steps end in what only their author can have thought of; from step 2 on if asked."""

    kind = ""

    def step(self, action):
        result = super().step(action)
        if self.count < 2 or self.name != 1:
            return result
        if self.kind == "exit":
            raise SystemExit(2)
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "text":
            raise BadlyError
        if self.kind == "unpicklable info":
            return (*result[:4], {"lock": threading.Lock()})
        return (*result[:4], {"text": Unloadable()})

    def lock(self):
        return threading.Lock() if self.name == 1 else None


class Unloadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self):
        return raise_error, ("not here",)


NASTY = {
    "exit": r"env 1 raised SystemExit\(2\)",
    "interrupt": r"env 1 raised KeyboardInterrupt\(\)",
    "text": r"env 1 raised <BadlyError",
    "unpicklable info": "cannot pickle",
    "unreadable info": "not here",
}


def test_nothing_that_an_env_does_takes_its_worker_along():
    env_fns = [functools.partial(NastyEnv, name) for name in range(4)]
    pool = AsyncVectorEnv(env_fns, num_workers=2, timeout=30)
    pids = pool.call("pid")
    for kind, call in itertools.product(NASTY, ("step", "send")):
        pool.set_attr("kind", kind)
        pool.reset()
        pool.step([FINE] * 4)
        with pytest.raises(Exception, match=NASTY[kind]) as raised:
            if call == "step":
                pool.step([FINE] * 4)
            else:
                pool.send([FINE] * 4)
                while True:
                    pool.recv(1)
        assert isinstance(raised.value, Exception)
        assert call == "step" or "env 1 in worker 0" in raised.value.__notes__[-1]
        pool.reset()
        assert pool.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    with pytest.raises(TypeError, match="cannot pickle") as raised:
        pool.call("lock")
    assert "env 1 in worker 0" in raised.value.__notes__[-1]
    assert pool.call("pid") == pids
    pool.close()


def test_arguments_that_cannot_be_pickled_are_refused_before_anything_is_done(make):
    pool = make(timeout=30)
    pool.reset()
    for call in (
        lambda: pool.reset(options={"lock": threading.Lock()}),
        lambda: pool.set_attr("name", threading.Lock()),
        lambda: pool.call("nap", threading.Lock()),
    ):
        with pytest.raises(TypeError, match="cannot pickle"):
            call()
    assert pool.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    with pytest.raises(OSError, match="not here"):
        pool.call("nap", Unloadable())
    assert pool.call("nap", 0) == (0, 1, 2, 3)


def test_after_an_envs_exception_the_next_step_tells_of_it(make):
    pool = make()
    pool.reset()
    with pytest.raises(ValueError, match="broken joint 3"):
        pool.step(actions(3, RAISE))
    for call in (lambda: pool.step([FINE] * 4), lambda: pool.send([FINE], [0]), pool.recv):
        with pytest.raises(ResetNeeded, match=r"ValueError: broken joint 3 .*step 1"):
            call()
    pool.reset()
    pool.step([FINE] * 4)


class OnceEnv(FaultyEnv):
    """Can be made once per folder."""

    def __init__(self, name, folder):
        super().__init__(name)
        (folder / str(name)).mkdir()


def test_a_worker_that_cannot_be_replaced_is_what_the_next_calls_tell(tmp_path):
    env_fns = [functools.partial(OnceEnv, name, tmp_path) for name in range(4)]
    pool = AsyncVectorEnv(env_fns, **TWO, on_error="restart")
    pool.reset()
    with pytest.raises(WorkerDiedError, match=r"SIGKILL.*could not be replaced: Making env 2"):
        pool.step(actions(3, DIE))
    with pytest.raises(ClosedEnvironmentError, match=r"SIGKILL.*could not be replaced"):
        pool.step([FINE] * 4)


class SuicidalEnv(FaultyEnv):
    """Takes its process along in every reset after the first."""

    def __init__(self, name, folder):
        super().__init__(name)
        self.file = folder / str(name)

    def reset(self, **kwargs):
        if self.name == 3 and self.file.exists():
            os._exit(9)
        self.file.touch()
        return super().reset(**kwargs)


def test_an_env_that_dies_again_and_again_is_given_up(tmp_path):
    env_fns = [functools.partial(SuicidalEnv, name, tmp_path) for name in range(4)]
    pool = AsyncVectorEnv(env_fns, **TWO, on_error="restart")
    pool.reset()
    with pytest.raises(WorkerDiedError, match=r"exited with code 9 .*5 workers .* ended, too"):
        pool.reset()


def test_messages_that_fill_the_pipe_both_ways_do_not_block():
    """Large infos come while large actions go; nobody waits for the other to read first."""
    env_fns = [functools.partial(LargeEnv, name) for name in range(4)]
    pool = AsyncVectorEnv(env_fns, **TWO, timeout=30)
    pool.reset()
    action = tuple(range(200_000))
    for number in (1, 2, 3):
        for env_id in range(4):
            pool.send([action], [env_id])
        received = [pool.recv(1) for _ in range(1)]
        while pool._calls.num_in_flight:
            received.append(pool.recv(1))
        assert sorted(np.concatenate([batch.env_ids for batch in received])) == [0, 1, 2, 3]
        texts = [text for batch in received for text in batch.infos["text"]]
        assert [text.strip("x") for text in texts] == [str(number)] * 4
        assert {len(text) for text in texts} == {400_001}
    pool.close()


class LargeEnv(FaultyEnv):
    action_space = gym.spaces.Sequence(Discrete(200_001))

    def step(self, action):
        result = super().step(0)
        return (*result[:4], {"text": "x" * 400_000 + str(self.count)})


class Published(FaultyEnv):
    """Publishes a value, from its first reset on."""

    publish = {"load": Box(0, 9, (2,), np.float32)}
    raises = ""

    def __init__(self, value=(0.0, 0.0)):
        super().__init__()
        self.value = value

    def reset(self, *, seed=None, options=None):
        if self.raises:
            raise KeyError(self.raises)
        self.load = self.value
        return super().reset(seed=seed, options=options)


class Unbooted(Published):
    raises = "no licence"


@pytest.mark.parametrize("options", WAYS.values())
def test_an_env_that_raises_publishes_nothing(options):
    pool = AsyncVectorEnv([Published, Unbooted], **options)
    with pytest.raises(KeyError, match="no licence"):
        pool.reset()
    pool.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"load, which is published, has shape \(\) and dtype float64, expected \(2,\) and f"),
        (np.zeros(3), r"load, .* has shape \(3,\)"),
        (["a", "b"], "could not convert string to float"),
    ],
)
def test_what_is_published_is_not_spread_over_a_row(value, message):
    factories = [lambda: Published(value)] * 2
    with contextlib.closing(AsyncVectorEnv(factories, num_workers=1)) as pool:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            pool.reset()
        assert raised.value.env_index == 1


@pytest.mark.parametrize(("nap_s", "is_kept"), [(60, False), (0.5, True)])
def test_a_reset_after_an_interrupt_replaces_workers_whose_envs_hang(
    nap_s, is_kept, make, monkeypatch
):
    monkeypatch.setattr("vecenv.workers.pool._GRACE_S", 5.0 if is_kept else 0.2)
    pool = make(4)
    pool.reset(seed=0)
    pids = pool.call("pid")
    pool.call_async("nap", nap_s)
    with interrupted_after(0.1), pytest.raises(KeyboardInterrupt):
        pool.call_wait()
    begin = time.monotonic()
    pool.reset(seed=0)
    assert time.monotonic() - begin < 30  # and not 60
    assert set(pool.call("pid")).isdisjoint(pids) is not is_kept


def test_one_failing_factory_is_told_while_another_still_works():
    env_fns = [functools.partial(time.sleep, 60), functools.partial(raise_error, "no licence")]
    begin = time.monotonic()
    with pytest.raises(EnvCreationError, match="Making env 1 of 2 failed with OSError"):
        AsyncVectorEnv(env_fns, num_workers=2)
    assert time.monotonic() - begin < 30


def test_a_maker_of_vector_envs_as_a_factory_is_told_the_way():
    def make_vec(num_envs):
        raise AssertionError

    with pytest.raises(EnvCreationError, match="makes a vector env, give module:KERNELS, or reg"):
        AsyncVectorEnv([make_vec] * 2, num_workers=2)


def test_a_closed_pool_that_is_referenced_has_no_files_open():
    before = open_files()
    pool = AsyncVectorEnv(faulty(4), num_workers=2)
    pool.close(terminate=True)
    assert open_files() == before


def test_too_few_files_for_so_many_workers_are_told():
    code = """
import resource
from vecenv import AsyncVectorEnv
from workers.faulty_envs import faulty, open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
counts = []
for _ in range(2):
    try:
        AsyncVectorEnv(faulty(40), num_workers=40)
    except OSError as error:
        print(error.__notes__[0])
    counts.append(len(open_files()))
print(counts[0] == counts[1])
"""
    told = printed(code)
    assert " ".join(told).startswith("40 workers need three files each: raise the limit")
    assert told[-1] == "True"


@contextlib.contextmanager
def interrupted_after(seconds):
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    timer.start()
    yield
    timer.join()


class DiaryEnv(FaultyEnv):
    """Keeps what was asked of it, over resets, and notes in a file that it was closed."""

    def __init__(self, name=0, folder=None):
        super().__init__(name)
        self.folder, self.diary = folder, []

    def step(self, action):
        self.diary.append(int(action))
        return super().step(action)

    def close(self):
        with open(self.folder / f"{self.name}", "a") as file:
            file.write("closed\n")


@pytest.fixture
def diaries(tmp_path):
    env_fns = [functools.partial(DiaryEnv, name, tmp_path) for name in range(4)]
    pool = AsyncVectorEnv(env_fns, num_workers=1)
    pool.reset()
    yield pool
    pool.close()


def test_envs_behind_one_that_raises_get_their_own_actions(diaries):
    given = [RAISE, WRONG_REWARD, RAISE, FINE]
    with pytest.raises((ValueError, ObservationError)):
        diaries.step(given)
    diaries.reset()
    assert diaries.get_attr("diary") == tuple([action] for action in given)


def test_a_full_reset_voids_what_a_worker_has_not_begun(diaries):
    diaries.send([HANG], [0])
    diaries.send([FINE], [1])
    diaries.reset()
    assert diaries.get_attr("diary")[1] == []


def test_envs_that_a_state_replaces_are_closed(diaries, tmp_path):
    diaries.load_state_dict(diaries.state_dict())
    assert [(tmp_path / str(name)).read_text() for name in range(4)] == ["closed\n"] * 4


def test_workers_know_envs_registered_after_they_started(diaries):
    gym.register("Late-v0", lambda: FaultyEnv(7))
    try:
        diaries.reopen([0], [functools.partial(gym.make, "Late-v0", disable_env_checker=True)])
    finally:
        gym.registry.pop("Late-v0")
    assert diaries.reset()[0][0, 0] == 7


def test_ctrl_c_in_a_workers_factory_is_a_fault_of_its_env():
    env_fns = [FaultyEnv, functools.partial(raise_interrupt)]
    with pytest.raises(EnvCreationError, match="Making env 1 of 2 failed with KeyboardInterrupt"):
        AsyncVectorEnv(env_fns, num_workers=1)


def raise_interrupt():
    raise KeyboardInterrupt


class UnloadableFactory(Unloadable):
    def __call__(self):
        return FaultyEnv()


def test_a_factory_that_cannot_be_unpickled_in_a_worker_names_its_first_env():
    with pytest.raises(EnvCreationError, match="Making env 1 of 3"):
        AsyncVectorEnv([FaultyEnv, UnloadableFactory(), FaultyEnv], num_workers=3, context="spawn")
