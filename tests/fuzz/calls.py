"""Hostile arguments to every public call of envs and buffers: each is answered or refused.

A case makes two objects alike, or takes two that are there. One is given what nobody should give:
arrays of other dtypes, strides and byte orders, read-only ones, overlapping ones, subclasses that
lie, huge numbers, nests of other shapes, objects. If it takes that, the other is given the same
values as plain contiguous arrays, and both must do the same. If it does not, it must say so by an
exception of a sensible kind, and both must still be the same afterwards.

Cases run in a process of their own, which runs many of them. That it ends, or does not answer, is
what must not be.
"""

from __future__ import annotations

import faulthandler
import functools
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vecenv import StepTimeoutError

UNIT = "calls"
_PATIENCE_S = 120
_CALLS = 60  # of a case
_MOST_BYTES = 16 << 30  # that the process may take more than it has: nothing here needs much
_TESTS = Path(__file__).parents[1]


# -- values ----------------------------------------------------------------------------------


class Liar(np.ndarray):
    """Says that it is larger than it is."""

    @property
    def shape(self):
        return tuple(3 * n for n in np.ndarray.shape.__get__(self))

    @property
    def nbytes(self):
        return 1 << 20

    def __len__(self):
        return self.shape[0] if self.ndim else 0


class Converts:
    """No array, but it can be made one."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array if dtype is None else self._array.astype(dtype)


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


def integers():
    """What may come where a small integer is expected."""
    import torch

    powers = [2**k + d for k in (7, 8, 15, 16, 31, 32, 53, 63, 64, 200) for d in (-1, 0, 1)]
    plain = [-1, 0, 1, 2, 3, 5, *powers, *(-p for p in powers)]
    own = [np.int8(3), np.uint64(2**63), np.int64(-(2**63)), np.uint8(200), np.bool_(True)]
    floats = [1.0, 1.5, -0.0, np.nan, np.inf, 1e300, np.float32(2), np.float64("nan"), 3 + 0j]
    odd = [True, False, None, "3", b"3", "", [], [2], (1, 2), {}, {1}, object(), Refuses(), int]
    arrays = [np.array(3), np.array([3]), np.array([1, 2]), np.array("x"), torch.tensor(3)]
    return [*plain, *own, *floats, *odd, *arrays, torch.tensor([3, 4]), np.datetime64("2020")]


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
    dtype = str(rng.choice(DTYPES))
    if rng.random() < 0.1:
        record = np.zeros(array.shape, [("x", array.dtype)])
        record["x"] = array
        return record
    try:
        return array.astype(dtype)
    except (RuntimeError, TypeError, ValueError):  # times as text that is too short, and the like
        return np.zeros(array.shape, dtype)


def with_layout(rng, array):
    """The same values in another place and order of memory."""
    choice = rng.integers(8)
    if choice == 0:
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if choice == 1:
        flipped = np.flip(array).copy()
        return np.flip(flipped)
    if choice == 2 and array.ndim:
        return np.broadcast_to(array[:1].copy(), array.shape) if len(array) else array
    if choice == 3:
        return np.asfortranarray(array)
    if choice == 4:
        copied = array.copy()
        copied.flags.writeable = False
        return copied
    if choice == 5 and array.dtype.kind != "O":
        pages = np.zeros(array.nbytes + 1, np.uint8)
        unaligned = pages[1:].view(array.dtype).reshape(array.shape)
        unaligned[...] = array
        return unaligned
    if choice == 6 and array.dtype.kind in "iuf":
        return array.astype(array.dtype.newbyteorder(">"))
    return np.broadcast_to(array.ravel()[:1].reshape(()), array.shape) if array.size else array


def with_shape(rng, array):
    choice = rng.integers(9)
    if choice == 0:
        return array[1:] if array.ndim else array[None]
    if choice == 1:
        return np.concatenate([array, array[:1]]) if array.ndim else np.stack([array, array])
    if choice == 2:
        return array[None]
    if choice == 3:
        return array[..., None]
    if choice == 4:
        return array.reshape(-1)
    if choice == 5:
        return array.T
    if choice == 6:
        return array.ravel()[:1].reshape(()) if array.size else np.zeros((), array.dtype)
    if choice == 7:
        return array[:0] if array.ndim else np.zeros(0, array.dtype)
    return np.zeros((2, *([1] * 30), *array.shape)[:32], array.dtype)


def with_class(rng, array, folder):
    """The same values as another class of arrays, or of what can be made one."""
    import torch

    choice = rng.integers(12)
    if choice == 0:
        return array.view(Liar)
    if choice == 1 and array.ndim == 2:
        return array.view(np.matrix)
    if choice == 2:
        return np.ma.masked_array(array, rng.random(array.shape) < 0.3)
    if choice == 3:
        return array.view(np.recarray)
    if choice == 4 and array.nbytes and array.dtype.kind in "iufb":
        path = os.path.join(folder, f"map{rng.integers(1 << 40)}")
        mapped = np.memmap(path, array.dtype, "w+", shape=array.shape)
        os.unlink(path)
        mapped[...] = array
        return mapped
    if choice == 5:
        return Converts(array)
    if choice == 6:
        return Converts(array.view(Liar))
    if choice == 7:
        return array.tolist()
    if choice == 8:
        return tuple(array) if array.ndim else array.tolist()
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    except TypeError:
        return array
    if choice == 9 and tensor.is_floating_point():
        return tensor.clone().requires_grad_()
    if choice == 10:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def odd_things():
    """What is no array of numbers at all."""
    import torch

    return [
        None, "text", b"bytes", 3, 2**70, np.nan, {}, {"a": 1}, {1: 2, None: 3}, set(), [], (),
        [[]], [[1], [1, 2]], [None], ["x"], object(), Refuses(), int, len, iter([1]), range(3),
        Ellipsis, slice(2), np.float64(1), np.zeros(3, object), np.array([{}, []], object),
        np.zeros(2, [("x", "f4"), ("y", "O")]), np.dtype("f4"), memoryview(b"abcd"), torch.empty(0),
        torch.zeros(2, 3).to_sparse(), torch.zeros(3, dtype=torch.complex64), torch.float32,
        torch.zeros(2, device="meta"), torch.zeros(3, dtype=torch.bfloat16), 1j, np.ma.masked,
    ]  # fmt: skip


class Values:
    """Draws hostile values from good ones; `folder` is for memory-mapped files."""

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, folder
        self.integers, self.odd = integers(), odd_things()
        self.own: list[np.ndarray] = []  # views of the object's own memory

    def array(self, good):
        """A good array, made hostile in one way or two."""
        rng = self.rng
        if rng.random() < 0.03:
            return self.odd[rng.integers(len(self.odd))]
        if self.own and rng.random() < 0.1:
            fitting = [
                view[: len(good)]
                for view in self.own
                if good.ndim and view.dtype == good.dtype and view.shape[1:] == good.shape[1:]
            ]
            if fitting:
                return fitting[rng.integers(len(fitting))]
        found = good
        for _ in range(rng.integers(1, 3)):
            with np.errstate(all="ignore"):
                try:
                    found = self._changed(found)
                except (TypeError, ValueError, OverflowError):  # NumPy does not make such an array
                    return good
            if type(found) is not np.ndarray:
                break
        return found

    def _changed(self, array):
        rng = self.rng
        choice = rng.random()
        if choice < 0.2:
            return with_values(rng, array)
        if choice < 0.35:
            return with_dtype(rng, array)
        if choice < 0.6:
            return with_layout(rng, array)
        if choice < 0.75:
            return with_shape(rng, array)
        return with_class(rng, array, self.folder)

    def tree(self, good):
        """A nest of arrays, perhaps with one leaf or one place made hostile."""
        rng = self.rng
        if isinstance(good, dict):
            found = dict(good)
            key = list(found)[rng.integers(len(found))]
            choice = rng.random()
            if choice < 0.1:
                del found[key]
            elif choice < 0.2:
                found[[None, 3, "extra", ("a",)][rng.integers(4)]] = found[key]
            elif choice < 0.25:
                return list(found.items())
            else:
                found[key] = self.tree(found[key])
            return found
        if isinstance(good, tuple):
            place = rng.integers(len(good))
            items = list(good)
            items[place] = self.tree(items[place])
            return [tuple(items), items, tuple(items[1:])][
                rng.integers(3) if rng.random() < 0.2 else 0
            ]
        return self.array(np.asarray(good))

    def integer(self, good):
        return (
            good
            if self.rng.random() < 0.3
            else self.integers[self.rng.integers(len(self.integers))]
        )

    def one_of(self, *items):
        return items[self.rng.integers(len(items))]


def clean(value):
    """The same as plain contiguous arrays; what can't be made one stays as it is."""
    import torch

    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        if value.is_sparse or value.device.type != "cpu":
            return value
        return value.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        with np.errstate(all="ignore"):
            return np.array(plain, plain.dtype.newbyteorder("="), order="C")
    if isinstance(value, Converts):
        return clean(value._array)
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


# What single calls may raise besides.
_ALSO: dict[str, tuple[type[Exception], ...]] = {
    "allocate": (MemoryError, OSError),
    "call": (AttributeError,),
    "get_attr": (AttributeError,),
}


class Finding(AssertionError):
    """Something that must not be."""


class Twins:
    """Two objects alike; one is called with hostile arguments, the other with clean ones."""

    def __init__(self, hostile, reference, path):
        self.hostile, self.reference, self.path = hostile, reference, path
        self.count = 0

    def call(self, name, *args, is_compared=True, **kwargs):
        """Call a method of both; return what came, or None if it was refused."""
        self.count += 2
        cleaned = clean(args), clean(kwargs)  # before: the call may write into its arguments
        told = f"{self.path}: {name}({describe(args)}, {describe(kwargs)})"
        try:
            found = getattr(self.hostile, name)(*args, **kwargs)
        except Exception as error:
            if not (is_sensible(error) or isinstance(error, _ALSO.get(name, ()))):
                raise Finding(f"{told} raised {type(error).__module__}.{error!r}") from error
            return None
        try:
            expected = getattr(self.reference, name)(*cleaned[0], **cleaned[1])
        except StepTimeoutError:  # the envs of the other one were ready within a short timeout
            return None
        except Exception as error:
            raise Finding(
                f"{told} was taken, but not its values in plain arrays: {error!r}"
            ) from error
        if is_compared:
            compare(found, expected, told)
        return found, expected


def describe(value):
    """A value in few words."""
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {np.ndarray.shape.__get__(value)}"
    if isinstance(value, dict):
        parts = (f"{key!r}: {describe(item)}" for key, item in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(item) for item in value[:8]) + ")"
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 100 else text[:100] + "..."


def compare(found, expected, path):
    """Raise Finding where two results differ; NaN equals NaN."""
    import torch

    if isinstance(found, torch.Tensor):
        found, expected = found.detach().cpu().numpy(), expected.detach().cpu().numpy()
    if isinstance(found, np.ndarray):
        found, expected = np.asarray(found), np.asarray(expected)
        is_same = found.shape == expected.shape and found.dtype == expected.dtype
        if is_same and found.dtype.kind == "O":
            for k, (left, right) in enumerate(zip(found.flat, expected.flat, strict=True)):
                compare(left, right, f"{path}[{k}]")
            return
        if not is_same or not np.array_equal(found, expected, equal_nan=found.dtype.kind in "fc"):
            raise Finding(f"{path}: {found!r} differs from {expected!r}")
    elif isinstance(found, dict):
        if found.keys() != expected.keys():
            raise Finding(f"{path}: {found.keys()} differ from {expected.keys()}")
        for key in found:
            compare(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(found, tuple | list):
        if len(found) != len(expected):
            raise Finding(f"{path}: {found} differs from {expected}")
        for k, (left, right) in enumerate(zip(found, expected, strict=True)):
            compare(left, right, f"{path}[{k}]")
    elif hasattr(found, "_asdict") and not isinstance(found, type):
        compare(found._asdict(), expected._asdict(), path)
    elif isinstance(found, float | int | str | bytes | np.generic) or found is None:
        is_same = found == expected or (found != found and expected != expected)
        if isinstance(found, float | np.floating):  # sums depend on strides
            is_same = is_same or math.isclose(found, expected, rel_tol=1e-12)
        if not is_same:
            raise Finding(f"{path}: {found!r} differs from {expected!r}")


# -- buffers ---------------------------------------------------------------------------------

NUM_ENVS = 3
_OBS_SPACES = {
    "flat": spaces.Box(-1, 1, (5,), np.float32),
    "nested": spaces.Dict(
        a=spaces.Box(-1, 1, (2,), np.float32),
        b=spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 255, (2, 2), np.uint8)]),
    ),
    "number": spaces.Discrete(9),
}
_ACTION_SPACES = {"discrete": spaces.Discrete(4), "box": spaces.Box(-1, 1, (2,), np.float32)}


def rows_of(space, count, rng):
    """Good rows of a space, nested like it."""
    if isinstance(space, spaces.Dict):
        return {key: rows_of(part, count, rng) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rows_of(part, count, rng) for part in space.spaces)
    shape = (count, *space.shape)
    if np.dtype(space.dtype).kind == "f":
        return rng.random(shape).astype(space.dtype)
    return rng.integers(0, 4, shape).astype(space.dtype)


def good_columns(case, count):
    rng = case.rng
    return {
        "obs": rows_of(case.space, count, rng),
        "next_obs": rows_of(case.space, count, rng),
        "actions": rows_of(case.actions, count, rng),
        "rewards": rng.random(count),
        "terminations": rng.random(count) < 0.2,
        "truncations": rng.random(count) < 0.2,
        **({"costs": rng.random((count, 2)).astype(np.float32)} if case.has_extras else {}),
    }


class Case:
    """What a case draws for its objects."""

    def __init__(self, number, folder):
        self.rng = rng = np.random.default_rng(number)
        self.values = Values(rng, folder)
        self.number = number
        self.space = _OBS_SPACES[str(rng.choice(list(_OBS_SPACES)))]
        self.actions = _ACTION_SPACES[str(rng.choice(list(_ACTION_SPACES)))]
        self.has_extras = bool(rng.random() < 0.3)

    def chance(self, share):
        return self.rng.random() < share

    def hostile_columns(self, columns):
        """Columns of which one or two are hostile, or one is missing or too many."""
        found = dict(columns)
        for _ in range(self.rng.integers(1, 3)):
            name = str(self.rng.choice(list(columns)))
            choice = self.rng.random()
            if choice < 0.04:
                found.pop(name, None)
            elif choice < 0.07:
                found["more"] = found.get(name)
            else:
                found[name] = self.values.tree(columns[name])
        return found

    @property
    def extras(self):
        return {"costs": spaces.Box(-1, 1, (2,), np.float32)} if self.has_extras else None


def make_both(make, path):
    return Twins(make(), make(), path)


def hostile_options(case, good):
    """Arguments of a constructor, one of them hostile."""
    name = str(case.rng.choice(list(good)))
    return {**good, name: case.values.integer(good[name])}


def try_constructor(case, cls, good, positional, path):
    """Make one with a hostile argument, and ask for its bytes; both are answered or refused."""
    given = hostile_options(case, good)
    count = 0
    for what in (cls, *filter(None, [getattr(cls, "nbytes_for", None)])):
        kept = {
            name: value
            for name, value in given.items()
            if what is cls
            or name
            not in (
                "seed",
                "alpha",
                "beta",
                "over",
                "gamma_",
                "gae_lambda",
                "device",
                "gamma" if cls.__name__ == "RolloutBuffer" else "",
            )
        }
        if cls.__name__ == "EpisodicReplayBuffer" and what is not cls:
            kept.pop("num_envs", None)
        first = [kept.pop(name) for name in positional]
        count += 1
        try:
            what(*first, case.space, case.actions, **kept)
        except Exception as error:
            if not is_sensible(error):
                raise Finding(
                    f"{path}: {what.__name__}({describe(given)}) raised {error!r}"
                ) from error
    return count


def run_replay(case):
    """The replay buffers that are rings."""
    from replay_model import RINGS

    from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer

    rng, values = case.rng, case.values
    cls = RINGS[rng.integers(len(RINGS))]
    options: dict[str, Any] = {"num_envs": NUM_ENVS, "seed": 0}
    if case.chance(0.5):
        options |= {"n_step": int(rng.integers(1, 4)), "gamma": 0.9}
    options["store_next"] = bool(rng.random() < 0.6)
    if case.chance(0.3):
        options["track_env"] = True
    if case.chance(0.1):
        options["staged"] = True
    if cls is PerEnvReplayBuffer:
        options["over"] = values.one_of("transitions", "envs")
    capacity = int(rng.integers(1, 60))
    path = f"case {case.number}, {cls.__name__}({capacity}, {options})"

    def make():
        return cls(capacity, case.space, case.actions, extra_columns=case.extras, **options)

    twins = make_both(make, path)
    count = try_constructor(case, cls, {"capacity": capacity, **options}, ["capacity"], path)
    values.own = [leaf.numpy() for leaf in leaves(twins.hostile.rows())]
    for _ in range(_CALLS):
        choice = rng.random()
        if choice < 0.45:
            size = int(rng.integers(0, 9)) * (1 if case.chance(0.5) else NUM_ENVS)
            columns = good_columns(case, size)
            ids = rng.integers(0, NUM_ENVS, size) if case.chance(0.5) else None
            if ids is not None and case.chance(0.5):
                twins.call("add", env_ids=values.array(ids), **columns)
            else:
                twins.call("add", env_ids=ids, **case.hostile_columns(columns))
        elif choice < 0.6:
            arguments = {"out": values.one_of(None, 3, "x", {})} if case.chance(0.2) else {}
            if cls is PrioritizedReplayBuffer:
                if case.chance(0.5):
                    arguments["beta"] = values.integer(0.4)
            elif case.chance(0.3):
                arguments["replace"] = False
            twins.call("sample", values.integer(4), **arguments)
        elif choice < 0.75:
            held = max(1, len(twins.hostile))
            rows = rng.integers(0, held, rng.integers(1, 6))
            twins.call("get", values.array(rows))
        elif choice < 0.85 and cls is PrioritizedReplayBuffer:
            held = max(1, len(twins.hostile))
            rows, given = rng.integers(0, held, 4), rng.random(4)
            if case.chance(0.5):
                twins.call("update_priorities", values.array(rows), given)
            else:
                twins.call("update_priorities", rows, values.array(given))
        elif choice < 0.93:
            twins.call("cut_episodes", values.array(rng.permutation(NUM_ENVS)[:2]))
        elif choice < 0.96:
            twins.call("reserve_final_obs", values.integer(3), is_compared=False)
        else:
            twins.call("new_batch", values.integer(3), is_compared=False)
    good = good_columns(case, NUM_ENVS)
    twins.call("add", **good)
    compare_states(twins)
    if len(twins.hostile):
        twins.call("sample", 8)
    return twins.count + count


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def compare_states(twins):
    found, expected = twins.hostile.state_dict(), twins.reference.state_dict()
    for state in (found, expected):  # rows of the pool and of dead slots are as they were left
        for name in ("units", "back", "slot"):
            state.pop(name, None)
    compare(found, expected, f"{twins.path}: state")


def run_episodic(case):
    from buffers import EpisodicReplayBuffer

    rng, values = case.rng, case.values
    options: dict[str, Any] = {"num_envs": NUM_ENVS, "seed": 0}
    if case.chance(0.5):
        options["max_episodes"] = int(rng.integers(1, 9))
    if case.chance(0.15):
        options["staged"] = True
    capacity = int(rng.integers(1, 60))
    path = f"case {case.number}, EpisodicReplayBuffer({capacity}, {options})"

    def make():
        return EpisodicReplayBuffer(
            capacity, case.space, case.actions, extra_columns=case.extras, **options
        )

    twins = make_both(make, path)
    good = {"capacity": capacity, **options}
    count = try_constructor(case, EpisodicReplayBuffer, good, ["capacity"], path)
    for _ in range(_CALLS):
        choice = rng.random()
        if choice < 0.3:
            columns = good_columns(case, int(rng.integers(0, 9)))
            columns.pop("next_obs")
            size = len(columns["rewards"])
            columns["obs"] = rows_of(case.space, size + 1, rng)
            columns["terminations"], columns["truncations"] = np.zeros((2, size), bool)
            if case.chance(0.5):
                columns["boundaries"] = rng.random(size) < 0.3
            if case.chance(0.5):
                columns = case.hostile_columns(columns)
            twins.call(
                "add_episode", values.odd[rng.integers(12)] if case.chance(0.02) else columns
            )
        elif choice < 0.5:
            columns = good_columns(case, NUM_ENVS)
            is_hostile = case.chance(0.6)
            ids = rng.permutation(NUM_ENVS)
            if is_hostile and case.chance(0.4):
                twins.call("add", values.array(ids), **columns)
            else:
                twins.call("add", **(case.hostile_columns(columns) if is_hostile else columns))
                twins.call("cut_episodes")
        elif choice < 0.6:
            twins.call("cut_episodes", values.array(rng.permutation(NUM_ENVS)[:2]))
        elif choice < 0.65:
            twins.call("episode", values.integer(-1))
        else:
            call_draws(case, twins)
    compare_states(twins)
    return twins.count + count


def call_draws(case, twins):
    rng, values = case.rng, case.values
    over = values.one_of("steps", "episodes", "steps", "x", None, [])
    which = rng.integers(4)
    if which == 0:
        twins.call("sample", values.integer(4), values.integer(0.9), over=over)
    elif which == 1:
        pad = bool(rng.integers(2))
        if case.chance(0.5):
            twins.call("sample_sequences", values.integer(3), 2, over=over, pad=pad)
        else:
            twins.call("sample_sequences", 3, values.integer(2), over=over, pad=pad)
    elif which == 2:
        if case.chance(0.5):
            twins.call("sample_stacks", values.integer(3), 2, over=over)
        else:
            twins.call("sample_stacks", 8, values.integer(2), over=over)
    else:
        strategy = values.one_of("future", "final", "episode", "x", None, {})
        ratio = values.integer(0.8)
        twins.call("sample_goals", values.integer(3), strategy, relabel_ratio=ratio, over=over)


def run_rollout(case):
    import torch
    from staged_rollouts import rollout_class

    rng, values = case.rng, case.values
    num_steps, mode = int(rng.integers(1, 4)), values.one_of("NextStep", "SameStep", "Disabled")
    options = {"autoreset_mode": mode, "seed": 0}
    cls = rollout_class(staged=case.chance(0.2))
    path = f"case {case.number}, {cls.__name__}({num_steps}, {NUM_ENVS}, {options})"

    def make():
        return cls(
            num_steps, NUM_ENVS, case.space, case.actions, extra_columns=case.extras, **options
        )

    twins = make_both(make, path)
    good = {
        "num_steps": num_steps,
        "num_envs": NUM_ENVS,
        "gamma": 0.9,
        "gae_lambda": 0.9,
        **options,
    }
    count = try_constructor(case, cls, good, ["num_steps", "num_envs"], path)
    for _ in range(_CALLS // 10):
        twins.call("start", values.tree(rows_of(case.space, NUM_ENVS, rng)))
        twins.call("start", rows_of(case.space, NUM_ENVS, rng))
        for t in range(num_steps):
            good = {
                "actions": rows_of(case.actions, NUM_ENVS, rng),
                "log_probs": rng.random(NUM_ENVS).astype(np.float32),
                "values": rng.random(NUM_ENVS).astype(np.float32),
                **({"costs": rng.random((NUM_ENVS, 2))} if case.has_extras else {}),
            }
            if case.chance(0.5):
                good = {name: torch.from_numpy(array) for name, array in good.items()}
            arrays = {name: np.asarray(array) for name, array in good.items()}
            twins.call("put", t, **case.hostile_columns(arrays))
            twins.call("put", values.integer(t), **arrays)
            twins.call("put", t, **good)
            twins.call("obs_at", values.integer(t))
            twins.call("env_actions", values.integer(t))
            twins.call("write_obs", values.integer(t), rows_of(case.space, NUM_ENVS, rng))
            twins.call("write_obs", t, values.tree(rows_of(case.space, NUM_ENVS, rng)))
            twins.call("slot", values.integer(t), is_compared=False)
            flags = rng.random((2, NUM_ENVS)) < 0.3
            rewards = rng.random(NUM_ENVS)
            for rollout in (twins.hostile, twins.reference):
                slot = rollout.slot(t)
                slot.rewards[:], slot.terminations[:], slot.truncations[:] = rewards, *flags
            ids, finals = np.flatnonzero(flags[1]), rng.random(int(flags[1].sum())).astype("f4")
            twins.call("set_final_values", t, values.array(ids), finals)
            twins.call("set_final_values", t, ids, values.array(finals))
            if mode != "NextStep":
                twins.call("set_final_values", t, ids, finals)
        last = rng.random(NUM_ENVS).astype(np.float32)
        twins.call("compute_advantages", values.array(last))
        twins.call("compute_advantages", last)
        both = twins.call("minibatches", values.integer(2), is_compared=False)
        if both is not None:
            compare(*map(list, both), path)
        twins.call("episodes")
        if case.chance(0.5):
            twins.call("advance")
    twins.call("start", rows_of(case.space, NUM_ENVS, rng))
    compare_states(twins)
    return twins.count + count


def run_trajectories(case):
    from buffers import TrajectoryBuffer

    rng, values = case.rng, case.values
    path = f"case {case.number}, TrajectoryBuffer"
    twins = make_both(
        lambda: TrajectoryBuffer(10, case.space, case.actions, extra_columns=case.extras), path
    )
    count = try_constructor(case, TrajectoryBuffer, {"capacity": 10}, ["capacity"], path)
    for _ in range(_CALLS):
        trajectories = []
        for _ in range(rng.integers(0, 4)):
            columns = good_columns(case, int(rng.integers(0, 9)))
            columns.pop("next_obs")
            trajectories.append(case.hostile_columns(columns) if case.chance(0.4) else columns)
        if case.chance(0.03):
            trajectories = values.odd[rng.integers(len(values.odd))]
        if twins.call("update", trajectories) is not None:
            compare(twins.hostile.offsets, twins.reference.offsets, path)
            for name in ("obs", "actions", "rewards", "terminations"):
                compare(twins.hostile[name], twins.reference[name], path)
    return twins.count + count


class _FakeEnvs:
    """What a TransitionWriter reads of a vector env."""

    def __init__(self, case, mode):
        self.metadata, self.num_envs = {"autoreset_mode": mode}, NUM_ENVS
        self.single_observation_space, self.single_action_space = case.space, case.actions


def run_writer(case):
    from buffers import EpisodicReplayBuffer, SharedReplayBuffer, TransitionWriter

    rng, values = case.rng, case.values
    case.has_extras = False
    mode = values.one_of("NextStep", "SameStep", "Disabled")
    cls = values.one_of(EpisodicReplayBuffer, SharedReplayBuffer)
    path = f"case {case.number}, TransitionWriter({mode}, {cls.__name__})"
    envs = _FakeEnvs(case, mode)

    def make():
        buffer = cls(100, case.space, case.actions, num_envs=NUM_ENVS, seed=0)
        return TransitionWriter(envs, buffer)

    twins = make_both(make, path)
    for _ in range(_CALLS // 6):
        twins.call("reset", values.tree(rows_of(case.space, NUM_ENVS, rng)))
        twins.call("reset", rows_of(case.space, NUM_ENVS, rng))
        mask = rng.random(NUM_ENVS) < 0.5
        twins.call("reset", rows_of(case.space, NUM_ENVS, rng), values.array(mask))
        for is_hostile in (True, False):
            over = np.zeros((2, NUM_ENVS), bool)
            result = [rows_of(case.space, NUM_ENVS, rng), rng.random(NUM_ENVS), *over, {}]
            actions = rows_of(case.actions, NUM_ENVS, rng)
            if is_hostile:
                place = int(rng.integers(6))
                if place == 5:
                    actions = values.tree(actions)
                elif place == 4:
                    result[4] = values.one_of({}, None, {"final_obs": 3}, [], {"final_obs": None})
                else:
                    result[place] = values.tree(result[place])
            twins.call("step", actions, *result)
        ids = rng.permutation(NUM_ENVS)[:2]
        actions = rows_of(case.actions, 2, rng)
        twins.call("sent", values.tree(actions), ids)
        twins.call("sent", actions, values.array(ids))
        in_flight = np.flatnonzero(twins.hostile._is_sent)
        count = len(in_flight)
        if count:
            result = [
                rows_of(case.space, count, rng),
                rng.random(count),
                *np.zeros((2, count), bool),
            ]
            place = int(rng.integers(5))
            given = list(result)
            given_ids = in_flight
            if place == 4:
                given_ids = values.array(in_flight)
            else:
                given[place] = values.tree(given[place])
            names = ("obs", "rewards", "terminations", "truncations")
            for parts, chosen in ((given, given_ids), (result, in_flight)):
                if twins.hostile._is_sent[in_flight].all():
                    fields = dict(zip(names, parts, strict=True))
                    twins.call("received", Received(**fields, infos={}, env_ids=chosen))
                    is_same = (twins.hostile._is_sent == twins.reference._is_sent).all()
                    if not is_same:
                        raise Finding(f"{path}: envs in flight differ")
        twins.call("reset", rows_of(case.space, NUM_ENVS, rng))
    compare_writers(twins)
    return twins.count


class Received(tuple):
    """What `recv` returned; `clean` makes one with plain arrays."""

    _fields = ("obs", "rewards", "terminations", "truncations", "infos", "env_ids")

    def __new__(cls, *parts, **named):
        return super().__new__(cls, parts or [named[name] for name in cls._fields])

    def __getattr__(self, name):
        if name in self._fields:
            return self[self._fields.index(name)]
        raise AttributeError(name)


def compare_writers(twins):
    found, expected = twins.hostile, twins.reference
    compare(found._obs, expected._obs, twins.path)
    if found.num_transitions != expected.num_transitions:
        raise Finding(f"{twins.path}: other numbers of transitions")


def run_gae(case):
    import torch

    from buffers import gae

    rng, values = case.rng, case.values
    module = types.SimpleNamespace(gae=gae)
    twins = Twins(module, module, f"case {case.number}")
    for _ in range(_CALLS):
        shape = (int(rng.integers(1, 6)), int(rng.choice([1, 3, 100])))
        dtype = values.one_of(np.float32, np.float64)
        arrays = {
            "rewards": rng.random(shape).astype(dtype),
            "values": rng.random((shape[0] + 1, shape[1])).astype(dtype),
            "terminations": rng.random(shape) < 0.2,
            "truncations": rng.random(shape) < 0.2,
        }
        if case.chance(0.5):
            arrays["final_values"] = rng.random(shape).astype(dtype)
        if case.chance(0.5):
            arrays["valid"] = rng.random(shape) < 0.8
        if case.chance(0.2):
            arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
        name = str(rng.choice(list(arrays)))
        arrays[name] = values.array(np.asarray(arrays[name]))
        if case.chance(0.3):
            arrays["gamma"] = values.integer(0.9)
        twins.call("gae", **arrays)
    return twins.count


# -- envs ------------------------------------------------------------------------------------


class _Counting(gym.Env):
    """Plain rules, and actions of two kinds."""

    def __init__(self, action_space):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = action_space
        self.total = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = float(self.np_random.integers(9))
        return np.array([self.total, 0], np.float32), {}

    def step(self, action):
        total = np.sum(np.nan_to_num(np.asarray(action, np.float64), posinf=9, neginf=-9))
        self.total += float(np.clip(total, -9, 9))
        obs = np.array([self.total, 1], np.float32)
        return obs, float(self.total), bool(abs(self.total) > 30), False, {}


_ENV_ACTIONS = (
    spaces.Discrete(4),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.MultiDiscrete([3, 4]),
)
_MODES = ("NextStep", "SameStep", "Disabled")


def make_sync(which, mode):
    from vecenv import SyncVectorEnv

    fns = [functools.partial(_Counting, _ENV_ACTIONS[which])] * NUM_ENVS
    return SyncVectorEnv(fns, autoreset_mode=mode)


def make_async(which, mode):
    from vecenv import AsyncVectorEnv

    fns = [functools.partial(_Counting, _ENV_ACTIONS[which])] * NUM_ENVS
    return AsyncVectorEnv(fns, num_workers=2, autoreset_mode=mode, timeout=60, context="fork")


def make_compiled(which, mode):
    if which == 0:
        from vecenv.jit.cartpole import CartPoleVectorEnv

        return CartPoleVectorEnv(NUM_ENVS, autoreset_mode=mode, num_threads=2)
    if which == 1:
        from vecenv.cage.challenge2.env import Cage2VectorEnv

        return Cage2VectorEnv(NUM_ENVS, episode_length=20, autoreset_mode=mode)
    from jit.toy_env import PARAMS, TOY

    from vecenv.jit import JitVectorEnv

    return JitVectorEnv(TOY, NUM_ENVS, params=PARAMS, autoreset_mode=mode)


def make_on_ray(which, mode):
    from vecenv import RayVectorEnv

    sys.modules["ray"] = fake_ray()
    fns = [functools.partial(_Counting, _ENV_ACTIONS[which])] * NUM_ENVS
    return RayVectorEnv(fns, num_workers=2, autoreset_mode=mode)


@functools.cache
def fake_ray():
    """As much of Ray as is used here; actors live in this process, and calls are done at once."""
    ray = types.ModuleType("ray")
    ray.exceptions = types.SimpleNamespace(
        RayError=type("RayError", (Exception,), {}),
        RayTaskError=type("RayTaskError", (Exception,), {}),
        GetTimeoutError=type("GetTimeoutError", (Exception,), {}),
    )

    class Reference:
        def __init__(self, value, error=None):
            self.value, self.error = value, error

    class Method:
        def __init__(self, method):
            self.method = method

        def remote(self, *args, **kwargs):
            args = [a.value if isinstance(a, Reference) else a for a in args]
            try:
                return Reference(self.method(*args, **kwargs))
            except Exception as error:
                return Reference(None, error)

    class Actor:
        def __init__(self, cls, args, kwargs):
            self._made = cls(*args, **kwargs)

        def __getattr__(self, name):
            return Method(getattr(self.__dict__["_made"], name))

    class Class:
        def __init__(self, cls):
            self.cls = cls

        def options(self, **options):
            return self

        def remote(self, *args, **kwargs):
            return Actor(self.cls, args, kwargs)

    def get(references, timeout=None):
        if isinstance(references, list):
            return [get(reference) for reference in references]
        if references.error is not None:
            raise references.error
        return references.value

    ray.remote = Class
    ray.put = Reference
    ray.get = get
    ray.wait = lambda references, **kwargs: (list(references), [])
    ray.kill = lambda actor, **kwargs: None
    ray.init = lambda *args, **kwargs: None
    ray.is_initialized = lambda: True
    ray.available_resources = lambda: {"CPU": 8.0, "memory": 1e9, "object_store_memory": 1e9}
    ray.cluster_resources = ray.available_resources
    ray.nodes = lambda: [
        {"Alive": True, "NodeID": "0", "Resources": {"CPU": 8.0, "object_store_memory": 1e9}}
    ]
    ray.__version__ = "0"
    context = types.SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "0")
    ray.get_runtime_context = lambda: context
    return ray


_MAKERS = {"sync": make_sync, "async": make_async, "compiled": make_compiled, "ray": make_on_ray}
_pairs: dict[Any, Twins] = {}


def env_twins(kind, which, mode):
    """Vector envs are made once for all cases."""
    key = kind, which, mode
    if key not in _pairs:
        make = _MAKERS[kind]
        _pairs[key] = Twins(make(which, mode), make(which, mode), "")
    return _pairs[key]


def run_envs(case, kind):
    rng, values = case.rng, case.values
    which, mode = int(rng.integers(3)), values.one_of(*_MODES)
    twins = env_twins(kind, which, mode)
    twins.path = f"case {case.number}, {kind} envs {which}, {mode}"
    twins.count = 0
    envs = twins.hostile
    space = envs.single_action_space
    for both in (twins.hostile, twins.reference):  # the case must not depend on those before
        both.reset(seed=3)
    for _ in range(_CALLS):
        choice = rng.random()
        good = good_actions(space, NUM_ENVS, rng)
        if choice < 0.35:
            twins.call("step", values.tree(good))
        elif choice < 0.45:
            twins.call("step", good, out=hostile_slot(case, envs), is_compared=False)
        elif choice < 0.55:
            seed = values.one_of(None, 3, [1, 2, 3], values.integer(3), values.array(np.arange(3)))
            twins.call("reset", seed=seed, is_compared=has_fixed_seed(seed))
            twins.call("reset", seed=4)
        elif choice < 0.65:
            mask = values.array(
                np.ones(NUM_ENVS, bool) if case.chance(0.5) else rng.random(3) < 0.5
            )
            options = values.one_of({"reset_mask": mask}, {"reset_mask": mask}, {"x": 1}, [], 3)
            twins.call("reset", options=options)
        elif choice < 0.85:
            call_first_ready(case, twins, kind)
        elif choice < 0.92:
            call_others(case, twins, kind)
        else:
            twins.call("step", good)
        restart_over(twins)
    settle(twins)
    twins.call("reset", seed=5)
    twins.call("step", good_actions(space, NUM_ENVS, rng))
    return twins.count


def has_fixed_seed(seed):
    if isinstance(seed, list | tuple) or (isinstance(seed, np.ndarray) and seed.ndim):
        return not any(s is None for s in seed)
    return isinstance(seed, int | np.integer)


def good_actions(space, count, rng):
    if isinstance(space, spaces.Box):
        return rng.random((count, *space.shape)).astype(space.dtype)
    low = getattr(space, "start", 0)
    high = low + (space.n if isinstance(space, spaces.Discrete) else space.nvec)
    return rng.integers(low, high, (count, *space.shape)).astype(space.dtype)


def restart_over(twins):
    """Reset both where the episodes of one have ended for good, or something is in flight."""
    try:
        twins.hostile.call("action_space") if False else None
        state = twins.hostile._calls
    except AttributeError:
        return
    if twins.path.endswith("Disabled") and state.num_in_flight == 0:
        for both in (twins.hostile, twins.reference):
            both.reset(seed=7)


def settle(twins):
    """Receive what is in flight in either."""
    for envs in (twins.hostile, twins.reference):
        while envs._calls.num_in_flight:
            envs.recv(timeout=60)


def call_first_ready(case, twins, kind):
    """Send and receive; envs that are first differ, so only who was in flight is compared."""
    rng, values = case.rng, case.values
    space = twins.hostile.single_action_space
    ids = rng.permutation(NUM_ENVS)[: rng.integers(1, 4)]
    actions = good_actions(space, len(ids), rng)
    if case.chance(0.5):
        twins.call("send", values.tree(actions), ids)
    else:
        twins.call("send", actions, values.array(ids))
    wanted = values.one_of({"min_envs": values.integer(1)}, {"max_envs": values.integer(2)}, {})
    found = twins.call(
        "recv",
        **wanted,
        timeout=values.one_of(60, 60, values.integer(60)) if case.chance(0.3) else 60,
        is_compared=False,
    )
    if found is not None and kind not in ("async",):
        compare(found[0], found[1], twins.path)
    settle(twins)


def call_others(case, twins, kind):
    rng, values = case.rng, case.values
    which = rng.integers(6)
    if which == 0:
        shape = values.one_of((3,), (-1,), (0,), (2**40,), (2**63,), 3, None, "x", (1.5,), ((2,),))
        dtype = values.one_of("f4", "S0", "O", "V3", "U", None, "M8", [("x", "f4")], 3, "x", ">f4")
        twins.call("allocate", shape, dtype, is_compared=False)
    elif which == 1 and kind == "compiled":
        obs = np.zeros(twins.hostile._obs_shape, twins.hostile._obs_dtype)
        twins.call("observe", out=values.array(obs))
    elif which == 2 and kind == "compiled":
        state = twins.reference.state_dict()
        name = str(rng.choice(["states", "runs"]))
        hostile = {**state, name: values.one_of(state[name][:1], state[name].copy(), None, 3, {})}
        twins.call("load_state_dict", hostile)
    elif which == 3 and kind in ("sync", "async", "ray"):
        twins.call("get_attr", values.one_of("total", "nothing", 3, None, ""))
    elif which == 4 and kind in ("sync", "async", "ray"):
        given = values.one_of([1.0, 2.0, 3.0], 4.0, [1.0], None, {}, values.array(np.ones(3)))
        twins.call("set_attr", "extra", given)
    elif kind in ("sync", "async"):
        twins.call("call", values.one_of("reset", "nothing", 3, None), is_compared=False)
        twins.call("reset", seed=6)


def hostile_slot(case, envs):
    """Memory to step into, one part of it hostile."""
    from vecenv import StepSlot

    obs_space = envs.single_observation_space
    parts: list[Any] = [
        np.zeros((NUM_ENVS, *obs_space.shape), obs_space.dtype),
        np.zeros(NUM_ENVS, case.values.one_of(np.float32, np.float64)),
        np.zeros(NUM_ENVS, bool),
        np.zeros(NUM_ENVS, bool),
    ]
    place = int(case.rng.integers(5))
    if place == 4:
        return case.values.one_of(3, None, tuple(parts), StepSlot(*parts[:3], parts[2]), {})
    parts[place] = case.values.array(parts[place])
    return StepSlot(*parts)


def run_ray_absent(case):
    """Arguments of `RayVectorEnv` where Ray is absent or faked."""
    from vecenv import RayVectorEnv

    values, count = case.values, 0
    fns = [functools.partial(_Counting, _ENV_ACTIONS[0])] * NUM_ENVS
    good = {
        "num_workers": 2, "cpus_per_worker": 1.0, "on_error": "raise",
        "timeout": 10.0, "start_timeout": 10.0, "address": None,
        "autoreset_mode": "NextStep", "observation_mode": "same", "num_envs": None,
    }  # fmt: skip
    for _ in range(_CALLS // 6):
        name = str(case.rng.choice([*good, "env_fns"]))
        given = {**good, name: values.integer(good.get(name))}
        sys.modules["ray"] = None if case.chance(0.5) else fake_ray()  # type: ignore[assignment]  # None: not to be imported
        made = given.pop("env_fns", fns)
        count += 1
        try:
            envs = RayVectorEnv(made, **given)
        except Exception as error:
            if not is_sensible(error) and not isinstance(
                error, ImportError | ConnectionError | RuntimeError
            ):
                raise Finding(
                    f"case {case.number}: RayVectorEnv({describe(given)}) raised {error!r}"
                ) from error
        else:
            envs.close()
    return count


RUNS = {
    "replay": run_replay,
    "episodic": run_episodic,
    "rollout": run_rollout,
    "trajectories": run_trajectories,
    "writer": run_writer,
    "gae": run_gae,
    "sync": functools.partial(run_envs, kind="sync"),
    "async": functools.partial(run_envs, kind="async"),
    "compiled": functools.partial(run_envs, kind="compiled"),
    "ray": functools.partial(run_envs, kind="ray"),
    "ray absent": run_ray_absent,
}
_WEIGHTED = [*RUNS, "replay", "replay", "episodic", "gae", "compiled", "compiled", "sync"]


# -- the process -----------------------------------------------------------------------------


def run_here(number, folder=None, run=None):
    """Run a case in this process; return the number of calls."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if folder is None:
            with tempfile.TemporaryDirectory() as made:
                return run_here(number, made, run)
        case = Case(number, folder)
        return (run or RUNS[_WEIGHTED[number % len(_WEIGHTED)]])(case)


def serve():
    """Run the cases whose numbers come, eight bytes each; answer with what each has given."""
    faulthandler.enable()
    own = sys.stdout.buffer
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        while len(head := sys.stdin.buffer.read(8)) == 8:
            (number,) = struct.unpack("q", head)
            try:
                count, text = run_here(number, folder), b""
            except BaseException:
                count, text = -1, traceback.format_exc()[-6000:].encode(errors="replace")
            own.write(struct.pack("qq", count, len(text)) + text)
            own.flush()
        for twins in _pairs.values():
            twins.hostile.close()
            twins.reference.close()


class Child:
    """The process that runs the cases."""

    def __init__(self, prelude=""):
        code = f"from fuzz import calls\n{prelude}\ncalls.serve()"
        paths = [str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def run(self, number):
        """Run a case there; return the number of calls, or say how it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(struct.pack("q", number))
        self._process.stdin.flush()
        count, size = struct.unpack("qq", self._read(16, number))
        text = self._read(size, number).decode() if size else ""
        if count < 0:
            raise AssertionError(f"case {number}: {text}")
        return count

    def _read(self, size, number):
        found = b""
        while len(found) < size:
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
            if not ready:
                self.end()
                raise AssertionError(f"case {number} does not end")
            part = os.read(self._process.stdout.fileno(), size - len(found))
            if not part:
                status = self._process.wait(30)
                ended = (
                    f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
                )
                raise AssertionError(f"case {number} has ended the process with {ended}")
            found += part
        return found

    def end(self):
        """End it and what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


_child: list[Child] = []


def run_case(number):
    """Run a case in the process for it; return the number of calls."""
    if not _child:
        _child.append(Child())
    try:
        return _child[0].run(number)
    except BaseException:
        _child.pop().end()
        raise
