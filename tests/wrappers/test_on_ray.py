"""Wrappers around actors: the same as around envs of this process."""

import pytest
from equality import assert_same
from wrappers.slides import MODES, Slide, make_both, pairs, run

import vecenv

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray", "no_actors_stay")]


@pytest.mark.parametrize("mode", MODES)
def test_a_stack_around_actors(mode):
    names = ["RecordEpisodeStatistics", "ClipReward", "FrameStack", "RescaleAction"]
    _, theirs = make_both("sync", names, mode)
    ours = vecenv.make_vec(
        [Slide] * 3, backend="ray", autoreset_mode=mode, vector_kwargs={"num_workers": 2}
    )
    for name in names:
        ours = pairs(name).ours(ours)
    found = [run(envs, mode, 3, 25, with_out=True, with_sends=True) for envs in (ours, theirs)]
    for a, b in zip(*found, strict=True):
        assert_same(a, b)
    ours.close()
