"""2048 against rules written with lists, with the same draws."""

import numpy as np
import pytest
from jit.envs.draws import Draws, disabled, feed


class Slow2048:
    """The rules of the game on a list of rows."""

    def __init__(self, draws):
        self.draws = draws

    def reset(self):
        self.rows = [[0] * 4 for _ in range(4)]
        self.add_tile()
        self.add_tile()

    def add_tile(self):
        empty = [(y, x) for y in range(4) for x in range(4) if not self.rows[y][x]]
        y, x = empty[self.draws.integers(len(empty))]
        self.rows[y][x] = 4 if self.draws.random() < 0.1 else 2

    def moved(self, action):
        """Rows after a move, and what it earns."""
        rows = np.rot90(self.rows, action + 1 if action != 3 else 0).tolist()  # the edge is left
        earned, after = 0, []
        for row in rows:
            tiles, merged = [tile for tile in row if tile], []
            while tiles:
                if len(tiles) > 1 and tiles[0] == tiles[1]:
                    merged.append(2 * tiles.pop(0))
                    earned += merged[-1]
                else:
                    merged.append(tiles[0])
                tiles.pop(0)
            after.append(merged + [0] * (4 - len(merged)))
        return np.rot90(after, -(action + 1) if action != 3 else 0).tolist(), earned

    def can_move(self, action):
        return self.moved(action)[0] != self.rows

    def step(self, action):
        if not self.can_move(action):
            return 0, False
        self.rows, earned = self.moved(action)
        self.add_tile()
        return earned, not any(self.can_move(other) for other in range(4))


def check_equal(num_envs, num_steps, debug):
    envs = disabled("Jit2048-v0", num_envs, debug)
    draws = [Draws() for _ in range(num_envs)]
    references = [Slow2048(one) for one in draws]
    rng, over, num_episodes = np.random.default_rng(0), np.ones(num_envs, np.bool_), 0
    for _ in range(num_steps):
        if over.any():
            feed(envs, draws, 4)
            envs.reset(options={"reset_mask": over})
            for i in np.flatnonzero(over):
                references[i].reset()
        boards = np.array([reference.rows for reference in references])
        exponents = np.where(boards > 0, np.log2(np.maximum(boards, 1)), 0)
        np.testing.assert_array_equal(envs.observe(), exponents)
        masks = [[one.can_move(action) for action in range(4)] for one in references]
        np.testing.assert_array_equal(envs.action_masks(), masks)
        actions = rng.choice(4, num_envs, p=[0.4, 0.3, 0.1, 0.2])
        feed(envs, draws, 2)
        _, rewards, over, _, _ = envs.step(actions)
        expected = [one.step(action) for one, action in zip(references, actions, strict=True)]
        assert list(zip(rewards, over, strict=True)) == expected
        num_episodes += over.sum()
    return num_episodes


def test_a_few_steps_equal_the_slow_rules():
    check_equal(num_envs=2, num_steps=50, debug=True)


@pytest.mark.slow
def test_a_hundred_thousand_steps_equal_the_slow_rules():
    assert check_equal(num_envs=50, num_steps=2_000, debug=False) > 100


def test_a_game_without_moves_is_over_and_its_mask_allows_all():
    envs = disabled("Jit2048-v0", 1, debug=True)
    envs.reset(seed=0)
    envs.states.board[0] = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 9, 9]
    rewards = envs.step([3])[1]
    assert rewards[0] == 1024 and envs.states.board[0, 14] == 10
    envs.states.board[0] = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]
    assert envs.action_masks().tolist() == [[1, 1, 1, 1]]
