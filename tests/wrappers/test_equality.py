"""Our wrappers around a vector env, and Gymnasium's around each env: the same, step by step."""

import numpy as np
import pytest
from choices import fast_are
from equality import assert_same
from wrappers.slides import MODES, NAMES, make_both, run


def assert_same_runs(ours, theirs, mode, seed, num_calls, **kwargs):
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.observation_space == theirs.observation_space
    found = [run(envs, mode, seed, num_calls, **kwargs) for envs in (ours, theirs)]
    ours.close()
    theirs.close()
    ends = 0
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same(a, b, f"call {number}")
        ends += 0 if b[0] in ("reset", "mask") else int((b[3] | b[4]).sum())
    return ends


# Of compiled envs every second wrapper in one mode; the wrappers do not know what they are around.
JIT = [("jit", name, MODES[number % 3]) for number, name in enumerate(NAMES)]
ONES = [("sync", name, mode) for name in NAMES for mode in MODES]
ONES = fast_are(ONES + JIT[::2], ONES + JIT)


@pytest.mark.parametrize(("backend", "name", "mode"), ONES)
def test_one_wrapper(backend, name, mode):
    ours, theirs = make_both(backend, [name], mode, has_infos=backend != "jit")
    assert assert_same_runs(ours, theirs, mode, 1, 40, with_out=True, with_sends=True) > 3


STACKS = {
    "learner": ["RecordEpisodeStatistics", "ClipReward", "FrameStack"],
    "clipped": ["RecordEpisodeStatistics", "half", "FrameStack zero", "ClipAction"],
    "rescaled": ["FrameStack", "TransformReward", "RescaleAction"],
}


@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
)
def test_stacks_around_workers(mode):
    for names in STACKS.values():
        ours, theirs = make_both("async", names, mode, has_infos=True)
        assert assert_same_runs(ours, theirs, mode, 2, 30, with_out=True, with_sends=True) > 3


def draw_case(seed):
    rng = np.random.default_rng(seed)
    names = list(rng.choice([name for name in NAMES if name != "ClipAction"], rng.integers(1, 5)))
    kept = []
    for name in names:
        if name == "RecordEpisodeStatistics" and name in kept:
            continue
        kept.append(str(name))
    if rng.random() < 0.2:
        kept.append("ClipAction")
    return {
        "backend": str(rng.choice(["sync", "jit"])),
        "names": kept,
        "mode": str(rng.choice(MODES)),
        "count": int(rng.integers(1, 6)),
        "k": int(rng.integers(1, 5)),
        "has_infos": False,
    }


def check_case(seed, num_calls=30):
    case = draw_case(seed)
    case["has_infos"] = case["backend"] != "jit" and seed % 2 == 0
    ours, theirs = make_both(**case)
    for_out = {"with_out": seed % 3 > 0, "with_sends": seed % 5 > 0}
    assert_same_runs(ours, theirs, case["mode"], seed, num_calls, **for_out)


def test_random_compositions():
    for seed in range(25):
        check_case(seed)


@pytest.mark.slow
def test_many_random_compositions():
    for seed in range(100, 1100):
        check_case(seed)
