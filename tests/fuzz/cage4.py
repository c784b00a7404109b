"""Games of CAGE Challenge 4 with any actions, masked or not: compiled ones keep the invariants.

Some of the games are played in plain Python besides, from somewhere in their episode on, with every
index checked; bit for bit the same.
"""

import numpy as np
from cage.challenge4.invariants import check
from cage.challenge4.lockstep import Games

from vecenv.cage.challenge4.env import Cage4Options
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
    play_compiled(rng)
    return NUM_GAMES * NUM_STEPS + play_plain(rng, 1, NUM_PLAIN)


def play_compiled(rng):
    """Play many games, and check what must hold."""
    options, family = draw_options(rng), int(rng.integers(1, 8))
    games = Games(NUM_GAMES, seed=int(rng.integers(1 << 40)), options=options)
    for step in range(NUM_STEPS):
        actions = draw_actions(rng, games, family)
        games.step(actions, rng.integers(0, 256, actions.shape))
        if step % 25 == 0:
            check(games.envs.states)
    games.close()


def play_plain(rng, num_games, num_steps):
    """Play games in plain Python too, from somewhere on; return how many steps of theirs."""
    options, family = draw_options(rng), int(rng.integers(1, 8))
    games = Games(num_games, seed=int(rng.integers(1 << 40)), options=options)
    plain = Games(num_games, options=options, debug=True)
    begin = int(rng.integers(500))
    for step in range(begin + num_steps):
        if step == begin:
            plain.envs.load_state_dict(games.envs.state_dict())
        actions = draw_actions(rng, games, family)
        messages = rng.integers(0, 256, actions.shape)
        games.step(actions, messages)
        if step >= begin:
            plain.step(actions, messages)
            assert (plain.obs == games.obs).all() and (plain.rewards == games.rewards).all()
            assert (plain.envs.states == games.envs.states).all()  # but for padding
            if step % 25 == 0:
                check(games.envs.states)
    games.close()
    plain.close()
    return num_games * num_steps
