"""The random stream of compiled games in the form of a `numpy.random.Generator`.

An env of another package that draws from it, and opens a block of the stream before each reset and
each step, makes the same draws as the compiled game of the same seed, if it makes them in the same
order.
"""

import numpy as np

from vecenv.jit.random import RNG_DTYPE, integers, open_block, seed_key, uniform


class FedGenerator:
    """What pursuit and spread draw from."""

    def __init__(self, seed):
        self.stream = np.zeros(1, RNG_DTYPE).view(np.recarray)[0]
        self.stream.key = seed_key(np.uint64(seed))

    def open_block(self):
        """Begin a reset or a step."""
        open_block(self.stream)

    def integers(self, low, high=None):
        """Draw an integer from [0, low) or [low, high)."""
        low, high = (0, low) if high is None else (low, high)
        return low + integers(self.stream, high - low)

    def uniform(self, low, high, size=None):
        """Draw one float, or an array of `size`, from [low, high)."""
        if size is None:
            return low + (high - low) * uniform(self.stream)
        return np.array([low + (high - low) * uniform(self.stream) for _ in range(size)])


class _FedGame:
    """A game of another package, `env`, and the stream `rng` that it draws from."""

    def reset(self):
        self.rng.open_block()
        observations, _ = self.env.reset()
        return np.stack(list(observations.values()))

    def step(self, actions):
        self.rng.open_block()
        agents = list(self.env.agents)
        results = self.env.step(dict(zip(agents, actions.tolist(), strict=True)))
        return tuple(np.stack([part[agent] for agent in agents]) for part in results[:4])


class FedPursuit(_FedGame):
    """PettingZoo's pursuit, drawing from a stream."""

    def __init__(self, seed, **options):
        from pettingzoo.sisl import pursuit_v5

        self.env = pursuit_v5.parallel_env(**options)
        self.game = self.env.unwrapped.env
        self.game.np_random = self.rng = FedGenerator(seed)
        for controller in (self.game.evader_controller, self.game.pursuer_controller):
            controller.rng = self.rng


class FedSpread(_FedGame):
    """mpe2's simple_spread, drawing from a stream."""

    def __init__(self, seed, **options):
        from mpe2 import simple_spread_v3

        self.env = simple_spread_v3.parallel_env(**options)
        self.env.unwrapped.np_random = self.rng = FedGenerator(seed)


def hunt(obs, rng):
    """Return actions of pursuers, most of which go to the nearest evader that they see."""
    reach = (obs.shape[1] - 1) // 2
    actions = rng.integers(0, 5, len(obs))
    for k, seen in enumerate(obs):
        places = np.argwhere(seen[..., 2] > 0) - reach
        if len(places) and rng.random() < 0.8:
            y, x = places[np.abs(places).sum(axis=1).argmin()]
            if abs(x) + abs(y) == 1:
                actions[k] = 4
            elif abs(x) > abs(y):
                actions[k] = 0 if x < 0 else 1
            elif y:
                actions[k] = 2 if y > 0 else 3
    return actions
