"""Look ahead in CAGE Challenge 2: try actions in copies of the game, take the best on average.

    python examples/lookahead.py
    python examples/lookahead.py --levels 2

For each step of a game, the likeliest actions of the trained defender are tried in copies of it,
all of them with the same luck, many times; from there on the defender itself plays some steps. The
copies know what blue can't see (where red is), so the score hints at what policies that learn from
observations could still save. Both play the same games with the same luck of red,
until their actions differ.

With 100 games of 100 steps the score changes by +0.06 ± 0.08 against B_line (the defender alone:
-13.2 ± 0.7) and by +0.28 ± 0.31 against Meander (-15.2 ± 0.6), in 10 s each.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import tyro

from vecenv.cage import Cage2VectorEnv, DefenderPolicy, find_policy


@dataclass
class Options:
    red_agent: str = "b_line"  # or "meander"
    num_games: int = 20  # played side by side
    episode_length: int = 100  # steps
    levels: int = 1  # actions that are tried one after the other
    width: int = 4  # actions tried at each level
    copies: int = 16  # of a game for each sequence of actions
    horizon: int = 30  # steps that the defender plays from there on
    least_errors: float = 2.0  # by which an action must be better than the defender's own
    seed: int = 1


class Defender:
    """The trained network: from what blue remembers to a number per choice."""

    def __init__(self) -> None:
        policy = find_policy("defender")
        assert isinstance(policy, DefenderPolicy)
        self.layers = policy.layers

    def __call__(self, envs: Cage2VectorEnv, obs: np.ndarray) -> np.ndarray:
        """Return the numbers float32 (N, choices), those of useless choices very low."""
        x = obs
        for number, (weight, bias) in enumerate(self.layers):
            x = (np.tanh(x) if number else x) @ weight + bias
        return np.where(envs.action_masks(), x, -1e9)


def plan(
    options: Options,
    games: Cage2VectorEnv,
    copies: Cage2VectorEnv,
    obs: np.ndarray,
    defender: Defender,
) -> np.ndarray:
    """Return the best first actions int64 (num_games,) by playing on in copies."""
    likeliest = np.argsort(-defender(games, obs), axis=1)[:, : options.width]
    sequences = np.array(list(product(range(options.width), repeat=options.levels)))
    shape = options.num_games, len(sequences), options.copies
    rows = np.arange(copies.num_envs).reshape(shape)
    source = np.repeat(np.arange(options.num_games), options.copies)
    copies.restore(rows[:, 0].reshape(-1), games.snapshot(source), luck="fresh")
    first = np.broadcast_to(rows[:, :1], rows[:, 1:].shape)
    copies.copy_rows(first.reshape(-1), rows[:, 1:].reshape(-1), luck="same")
    total, goes_on = np.zeros(copies.num_envs), np.ones(copies.num_envs, bool)
    seen = copies.observe()
    for step in range(options.levels + options.horizon):
        if step == 0:
            tried = likeliest[:, sequences[:, 0]]  # (games, sequences)
            actions = np.repeat(tried.reshape(-1), options.copies)
        else:
            found = defender(copies, seen)
            actions = found.argmax(1)
            if step < options.levels:  # the k-th likeliest of each copy
                ranks = np.tile(np.repeat(sequences[:, step], options.copies), options.num_games)
                order = np.argsort(-found, axis=1)
                actions = order[np.arange(len(order)), ranks]
        seen, rewards, terminations, truncations, _ = copies.step(actions)
        total += rewards * goes_on
        goes_on &= ~(terminations | truncations)
    gains = total.reshape(shape) - total.reshape(shape)[:, :1]  # over the defender's own actions
    errors = gains.std(2) / options.copies**0.5
    is_clear = gains.mean(2) > options.least_errors * errors
    best = np.where(is_clear, gains.mean(2), 0.0).argmax(1)  # else the likeliest, which is first
    return likeliest[np.arange(options.num_games), sequences[best, 0]]


def play(options: Options, *, looks_ahead: bool) -> np.ndarray:
    """Return the scores of the games, float64 (num_games,)."""
    made: Any = {"red_agent": options.red_agent, "observation": "memory"}
    made |= {"episode_length": options.episode_length}
    games = Cage2VectorEnv(options.num_games, **made)
    count = options.num_games * options.width**options.levels * options.copies
    copies = Cage2VectorEnv(count if looks_ahead else 1, **made)
    defender, scores = Defender(), np.zeros(options.num_games)
    copies.reset(seed=options.seed)
    obs, _ = games.reset(seed=options.seed)
    for _ in range(options.episode_length):
        if looks_ahead:
            actions = plan(options, games, copies, obs, defender)
        else:
            actions = defender(games, obs).argmax(1)
        obs, rewards, *_ = games.step(actions)
        scores += rewards
    games.close()
    copies.close()
    return scores


def main(options: Options) -> None:
    plain, planned = (play(options, looks_ahead=looks) for looks in (False, True))
    for name, scores in (
        ("the defender", plain), ("with look-ahead", planned), ("difference", planned - plain)
    ):  # fmt: skip
        half = 1.96 * scores.std(ddof=1) / len(scores) ** 0.5
        print(f"{name:16s} {scores.mean():8.2f} ± {half:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
