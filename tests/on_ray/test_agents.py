"""Games with several agents in actors."""

import pytest
from agents.games import Tag
from agents.twins import play
from envs import MODES, mode_id

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

TWO = {"backend": "ray", "vector_kwargs": {"num_workers": 2}}


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("by", ["step", "out", "send"])
def test_games_in_actors_do_as_bare_games(by, mode):
    num_ends, num_early = play(Tag, 3, 25, by=by, autoreset_mode=mode, central_state=True, **TWO)
    assert num_ends > 3 and num_early > 10
