"""The draws of compiled envs, to feed them to reference envs."""

import numpy as np

import vecenv
from vecenv.core.compiling import cached_njit
from vecenv.jit.random import next_word, open_block, to_integer, to_uniform


@cached_njit
def words_of_next_step(streams, words):
    """Write the first words that each stream hands out in its next step or reset."""
    for i in range(words.shape[0]):
        stream = streams[i : i + 1].copy()[0]
        open_block(stream)
        for k in range(words.shape[1]):
            words[i, k] = next_word(stream)


class Draws:
    """Stands for a NumPy generator: hands out given words as the kit's draws."""

    def __init__(self):
        self.words = iter(())

    def random(self):
        return to_uniform.py_func(next(self.words))

    def rand(self, count=None):
        if count is None:
            return self.random()
        return np.array([self.random() for _ in range(count)])

    def integers(self, low, high=None, size=None):
        if high is None:
            low, high = 0, low
        if size is not None:
            return np.array([self.integers(low, high) for _ in range(size)])
        return low + int(to_integer.py_func(next(self.words), high - low))

    randint = integers


def disabled(name, num_envs, debug, **options):
    """Make a vector env whose episodes the test begins, and begin its streams."""
    vector_kwargs = {"debug": debug, "autoreset_mode": "Disabled"}
    envs = vecenv.make_vec(name, num_envs, vector_kwargs=vector_kwargs, **options)
    envs.np_random_seed  # noqa: B018
    return envs


def feed(envs, draws, count):
    """Give each of the draws what its env will draw in the next step or reset."""
    words = np.zeros((envs.num_envs, count), np.uint64)
    streams = np.zeros(envs.num_envs, [("key", np.uint64), ("counter", np.uint64)])
    for name in streams.dtype.names:
        streams[name] = envs._runs[name]
    words_of_next_step(streams.view(np.recarray), words)
    for one, row in zip(draws, words, strict=True):
        one.words = iter(row)
