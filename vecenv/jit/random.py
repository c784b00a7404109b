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

* `next_word`, `uniform`, `integers`, `normal` take the next draw of the step;
* `word_at`, `uniform_at`, `integers_at` name a draw by its number (`slot`), so a kernel that draws
  in another order, or skips some draws, still sees the same values.

Sums and products of words go through `np.add` and `np.multiply`: with the JIT switched off, the
operators would warn about wraparound.
"""

import math

import numpy as np
from numba import njit

# For kernels; the rest of this module is the driver's.
__all__ = [
    "integers",
    "integers_at",
    "next_word",
    "normal",
    "uniform",
    "uniform_at",
    "word_at",
]

RNG_DTYPE = np.dtype([("key", np.uint64), ("counter", np.uint64)])
BLOCK_SIZE = 1 << 16  # words per step; a step that draws more runs on into the next block
NUM_SLOTS = BLOCK_SIZE // 2  # slots of `word_at`, the upper half of a block

_ONE = np.uint64(1)
_BLOCK_LOW_BITS = np.uint64(BLOCK_SIZE - 1)
_FIRST_SLOT = np.uint64(NUM_SLOTS)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1 = np.uint64(30)
_SHIFT_2 = np.uint64(27)
_SHIFT_3 = np.uint64(31)
_HALF = np.uint64(32)
_UNUSED_BITS = np.uint64(11)  # a float64 in [0, 1) takes 53 of the 64 bits
_UNIT = 2.0**-53
_LOW_HALF = np.uint64(0xFFFFFFFF)


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
def seed_streams(streams, env_ids, seeds):
    """Begin the streams of env_ids int64 (B,), of streams (N,), at seeds uint64 (B,)."""
    for k in range(env_ids.shape[0]):
        stream = streams[env_ids[k]]
        stream.key = seed_key(seeds[k])
        stream.counter = np.uint64(0)


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

    The slots are apart from the words that `next_word` hands out.
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

    Values differ in probability by at most a part in 2**32 / n.
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
