"""Batched infos of a pool are those of SyncVectorEnv and of Gymnasium, whatever the workers."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are
from equality import assert_same
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv as GymnasiumSyncVectorEnv

from vecenv import InfoError, SyncVectorEnv
from vecenv.core.infos import add_info
from vecenv.workers.env import AsyncVectorEnv

OPTIONS = {
    "2 workers": {"num_workers": 2},
    "a worker per env": {"num_workers": 4},
    "caller and 1": {"num_workers": 1, "caller_steps": True},
}
of_some_options = pytest.mark.parametrize(
    "options", fast_are(["2 workers", "caller and 1"], OPTIONS)
)


class Script(gym.Env):
    """Returns the infos it is given, one after the other; a new dict each time."""

    observation_space = spaces.Box(-1, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, infos, length=99):
        self.infos, self.length, self.count = list(infos), length, 0

    def _next(self):
        info = self.infos.pop(0) if self.infos else {}
        return np.zeros(1, np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._next()

    def step(self, action):
        self.count += 1
        obs, info = self._next()
        return obs, 0.0, self.count >= self.length, False, info


def scripts(per_env, **kwargs):
    """One factory per env; `per_env` has the infos of one step for all envs."""
    return [functools.partial(Script, [{}, *[info] * 3], **kwargs) for info in per_env]


VALUES = {
    "numbers of two types": [{"a": 0.5}, {"a": 1.5}, {"a": 0}, {"a": 3.5}],
    "the first decides": [{"a": 1}, {"a": 1.5}, {"a": 0.25}, {"a": 3.5}],
    "none and numbers": [{"a": None}, {"a": 1}, {"a": 2}, {"a": None}],
    "text and numbers": [{"a": "s"}, {"a": 0.5}, {"a": 0.5}, {"a": "s"}],
    "text of one env": [{}, {}, {"a": "word"}, {}],
    "text array of one env": [{}, {}, {}, {"a": np.array(["x", "yy"])}],
    "text arrays": [{}, {"a": np.array(["x", "y"])}, {"a": np.array(["long", "er"])}, {}],
    "one NumPy type": [{"a": np.float32(1)}, {"a": 2.5}, {"a": True}, {"a": np.int8(3)}],
    "NumPy bools": [{"a": np.bool_(True)}, {"a": 2}, {}, {"a": np.bool_(False)}],
    "arrays of two dtypes": [{"a": np.ones(2, t)} for t in ("f4", "i8", "f8", "?")],
    "a number for an array": [{"a": np.ones(2)}, {"a": 3}, {"a": np.zeros(2)}, {"a": [1, 2]}],
    "keys with their masks": [{"a": 1, "_a": 5}, {"_a": 2}, {"a": 3}, {"_a": 1, "a": 2}],
    "a mask first": [{"_a": 2.5}, {"a": 3}, {}, {"_a": 4, "a": 1}],
    "the user's final_info": [{"final_info": {"x": 1}}, {}, {"final_info": {"x": 2.5}}, {}],
    "the user's final_obs": [{"final_obs": np.ones(2)}, {"final_obs": {"x": 1}}, {}, {}],
    "nested": [{"d": {"x": 1}}, {"d": {"y": 2.5, "x": 0.5}}, {}, {"d": {}}],
    "a dict in one, a number in another": [{"d": {"x": 1}}, {"d": 2.5}, {}, {"d": {"y": 1}}],
    "another order of keys": [{}, {"a": 1, "b": 2}, {"b": 2, "c": 1, "a": 0}, {"c": 2}],
    "keys that are no text": [{1: 2.5}, {1: 3, None: 1}, {}, {(1, 2): "x"}],
    "records": [{"a": np.ones(1, [("x", "i4"), ("y", "f8")])}, {}, {}, {}],
    "times": [{"a": np.datetime64("2020-01-01")}, {"a": None}, {}, {"a": 1}],
    "large numbers": [{"a": 1.5}, {"a": 10**30}, {}, {}],
    "tuples": [{"a": (1, 2.5)}, {"a": (1, 2)}, {"a": None}, {}],
    "other byte orders": [{"a": np.ones(2, ">f4")}, {"a": np.ones(2, "<f4")}, {}, {}],
    "numbers of all": [{"a": 0.5 * k, "b": k, "c": k > 1, "d": np.float32(k)} for k in range(4)],
    "numbers of all in another order": [
        {"a": 1, "b": 2},
        {"b": 3, "a": 4},
        *[{"a": 5, "b": 6}] * 2,
    ],
    "as many other keys": [{"a": 1}, {"b": 2}, {"a": 3}, {"a": 4}],
    "a number and its mask of all": [{"a": 1.5, "_a": 2.5}] * 4,
    "a number as final_obs of all": [{"final_obs": 1.5}] * 4,
    "other numbers of all": [{"a": np.int8(k)} for k in range(4)],
    "empty arrays": [{"a": np.zeros((0, 2))}, {}, {"a": np.zeros((0, 2), "i4")}, {}],
}


@of_some_options
def test_infos_do_not_depend_on_the_number_of_workers(options):
    """The first env that has a key decides its dtype; what comes after is cast, as in Gymnasium."""
    cases = [(*infos, {}, {}, {})[:4] for infos in VALUES.values()]  # of the four envs
    per_env = [
        [{}, *(infos[k] for infos in cases for _ in range(3)), dict(zip(VALUES, row, strict=True))]
        for k, row in enumerate(zip(*cases, strict=True))
    ]
    fns = [functools.partial(Script, infos) for infos in per_env]
    pool = AsyncVectorEnv(fns, **OPTIONS[options])
    others = [make(fns) for make in (SyncVectorEnv, GymnasiumSyncVectorEnv)]
    for envs in (pool, *others):
        envs.reset()
    for number in range(3 * len(cases) + 1):
        expected = others[1].step([0] * 4)
        assert_same(others[0].step([0] * 4), expected, f"step {number}")
        assert_same(pool.step([0] * 4), expected, f"step {number}")
    pool.close()


@of_some_options
def test_rows_of_recv_have_the_infos_of_their_envs_alone(options):
    """Whoever comes back first decides the dtype, whatever envs that are not in the batch have."""
    infos = [{"a": 0.5}, {"a": 1}, {"a": 2.5}, {"b": "x"}]
    fns = scripts(infos)
    for envs in (AsyncVectorEnv(fns, **OPTIONS[options]), SyncVectorEnv(fns)):
        envs.reset()
        for ids in ([1, 0], [3, 2], [2, 1, 0]):
            envs.send([0] * len(ids), ids)
            left = len(ids)
            while left:
                batch = envs.recv()
                left -= len(batch.env_ids)
                expected = {}
                for row, env_id in enumerate(batch.env_ids.tolist()):
                    add_info(expected, infos[env_id], row, len(batch.env_ids))
                assert_same(batch.infos, expected)
        envs.close()


BAD = {
    "none after a number": [{"a": 1}, {}, {}, {"a": None}],
    "text after a number": [{"a": 1.5}, {}, {}, {"a": "fast"}],
    "arrays of other shapes": [{"a": np.ones(2)}, {}, {}, {"a": np.ones(3)}],
    "a number of many digits": [{"a": 1}, {}, {}, {"a": 10**30}],
    "numbers of many digits": [{"a": 10**30}] * 4,
    "a dict after a number": [{"a": 1.5}, {}, {}, {"a": {"x": 1}}],
    "nested": [{"d": {"a": 1}}, {}, {}, {"d": {"a": "x"}}],
    "no dict": [{}, {}, {}, [("a", 1)]],
}


# In recv the first that is ready decides, so these have to fail in any order.
IN_ANY_ORDER = ["arrays of other shapes", "no dict"]


@pytest.mark.parametrize("call", ["step", "reset", "recv"])
def test_infos_that_cannot_be_batched_name_env_and_key(call):
    """A worker does not die of them, nothing hangs, and a reset makes the pool usable."""
    names = IN_ANY_ORDER if call == "recv" else list(BAD)
    before = [] if call == "reset" else [{}]
    per_env = [
        [info for name in names for info in (*before, BAD[name][k], {}, {})] for k in range(4)
    ]
    fns = [functools.partial(Script, infos) for infos in per_env]
    pool = AsyncVectorEnv(fns, num_workers=2, timeout=30)
    for name in names:
        place = r"env 3" if name == "no dict" else r"infos(\['d'\])?\['a'\] of env [03]"
        with pytest.raises(InfoError, match=place):
            pool.reset()
            if call == "step":
                pool.step([0] * 4)
            pool.send([0] * 4)
            pool.recv()
        pool.reset()
        assert pool.step([0] * 4)[4] == {}
    pool.close()
