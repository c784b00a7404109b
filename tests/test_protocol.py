"""Which call may follow which: a state machine against a list model, and what refusals say."""

import numpy as np
import pytest
import torch
from envs import MODES, counters
from equality import assert_same
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from vecenv import SyncVectorEnv

LENGTHS = [1, 2, 3, 9]
IDS = st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, unique=True)


class Model:
    """Counter envs and the calls to them, as lists; slow and obvious."""

    def __init__(self, mode):
        self.mode = mode
        self.episodes = [-1] * len(LENGTHS)
        self.steps = [0] * len(LENGTHS)
        self.has_ended = [False] * len(LENGTHS)
        self.sent = []  # ids in flight, in order
        self.is_reset = False
        self.is_closed = False

    def reset(self, ids):
        for i in ids:
            self.episodes[i] += 1
            self.steps[i] = 0
            self.has_ended[i] = False
        self.is_reset = True

    def obs(self, ids):
        return [[i, self.episodes[i], self.steps[i]] for i in ids]

    def step(self, ids):
        """Results of these envs, one row each: obs, reward, whether the episode ended."""
        rows = []
        for i in ids:
            if self.has_ended[i]:
                assert self.mode is AutoresetMode.NEXT_STEP
                self.reset([i])
                rows.append((self.obs([i])[0], 0, False))
                continue
            self.steps[i] += 1
            reward, ends = self.steps[i], self.steps[i] == LENGTHS[i]
            if ends and self.mode is AutoresetMode.SAME_STEP:
                self.reset([i])
            else:
                self.has_ended[i] = ends
            rows.append((self.obs([i])[0], reward, ends))
        return rows

    def refusal(self, call, ids):
        """The error that a call must raise in this state, or None."""
        if self.is_closed:
            return ClosedEnvironmentError
        if call == "recv":
            return None if self.sent else NoAsyncCallError
        if call == "reset":
            if len(ids) == len(LENGTHS):
                return None
            if not self.is_reset:
                return ResetNeeded
            return AlreadyPendingCallError if set(ids) & set(self.sent) else None
        if call in {"render", "call", "set_attr"}:
            return AlreadyPendingCallError if self.sent else None
        if not self.is_reset:
            return ResetNeeded
        if (call == "step" and self.sent) or set(ids) & set(self.sent):
            return AlreadyPendingCallError
        is_stuck = self.mode is AutoresetMode.DISABLED and any(self.has_ended[i] for i in ids)
        return ResetNeeded if is_stuck else None


ALL_IDS = list(range(len(LENGTHS)))


class Protocol(RuleBasedStateMachine):
    """Every call in every state: it does what the model does, or raises the error due."""

    @initialize(mode=st.sampled_from(MODES), copy=st.booleans())
    def make(self, mode, copy):
        self.envs = SyncVectorEnv(counters(LENGTHS), copy=copy, autoreset_mode=mode)
        self.model = Model(mode)

    def is_refused(self, name, ids, call):
        expected = self.model.refusal(name, ids)
        if expected is None:
            return False
        calls = [list(env.calls) for env in self.envs.envs]
        with pytest.raises(expected):
            call()
        assert [env.calls for env in self.envs.envs] == calls
        return True

    def check(self, ids, rows, obs, rewards, terminations, truncations):
        assert obs.tolist() == [row[0] for row in rows]
        assert rewards.tolist() == [row[1] for row in rows]
        assert terminations.tolist() == [row[2] for row in rows]
        assert not truncations.any()
        assert obs.dtype == np.float32
        assert rewards.dtype == np.float64
        assert terminations.dtype == truncations.dtype == np.bool_

    @rule()
    def reset(self):
        if self.is_refused("reset", ALL_IDS, self.envs.reset):
            return
        obs, _ = self.envs.reset()
        self.model.reset(ALL_IDS)
        self.model.sent = []
        assert obs.tolist() == self.model.obs(ALL_IDS)

    @rule(ids=IDS)
    def reset_some(self, ids):
        mask = np.isin(ALL_IDS, ids)
        options = {"reset_mask": mask}
        if self.is_refused("reset", ids, lambda: self.envs.reset(options=options)):
            return
        obs, infos = self.envs.reset(options=options)
        self.model.reset(sorted(ids))
        if len(ids) == len(LENGTHS):
            self.model.sent = []
        assert obs.tolist() == self.model.obs(ALL_IDS)
        assert_same(infos["_episode"], mask)

    @rule()
    def step(self):
        actions = np.zeros(len(LENGTHS), int)
        if self.is_refused("step", ALL_IDS, lambda: self.envs.step(actions)):
            return
        rows = self.model.step(ALL_IDS)
        self.check(ALL_IDS, rows, *self.envs.step(actions)[:4])

    @rule(ids=st.one_of(IDS, st.none()), as_array=st.booleans())
    def send(self, ids, as_array):
        chosen = ALL_IDS if ids is None else ids
        given = np.array(ids) if as_array and ids else ids
        actions = [0] * len(chosen)
        if self.is_refused("send", chosen, lambda: self.envs.send(actions, given)):
            return
        self.envs.send(actions, given)
        self.model.sent += chosen

    @rule(count=st.integers(1, len(LENGTHS)))
    def recv(self, count):
        if self.is_refused("recv", [], self.envs.recv):
            return
        if count > len(self.model.sent):
            with pytest.raises(ValueError, match=f"min_envs is {count}, expected an integer from"):
                self.envs.recv(min_envs=count)
            count = None
        batch = self.envs.recv(min_envs=count)
        ids = self.model.sent[:count]
        self.model.sent = self.model.sent[len(ids) :]
        assert_same(batch.env_ids, np.array(ids, np.int64))
        self.check(ids, self.model.step(ids), *batch[:4])

    @rule(name=st.sampled_from(["render", "call", "set_attr"]))
    def other_calls(self, name):
        arguments = {"render": (), "call": ("double", 4), "set_attr": ("color", "red")}[name]
        if self.is_refused(name, [], lambda: getattr(self.envs, name)(*arguments)):
            return
        result = getattr(self.envs, name)(*arguments)
        expected = {
            "render": tuple(f"frame of {i}" for i in ALL_IDS),
            "call": tuple(8 + i for i in ALL_IDS),
            "set_attr": None,
        }
        assert result == expected[name]

    @rule(is_due=st.integers(0, 19))
    def close(self, is_due):
        if is_due == 0:
            self.envs.close()
            self.model.is_closed = True
            assert self.envs.closed
            assert all(env.is_closed for env in self.envs.envs)


Protocol.TestCase.settings = settings(max_examples=20, stateful_step_count=30)
TestProtocol = Protocol.TestCase


@pytest.fixture
def envs():
    envs = SyncVectorEnv(counters([9, 9, 9]))
    yield envs
    envs.close()


def test_step_and_send_before_reset_say_so(envs):
    with pytest.raises(ResetNeeded, match="`step` was called before the first `reset`"):
        envs.step([0, 0, 0])
    with pytest.raises(ResetNeeded, match="`send` was called before the first `reset`"):
        envs.send([0, 0, 0])
    assert envs.get_attr("calls") == ([], [], [])


def test_recv_without_send_names_both(envs):
    envs.reset()
    with pytest.raises(NoAsyncCallError, match="`recv` was called without a pending `send`") as e:
        envs.recv()
    assert e.value.name == "recv"


@pytest.mark.parametrize("name", ["step", "render", "call", "get_attr", "set_attr"])
def test_calls_while_envs_are_in_flight_name_the_pending_call(envs, name):
    arguments = {"step": ([0, 0, 0],), "call": ("calls",), "get_attr": ("calls",)}
    envs.reset()
    envs.send([0, 0], [2, 1])
    message = r"while 2 envs are in flight since `send` \(the first is env 1\); call `recv`"
    with pytest.raises(AlreadyPendingCallError, match=message) as caught:
        getattr(envs, name)(*arguments.get(name, () if name == "render" else ("color", 1)))
    assert caught.value.name == "send"
    assert envs.recv().env_ids.tolist() == [2, 1]
    assert envs.step([0, 0, 0])[1].tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([3], ValueError, "env_ids has 3, expected ids from 0 to 2"),
        ([-1, 0], ValueError, "env_ids has -1, expected ids from 0 to 2"),
        ([1, 1], ValueError, "repeated ids: 2 ids, 1 different"),
        ([], ValueError, r"non-empty \(B,\) array of ids, got shape \(0,\)"),
        ([[0, 1]], ValueError, r"got shape \(1, 2\)"),
        (1, ValueError, r"got shape \(\)"),
        ([0.0, 1.0], TypeError, "must be integers, got dtype float64"),
        ([True, False, True], TypeError, "must be integers, got dtype bool"),
        (torch.ones(2, requires_grad=True), TypeError, "can't be made an array of integers"),
    ],
)
def test_wrong_ids_are_refused(envs, ids, error, message):
    envs.reset()
    with pytest.raises(error, match=message):
        envs.send(np.zeros(len(ids) if hasattr(ids, "__len__") else 1, int), ids)
    with pytest.raises(NoAsyncCallError):
        envs.recv()
    assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("min_envs", [1.5, 1.0, True, "1", np.float64(2)])
def test_recv_of_something_else_than_a_number_of_envs_is_refused(envs, min_envs):
    envs.reset()
    envs.send([0, 0], [0, 2])
    with pytest.raises(ValueError, match="expected an integer"):
        envs.recv(min_envs=min_envs)
    assert envs.recv(min_envs=np.int32(2)).env_ids.tolist() == [0, 2]
