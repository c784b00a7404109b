"""The example of look-ahead: it plays, and its copies leave the game alone."""

import numpy as np
import pytest
from example_files import load_example

from vecenv.core.compiling import is_jit_off

lookahead = load_example("lookahead")
SMALL = {"num_games": 3, "episode_length": 6, "width": 2, "copies": 2, "horizon": 3}


@pytest.mark.skipif(is_jit_off(), reason="takes too long without compiled code")
@pytest.mark.parametrize("levels", [1, 2])
def test_a_game_is_the_defenders_own_unless_another_action_is_clearly_better(levels):
    options = lookahead.Options(**SMALL, levels=levels, least_errors=1e9)
    plain, planned = (lookahead.play(options, looks_ahead=ahead) for ahead in (False, True))
    np.testing.assert_array_equal(planned, plain)
    eager = lookahead.Options(**SMALL, levels=levels, least_errors=-1e9)
    assert lookahead.play(eager, looks_ahead=True).shape == (3,)
