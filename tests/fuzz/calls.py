"""Hostile arguments to every public call of buffers: each is answered or refused.

A case makes two objects alike, or takes two that are there. One is given what nobody should give:
arrays of other dtypes, strides and byte orders, read-only ones, huge numbers, nests of other
shapes, objects. If it takes that, the other is given the same values as plain contiguous arrays,
and both must do the same. If it does not, it must say so by an exception of a sensible kind, and
both must still be the same afterwards.

Cases run in processes of their own: none may die by a signal, none may hang.
"""

from __future__ import annotations

import functools
import math
import resource
import warnings
from pathlib import Path

import numpy as np
import torch
from fuzz.harness import run_apart
from gymnasium import spaces
from replay_model import RINGS
from staged_rollouts import rollout_class

import buffers

UNIT = "calls"
NUM_ENVS = 3
_CALLS = 60  # of a case
_MOST_BYTES = 16 << 30  # that the process may take more than it has: nothing here needs much
_MODES = ("NextStep", "SameStep", "Disabled")


def run_case(number):
    """Run a case in a process of its own; return the number of calls."""
    return run_apart("fuzz.calls", number)


def run_here(number, kind=None):
    """Run a case in this process, which is to be thrown away."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_BYTES,) * 2)
    kind = kind or _WEIGHTED[number % len(_WEIGHTED)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return RUNS[kind](Case(number))


def warm_up():
    """Have the compiled code of the cases."""
    torch.set_num_threads(1)  # a fork has none of the threads that it would wait for
    for kind in ("replay", "episodic", "rollout"):
        with np.errstate(all="ignore"):
            RUNS[kind](Case(1))


# -- values ----------------------------------------------------------------------------------


class Refuses:
    """Raises where one looks."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("no array")

    def __index__(self):
        raise TypeError("no index")

    def __len__(self):
        raise TypeError("no length")

    def __float__(self):
        raise TypeError("no number")


# What may come where a small integer is expected.
_POWERS = [2**k + d for k in (7, 8, 15, 16, 31, 32, 53, 63, 64, 200) for d in (-1, 0, 1)]
INTEGERS = [
    -1, 0, 1, 2, 3, 5, *_POWERS, *(-p for p in _POWERS),
    np.int8(3), np.uint64(2**63), np.int64(-(2**63)), np.uint8(200), np.bool_(True),
    1.0, 1.5, -0.0, np.nan, np.inf, 1e300, np.float32(2), np.float64("nan"), 3 + 0j,
    True, False, None, "3", b"3", "", [], [2], (1, 2), {}, {1}, object(), Refuses(), int,
    np.array(3), np.array([3]), np.array([1, 2]), np.array("x"), torch.tensor(3),
    torch.tensor([3, 4]), np.datetime64("2020"),
]  # fmt: skip
# What is no array of numbers at all.
ODD = [
    None, "text", b"bytes", 3, 2**70, np.nan, {}, {"a": 1}, {1: 2, None: 3}, set(), [], (),
    [[]], [[1], [1, 2]], [None], ["x"], object(), Refuses(), int, len, range(3),
    Ellipsis, slice(2), np.float64(1), np.zeros(3, object), np.array([{}, []], object),
    np.zeros(2, [("x", "f4"), ("y", "O")]), np.dtype("f4"), memoryview(b"abcd"), torch.empty(0),
    torch.zeros(2, 3).to_sparse(), torch.zeros(3, dtype=torch.complex64), torch.float32,
    torch.zeros(2, device="meta"), torch.zeros(3, dtype=torch.bfloat16), 1j, np.ma.masked,
]  # fmt: skip
DTYPES = (
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D",
    ">i4", ">i8", ">f4", ">f8", "S3", "U3", "O", "M8[s]", "m8[s]", "V4",
)  # fmt: skip


def with_values(rng, array):
    """The same shape with other values: those that come where nobody expects them."""
    kind = array.dtype.kind
    if kind == "f":
        pool = [np.nan, np.inf, -np.inf, 1e30, -0.0, 0.5, 1e-40, 3.0]
    elif kind in "iu":
        about = np.iinfo(array.dtype)
        pool = [about.min, about.max, 0, 1, 2, 3, about.max - 1]
    elif kind == "b":
        pool = [False, True]
    else:
        return array
    values, where = array.copy(), rng.random(array.shape) < 0.3
    values[where] = rng.choice(np.array(pool).astype(array.dtype), int(where.sum()))
    return values


def with_dtype(rng, array):
    try:
        return array.astype(str(rng.choice(DTYPES)))
    except (RuntimeError, TypeError, ValueError):  # times as text that is too short, and the like
        return np.zeros(array.shape, object)


def with_layout(rng, array):
    """The same values in another place and order of memory."""
    choice = rng.integers(6)
    if choice == 0:
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if choice == 1:
        return np.flip(np.flip(array).copy())
    if choice == 2:
        return np.asfortranarray(array)
    if choice == 3:
        copied = array.copy()
        copied.flags.writeable = False
        return copied
    if choice == 4 and array.dtype.kind != "O":
        pages = np.zeros(array.nbytes + 1, np.uint8)
        unaligned = pages[1:].view(array.dtype).reshape(array.shape)
        unaligned[...] = array
        return unaligned
    return np.broadcast_to(array.ravel()[:1].reshape(()), array.shape) if array.size else array


def with_shape(rng, array):
    row = array.ravel()[:1]
    forms = [
        array[None], array[..., None], array.reshape(-1), array.T, np.stack([array, array]),
        row.reshape(()) if array.size else np.zeros((), array.dtype),
        np.zeros((2, *([1] * 30), *array.shape)[:32], array.dtype),
    ]  # fmt: skip
    if array.ndim:
        forms += [array[1:], np.concatenate([array, array[:1]]), array[:0]]
    return forms[rng.integers(len(forms))]


class Case:
    """Draws objects, good values, and hostile ones from those."""

    def __init__(self, number):
        self.rng = rng = np.random.default_rng(number)
        self.number = number
        self.space = _OBS_SPACES[rng.integers(len(_OBS_SPACES))]
        self.actions = _ENV_ACTIONS[rng.integers(2)]
        self.has_extras = bool(rng.random() < 0.3)
        self.extras = {"costs": spaces.Box(-1, 1, (2,))} if self.has_extras else None

    def chance(self, share):
        return self.rng.random() < share

    def one_of(self, *items):
        return items[self.rng.integers(len(items))]

    def integer(self, good):
        return good if self.chance(0.3) else INTEGERS[self.rng.integers(len(INTEGERS))]

    def array(self, good):
        """A good array, made hostile in one way or two."""
        rng = self.rng
        if self.chance(0.03):
            return ODD[rng.integers(len(ODD))]
        found, ways = good, (with_values, with_dtype, with_layout, with_shape)
        for _ in range(rng.integers(1, 3)):
            try:
                found = self.one_of(*ways)(rng, found)
            except (TypeError, ValueError, OverflowError):  # NumPy does not make such an array
                return good
            if type(found) is not np.ndarray:
                break
        return found

    def tree(self, good):
        """A nest of arrays with one leaf or one place made hostile."""
        if isinstance(good, dict):
            found, choice = dict(good), self.rng.random()
            key = list(found)[self.rng.integers(len(found))]
            if choice < 0.1:
                del found[key]
            elif choice < 0.2:
                found[self.one_of(None, 3, "extra", ("a",))] = found[key]
            else:
                found[key] = self.tree(found[key])
            return list(found.items()) if self.chance(0.05) else found
        if isinstance(good, tuple):
            items, place = list(good), self.rng.integers(len(good))
            items[place] = self.tree(items[place])
            return self.one_of(items, tuple(items[1:])) if self.chance(0.1) else tuple(items)
        return self.array(np.asarray(good))

    def hostile_columns(self, columns):
        """Columns of which one or two are hostile, or one is missing or too many."""
        found = dict(columns)
        for _ in range(self.rng.integers(1, 3)):
            name, choice = str(self.rng.choice(list(columns))), self.rng.random()
            if choice < 0.04:
                found.pop(name, None)
            elif choice < 0.07:
                found["more"] = found.get(name)
            else:
                found[name] = self.tree(columns[name])
        return found

    def rows(self, count, space=None):
        """Good rows of a space, nested like it."""
        space = self.space if space is None else space
        if isinstance(space, spaces.Dict):
            return {key: self.rows(count, part) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self.rows(count, part) for part in space.spaces)
        shape = (count, *space.shape)
        if np.dtype(space.dtype).kind == "f":
            return self.rng.random(shape).astype(space.dtype)
        return self.rng.integers(0, 3, shape).astype(space.dtype)

    def columns(self, count):
        rng = self.rng
        return {
            "obs": self.rows(count),
            "next_obs": self.rows(count),
            "actions": self.rows(count, self.actions),
            "rewards": rng.random(count),
            "terminations": rng.random(count) < 0.2,
            "truncations": rng.random(count) < 0.2,
            **({"costs": rng.random((count, 2)).astype(np.float32)} if self.has_extras else {}),
        }


def clean(value):
    """The same as plain contiguous arrays; what can't be made one stays as it is."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        if value.is_sparse or value.device.type != "cpu":
            return value
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        return np.array(plain, plain.dtype.newbyteorder("="), order="C")
    if isinstance(value, tuple | list):
        cleaned = [clean(item) for item in value]
        return type(value)(*cleaned) if hasattr(value, "_fields") else type(value)(cleaned)
    return value


# -- what is allowed -------------------------------------------------------------------------

_SENSIBLE = (TypeError, ValueError, IndexError, KeyError, OverflowError, NotImplementedError)


def is_sensible(error):
    """Whether an exception tells a user that an argument or the moment was wrong."""
    module = type(error).__module__.partition(".")[0]
    if module in ("buffers", "vecenv", "gymnasium"):
        return True
    if isinstance(error, RuntimeError) and "Boolean value of Tensor" in str(error):
        return True  # torch's way to say that it is no number
    return module in ("builtins", "numpy") and isinstance(error, _SENSIBLE)


class Twins:
    """Two objects alike; one is called with hostile arguments, the other with clean ones."""

    def __init__(self, make, path):
        self.hostile, self.reference, self.path = make(), make(), path
        self.count = 0

    def call(self, name, *args, is_compared=True, **kwargs):
        """Call a method of both; return what came, or None if it was refused."""
        self.count += 2
        cleaned = clean(args), clean(kwargs)  # before: the call may write into its arguments
        told = f"{self.path}: {name}({describe(args)}, {describe(kwargs)})"
        try:
            found = getattr(self.hostile, name)(*args, **kwargs)
        except Exception as error:
            if not is_sensible(error):
                raise AssertionError(f"{told} raised {error!r}") from error
            return None
        try:
            expected = getattr(self.reference, name)(*cleaned[0], **cleaned[1])
        except Exception as error:
            raise AssertionError(f"{told} was taken, but not its values in plain arrays") from error
        if is_compared:
            compare(found, expected, told)
        return found, expected

    def compare_states(self):
        found, expected = self.hostile.state_dict(), self.reference.state_dict()
        for state in (found, expected):  # rows of the pool and of dead slots are as they were left
            for name in ("units", "back", "slot"):
                state.pop(name, None)
        compare(found, expected, f"{self.path}: state")


def describe(value):
    """A value in few words."""
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {value.shape}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(item) for item in value[:8]) + ")"
    return f"{type(value).__name__} {value!r}"[:100]


def compare(found, expected, path):
    """Raise AssertionError where two results differ; NaN equals NaN."""
    if isinstance(found, torch.Tensor):
        found, expected = found.detach().cpu().numpy(), expected.detach().cpu().numpy()
    if hasattr(found, "_asdict") and not isinstance(found, type):
        found, expected = found._asdict(), expected._asdict()
    if isinstance(found, np.ndarray) and found.dtype.kind != "O":
        expected = np.asarray(expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), path
        is_same = np.array_equal(found, expected, equal_nan=found.dtype.kind in "fc")
        assert is_same, f"{path}: {found!r} differs from {expected!r}"
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), path
        for key in found:
            compare(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(found, tuple | list | np.ndarray):
        assert len(found) == len(expected), path
        for k, (left, right) in enumerate(zip(found, expected, strict=True)):
            compare(left, right, f"{path}[{k}]")
    elif isinstance(found, float | np.floating):  # sums depend on strides
        is_nan = found != found and expected != expected
        assert is_nan or found == expected or math.isclose(found, expected, rel_tol=1e-12), path
    elif isinstance(found, int | str | bytes | np.generic) or found is None:
        assert found == expected, f"{path}: {found!r} differs from {expected!r}"


# -- buffers ---------------------------------------------------------------------------------

_OBS_SPACES = (
    spaces.Box(-1, 1, (5,)),
    spaces.Dict(
        a=spaces.Box(-1, 1, (2,)),
        b=spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 255, (2, 2), np.uint8)]),
    ),
    spaces.Discrete(9),
)
_ENV_ACTIONS = (spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([3, 4]))


def make_twins(case, cls, *sizes, **options):
    """Make two buffers; before that, one with a hostile argument, which is made or refused."""
    path = f"case {case.number}, {cls.__name__}({sizes}, {options})"
    given = dict(enumerate(sizes)) | options
    name = list(given)[case.rng.integers(len(given))]
    given[name] = case.integer(given[name])
    first = [given.pop(k) for k in range(len(sizes))]
    try:
        cls(*first, case.space, case.actions, **given)
    except Exception as error:
        if not is_sensible(error):
            raise AssertionError(f"{path}: with {describe([*first, given])}") from error
    make = functools.partial(cls, *sizes, case.space, case.actions, **options)
    return Twins(functools.partial(make, extra_columns=case.extras), path)


def run_replay(case):
    """The replay buffers that are rings."""
    rng = case.rng
    cls = RINGS[rng.integers(len(RINGS))]
    options = {"num_envs": NUM_ENVS, "seed": 0, "store_next": case.chance(0.6)}
    options |= {"n_step": int(rng.integers(1, 4)), "gamma": 0.9} if case.chance(0.5) else {}
    options |= {"track_env": case.chance(0.3), "staged": case.chance(0.1)}
    is_prioritized = cls is buffers.PrioritizedReplayBuffer
    if cls is buffers.PerEnvReplayBuffer:
        options["over"] = case.one_of("transitions", "envs")
    twins = make_twins(case, cls, int(rng.integers(1, 60)), **options)
    for _ in range(_CALLS):
        choice, held = rng.random(), max(1, len(twins.hostile))
        if choice < 0.45:
            size = int(rng.integers(0, 9)) * (1 if case.chance(0.5) else NUM_ENVS)
            columns = case.columns(size)
            ids = rng.integers(0, NUM_ENVS, size) if case.chance(0.5) else None
            if ids is not None and case.chance(0.5):
                twins.call("add", env_ids=case.array(ids), **columns)
            else:
                twins.call("add", env_ids=ids, **case.hostile_columns(columns))
        elif choice < 0.6:
            given = {"out": case.one_of(None, 3, "x", {})} if case.chance(0.2) else {}
            if case.chance(0.4):
                given |= {"beta": case.integer(0.4)} if is_prioritized else {"replace": False}
            twins.call("sample", case.integer(4), **given)
        elif choice < 0.75:
            twins.call("get", case.array(rng.integers(0, held, rng.integers(1, 6))))
        elif choice < 0.85 and is_prioritized:
            rows, given = rng.integers(0, held, 4), rng.random(4)
            twins.call("update_priorities", case.array(rows), given)
            twins.call("update_priorities", rows, case.array(given))
        elif choice < 0.93:
            twins.call("cut_episodes", case.array(rng.permutation(NUM_ENVS)[:2]))
        else:
            name = case.one_of("reserve_final_obs", "new_batch")
            twins.call(name, case.integer(3), is_compared=False)
    twins.call("add", **case.columns(NUM_ENVS))
    twins.compare_states()
    if len(twins.hostile):
        twins.call("sample", 8)
    return twins.count


def run_episodic(case):
    rng = case.rng
    options = {"num_envs": NUM_ENVS, "seed": 0, "staged": case.chance(0.15)}
    options |= {"max_episodes": int(rng.integers(1, 9))} if case.chance(0.5) else {}
    twins = make_twins(case, buffers.EpisodicReplayBuffer, int(rng.integers(1, 60)), **options)
    for _ in range(_CALLS):
        choice = rng.random()
        if choice < 0.3:
            size = int(rng.integers(0, 9))
            columns = case.columns(size) | {"obs": case.rows(size + 1)}
            del columns["next_obs"]
            columns["terminations"], columns["truncations"] = np.zeros((2, size), bool)
            if case.chance(0.5):
                columns["boundaries"] = rng.random(size) < 0.3
            columns = case.hostile_columns(columns) if case.chance(0.5) else columns
            twins.call("add_episode", ODD[rng.integers(12)] if case.chance(0.02) else columns)
        elif choice < 0.5:
            columns, ids = case.columns(NUM_ENVS), rng.permutation(NUM_ENVS)
            if case.chance(0.25):
                twins.call("add", case.array(ids), **columns)
            else:
                columns = case.hostile_columns(columns) if case.chance(0.5) else columns
                twins.call("add", **columns)
                twins.call("cut_episodes")
        elif choice < 0.6:
            twins.call("cut_episodes", case.array(rng.permutation(NUM_ENVS)[:2]))
        elif choice < 0.65:
            twins.call("episode", case.integer(-1))
        else:
            over = case.one_of("steps", "episodes", "steps", "x", None, [])
            sizes = case.one_of((case.integer(3), 2), (3, case.integer(2)))
            name = case.one_of("sample", "sample_sequences", "sample_stacks", "sample_goals")
            if name == "sample":
                twins.call(name, case.integer(4), case.integer(0.9), over=over)
            elif name == "sample_sequences":
                twins.call(name, *sizes, over=over, pad=case.chance(0.5))
            elif name == "sample_stacks":
                twins.call(name, *sizes, over=over)
            else:
                strategy = case.one_of("future", "final", "episode", "x", None, {})
                ratio = case.integer(0.8)
                twins.call(name, case.integer(3), strategy, relabel_ratio=ratio, over=over)
    twins.compare_states()
    return twins.count


def run_rollout(case):
    rng, num_steps = case.rng, int(case.rng.integers(1, 4))
    mode, cls = case.one_of(*_MODES), rollout_class(staged=case.chance(0.2))
    twins = make_twins(case, cls, num_steps, NUM_ENVS, autoreset_mode=mode, seed=0)
    for _ in range(_CALLS // 10):
        twins.call("start", case.tree(case.rows(NUM_ENVS)))
        twins.call("start", case.rows(NUM_ENVS))
        for t in range(num_steps):
            good = {
                "actions": case.rows(NUM_ENVS, case.actions),
                "log_probs": rng.random(NUM_ENVS).astype(np.float32),
                "values": rng.random(NUM_ENVS).astype(np.float32),
                **({"costs": rng.random((NUM_ENVS, 2))} if case.has_extras else {}),
            }
            twins.call("put", t, **case.hostile_columns(good))
            twins.call("put", case.integer(t), **good)
            twins.call("put", t, **good)
            twins.call("obs_at", case.integer(t))
            twins.call("env_actions", case.integer(t))
            twins.call("write_obs", case.integer(t), case.rows(NUM_ENVS))
            twins.call("write_obs", t, case.tree(case.rows(NUM_ENVS)))
            twins.call("slot", case.integer(t), is_compared=False)
            flags, rewards = rng.random((2, NUM_ENVS)) < 0.3, rng.random(NUM_ENVS)
            for rollout in (twins.hostile, twins.reference):
                slot = rollout.slot(t)
                slot.rewards[:], slot.terminations[:], slot.truncations[:] = rewards, *flags
            ids, finals = np.flatnonzero(flags[1]), rng.random(int(flags[1].sum())).astype("f4")
            twins.call("set_final_values", t, case.array(ids), finals)
            twins.call("set_final_values", t, ids, case.array(finals))
            if mode != "NextStep":
                twins.call("set_final_values", t, ids, finals)
        last = rng.random(NUM_ENVS).astype(np.float32)
        twins.call("compute_advantages", case.array(last))
        twins.call("compute_advantages", last)
        both = twins.call("minibatches", case.integer(2), is_compared=False)
        if both is not None:
            compare(*map(list, both), twins.path)
        twins.call("episodes")
        if case.chance(0.5):
            twins.call("advance")
    twins.call("start", case.rows(NUM_ENVS))
    twins.compare_states()
    return twins.count


RUNS = {
    "replay": run_replay,
    "episodic": run_episodic,
    "rollout": run_rollout,
}
_WEIGHTED = [*RUNS, "replay", "replay", "episodic"]
