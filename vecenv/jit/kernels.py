"""What authors write: `EnvKernels`, the description of an env, its parameters, and `write_bits`.

Parameters are one record for all envs, or one per env, which a sampler may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numba.extending import overload

from vecenv.core.masks import mask_width
from vecenv.core.rows import aligned_zeros
from vecenv.jit.driver import NEXT_STEP, NO_LIMIT, RESET, RUN_DTYPE, Batch
from vecenv.jit.games import AgentsOf, GameLayout, as_njit, check_space, with_columns
from vecenv.jit.random import uniform

ARGUMENTS = {
    "reset": ("state", "rng"),
    "step": ("state", "action", "rng"),
    "observe": ("state", "out"),
    "action_mask": ("state", "out"),
    "sampler": ("params", "rng"),
}  # arguments of the kernels; see `arguments_of`
_LEFT_OUT: Any = None  # omitted by a game, which has groups instead, or by mistake


def arguments_of(name: str, *, has_params: bool) -> tuple[str, ...]:
    """Return the names of a kernel's arguments: the parameters come last, but for a sampler."""
    arguments = ARGUMENTS.get(name, ("state",))  # of `render`
    return (*arguments, "params") if has_params and name != "sampler" else arguments


@dataclass(frozen=True, eq=False)
class EnvKernels:
    """One kind of compiled environment: a state record, spaces, and functions for one env.

    The functions are compiled with `numba.njit` (plain functions are compiled for you). They get a
    reference to the env's own record and stream, change these in place, and allocate nothing:

    - `reset(state, rng)` begins an episode;
    - `step(state, action, rng) -> (reward, terminated, truncated)` advances it by one step;
    - `observe(state, out)` writes the observation of the current state; it draws nothing;
    - `action_mask(state, out)` writes which actions are valid, `out` bool (width,): one entry per
      action of a Discrete space; for MultiDiscrete, one per value of each part, in order.

    With `params`, each function takes the parameter record as its last argument, and
    `sampler(params, rng)` may write it before every `reset`: then each env has its own record.

    Attributes:
        state_dtype: Structured dtype of the state: a dtype, or a list or dict of named fields as
            `numpy.dtype` takes it (then laid out aligned).
        observation_space: Space of one observation: Box, Discrete, MultiDiscrete or MultiBinary.
            `out` is an array of its shape and dtype; of shape (1,) for Discrete.
        action_space: Space of one action. `action` is an int64 for Discrete, else a read-only row.
        reset, step, observe, action_mask: The functions.
        name: Name of this kind of env in messages.
        render: An ordinary Python function `(state)`, or `(state, params)`, that draws one env. It
            gets a copy of the record and returns a picture, uint8 (height, width, 3), or a text.

        params: Record with the defaults of all that can vary between envs, see `pack_record`; None
            if each vector env is given its own, or nothing varies.
        sampler: The kernel above; None keeps the parameters. Fields that it does not write stay.

    Draw from `rng` with the functions of `vecenv.jit.random`.

    A game with several agents has `groups` instead of the spaces, and is made by
    `make_vec_agents`. Agents are numbered in the order of the groups. Its functions are

    - `reset(state, rng)`, `step(state, actions, rng)`: of the game. `actions` is
      (A, *action_shape) for one group, and a tuple of such arrays for several. `step` returns the
      results that all acting agents share: a reward, and whether all agents end. Results of single
      agents are written into these fields of the state, one entry per agent: `rewards`,
      `terminations` and `truncations`, zero before each step; and `alive`, one before each reset.
      Agents that end are no longer alive; setting `alive` lets an agent join the game;
    - `observe(state, agent, out)` and `action_mask(state, agent, out)`: of one agent that is alive
      or has just ended. Either may be a dict of functions by group.

    - `central_state(state, out)`: writes what a central critic sees, `out` of `state_space`.

    Further attributes of a game:
        groups: `AgentsOf` by the name of the group.
        central_state: That function, or None.
        state_space: Box space of the central state.
    """

    state_dtype: Any
    observation_space: Space = _LEFT_OUT
    action_space: Space = _LEFT_OUT
    reset: Callable[..., Any] = _LEFT_OUT
    step: Callable[..., Any] = _LEFT_OUT
    observe: Any = None
    action_mask: Any = None
    name: str = "compiled env"
    render: Callable[..., Any] | None = None
    groups: Mapping[str, AgentsOf] | None = None
    central_state: Callable[..., Any] | None = None
    state_space: Space | None = None
    params: Any = None
    sampler: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_dtype", _state_dtype(self.state_dtype))
        if self.params is not None:
            object.__setattr__(self, "params", as_record(self.params))
        if self.groups is not None:
            layout = GameLayout.of(self.groups)
            dtype = with_columns(self.state_dtype, layout.num_agents)
            object.__setattr__(self, "state_dtype", dtype)
            for name in ("observation_space", "action_space"):
                if getattr(self, name) not in (None, space := getattr(layout, name)):
                    raise ValueError(
                        f"{name} is given beside groups, which have their own; leave it out"
                    )
                object.__setattr__(self, name, space)
        check_space("observation_space", self.observation_space)
        check_space("action_space", self.action_space)
        for name in (*ARGUMENTS, "render"):
            self._check_function(name)
        space = self.action_space
        if self.action_mask is not None and not isinstance(space, Discrete | MultiDiscrete):
            raise TypeError(f"action_mask needs a Discrete or MultiDiscrete action space: {space}")
        is_central = callable(self.central_state) and isinstance(self.state_space, Box)
        has_any = self.central_state is not None or self.state_space is not None
        if has_any and (self.groups is None or not is_central):
            raise TypeError(
                "central_state must be a function of a game with groups and come with state_space, "
                f"a Box, got {self.central_state!r} and {self.state_space!r}"
            )

    def having(self, **changed: Any) -> EnvKernels:
        """Return these kernels with some attributes, `params` or `sampler`, replaced."""
        return replace(self, **changed)

    def _check_function(self, name: str) -> None:
        """Raise unless a kernel is a function, or, in a game, a dict of functions by group."""
        found, is_optional = getattr(self, name), name in ("action_mask", "sampler", "render")
        if self.groups and isinstance(found, Mapping) and name in ("observe", "action_mask"):
            if found.keys() != self.groups.keys() or not all(map(callable, found.values())):
                raise TypeError(
                    f"{name} must be a function, or one for each of the groups "
                    f"{list(self.groups)}, got {dict(found)!r}"
                )
        elif not callable(found) and not (is_optional and found is None):
            wanted = "a function or None" if is_optional else "a function"
            raise TypeError(f"{name} must be {wanted}, got {found!r}")


def _state_dtype(fields: Any) -> np.dtype:
    """Return the author's state record as a structured dtype, or raise TypeError."""
    if isinstance(fields, list):  # `descr` of another dtype gives padding as nameless fields
        fields = [one for one in fields if not (isinstance(one, tuple) and one[0] == "")]
    try:
        dtype = fields if isinstance(fields, np.dtype) else np.dtype(fields, align=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"state_dtype {fields!r} is no NumPy dtype: {error}") from error
    if not dtype.names:
        raise TypeError(
            f"state_dtype must have named fields, e.g. [('x', np.float64)], got {fields!r}"
        )
    _check_fields("state_dtype field", dtype)
    return dtype


def _check_fields(what: str, dtype: np.dtype) -> None:
    """Raise TypeError for fields of records that can't be compiled."""

    def has_bool_array(field: np.dtype) -> bool:
        inner = [field.base[name] for name in field.base.names or ()]
        return (field.ndim > 0 and field.base.kind == "b") or any(map(has_bool_array, inner))

    for name in dtype.names or ():
        field = dtype[name]
        if field.hasobject or field.base.kind not in "biufcV" or 0 in field.shape:
            raise TypeError(
                f"{what} {name!r} has dtype {field}; "
                "expected numbers, bools, arrays of numbers, or records"
            )
        if has_bool_array(field):
            raise TypeError(
                f"{what} {name!r} has dtype {field}: arrays of bools inside of records can't be "
                "compiled; use np.int8"
            )


def pack_record(**fields: Any) -> np.record:
    """Pack arrays and numbers into one record, to be passed to kernels as `params`.

    Args:
        **fields: Named arrays of numbers (any shape), numbers or bools; copied.

    Raises:
        TypeError: A field is something else, or an array of bools, which can't be compiled inside a
            record.

    Example:
        >>> params = pack_record(gravity=9.8, masses=np.array([1.0, 0.1], dtype=np.float32))
        >>> params.gravity, params.masses.shape
        (np.float64(9.8), (2,))
    """
    arrays = {name: np.asarray(value) for name, value in fields.items()}
    layout = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    dtype = np.dtype(layout, align=True)
    _check_fields("field", dtype)
    return np.array([tuple(arrays.values())], dtype).view(np.recarray)[0]


def as_record(params: Any) -> np.ndarray:
    """Return a copy, (1,), of a parameter record.

    Raises:
        TypeError: It is not a single record of numbers and arrays of numbers.
    """
    array = np.asarray(params)
    if array.dtype.names is None or array.size != 1 or array.dtype.hasobject:
        raise TypeError(
            "params must be one record (a NumPy structured scalar, as `pack_record` makes), "
            f"got {type(params).__name__} of dtype {array.dtype}, shape {array.shape}"
        )
    plain = np.dtype((np.void, array.dtype))  # without the Python class of np.record
    return array.reshape(1).astype(plain)


def empty_batch(kernels: EnvKernels, num_rows: int = 0) -> Batch:
    """Return the job that resets `num_rows` envs, all zeros; it has no parameters."""
    space, obs_space = kernels.action_space, kernels.observation_space
    width = 0 if kernels.action_mask is None else mask_width(space)
    obs = np.zeros((num_rows, *(obs_space.shape or ())), obs_space.dtype)
    return Batch(
        op=RESET,
        autoreset_mode=NEXT_STEP,
        max_episode_steps=NO_LIMIT,
        states=aligned_zeros((num_rows,), kernels.state_dtype),
        runs=aligned_zeros((num_rows,), RUN_DTYPE),
        params=None,
        env_ids=np.zeros(0, np.int64),
        actions=np.zeros((num_rows, *(space.shape or ())), space.dtype),
        obs=obs,
        rewards32=np.zeros(0, np.float32),
        rewards64=np.zeros(num_rows),
        terminations=np.zeros(num_rows, np.bool_),
        truncations=np.zeros(num_rows, np.bool_),
        final_obs=obs[:0],
        masks=np.zeros((num_rows, width), np.bool_),
    )


def draw(kernels: EnvKernels, render_mode: str, *args: Any) -> str | np.ndarray:
    """Call the `render` function of kernels; check that its frame fits `render_mode`.

    Raises:
        TypeError: The frame is neither a text nor a picture, or not the one that the mode requires.
    """
    assert kernels.render is not None
    frame = kernels.render(*args)
    is_text = isinstance(frame, str)
    picture = np.zeros((1, 1, 3), np.uint8) if is_text else np.asarray(frame)
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise TypeError(
            f"render of {kernels.name} returned {picture.dtype} {picture.shape}, expected a "
            "picture uint8 (height, width, 3) or a text"
        )
    if is_text != (render_mode == "ansi"):
        words = "leaving out --gif and --html" if is_text else "--gif FILE or --html FILE"
        raise TypeError(
            f"render of {kernels.name} returns {'text' if is_text else 'pictures'}: "
            f"make the vector env with render_mode={'ansi' if is_text else 'rgb_array'!r}, "
            f"with the command vecenv by {words}"
        )
    return frame if is_text else picture


# -- parameters --------------------------------------------------------------------------------


def read_params(
    kernels: EnvKernels, params: Any, num_envs: int, *, per_env: bool
) -> np.ndarray | None:
    """Return the parameter records of envs, a copy: (num_envs,), or (1,) where all share one.

    For `params` see `JitVectorEnv`. `per_env` says that each env must have its own record, because
    a sampler writes it. Raises TypeError or ValueError if a field does not fit; names it.
    """
    own, values = kernels.params, {}
    if params is None and own is None:
        return None
    if params is None or isinstance(params, Mapping):
        if own is None:
            raise TypeError(
                f"params must be one record, as `pack_record` makes, or several: {kernels.name} "
                f"has no defaults that a {type(params).__name__} could change"
            )
        base, values, fields = own, params or {}, own.dtype
        names = values.keys() & set(fields.names)  # `write_params` refuses others
        per_env = per_env or any(np.ndim(values[k]) > fields[k].ndim for k in names)
    else:
        base = np.asarray(params)
        if own is not None and base.dtype.names is not None and base.dtype.base != own.dtype.base:
            given, wanted = (_listed(dtype, has_types=True) for dtype in (base.dtype, own.dtype))
            raise TypeError(
                f"params have the fields {given}, expected those of {kernels.name} in this order: "
                f"{wanted}. A dict of some of them will do, too"
            )
        if base.dtype.names is None or base.dtype.hasobject or base.size == 1:
            base = as_record(params)  # raises if it is no record
        elif base.shape != (num_envs,):
            raise ValueError(
                f"params has shape {base.shape}, expected one record, or ({num_envs},): one per env"
            )
        else:
            per_env = True
    found = aligned_zeros((num_envs if per_env else 1,), np.dtype((np.void, base.dtype)))
    found[...] = base
    write_params(found, values, kernels.name)
    return found


def write_params(records: np.ndarray, values: Any, name: str) -> None:
    """Write parameters into records (B,) of envs of the kind `name`.

    Values are a mapping of field names to values, for all rows or one per row; or records of the
    same dtype. Raises TypeError or ValueError if a name, dtype or shape is wrong.
    """
    if not isinstance(values, Mapping):
        given = np.asarray(values)
        if given.dtype.base != records.dtype.base or given.shape not in ((), (1,), records.shape):
            raise TypeError(
                f"parameters of {name} are {given.dtype} {given.shape}, expected a dict, or "
                f"records with the fields {_listed(records.dtype)}, one or {len(records)}"
            )
        records[:] = given.astype(records.dtype)
        return
    for key, value in values.items():
        if key not in (records.dtype.names or ()):
            raise ValueError(f"{name} has no parameter {key!r}; it has {_listed(records.dtype)}")
        field, array = records[key], np.asarray(value)
        is_number = array.dtype.kind in "biuf" and not (
            array.dtype.kind == "f" and field.dtype.kind in "biu"
        )
        if not is_number and array.dtype.names is None:
            raise TypeError(f"parameter {key!r} of {name} is {array.dtype}, expected {field.dtype}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"parameter {key!r} of {name} is NaN")
        try:
            field[...] = array
        except ValueError as error:
            raise ValueError(
                f"parameter {key!r} of {name} has shape {array.shape}, expected "
                f"{records.dtype[key].shape} for all, or {field.shape}: one per env"
            ) from error


def as_sampler(kernels: EnvKernels, sampler: Any) -> Callable[..., Any]:
    """Return a kernel `(params, rng)` for a sampler.

    A sampler is such a kernel; or a mapping of field names to (lowest, highest): each episode draws
    a float uniformly between them, or an integer including both; or a list of texts, "gravity 5
    15". Raises TypeError or ValueError if a range is invalid, or there is no such parameter.
    """
    form = ""
    if isinstance(sampler, tuple | list) and all(isinstance(text, str) for text in sampler):
        form = " (expected NAME LOWEST HIGHEST)"
        sampler = {words[0]: words[1:] for text in sampler if (words := text.split())}
    if not isinstance(sampler, Mapping):
        if not callable(sampler):
            raise TypeError(
                f"sampler is {sampler!r}, expected a kernel (params, rng) that writes parameters, "
                "or a dict such as {'gravity': (5.0, 15.0)}"
            )
        return sampler
    fields = {} if kernels.params is None else kernels.params.dtype.fields or {}
    draw: Callable[..., Any] = _draw_nothing
    for name, ends in sampler.items():
        if name not in fields or fields[name][0].kind not in "iuf":
            numbers = [key for key, (dtype, *_) in fields.items() if dtype.kind in "iuf"]
            has = ", ".join(numbers) or "none: EnvKernels(params=...) gives them their defaults"
            told = f"sampler: {kernels.name} has no number {name!r} among its parameters{form}"
            raise ValueError(f"{told}; it has {has}")
        is_float = fields[name][0].kind == "f"
        try:
            low, high = map(float, ends)
        except (TypeError, ValueError):
            low, high = 1.0, 0.0
        are_whole = low.is_integer() and high.is_integer()
        if not -np.inf < low <= high < np.inf or not (is_float or are_whole):
            raise ValueError(
                f"sampler[{name!r}] is {ends!r}, expected (lowest, highest), two finite "
                f"{'numbers' if is_float else 'integers'}"
            )
        draw = _then(draw, name, low, high, is_float)
    return draw


def _draw_nothing(params, rng):
    """Draw nothing: the first link of a chain of samplers."""


def _then(before: Any, name: str, low: float, high: float, is_float: bool) -> Callable[..., Any]:
    """Return a kernel that also draws one more parameter: a float, or an integer with both ends."""
    first, lowest, count = as_njit(before), int(low), int(high) - int(low) + 1

    def draw(params, rng):
        first(params, rng)
        params[name] = low + (high - low) * uniform(rng)

    def draw_whole(params, rng):
        first(params, rng)
        params[name] = lowest + int(uniform(rng) * count)

    return draw if is_float else draw_whole


def _listed(dtype: np.dtype, *, has_types: bool = False) -> str:
    names = dtype.names or ()
    told = [f"{name} {dtype.base[name]}" for name in names] if has_types else names
    return ", ".join(told) or "no fields"


# -- bits --------------------------------------------------------------------------------------

_ONE, _EIGHT, _BYTE, _BYTE_SHIFT = map(np.uint64, (1, 8, 255, 3))
_BITS_OF_BYTE = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


def write_bits(bits, num_bits, out):
    """Write the lowest num_bits bits (at most 64) of a uint64 as numbers 0 and 1.

    They go to the start of `out` (N,), of any number type; it must be long enough.
    """
    bits = np.uint64(bits)
    for bit in range(np.uint64(num_bits)):
        out[np.uint64(bit)] = (bits >> np.uint64(bit)) & _ONE


@overload(write_bits, jit_options={"forceinline": True})
def _write_bits(bits, num_bits, out):  # on CPUs; `vecenv.jit.cuda.compiler` has that for devices
    def by_table(bits, num_bits, out):
        """Look bytes up in a table: one wide load and one wide store each."""
        bits, num_bits = np.uint64(bits), np.uint64(num_bits)
        num_bytes = num_bits >> _BYTE_SHIFT
        for byte in range(num_bytes):
            start = np.uint64(byte) << _BYTE_SHIFT
            for bit in range(8):
                out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]
            bits >>= _EIGHT
        start = num_bytes << _BYTE_SHIFT
        for bit in range(num_bits - start):
            out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]

    return by_table
