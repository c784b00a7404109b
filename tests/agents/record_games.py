"""Record what PettingZoo's games do with the draws of compiled ones: the files in `golden/`.

    python tests/agents/record_games.py     # needs pettingzoo[sisl] and mpe2

`test_bundled_games.py` replays them with the compiled games.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from agents.fed_draws import FedPursuit, FedSpread, hunt

GOLDEN = Path(__file__).parent / "golden"
SEED = 31
CASES = {
    "pursuit": (FedPursuit, {}, 25),
    "pursuit_small": (
        FedPursuit,
        {
            **{"n_pursuers": 5, "n_evaders": 6, "x_size": 9, "y_size": 8, "obs_range": 6},
            **{"shared_reward": False, "surround": False, "n_catch": 1, "max_cycles": 20},
        },
        60,
    ),
    "pursuit_crowd": (
        FedPursuit,
        {"n_pursuers": 20, "n_evaders": 20, "obs_range": 5, "constraint_window": 0.7},
        70,
    ),
    "spread": (FedSpread, {}, 60),
    "spread_pushed": (
        FedSpread,
        {"N": 5, "local_ratio": 0.3, "continuous_actions": True, "max_cycles": 12},
        30,
    ),
}


def choose(game, obs, rng, options):
    """Return actions for all agents of a game."""
    if game is FedPursuit:
        return hunt(obs, rng)
    if options.get("continuous_actions"):
        return rng.uniform(-0.25, 1.25, (len(obs), 5)).astype(np.float32)
    return rng.integers(0, 5, len(obs))


def play(game, options, num_steps):
    """Play one game, begun anew when it ends; return arrays with a row per reset or step."""
    rng = np.random.default_rng(SEED)
    env = game(SEED, **options)
    obs = env.reset()
    actions = np.zeros_like(choose(game, obs, rng, options))
    nothing = np.zeros(len(obs))
    rows = [(actions, obs, nothing, nothing > 0, nothing > 0)]
    for _ in range(num_steps):
        actions = choose(game, obs, rng, options)
        if rows[-1][3].all() or rows[-1][4].all():
            rows.append((actions, env.reset(), nothing, nothing > 0, nothing > 0))
        else:
            rows.append((actions, *env.step(actions)))
        obs = rows[-1][1]
    names = ("actions", "obs", "rewards", "terminations", "truncations")
    columns = map(np.stack, zip(*rows, strict=True))
    return dict(zip(names, columns, strict=True))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, (game, options, num_steps) in CASES.items():
        arrays = play(game, options, num_steps)
        if game is FedPursuit:
            arrays["obs"] = arrays["obs"].astype(np.uint8)
            arrays["actions"] = arrays["actions"].astype(np.int8)
        np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
