"""Give a Python env the random numbers that its kernels draw.

    seed s --> stream (key, counter) --> kernels:  integers(rng, 5)            word 0
                     the same words  --> Python:   self.np_random.integers(5)  word 0
                                                   |
                                                   Draw("integers", (5,), 1 word, file:line)

The kernels are not changed, compiled or not. In the Python env, each generator (NumPy's `Generator`
and `RandomState`, Python's `random.Random`) is replaced by one that takes the words of the same
stream, by the algorithms of `vecenv.jit.random`, and notes the line of each call.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import random as python_random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from gymnasium.utils import seeding

from vecenv.core.compiling import cached_njit
from vecenv.jit import random
from vecenv.port.deadline import within

__all__ = ["Draw", "Tape", "UnsupportedDraw", "find_generators", "open_tape", "taped_constructors"]

GENERATORS = (np.random.Generator, np.random.RandomState, python_random.Random)
_PLAIN = (str, bytes, int, float, type(None), np.ndarray, np.generic, type, types.ModuleType)
_OPAQUE = ("numpy", "pygame", "matplotlib", "logging", "threading", "torch", "builtins")
_MOST_OBJECTS = 20_000  # most objects to search for generators


class UnsupportedDraw(ValueError):
    """A Python env draws from a distribution that `vecenv.jit.random` does not have."""


class Draw(NamedTuple):
    """One call of a generator.

    Attributes:
        kind: The distribution's name in `vecenv.jit.random`.
        args: Numeric arguments, such as the number of values.
        words: Number of words taken from the stream.
        file, line: Place of the call.
    """

    kind: str
    args: tuple[Any, ...]
    words: int
    file: str
    line: int

    def __str__(self) -> str:
        name = self.file.rpartition("/")[2]
        return f"{self.kind}({', '.join(map(str, self.args))}) {name}:{self.line}"


@cache  # a single draw is compiled: calls cost a microsecond, and it is the kernels' own code
def _compiled(name: str) -> Callable[..., Any]:
    return cached_njit(getattr(random, name))


_ready: set[str] = set()  # functions that have been compiled


def _call(name: str, *args: Any) -> Any:
    """Call a function of `vecenv.jit.random`; compiling it is not the env's time."""
    if name in _ready:
        return _compiled(name)(*args)
    with within("compiling a draw", 20.0):
        value = _compiled(name)(*args)
    _ready.add(name)
    return value


class Tape:
    """The random stream of one kernel env, read by the Python env.

    Attributes:
        draws: Calls since the latest `begin`.
        num_words: Number of words that they took.
    """

    def __init__(self) -> None:
        self._stream: Any = np.zeros(1, random.RNG_DTYPE).view(np.recarray)[0]
        self.draws: list[Draw] = []

    @property
    def num_words(self) -> int:
        """Return the number of words taken since `begin`."""
        return sum(draw.words for draw in self.draws)

    def seed(self, seed: int) -> None:
        """Start at the beginning of the kernels' stream for this seed."""
        self._stream.key = _call("seed_key", np.uint64(seed))
        self._stream.counter = np.uint64(0)

    def save(self) -> tuple[Any, Any]:
        """Return the place in the stream."""
        return self._stream.key.copy(), self._stream.counter.copy()

    def load(self, saved: tuple[Any, Any]) -> None:
        """Go to a place in the stream."""
        self._stream.key, self._stream.counter = saved

    def begin(self) -> None:
        """Begin a reset or a step, as the kernels' driver does before each."""
        _call("open_block", self._stream)
        self.draws = []

    def take(self, kind: str, *args: Any) -> Any:
        """Draw from a distribution of `vecenv.jit.random`, and note the call."""
        before = int(self._stream.counter)
        value = _call(kind, self._stream, *args)
        frame: Any = inspect.currentframe()
        while frame.f_globals.get("__name__") in (__name__, "functools"):
            frame = frame.f_back
        shown = tuple(one for one in args if not isinstance(one, np.ndarray))
        words = int(self._stream.counter) - before
        self.draws.append(Draw(kind, shown, words, frame.f_code.co_filename, frame.f_lineno))
        return value

    def below(self, n: Any) -> int:
        """Draw an integer in [0, n)."""
        if n < 1:
            raise ValueError(f"a draw of one of {n} values")
        return int(self.take("integers", int(n)))


# One number of each distribution of NumPy and Python, drawn as in kernels: its parameters with
# defaults, and the function that draws it.
_NUMBERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "random": ({}, lambda t: t.take("uniform")),
    "uniform": ({"low": 0.0, "high": 1.0}, lambda t, a, b: a + (b - a) * t.take("uniform")),
    "normal": ({"loc": 0.0, "scale": 1.0}, lambda t, a, b: a + b * t.take("normal")),
    "exponential": ({"scale": 1.0}, lambda t, a: a * t.take("exponential")),
    "expovariate": ({"lambd": 1.0}, lambda t, a: t.take("exponential") / a),
    "gamma": ({"shape": 1.0, "scale": 1.0}, lambda t, a, b: b * t.take("gamma", float(a))),
    "poisson": ({"lam": 1.0}, lambda t, a: t.take("poisson", float(a))),
    "binomial": ({"n": 1, "p": 0.5}, lambda t, n, p: t.take("binomial", int(n), float(p))),
}
_SAME = {"random_sample": "random", "gauss": "normal", "normalvariate": "normal"}
_SAME |= {"standard_normal": "normal", "standard_exponential": "exponential"}
_NUMBERS |= {other: _NUMBERS[name] for other, name in _SAME.items()}


def _numbers(
    tape: Tape, name: str, *args: Any, size: Any = None, dtype: Any = None, **named: Any
) -> Any:
    """Draw one number, or an array of them in C order, of a distribution."""
    parameters, one = _NUMBERS[name]
    is_short = name.startswith(("standard", "random_"))  # parameters: only the size
    if len(args) > (0 if is_short else len(parameters)):
        args, size = args[:-1], args[-1]
    values = list((parameters | dict(zip(parameters, args, strict=False)) | named).values())
    return _filled(partial(one, tape), values, size, dtype)


def _filled(one: Callable[..., Any], values: Any, size: Any, dtype: Any) -> Any:
    """Call `one` for each number of the result; its values may be arrays."""
    if size is None and all(np.ndim(value) == 0 for value in values):
        return one(*values)
    shape = np.broadcast_shapes(*map(np.shape, values)) if size is None else size
    arrays = [np.broadcast_to(value, shape) for value in values]
    out = [one(*(array[at] for array in arrays)) for at in np.ndindex(np.empty(shape).shape)]
    return np.array(out, dtype).reshape(shape)


class TapedNumpy:
    """Replaces `np.random.Generator` and `np.random.RandomState`.

    Attributes that it lacks are looked up in `_NUMBERS`.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # copies of an env share the tape

    def __getattr__(self, name: str) -> Any:
        if name in _NUMBERS:
            return partial(_numbers, self._tape, name)
        if name.startswith("__"):
            raise AttributeError(name)
        frame: Any = inspect.currentframe()
        frame = frame.f_back
        raise UnsupportedDraw(
            f"{frame.f_code.co_filename}:{frame.f_lineno}: the env draws by `{name}`, which has no "
            f"counterpart in vecenv.jit.random; draw by one of {', '.join(random.__all__)} instead"
        )

    def seed(self, *args: Any) -> None:
        """Do nothing: the tape has the seed."""

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Any:  # fmt: skip
        """Draw from [low, high), or [0, low)."""
        low, high = (0, low) if high is None else (low, high)
        one = lambda a, b: int(a) + self._tape.below(b - a + endpoint)  # noqa: E731
        return np.dtype(dtype).type(_filled(one, (low, high), size, dtype))

    randint = integers

    def rand(self, *shape: int) -> Any:
        """Draw from [0, 1), an array of this shape."""
        return _numbers(self._tape, "random", size=shape or None)

    def randn(self, *shape: int) -> Any:
        """Draw from the standard normal distribution, an array of this shape."""
        return _numbers(self._tape, "normal", size=shape or None)

    def shuffle(self, x: Any, axis: int = 0) -> None:
        """Put a list or the rows of an array in random order."""
        order = np.arange(len(x))
        self._tape.take("shuffle", order)
        copied = x.copy()
        for k, source in enumerate(order):
            x[k] = copied[source]

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """Return an array, or the numbers below x, in random order."""
        array = np.arange(x) if np.ndim(x) == 0 else np.array(x)
        self.shuffle(array)
        return array

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        """Draw elements; without replacement they are the first of a permutation."""
        count = int(a) if np.ndim(a) == 0 else len(a)
        if size is not None and not replace:
            if p is not None:
                return self.choice_without_replacement_by_weights  # refused
            found = self.permutation(count)[: int(np.prod(size))].reshape(size)
        else:
            one = lambda: self._index(count, p)  # noqa: E731
            found = _filled(one, (), size, np.int64)
        return found if np.ndim(a) == 0 else np.asarray(a)[found]

    def _index(self, count: int, weights: Any) -> int:
        """Draw a number below `count`, in proportion to weights if there are any."""
        if weights is None:
            return self._tape.below(count)
        return int(self._tape.take("choice", np.asarray(weights, np.float64)))


class TapedPython(TapedNumpy):
    """Replaces `random.Random`."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """Draw an element of a range."""
        return self.choices(range(start) if stop is None else range(start, stop, step))[0]

    def randint(self, a: int, b: int) -> int:  # type: ignore[override]  # Python's includes b
        """Draw from a to b, both included."""
        return self.randrange(a, b + 1)

    def choice(self, seq: Any) -> Any:  # type: ignore[override]
        """Draw an element."""
        return self.choices(seq)[0]

    def choices(self, population: Any, weights: Any = None, *, k: int = 1) -> list[Any]:
        """Draw k elements with replacement."""
        return [population[self._index(len(population), weights)] for _ in range(k)]

    def sample(self, population: Any, k: int) -> list[Any]:
        """Draw k elements without replacement: the first of a permutation."""
        elements = list(population)
        self.shuffle(elements)
        return elements[:k]


def _children(found: Any) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield name, value and setter for each part of an object."""
    held: Any = found
    if isinstance(found, dict | list | tuple):
        for key, value in list(found.items() if isinstance(found, dict) else enumerate(found)):
            yield f"[{key!r}]", value, partial(operator.setitem, held, key)
    elif not (type(found).__module__ or "").startswith(_OPAQUE):
        for name, value in list(getattr(found, "__dict__", {}).items()):
            yield f".{name}", value, partial(found.__dict__.__setitem__, name)


def find_generators(env: Any) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield place, generator and replacing function for each generator of an env.

    The search follows attributes, lists, dicts and tuples, nearest first, and globals of the
    modules of its classes. It leaves out the module-level functions of `random` and
    `numpy.random`: `vecenv.port.hidden` refuses envs that use them.
    """
    queue = deque[tuple[str, Any]]([("env", env)])
    for one in type(getattr(env, "unwrapped", env)).__mro__:
        if not one.__module__.startswith(("gymnasium.core", "typing", "abc", "vecenv", *_OPAQUE)):
            own = getattr(sys.modules.get(one.__module__), "__dict__", {})
            kept = {name: x for name, x in own.items() if isinstance(x, GENERATORS)}
            for name, generator in kept.items():
                yield f"{one.__module__}.{name}", generator, partial(own.__setitem__, name)
    seen = {id(env)}
    while queue and len(seen) < _MOST_OBJECTS:
        path, found = queue.popleft()
        for key, value, put in _children(found):
            if isinstance(value, GENERATORS):
                yield path + key, value, put
            elif id(value) not in seen and not isinstance(value, _PLAIN):
                seen.add(id(value))
                queue.append((path + key, value))


def open_tape(env: Any, tape: Tape) -> None:
    """Replace the generators of an env by taped ones."""
    for _, generator, put in list(find_generators(env)):
        is_python = isinstance(generator, python_random.Random)
        with contextlib.suppress(TypeError):  # a tuple can't be changed
            put(TapedPython(tape) if is_python else TapedNumpy(tape))


@contextlib.contextmanager
def taped_constructors(tape: Tape) -> Iterator[None]:
    """Make all generators that are created inside taped ones."""
    make = lambda *_, **__: TapedNumpy(tape)  # noqa: E731
    with (
        mock.patch.object(np.random, "default_rng", make),
        mock.patch.object(np.random, "RandomState", make),
        mock.patch.object(python_random, "Random", lambda *_: TapedPython(tape)),
        mock.patch.object(seeding, "np_random", lambda seed=None: (make(), seed or 0)),
    ):
        yield
