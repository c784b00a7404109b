"""Episodes that draw for themselves, played by the policies of the reference returns."""

from typing import NamedTuple

import numpy as np

from vecenv.cage.challenge4.games import Cage4Games
from vecenv.cage.challenge4.options import Cage4Options
from vecenv.cage.challenge4.play.policies import make_policy


class Episodes(NamedTuple):
    rewards: np.ndarray  # (steps, episodes)
    causes: np.ndarray  # (episodes, 4): LocalWork, AccessService, Impact, cost of actions
    sessions: np.ndarray  # (episodes, 6) of each red agent at the end
    overflows: dict


def play(policy, num_episodes, seed, *, batch=500, **options):
    """Play whole episodes, `batch` at a time; episodes i have seeds seed + i."""
    chosen = Cage4Options(**options)
    parts = []
    for start in range(0, num_episodes, batch):
        size = min(batch, num_episodes - start)
        games = Cage4Games(size, seed=seed + start, options=chosen, autoreset_mode="Disabled")
        act = make_policy(policy, seed + start)
        rewards = np.zeros((chosen.steps - 1, size))
        causes = np.zeros((size, 4))
        for step in range(chosen.steps - 1):
            games.step(act(games))
            rewards[step] = games.rewards
            causes += games.envs.states["reward_parts"]
        assert games.is_over.all()
        sessions = games.envs.states["num_sessions"].astype(int)
        parts.append(Episodes(rewards, causes, sessions, games.overflows))
        games.close()
    return Episodes(
        np.concatenate([part.rewards for part in parts], axis=1),
        np.concatenate([part.causes for part in parts]),
        np.concatenate([part.sessions for part in parts]),
        {name: n for part in parts for name, n in part.overflows.items()},
    )


def phase_sums(rewards):
    """Sums (episodes, 3) over the phases of a challenge of 500 steps."""
    return np.stack([part.sum(axis=0) for part in np.split(rewards, [167, 334])], axis=1)


def z_score(sample, theirs_mean, theirs_sd, theirs_n):
    """Difference of two means in standard errors."""
    error = np.sqrt(sample.var(ddof=1) / len(sample) + theirs_sd**2 / theirs_n)
    return (sample.mean() - theirs_mean) / error if error > 0 else 0.0
