"""Counter-based random numbers for compiled environments.

Every environment owns one *stream*, a record with the fields of `RNG_DTYPE`. A word is a pure
function of the stream's `key` and `counter`; nothing else is remembered. The key comes from the
environment's own seed. The counter is split into blocks of `BLOCK_SIZE` words, and the driver opens
a new block before every reset and every step:

    counter = block number * BLOCK_SIZE + draw number
    word = mix(rotate(key) + counter * odd(key))

So a draw depends on the seed of its environment, the number of its steps and resets so far, and the
number of the draw within the step; not on the batch around it, the number of threads, or the number
of words that earlier steps drew. `mix` is the 64-bit finaliser of SplitMix64, and every stream has
an odd increment of its own, as in Java's `SplittableRandom`.

Kernels draw in one of two ways, and may use both:

* `next_word`, `uniform`, `integers`, `normal` and the other distributions take the next draws of
  the step, and rejection methods take as many as they need;
* `word_at`, `uniform_at`, `integers_at` name a draw by its number (`slot`), so a kernel that draws
  in another order, or skips some draws, still sees the same values.

Sums and products of words go through `np.add` and `np.multiply`: with the JIT switched off, the
operators would warn about wraparound.
"""

import math

import numpy as np
from numba import njit

# Functions for kernels; the rest of this module is for the driver.
__all__ = [
    "RNG_DTYPE", "binomial", "choice", "exponential", "gamma", "integers", "integers_at",
    "next_word", "normal", "permutation", "poisson", "shuffle", "uniform", "uniform_at", "word_at",
]  # fmt: skip

RNG_DTYPE = np.dtype([("key", np.uint64), ("counter", np.uint64)])
BLOCK_SIZE = 1 << 16  # words per step; a step that draws more runs on into the next block
NUM_SLOTS = BLOCK_SIZE // 2  # slots of `word_at`, the upper half of a block

_ONE, _HALF = np.uint64(1), np.uint64(32)
_BLOCK_LOW_BITS = np.uint64(BLOCK_SIZE - 1)
_FIRST_SLOT = np.uint64(NUM_SLOTS)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_UNUSED_BITS = np.uint64(11)  # a float64 in [0, 1) takes 53 of the 64 bits
_UNIT = 2.0**-53
_LOW_HALF = np.uint64(0xFFFFFFFF)
_SMALL_MEAN = 10.0  # below it, Poisson and binomial draws add up probabilities
_LARGEST = 1e12  # rate and number of trials up to which logarithms are exact enough
_FAR = 1e15  # no Poisson number is as large
_NO_CHANCE = 1e-20  # ends the sums of probabilities, if rounding loses more than is left


@njit
def mix(word):
    """Scramble uint64 -> uint64, one to one; the finaliser of SplitMix64."""
    word = np.multiply(word ^ (word >> _SHIFT_1), _MIX_1)
    word = np.multiply(word ^ (word >> _SHIFT_2), _MIX_2)
    return word ^ (word >> _SHIFT_3)


@njit
def seed_key(seed):
    """Key uint64 of the stream of a seed uint64; different seeds have different keys."""
    return mix(np.add(mix(np.add(seed, _GOLDEN)), _GOLDEN))


@njit
def seed_streams(streams, seeds):
    """Begin streams (N,) at seeds uint64 (N,)."""
    for k in range(seeds.shape[0]):
        streams[k].key = seed_key(seeds[k])
        streams[k].counter = np.uint64(0)


@njit
def draw_seeds(streams, env_ids, out):
    """Write new seeds of envs int64 (B,), each from the env's number and its stream, of (B,)."""
    for k in range(env_ids.shape[0]):
        stream = streams[k]
        word = word_of(stream.key, ~stream.counter)  # far from the words that the stream draws
        out[k] = mix(word ^ seed_key(np.uint64(env_ids[k])))


@njit
def word_of(key, counter):
    """Word uint64 number `counter` uint64 of the stream `key` uint64."""
    start = (key << _HALF) | (key >> _HALF)
    return mix(np.add(start, np.multiply(counter, key | _ONE)))


@njit
def open_block(rng):
    """Move to the first word of the next block; the driver does this before each step and reset."""
    rng.counter = np.add(rng.counter | _BLOCK_LOW_BITS, _ONE)


@njit
def next_word(rng):
    """Draw 64 random bits, uint64."""
    counter = rng.counter
    rng.counter = np.add(counter, _ONE)
    return word_of(rng.key, counter)


@njit
def word_at(rng, slot):
    """64 random bits of draw number `slot` in [0, NUM_SLOTS) of this step, uint64; draws nothing.

    These draws are separate from the words that `next_word` returns.
    """
    block = rng.counter & ~_BLOCK_LOW_BITS
    return word_of(rng.key, block | np.add(np.uint64(slot), _FIRST_SLOT))


@njit
def to_uniform(word):
    """Turn 64 random bits into a float64 in [0, 1)."""
    return float(word >> _UNUSED_BITS) * _UNIT


@njit
def to_integer(word, n):
    """Turn 64 random bits into an int64 in [0, n), 1 <= n < 2**32, by multiply and shift.

    The probabilities of two values differ by at most one part in 2**32 / n.
    """
    return np.int64(np.multiply(word >> _HALF, np.uint64(n) & _LOW_HALF) >> _HALF)


@njit
def uniform(rng):
    """Draw a float64, uniform in [0, 1)."""
    return to_uniform(next_word(rng))


@njit
def uniform_at(rng, slot):
    """Float64 uniform in [0, 1) of draw number `slot` of this step."""
    return to_uniform(word_at(rng, slot))


@njit
def integers(rng, n):
    """Draw an int64, uniform in [0, n), 1 <= n < 2**32."""
    return to_integer(next_word(rng), n)


@njit
def integers_at(rng, slot, n):
    """Int64 uniform in [0, n) of draw number `slot` of this step."""
    return to_integer(word_at(rng, slot), n)


@njit
def normal(rng):
    """Draw a float64 from the standard normal distribution; takes two words."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(rng)))
    return radius * math.cos(2.0 * math.pi * uniform(rng))


@njit
def exponential(rng):
    """Draw a float64 from the exponential distribution of mean 1, by inversion; takes a word."""
    return 0.0 - math.log(1.0 - uniform(rng))


@njit
def gamma(rng, shape):
    """Draw a float64 from the gamma distribution of scale 1; 0 if `shape` is not above 0.

    By the rejection method of Marsaglia and Tsang, "A simple method for generating gamma
    variables" (2000); below a shape of 1 as they say, from that of shape + 1.
    """
    if not shape > 0.0:
        return 0.0
    factor = 1.0
    d = np.float64(shape) - 1.0 / 3.0
    if shape < 1.0:
        factor = (1.0 - uniform(rng)) ** (1.0 / np.float64(shape))
        d += 1.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = normal(rng)
        v = 1.0 + c * x
        if v <= 0.0:
            continue
        v = v * v * v
        u = 1.0 - uniform(rng)
        if u < 1.0 - 0.0331 * (x * x) * (x * x):
            return d * v * factor
        if math.log(u) < 0.5 * x * x + d * (1.0 - v + math.log(v)):
            return d * v * factor


@njit
def poisson(rng, rate):
    """Draw an int64 from the Poisson distribution; 0 if `rate` is not above 0.

    Below a rate of 10 by inversion, adding up probabilities (Devroye, "Non-uniform random variate
    generation", 1986, X.3.3), with one word; above by transformed rejection, PTRS of Hoermann, "The
    transformed rejection method for generating Poisson random variables" (1993). Rates above 1e12
    count as 1e12.
    """
    if not rate > 0.0:
        return np.int64(0)
    mean = min(np.float64(rate), _LARGEST)
    if mean < _SMALL_MEAN:
        chance = math.exp(-mean)
        u = uniform(rng)
        k = 0
        while u >= chance > _NO_CHANCE:
            u -= chance
            k += 1
            chance *= mean / k
        return np.int64(k)
    log_mean = math.log(mean)
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    v_r = 0.9277 - 3.6224 / (b - 2.0)
    while True:
        u = 0.5 - uniform(rng)
        v = 1.0 - uniform(rng)
        us = 0.5 - abs(u) + _UNIT  # never 0
        x = (2.0 * a / us + b) * u + mean + 0.43
        if not 0.0 <= x < _FAR:
            continue
        k = np.int64(x)
        if us >= 0.07 and v <= v_r:
            return k
        if us < 0.013 and v > us:
            continue
        accepted = k * log_mean - mean - math.lgamma(k + 1.0)
        if math.log(v * inverse_alpha / (a / (us * us) + b)) <= accepted:
            return k


@njit
def binomial(rng, n, p):
    """Draw an int64, how many of `n` trials succeed, each with probability `p`.

    Up to a mean of 10 (of successes, or of failures if these are fewer) by inversion, adding up
    probabilities (BINV of Kachitvichyanukul and Schmeiser, "Binomial random variate generation",
    1988), with one word; above by transformed rejection, BTRS of Hoermann, "The generation of
    binomial random variates" (1993). 0 if `n` or `p` is not above 0, `n` from p = 1 on; for `n` up
    to 1e12.
    """
    if not (n > 0 and p > 0.0):
        return np.int64(0)
    if p >= 1.0:
        return np.int64(n)
    if p > 0.5:
        return np.int64(n) - _binomial(rng, np.float64(n), 1.0 - np.float64(p))
    return _binomial(rng, np.float64(n), np.float64(p))


@njit
def _binomial(rng, n, p):
    """Draw an int64 for n float64, n >= 1 and 0 < p <= 0.5."""
    q = 1.0 - p
    odds = p / q
    if n * p < _SMALL_MEAN:
        chance = math.exp(n * math.log1p(-p))
        u = uniform(rng)
        k = 0.0
        while u >= chance > _NO_CHANCE:
            u -= chance
            k += 1.0
            chance *= odds * (n - k + 1.0) / k
        return np.int64(min(k, n))
    spread = math.sqrt(n * p * q)
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    c = n * p + 0.5
    v_r = 0.92 - 4.2 / b
    alpha = (2.83 + 5.1 / b) * spread
    mode = np.int64((n + 1.0) * p)
    while True:
        u = 0.5 - uniform(rng)
        v = 1.0 - uniform(rng)
        us = 0.5 - abs(u) + _UNIT  # never 0
        x = (2.0 * a / us + b) * u + c
        if not 0.0 <= x < n + 1.0:
            continue
        k = np.int64(x)
        if us >= 0.07 and v <= v_r:
            return k
        v = math.log(v * alpha / (a / (us * us) + b))
        accepted = (mode + 0.5) * math.log((mode + 1.0) / (odds * (n - mode + 1.0)))
        accepted += (n + 1.0) * math.log((n - mode + 1.0) / (n - k + 1.0))
        accepted += (k + 0.5) * math.log(odds * (n - k + 1.0) / (k + 1.0))
        accepted += _stirling_tail(mode) + _stirling_tail(n - mode)
        accepted -= _stirling_tail(k) + _stirling_tail(n - k)
        if v <= accepted:
            return k


@njit
def _stirling_tail(k):
    """Return log(k!) - ((k + 1/2) log(k + 1) - (k + 1) + log(2 pi) / 2), float64."""
    if k < 10.0:
        exact = math.lgamma(k + 1.0)
        return exact - ((k + 0.5) * math.log(k + 1.0) - (k + 1.0) + 0.9189385332046727)
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / 1260.0 / square) / square) / (k + 1.0)


@njit
def choice(rng, weights):
    """Draw the index of a weight, int64, with a probability in proportion to it; takes a word.

    Args:
        rng: The stream.
        weights: 1-D array, or a tuple, of numbers whose sum is finite. Those that are not above 0
            are never drawn.

    Returns:
        The index; -1 if no weight is above 0.
    """
    total = 0.0
    for k in range(len(weights)):
        if weights[k] > 0:
            total += weights[k]
    left = uniform(rng) * total
    found = -1
    for k in range(len(weights)):
        if weights[k] > 0:
            found = k  # the last one counts, if rounding leaves something
            left -= weights[k]
            if left < 0.0:
                break
    return np.int64(found)


@njit
def shuffle(rng, values):
    """Put the elements of a 1-D array in random order, each order as likely as the others.

    The shuffle of Fisher and Yates in Durstenfeld's form (1964); takes one word less than there are
    elements.
    """
    for k in range(len(values) - 1, 0, -1):
        other = integers(rng, k + 1)
        value = values[k]
        values[k] = values[other]
        values[other] = value


@njit
def permutation(rng, out):
    """Write the numbers from 0 to n - 1 into a 1-D array of n elements, in random order."""
    for k in range(len(out)):
        out[k] = k
    shuffle(rng, out)
