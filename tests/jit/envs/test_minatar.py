"""MinAtar's games against the package `minatar`, with the same draws; skipped without it."""

import warnings

import numpy as np
import pytest
from jit.envs.draws import Draws, disabled, feed

import vecenv

GAMES = {
    "Asterix": ("asterix", 13),
    "Freeway": ("freeway", 17),
    "Seaquest": ("seaquest", 6),
    "SpaceInvaders": ("space_invaders", 1),
}


def make_reference(name, draws, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minatar = pytest.importorskip("minatar")
        game = minatar.Environment(name, **options)
    game.random = game.env.random = draws
    return game


def check_equal(name, num_envs, num_steps, debug, skill=0.0, **options):
    """Step both with the same actions and draws; return episodes and the sum of rewards."""
    module, num_words = GAMES[name]
    references = [make_reference(module, Draws(), **options) for _ in range(num_envs)]
    draws = [reference.random for reference in references]
    envs = disabled(f"JitMinAtar{name}-v1", num_envs, debug, **options)
    action_set = references[0].minimal_action_set()
    assert envs.single_action_space.n == len(action_set)
    over, num_episodes, total = np.ones(num_envs, np.bool_), 0, 0.0
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        if over.any():
            feed(envs, draws, num_words)
            obs, _ = envs.reset(options={"reset_mask": over})
            for i in np.flatnonzero(over):
                references[i].reset()
                references[i].last_action = 0
                np.testing.assert_array_equal(obs[i] > 0, references[i].state())
        actions = rng.integers(0, len(action_set), num_envs)
        if skill:
            actions = np.where(rng.random(num_envs) < skill, ACTORS[name](obs), actions)
        feed(envs, draws, num_words + 17)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        for i, reference in enumerate(references):
            reward, is_over = reference.act(action_set[actions[i]])
            assert (rewards[i], terminations[i]) == (reward, is_over)
            np.testing.assert_array_equal(obs[i] > 0, reference.state())
        assert set(np.unique(obs)) == {0, 255} and not truncations.any()
        over = terminations
        num_episodes += over.sum()
        total += rewards.sum()
    return num_episodes, total


def dive(obs):
    """Go for divers, and up with six or little air, as far as someone is on board."""
    actions = np.zeros(len(obs), np.int64)
    for i, board in enumerate(obs):
        (y,), (x,) = np.nonzero(board[..., 0])
        num_divers, air = np.count_nonzero(board[..., 8]), np.count_nonzero(board[..., 7])
        divers = np.argwhere(board[..., 9])
        if num_divers == 6 or (air < 4 and num_divers > 0):
            actions[i] = 2
        elif len(divers):
            row, column = divers[np.abs(divers - (y, x)).sum(axis=1).argmin()]
            actions[i] = (4 if row > y else 2) if row != y else (3 if column > x else 1)
            if y == 1 and actions[i] == 2:
                actions[i] = 5
        else:
            actions[i] = 4 if y < 4 else 5
    return actions


def aim(obs):
    """Shoot, and dodge."""
    actions = np.full(len(obs), 3)
    for i, board in enumerate(obs):
        x = int(np.argmax(board[9, :, 0]))
        if board[7:, x, 5].any():
            actions[i] = 1 if x > 0 and not board[7:, x - 1, 5].any() else 2
    return actions


ACTORS = {
    "Asterix": lambda obs: np.zeros(len(obs), np.int64),
    "Freeway": lambda obs: np.ones(len(obs), np.int64),
    "Seaquest": dive,
    "SpaceInvaders": aim,
}


@pytest.mark.parametrize("name", GAMES)
def test_a_few_steps_equal_minatars(name):
    check_equal(name, num_envs=2, num_steps=100, debug=True, skill=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"difficulty_ramping": False, "sticky_action_prob": 0.0}])
@pytest.mark.parametrize("name", GAMES)
def test_a_hundred_thousand_steps_equal_minatars(name, options):
    num_episodes, total = check_equal(name, 20, 2_600, debug=False, **options)
    more, more_total = check_equal(name, 20, 2_600, debug=False, skill=0.8, **options)
    assert num_episodes + more >= 20 and total + more_total > 0


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"sticky_action_prob is 1.5, expected a probability"):
        vecenv.make_vec("JitMinAtarAsterix-v1", 1, sticky_action_prob=1.5)
