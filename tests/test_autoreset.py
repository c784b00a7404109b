"""Exact autoreset in all modes, shown with envs that count; partial resets; what envs get wrong."""

import gymnasium as gym
import numpy as np
import pytest
from envs import MODES, CounterEnv, counters, mode_id
from equality import assert_same
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from buffers import RolloutBuffer
from vecenv import AsyncVectorEnv, ObservationError, SyncVectorEnv, make_vec
from vecenv.jit.cartpole import CartPoleVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = MODES


def steps(envs, count):
    """Obs (as name, episode, step), rewards and flags of several steps, as lists."""
    rows = []
    for k in range(count):
        obs, rewards, terminations, truncations, infos = envs.step([k] * envs.num_envs)
        flags = [
            "T" if ended else "t" if cut else "-"
            for ended, cut in zip(terminations, truncations, strict=True)
        ]
        rows.append((obs[:, 1:].astype(int).tolist(), rewards.tolist(), "".join(flags), infos))
    return rows


@pytest.mark.parametrize(("truncates", "mark"), [(False, "T"), (True, "t")])
def test_next_step_resets_in_the_step_after_the_end(truncates, mark):
    envs = SyncVectorEnv(counters([2, 3], truncates=truncates), autoreset_mode=NEXT_STEP)
    envs.reset(seed=5)
    rows = steps(envs, 5)
    assert [row[:3] for row in rows] == [
        ([[0, 1], [0, 1]], [1, 1], "--"),
        ([[0, 2], [0, 2]], [2, 2], f"{mark}-"),
        ([[1, 0], [0, 3]], [0, 3], f"-{mark}"),
        ([[1, 1], [1, 0]], [1, 0], "--"),
        ([[1, 2], [1, 1]], [2, 1], f"{mark}-"),
    ]
    expected_infos = {
        "episode": np.array([1, 0]),
        "_episode": np.array([True, False]),
        "step": np.array([0, 3]),
        "_step": np.array([False, True]),
    }
    assert_same(rows[2][3], expected_infos)
    # The action of the dead step reaches nobody, and resets have neither seed nor options.
    assert envs.envs[0].calls == [
        ("reset", 5, None), ("step", 0), ("step", 1),
        ("reset", None, None), ("step", 3), ("step", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("truncates", "mark"), [(False, "T"), (True, "t")])
def test_same_step_returns_the_new_episode_and_keeps_the_final_observation(truncates, mark):
    envs = SyncVectorEnv(counters([2, 3], truncates=truncates), autoreset_mode=SAME_STEP)
    envs.reset(seed=5)
    rows = steps(envs, 4)
    assert [row[:3] for row in rows] == [
        ([[0, 1], [0, 1]], [1, 1], "--"),
        ([[1, 0], [0, 2]], [2, 2], f"{mark}-"),
        ([[1, 1], [1, 0]], [1, 3], f"-{mark}"),
        ([[2, 0], [1, 1]], [2, 1], f"{mark}-"),
    ]
    assert "final_obs" not in rows[0][3]
    final_obs = np.array([np.array([0, 0, 2], np.float32), None], dtype=object)
    expected_infos = {
        "final_obs": final_obs,
        "_final_obs": np.array([True, False]),
        "final_info": {"step": np.array([2, 0]), "_step": np.array([True, False])},
        "_final_info": np.array([True, False]),
        "episode": np.array([1, 0]),
        "_episode": np.array([True, False]),
        "step": np.array([0, 2]),
        "_step": np.array([False, True]),
    }
    assert_same(rows[1][3], expected_infos)
    assert envs.envs[1].calls[3:] == [("step", 2), ("reset", None, None), ("step", 3)]


@pytest.mark.parametrize(("truncates", "mark"), [(False, "T"), (True, "t")])
def test_disabled_leaves_resets_to_the_caller(truncates, mark):
    envs = SyncVectorEnv(counters([2, 3], truncates=truncates), autoreset_mode=DISABLED)
    envs.reset(seed=5)
    rows = steps(envs, 2)
    assert rows[1][:3] == ([[0, 2], [0, 2]], [2, 2], f"{mark}-")
    assert "final_obs" not in rows[1][3]
    obs, infos = envs.reset(options={"reset_mask": np.array([True, False])})
    assert obs.tolist() == [[0, 1, 0], [1, 0, 2]]
    assert_same(infos, {"episode": np.array([1, 0]), "_episode": np.array([True, False])})
    assert steps(envs, 1)[0][:3] == ([[1, 1], [0, 3]], [1, 3], f"-{mark}")


class ReusedParts(gym.Env):
    """Returns one dict again and again, and one info with a dict and an array in it."""

    observation_space = spaces.Dict(pos=spaces.Box(-9, 9, (2,)), left=spaces.Discrete(9))
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.obs = {"pos": np.zeros(2, np.float32), "left": 0}
        self.info = {"pos": np.zeros(2, np.float32), "deep": {"left": 0}}

    def _set(self, value):
        self.obs["pos"][:] = self.info["pos"][:] = value
        self.obs["left"] = self.info["deep"]["left"] = value
        return self.obs, self.info

    def reset(self, *, seed=None, options=None):
        return self._set(7)

    def step(self, action):
        obs, info = self._set(3)
        return obs, 0.0, True, False, info


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_observations_and_final_ones_survive_envs_that_reuse_their_arrays(backend):
    """Also where Gymnasium's AsyncVectorEnv has the reset's values in `final_obs`."""
    envs = make_vec(ReusedParts, 2, backend=backend, autoreset_mode=SAME_STEP, copy=True)
    first, _ = envs.reset()
    obs, _, _, _, infos = envs.step([0, 0])
    for _ in range(2):
        envs.step([0, 0])
    envs.close()
    for kept in (first, obs):
        assert_same(kept["left"], np.array([7, 7]))
        assert_same(kept["pos"], np.full((2, 2), 7, np.float32))
    for i in range(2):
        assert_same(infos["final_obs"][i], {"pos": np.full(2, 3, np.float32), "left": 3})
    assert_same(infos["final_info"]["pos"], np.full((2, 2), 3, np.float32))
    assert_same(infos["final_info"]["deep"]["left"], np.array([3, 3]))


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_partial_reset_touches_only_the_masked_envs(mode):
    envs = SyncVectorEnv(counters([9, 9, 9]), autoreset_mode=mode)
    envs.reset(seed=1)
    envs.step([0, 0, 0])
    options = {"reset_mask": np.array([False, True, False]), "level": {"size": 3}}
    obs, infos = envs.reset(seed=20, options=options)
    assert obs.tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    assert_same(infos, {"episode": np.array([0, 1, 0]), "_episode": np.array([False, True, False])})
    assert envs.envs[1].calls[-1] == ("reset", 21, {"level": {"size": 3}})
    assert [len(env.calls) for env in envs.envs] == [2, 3, 2]
    assert envs.step([0, 0, 0])[0][:, 2].tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True, False], TypeError, r"reset_mask.*numpy array, got <class 'list'>"),
        (np.array([True]), ValueError, r"reset_mask.*shape `\(2,\)`, got \(1,\)"),
        (np.array([[True, False]]), ValueError, r"shape `\(2,\)`, got \(1, 2\)"),
        (np.array([1, 0]), TypeError, r"dtype=np.bool_`, got int64"),
        (
            np.array([False, False]),
            ValueError,
            r"at least one True.*got reset_mask=\[False False\]",
        ),
    ],
)
def test_wrong_masks_are_refused_before_anything_is_reset(mask, error, message):
    envs = SyncVectorEnv(counters([1, 9]))
    envs.reset()
    envs.step([0, 0])
    options = {"reset_mask": mask}
    with pytest.raises(error, match=message):
        envs.reset(options=options)
    assert list(options) == ["reset_mask"]
    assert [len(calls) for calls in envs.get_attr("calls")] == [2, 2]
    assert envs.step([0, 0])[0].tolist() == [[0, 1, 0], [1, 0, 2]]


class Faulty(CounterEnv):
    """Does `fault` in step 2 of env 1."""

    def __init__(self, name, fault, space=CounterEnv.observation_space):
        super().__init__(name, length=9)
        self.observation_space = space
        self.fault = fault

    def step(self, action):
        obs, *rest = super().step(action)
        if isinstance(self.observation_space, spaces.Dict):
            obs = {"all": obs}
        if self.name == 1 and self.step_number == 2:
            return self.fault(obs, *rest)
        return (obs, *rest)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return ({"all": obs} if isinstance(self.observation_space, spaces.Dict) else obs), info


DICT_SPACE = spaces.Dict(all=CounterEnv.observation_space)
FAULTS = {
    "short": (lambda obs, *rest: (obs[:2], *rest), r"env 1 .*shape \(2,\).*expected shape \(3,\)"),
    "number": (lambda obs, *rest: (1.0, *rest), r"env 1 .*shape \(\).*expected shape \(3,\)"),
    "text": (
        lambda obs, *rest: ("left", *rest),
        r"env 1 .*expected shape \(3,\) and dtype float32",
    ),
    "none": (lambda obs, *rest: (None, *rest), r"env 1 .*expected shape \(3,\) and dtype float32"),
    "complex": (lambda obs, *rest: (obs * 1j, *rest), r"env 1 .*dtype complex.*dtype float32"),
    "reward text": (
        lambda obs, _, *rest: (obs, "3", *rest),
        r"env 1 .*reward '3', expected one num",
    ),
    "reward none": (
        lambda obs, _, *rest: (obs, None, *rest),
        r"env 1 .*reward None, expected one n",
    ),
    "four values": (lambda obs, *rest: (obs, *rest[1:]), r"env 1 .*expected \(obs, reward, term"),
    "no result": (lambda *result: None, r"env 1 returned None from step, expected \(obs, reward"),
    "two rewards": (
        lambda obs, _, *rest: (obs, [1, 2], *rest),
        r"env 1 .*reward \[1, 2\], expected",
    ),
}
DICT_FAULTS = {
    "no part": (lambda obs, *rest: ({}, *rest), r"env 1 .*'all'"),
    "other part": (lambda obs, *rest: ({"some": 1}, *rest), r"env 1 .*'all'"),
    "no dict": (lambda obs, *rest: (obs["all"], *rest), r"env 1 "),
    "none": (lambda obs, *rest: (None, *rest), r"env 1 "),
    "short part": (lambda obs, *rest: ({"all": obs["all"][:2]}, *rest), r"env 1 .*shape \(2,\)"),
}


@pytest.mark.parametrize("calls", ["step", "send"])
@pytest.mark.parametrize(
    ("space", "fault", "message"),
    [(CounterEnv.observation_space, *case) for case in FAULTS.values()]
    + [(DICT_SPACE, *case) for case in DICT_FAULTS.values()],
    ids=[*FAULTS, *(f"dict: {name}" for name in DICT_FAULTS)],
)
def test_results_that_break_the_envs_own_space_name_the_env(space, fault, message, calls):
    envs = SyncVectorEnv([lambda name=name: Faulty(name, fault, space) for name in range(3)])
    envs.reset()
    envs.step([0, 0, 0])
    with pytest.raises(ObservationError, match=message):
        if calls == "step":
            envs.step([0, 0, 0])
        else:
            envs.send([0, 0, 0])
            envs.recv()
    obs, _ = envs.reset()
    assert len(obs) == (1 if space is DICT_SPACE else 3)
    assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["step", "reset", "autoreset"])
def test_an_exception_in_an_env_keeps_its_type_and_names_the_env(where):
    class Broken(CounterEnv):
        is_broken = False

        def step(self, action):
            if self.is_broken and where == "step":
                raise FloatingPointError("physics exploded")
            return super().step(action)

        def reset(self, *, seed=None, options=None):
            if self.is_broken:
                raise FloatingPointError("physics exploded")
            return super().reset(seed=seed, options=options)

    envs = SyncVectorEnv([lambda i=i: Broken(i, length=1) for i in range(3)])
    envs.reset()
    if where == "autoreset":
        envs.step([0, 0, 0])
    envs.set_attr("is_broken", [False, True, False])
    with pytest.raises(FloatingPointError, match="physics exploded") as caught:
        envs.reset(seed=4) if where == "reset" else envs.step([0, 0, 0])
    assert any("env 1" in note for note in caught.value.__notes__)
    assert caught.value.env_index == 1
    envs.set_attr("is_broken", False)
    assert envs.reset()[0][:, 2].tolist() == [0, 0, 0]
    assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


SPELLINGS = ["SameStep", "same_step", "SAME_STEP", "same-step", "samestep", SAME_STEP]
MAKERS = {
    "sync": lambda **mode: SyncVectorEnv(counters([1]), **mode),
    "async": lambda **mode: AsyncVectorEnv(counters([1]), **mode),
    "jit": lambda **mode: CartPoleVectorEnv(1, **mode),
    "make_vec": lambda **mode: make_vec(CounterEnv, 1, backend="sync", **mode),
    "vector_kwargs": lambda **mode: make_vec(CounterEnv, 1, backend="sync", vector_kwargs=mode),
    "rollout": lambda **mode: RolloutBuffer(1, 1, Box(-1, 1, (2,)), Discrete(2), **mode),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_mode_may_be_spelled_in_any_way_and_nothing_else(maker):
    for spelling in SPELLINGS[:1] if maker == "async" else SPELLINGS:
        made = MAKERS[maker](autoreset_mode=spelling)
        assert made.autoreset_mode is SAME_STEP
        if hasattr(made, "close"):
            made.close()
    for wrong in ("Sometimes", "", 3):
        expected = "'NextStep', 'SameStep', 'Disabled'"
        with pytest.raises(ValueError, match=f"autoreset_mode is {wrong!r}, .*{expected}"):
            MAKERS[maker](autoreset_mode=wrong)


def test_a_wrong_mode_is_refused_before_an_env_is_made():
    assert AutoresetMode(NEXT_STEP) is SyncVectorEnv(counters([1])).autoreset_mode
    made = []
    with pytest.raises(ValueError, match="'Sometimes'"):
        SyncVectorEnv([lambda: made.append(1)], autoreset_mode="Sometimes")
    assert made == []
