"""Games of CAGE Challenge 4 with any actions, masked or not: compiled ones keep the invariants.

One of the games is played in plain Python besides, with every index checked; bit for bit the same.
"""

import numpy as np
from cage.challenge4.invariants import check
from cage.challenge4.lockstep import Games

from vecenv.cage.challenge4.options import Cage4Options
from vecenv.cage.challenge4.rules import codes

UNIT = "game steps"
NUM_GAMES, NUM_STEPS, NUM_PLAIN = 64, 250, 40


def draw_options(rng):
    return Cage4Options(
        steps=int(rng.choice([3, 10, 100, 500])),
        red=str(rng.choice(codes.RED_VARIANTS[:2])),
        phishing_rate=float(rng.choice([0, 0.01, 0.1, 0.3])),
        alarm_rate=float(rng.choice([0, 0.01, 0.3])),
        greens_one_by_one=bool(rng.integers(2)),
    )


def draw_actions(rng, games, family):
    """Any actions, of one family often; half of them whatever the mask says."""
    actions = rng.integers(0, codes.NUM_ACTIONS, (games.num_games, 5))
    for agent, mask in enumerate(games.masks):
        size = codes.NUM_ACTIONS[agent]
        wanted = np.flatnonzero(codes.ACTION_FAMILY[agent, :size] == family)
        is_wanted = rng.random(games.num_games) < 0.5
        actions[is_wanted, agent] = rng.choice(wanted, is_wanted.sum())
        is_masked = ~mask[np.arange(games.num_games), actions[:, agent]]
        sleeps = is_masked & (rng.random(games.num_games) < 0.5)
        actions[sleeps, agent] = codes.SLEEPS[agent]
    return actions


def run_case(number):
    rng = np.random.default_rng(number)
    options, family = draw_options(rng), int(rng.integers(1, 8))
    seed = int(rng.integers(1 << 40))
    games = Games(NUM_GAMES, seed=seed, options=options)
    plain = Games(1, seed=seed, options=options, debug=True)
    for step in range(NUM_STEPS):
        actions = draw_actions(rng, games, family)
        messages = rng.integers(0, 256, actions.shape)
        games.step(actions, messages)
        if step < NUM_PLAIN:
            plain.step(actions[:1], messages[:1])
            assert (plain.obs[0] == games.obs[0]).all() and plain.rewards[0] == games.rewards[0]
            assert plain.envs.states[0].tobytes() == games.envs.states[0].tobytes()
        if step % 25 == 0:
            check(games.envs.states)
    games.close()
    plain.close()
    return NUM_GAMES * NUM_STEPS + NUM_PLAIN
