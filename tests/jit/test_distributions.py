"""Distributions of `vecenv.jit.random`: as their slow twins say, and as the laws say."""

import itertools
import math

import numpy as np
import pytest
from jit.drawn_env import DRAWN
from jit.test_random import LIMIT_SIGMA, SMALL, seeded
from jit.toy_env import slow_word

from vecenv.core.compiling import cached_njit
from vecenv.jit import JitVectorEnv, random


class SlowStream:
    """Uniform numbers of the stream of a seed, before its first block, in plain Python."""

    def __init__(self, seed):
        self.seed, self.draw = seed, -1

    def uniform(self):
        self.draw += 1
        return (slow_word(self.seed, 0, self.draw) >> 11) / 2**53

    def below(self, n):
        self.draw += 1
        return (slow_word(self.seed, 0, self.draw) >> 32) * n >> 32

    def normal(self):
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())


def slow_exponential(stream):
    return -math.log(1.0 - stream.uniform())


def slow_gamma(stream, shape):
    if shape <= 0:
        return 0.0
    if shape < 1:
        factor = (1.0 - stream.uniform()) ** (1 / shape)
        return slow_gamma(stream, shape + 1) * factor
    d = shape - 1 / 3
    while True:
        x = stream.normal()
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v <= 0:
            continue
        # The quick test of the paper accepts nothing that this one does not.
        if math.log(1.0 - stream.uniform()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v


def by_inversion(stream, probabilities):
    """Return how many of the probabilities sum up to less than a uniform number."""
    u = stream.uniform()
    sums = itertools.accumulate(probabilities)
    return next((k for k, total in enumerate(sums) if u < total), None)


def log_poisson(k, rate):
    return k * math.log(rate) - rate - math.lgamma(k + 1)


def log_binomial(k, n, p):
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


def slow_poisson(stream, rate):
    if rate <= 0:
        return 0
    if rate < 10:
        return by_inversion(stream, (math.exp(log_poisson(k, rate)) for k in range(200)))
    b = 0.931 + 2.53 * math.sqrt(rate)
    a = -0.059 + 0.02483 * b
    while True:
        u, v = 0.5 - stream.uniform(), 1.0 - stream.uniform()
        us = 0.5 - abs(u) + 2.0**-53
        k = math.floor((2 * a / us + b) * u + rate + 0.43)
        if us >= 0.07 and v <= 0.9277 - 3.6224 / (b - 2):
            return k
        if k >= 0 and not (us < 0.013 and v > us):
            density = (1.1239 + 1.1328 / (b - 3.4)) / (a / us**2 + b)
            if math.log(v * density) <= log_poisson(k, rate):
                return k


def slow_binomial(stream, n, p):
    if n <= 0 or p <= 0:
        return 0
    if p >= 1:
        return n
    if p > 0.5:
        return n - slow_binomial(stream, n, 1 - p)
    if n * p < 10:
        chances = (math.exp(log_binomial(k, n, p)) for k in range(min(n, 500) + 1))
        return by_inversion(stream, chances)
    spread = math.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    mode = math.floor((n + 1) * p)
    while True:
        u, v = 0.5 - stream.uniform(), 1.0 - stream.uniform()
        us = 0.5 - abs(u) + 2.0**-53
        k = math.floor((2 * a / us + b) * u + n * p + 0.5)
        if us >= 0.07 and v <= 0.92 - 4.2 / b:
            return k
        if 0 <= k <= n:
            density = (2.83 + 5.1 / b) * spread / (a / us**2 + b)
            if math.log(v * density) <= log_binomial(k, n, p) - log_binomial(mode, n, p):
                return k


def slow_choice(stream, weights):
    weights = [max(float(weight), 0.0) for weight in weights]
    u = stream.uniform() * sum(weights)
    sums = itertools.accumulate(weights)
    return next((k for k, total in enumerate(sums) if u < total), -1)


def slow_permutation(stream, n):
    left = list(range(n))
    for k in range(n - 1, 0, -1):
        other = stream.below(k + 1)
        left[k], left[other] = left[other], left[k]
    return left


def filling(draw):
    """Compile what fills an array with draws of a distribution."""

    @cached_njit
    def fill(stream, out, *args):
        for k in range(len(out)):
            out[k] = draw(stream, *args)

    return fill


fill_exponential, fill_gamma = filling(random.exponential), filling(random.gamma)
fill_poisson, fill_binomial = filling(random.poisson), filling(random.binomial)
fill_choice = filling(random.choice)


@cached_njit
def fill_permutations(stream, out):
    for k in range(len(out)):
        random.permutation(stream, out[k])


def drawn(fill, *args, count, seed=11, dtype=np.int64):
    out = np.zeros(count, dtype)
    fill(seeded([seed])[0], out, *args)
    return out


NUM_TWIN = 40
COUNT = 2_000 if SMALL else 200_000
SHAPES = (0.05, 0.5, 1.0, 2.5, 300.0)
RATES = (1e-4, 0.3, 4.0, 9.99, 10.0, 12.5, 70.0, 3000.0)
TRIALS = ((1, 0.3), (9, 0.5), (40, 0.2), (20, 0.5), (100, 0.93), (30, 0.6))
TRIALS += ((10**6, 2e-6), (900, 0.3))


def test_draws_are_those_of_the_slow_twins():
    seed = 3

    def slow(draw, *args):
        stream = SlowStream(seed)
        return [draw(stream, *args) for _ in range(NUM_TWIN)]

    def quick(fill, *args, dtype=np.int64):
        return drawn(fill, *args, count=NUM_TWIN, seed=seed, dtype=dtype)

    found = quick(fill_exponential, dtype=float)
    np.testing.assert_allclose(found, slow(slow_exponential), rtol=1e-12)
    for shape in SHAPES:
        found = quick(fill_gamma, shape, dtype=float)
        np.testing.assert_allclose(found, slow(slow_gamma, shape), rtol=1e-10)
    for rate in RATES:
        assert quick(fill_poisson, rate).tolist() == slow(slow_poisson, rate)
    for n, p in TRIALS:
        assert quick(fill_binomial, n, p).tolist() == slow(slow_binomial, n, p)
    for weights in ([0.5], [0.0, 2.0, 1e-3, -1.0, 3.0], [1.0] * 17):
        assert quick(fill_choice, np.array(weights)).tolist() == slow(slow_choice, weights)
    for n in (0, 1, 2, 7):
        out = np.zeros((5, n), np.int64)
        fill_permutations(seeded([seed])[0], out)
        stream = SlowStream(seed)
        assert out.tolist() == [slow_permutation(stream, n) for _ in range(5)]


def assert_lawful(values, probabilities):
    """Compare counts of integers 0, 1, ... with their law, by chi-square over cells of 20 or more.

    The rest of the law, and rare values, are one cell.
    """
    expected = np.asarray(probabilities) * len(values)
    counts = np.bincount(np.minimum(values, len(expected)), minlength=len(expected) + 1)
    is_cell = expected >= 20
    seen = np.append(counts[:-1][is_cell], counts[:-1][~is_cell].sum() + counts[-1])
    wanted = np.append(expected[is_cell], len(values) - expected[is_cell].sum())
    if wanted[-1] < 20:
        assert seen[-1] <= wanted[-1] + LIMIT_SIGMA * np.sqrt(wanted[-1] + 1) + 3
        seen, wanted = seen[:-1], wanted[:-1]
    freedom = len(seen) - 1
    off = ((seen - wanted) ** 2 / wanted).sum() - freedom
    assert abs(off) <= LIMIT_SIGMA * np.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("rate", RATES)
def test_poisson_numbers_have_their_law(rate):
    values = drawn(fill_poisson, rate, count=COUNT)
    most = int(rate + 12 * math.sqrt(rate) + 20)
    assert_lawful(values, [math.exp(log_poisson(k, rate)) for k in range(most)])
    assert abs(values.mean() - rate) <= LIMIT_SIGMA * math.sqrt(rate / COUNT)


@pytest.mark.parametrize(("n", "p"), TRIALS)
def test_binomial_numbers_have_their_law(n, p):
    values = drawn(fill_binomial, n, p, count=COUNT)
    assert values.max() <= n
    spread = math.sqrt(n * p * (1 - p))
    most = min(n, int(n * p + 12 * spread + 20)) + 1
    assert_lawful(values, [math.exp(log_binomial(k, n, p)) for k in range(most)])
    assert abs(values.mean() - n * p) <= LIMIT_SIGMA * spread / math.sqrt(COUNT)


def gamma_law(shape, edges):
    """Return the share below each edge, by the series of the incomplete gamma function."""
    shares = []
    for x in edges:
        terms = [math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))]
        while terms[-1] > 1e-17 or len(terms) < x:
            terms.append(terms[-1] * x / (shape + len(terms)))
        shares.append(math.fsum(terms))
    return np.array(shares)


@pytest.mark.parametrize("shape", [*SHAPES, None])
def test_gamma_and_exponential_numbers_have_their_law(shape):
    """None is the exponential distribution."""
    law = 1.0 if shape is None else shape
    args = (fill_exponential,) if shape is None else (fill_gamma, shape)
    values = drawn(*args, count=COUNT, dtype=float)
    assert values.min() >= 0.0
    edges = np.quantile(values[: COUNT // 2], np.linspace(0.02, 0.98, 40))
    shares = gamma_law(law, edges)
    assert_lawful(np.searchsorted(edges, values[COUNT // 2 :]), np.diff([0.0, *shares, 1.0]))
    assert abs(values.mean() - law) <= LIMIT_SIGMA * math.sqrt(law / COUNT)


def test_each_order_is_as_likely():
    out = np.zeros((COUNT, 4), np.int8)
    fill_permutations(seeded([5])[0], out)
    orders = out.astype(np.int64) @ [64, 16, 4, 1]
    found, counts = np.unique(orders, return_counts=True)
    assert len(found) == 24
    assert ((counts - COUNT / 24) ** 2).sum() * 24 / COUNT < 23 + LIMIT_SIGMA * math.sqrt(46)
    values = np.array([2.5, -1.0, 7.0])
    random.shuffle(seeded([5])[0], values)
    assert sorted(values) == [-1.0, 2.5, 7.0]


def test_edges_of_distributions():
    """What kernels can't refuse has a result, and none takes for ever."""

    def one(fill, *args, seed=1, dtype=np.int64):
        return drawn(fill, *args, count=1, seed=seed, dtype=dtype)[0]

    for rate in (0.0, -1.0, np.nan, 0):
        assert one(fill_poisson, rate) == 0 and one(fill_gamma, rate, dtype=float) == 0.0
    assert one(fill_poisson, np.inf) == pytest.approx(1e12, rel=1e-4)
    for n, p, k in ((0, 0.5, 0), (-3, 0.5, 0), (5, 0.0, 0), (5, -1.0, 0), (5, 1.0, 5), (5, 2.0, 5)):
        assert one(fill_binomial, n, p) == k
    assert one(fill_binomial, 5, np.nan) == 0
    for weights in ([], [0.0, 0.0], [-1.0], [np.nan]):
        assert one(fill_choice, np.array(weights, float)) == -1
    fill_permutations(seeded([1])[0], np.zeros((1, 0), np.int64))
    for shape, least in ((1e-9, 0.0), (np.inf, np.inf)):
        assert one(fill_gamma, shape, dtype=float) >= least
    single = np.float32(3.7)
    assert one(fill_poisson, single, seed=2) == one(fill_poisson, float(single), seed=2)


@pytest.mark.slow  # compiles
def test_kernels_draw_the_same_compiled_and_as_plain_python():
    both = [JitVectorEnv(DRAWN, 8, debug=debug, num_threads=1) for debug in (False, True)]
    results = [[envs.reset(seed=6)[0]] for envs in both]
    for _ in range(30):
        for envs, found in zip(both, results, strict=True):
            found.append(envs.step(np.zeros(8, np.int64))[0])
    np.testing.assert_allclose(*results, rtol=1e-12)
