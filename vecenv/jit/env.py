"""Environments written as Numba functions: thousands in one compiled call, or a single one."""

from __future__ import annotations

import functools
import statistics
import timeit
from collections.abc import Callable, Mapping
from importlib import import_module
from time import perf_counter_ns
from typing import Any, ClassVar, NoReturn

import numpy as np
from gymnasium import Env
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_autoreset_mode, read_count
from vecenv.core.errors import ActionError
from vecenv.core.rows import StepSlot, aligned_zeros
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.base import MODES, CompiledVecEnv, HostMemory
from vecenv.jit.binding import bind_loop
from vecenv.jit.driver import (
    NO_LIMIT,
    OBSERVE,
    RESET,
    RUN_DTYPE,
    STEP,
    element_bounds,
    first_invalid_row,
)  # fmt: skip
from vecenv.jit.interpreted import try_out
from vecenv.jit.kernels import EnvKernels, as_sampler, empty_batch, read_params
from vecenv.jit.runner import Runner
from vecenv.machine import usable_cores

_ALL = slice(None)
_OF_VECTORS = ("num_envs", "autoreset_mode", "num_threads")
_SAVED = "_saved_state"  # key of a pickled single env, in place of its vector env
_NUM_EMPTY = 20  # empty compiled calls, to measure the cost of a time stamp


class JitVectorEnv(CompiledVecEnv):
    """Many environments of one kind, in compiled code.

    A step of all envs is one call into machine code: it checks the actions, steps the envs, resets
    those that are due, counts returns and lengths, and writes the results into the output arrays.
    Long calls are split among threads. An env's trajectory depends only on its seed and actions:
    not on the number of envs or threads, nor on how envs are grouped into sends.

    Args:
        kernels: The kind of environment.
        num_envs: Number of copies.
        params: Parameters for the kernels, copied. A record for all envs (see `pack_record`); or an
            array of records (num_envs,), one per env; or a dict of names to values, for all envs or
            one per env, that replace those of `kernels.params`. None for `kernels.params`.
        sampler: A kernel `(params, rng)` that writes an env's parameters before each reset; or a
            dict of ranges such as {"gravity": (5.0, 15.0)}, from which each episode draws them.
            None for the kernels' own sampler, unless `params` are given; False for none.
        on_episode_end: Called as `on_episode_end(envs, env_ids)` after a step in which episodes
            ended, env_ids int64 (B,): for curricula by `set_params`. The next episodes begin after
            this call, except in SAME_STEP mode, where they have begun.
        max_episode_steps: Truncate episodes at this length; None leaves that to `step`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_threads: Maximum number of threads; None for one per processor this process may use.
        episode_infos: Whether infos["episode"] reports the return "r" and length "l" of episodes
            that end. `last_returns` and `last_lengths` have them in any case.
        mask_infos: Whether infos["action_mask"] has the envs' action masks after every reset, step
            and `recv`. `action_masks` returns them in any case.
        metadata: Further metadata; None for that of the class.
        render_mode: Type of the frames, "rgb_array" or "ansi"; for kernels with a `render`
            function, or a subclass with a method of its own.
        debug: Whether everything runs as plain Python: slow, but with tracebacks, breakpoints, and
            an IndexError for every index out of range.
        dry_run: Whether kernels first run in Python for a few steps, before compiled code uses
            them. This finds indices out of range (in these steps; not with `debug`), wrong results
            of `step`, and memory left unwritten.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        NoActionMaskError: `mask_infos`, and there is no `action_mask` kernel.
        KernelIndexError: A kernel uses an index that is out of range.
        KernelResultError: A kernel returns something wrong, or leaves `out` or fields unwritten.
        KernelCompileError: A kernel can't be compiled, or draws from `numpy.random` or `random`.

    Attributes:
        agents_class: In a subclass where one agent plays all: the subclass of the same games whose
            kernels have `groups`, made by `vecenv.make_vec_agents` for the same id. None if there
            is none, or for that subclass itself.
    """

    agents_class: ClassVar[type[JitVectorEnv] | None] = None

    def __init__(
        self,
        kernels: EnvKernels,
        num_envs: int = 1,
        *,
        params: Any = None,
        sampler: Any = None,
        on_episode_end: Callable[[Any, np.ndarray], Any] | None = None,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        episode_infos: bool = False,
        mask_infos: bool = False,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
        debug: bool = False,
        dry_run: bool = True,
    ) -> None:
        _check_kernels(kernels)
        num_envs = read_count("num_envs", num_envs)
        mode = read_autoreset_mode(autoreset_mode)
        limit = NO_LIMIT
        if max_episode_steps is not None:
            limit = min(read_count("max_episode_steps", max_episode_steps), NO_LIMIT)
        threads = read_count("num_threads", usable_cores() if num_threads is None else num_threads)
        if sampler is False or (sampler is None and params is not None):
            kernels = kernels.having(sampler=None)
        elif sampler is not None:
            kernels = kernels.having(sampler=as_sampler(kernels, sampler))
        has_sampler = kernels.sampler is not None
        records = read_params(kernels, params, num_envs, per_env=has_sampler)
        if has_sampler and records is None:
            raise TypeError(f"{kernels.name} has a sampler, but no params that it could write")
        self.has_own_params = has_sampler or (records is not None and len(records) > 1)
        all_metadata = {**type(self).metadata, **(metadata or {})}
        spaces = BatchedSpaces.of(kernels.observation_space, kernels.action_space, num_envs)
        self._set_up(
            num_envs, spaces, mode, _with_rendering(kernels, all_metadata, render_mode), render_mode
        )
        self.kernels = kernels
        self.max_episode_steps = max_episode_steps
        self.episode_infos, self.mask_infos = episode_infos, mask_infos
        if mask_infos:
            self.require_masks()
        self._on_episode_end = on_episode_end
        self._states = aligned_zeros((num_envs,), kernels.state_dtype)
        self._runs = aligned_zeros((num_envs,), RUN_DTYPE)
        as_rows = HostMemory.as_rows
        self._allocate(as_rows(self._states), as_rows(self._runs), records)
        self._over = self.episode_over
        self._bounds = bounds = element_bounds(kernels.action_space)
        if (bounds == bounds[:, :1]).all():
            self._bounds = bounds[:, :1].copy()  # one column is checked in one pass
        self._action_dtype = np.dtype(kernels.action_space.dtype)
        self._cast: np.ndarray | None = None  # actions of this dtype; made by the first cast
        self._unused = self._new_outputs(0)  # for jobs that do not write these outputs
        first = None if records is None else records[:1]
        self._loop = loop = bind_loop(
            kernels, first, max_episode_steps=limit, debug=debug, dry_run=dry_run
        )
        self._batch = empty_batch(kernels)._replace(  # a step of all envs
            op=STEP, autoreset_mode=MODES[mode], max_episode_steps=limit, states=self._states,
            runs=self._runs, params=records, final_obs=self._final_obs,
        )  # fmt: skip
        self._runner = Runner(loop, self._batch, self._bounds, threads, self._calls.give_up)
        self._run_job = self._runner.run

    @property
    def params(self) -> np.ndarray | None:
        """The parameter record, (1,), or one per env, (num_envs,): a live view; None if none.

        Values written here, `envs.params.gravity = 1.6`, count from the next step on. `state_dict`
        includes the parameters if each env has its own.
        """
        return None if self._batch.params is None else self._batch.params.view(np.recarray)

    @property
    def states(self) -> np.ndarray:
        """The state records (num_envs,): a live view. After changing it, call `observe`."""
        return self._states.view(np.recarray)

    def _params_moved(self) -> None:
        own = self._rows["params"].view(self._dtypes["params"])
        self._batch = self._batch._replace(params=own)

    def _run(self, op: int, num_rows: int, env_ids: np.ndarray | None = None, **arrays: Any) -> int:
        outputs = self._unused
        if "obs" in arrays:
            outputs = outputs._replace(obs=arrays.pop("obs"))
        if env_ids is not None:
            arrays["env_ids"] = env_ids
        job = self._batch._replace(op=op, **arrays)
        return self._run_job(job, num_rows, self._batch.actions, outputs)

    def _begin(self, obs: np.ndarray, reset_mask: np.ndarray | None) -> None:
        if reset_mask is None:
            self._run(RESET, self.num_envs, obs=obs)
        else:
            chosen = np.flatnonzero(reset_mask)
            self._run(RESET, len(chosen), chosen, obs=obs[: len(chosen)])
            self._run(OBSERVE, self.num_envs, obs=obs)

    def observer(self, kernels: EnvKernels) -> Callable[[np.ndarray], Any]:
        """Return a function that writes what other kernels observe of the current states.

        Args:
            kernels: Kernels with the same state record and parameters.

        Returns:
            A function of memory (num_envs, *obs_shape), of the dtype of these observations.
        """
        shared = {name: getattr(self._batch, name) for name in ("states", "runs")}
        batch = empty_batch(kernels)._replace(op=OBSERVE, **shared)
        first = None if self.params is None else self._batch.params[:1]
        loop = bind_loop(kernels, first, debug=self._runner.is_python, dry_run=False)
        threads, no_bounds = self._runner.num_threads, np.zeros((2, 0), np.int64)
        runner = Runner(loop, batch, no_bounds, threads, self._calls.give_up)

        def write(obs: np.ndarray) -> None:
            job = batch._replace(params=self._batch.params)
            runner.run(job, self.num_envs, batch.actions, self._unused._replace(obs=obs))

        return write

    # -- steps --------------------------------------------------------------------------------

    def _step_rows(self, actions: Any, outputs: StepSlot, env_ids: np.ndarray | None) -> dict:
        batch = self._batch
        if env_ids is not None:
            batch = batch._replace(env_ids=env_ids)
        else:
            self._refuse_ended()
        given = actions
        if actions.dtype != self._action_dtype or not actions.flags.carray:
            if not np.can_cast(actions.dtype, self._action_dtype):
                self._check_actions(actions)
            if self._cast is None:
                self._cast = np.zeros((self.num_envs, *actions.shape[1:]), self._action_dtype)
            np.copyto(given := self._cast[: len(actions)], actions, casting="unsafe")
        num_ended = self._run_job(batch, len(given), given, outputs)
        if num_ended < 0:
            self._refuse_action(actions, -1 - num_ended, env_ids)
        infos: dict[str, Any] = {}
        if num_ended and self._has_end_infos:
            infos = self._end_infos(outputs, env_ids)
        if self.mask_infos:
            infos = self._with_masks(infos, env_ids, np.ones(len(given), np.bool_))
        return infos

    def _send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
        self._refuse_ended(env_ids)
        self._check_actions(actions, env_ids)
        super()._send(actions, env_ids)

    def _check_actions(self, actions: np.ndarray, env_ids: np.ndarray | None = None) -> None:
        """Raise ActionError for actions (B, ...) out of bounds, of these envs or of all."""
        if (row := first_invalid_row(actions, self._bounds)) >= 0:
            self._refuse_action(actions, row, env_ids)

    def _refuse_action(self, actions: np.ndarray, row: int, env_ids: np.ndarray | None) -> NoReturn:
        space, (low, high) = self.single_action_space, self._bounds[:, :1]
        expected = f"an action of {space}"
        if isinstance(space, Discrete):
            expected = f"an integer from {low[0]} to {high[0]} ({space})"
        raise ActionError(
            f"actions[{row}] (env {row if env_ids is None else env_ids[row]}) is {actions[row]}, "
            f"expected {expected}; nothing was stepped"
        )

    def _is_over(self, env_ids: np.ndarray | slice = _ALL) -> np.ndarray:
        return self._over[env_ids]

    def _final_infos(self, final_obs: np.ndarray, over: np.ndarray) -> np.ndarray:
        rows, objects = np.flatnonzero(over), np.full(len(over), None, dtype=object)
        objects[rows] = np.fromiter(final_obs[rows], dtype=object, count=len(rows))
        return objects

    def play_in_python(self, seconds: float) -> int | None:
        """Play whole episodes of one separate env in plain Python, where indices are checked.

        The vector env itself does not change. `vecenv.check_vector_env` calls this.

        Args:
            seconds: Time limit; otherwise it ends after three episodes with random actions.

        Returns:
            The number of episodes that ended; None for bundled kernels, which are not played.

        Raises:
            KernelIndexError: An index is out of range; names file and line.
            KernelResultError: `step` returns something wrong.
        """
        if self._loop.is_ours:
            return None
        params, limit = self._batch.params, self._batch.max_episode_steps
        return try_out(self.kernels, self._loop.run_rows, params, limit, seconds)

    def _begin_stamps(self) -> int:
        """Stamp jobs instead of envs; return the time of an empty job, in ns."""
        self._calls.require_open("timing.enable")
        # A reference to self would be a cycle and delay the env's deletion.
        run, log = self._runner.run, self.timing.log
        empty = self._batch._replace(op=OBSERVE), 0, self._batch.actions, self._unused
        seconds = timeit.repeat(lambda: run(*empty), number=1, repeat=_NUM_EMPTY)

        def stamped(*args: Any) -> int:
            begin_ns = perf_counter_ns()
            try:
                return run(*args)
            finally:
                log.note_wait(begin_ns, perf_counter_ns())  # of the calling thread

        self._run_job = stamped
        return int(1e9 * statistics.median(seconds))

    def _end_stamps(self) -> None:
        self._run_job = self._runner.run

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the helper threads; may be called twice."""
        super().close()  # the arguments are for workers
        if hasattr(self, "_runner"):
            self._runner.stop()


def _with_rendering(
    kernels: EnvKernels, metadata: dict[str, Any], render_mode: str | None
) -> dict[str, Any]:
    """Add render modes and frame rate if the kernels have a `render` function; check the mode."""
    if kernels.render is not None:
        metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 10, **metadata}
    if "render_modes" in metadata and render_mode not in (None, *metadata["render_modes"]):
        modes = ", ".join(metadata["render_modes"])
        hint = "; with the command vecenv by --gif FILE or --html FILE" * (render_mode == "ansi")
        raise ValueError(f"render_mode is {render_mode!r}, expected one of {modes}{hint}")
    return metadata


def _check_kernels(kernels: Any) -> None:
    """Raise TypeError for anything but an `EnvKernels`."""
    if isinstance(kernels, EnvKernels):
        return
    given = f"got {type(kernels).__name__}"
    if isinstance(kernels, list | tuple) and any(isinstance(one, EnvKernels) for one in kernels):
        given = f"got a {type(kernels).__name__} of {len(kernels)}: pass one of them and num_envs"
    raise TypeError(f"kernels must be one EnvKernels, of which num_envs copies are made; {given}")


class JitEnv(Env[Any, Any]):
    """One env of a compiled kind as a `gymnasium.Env`: a vector env of one, without autoreset.

    With seed s it acts like env i of the vector env with seed s - i. A step costs some microseconds
    of Python, however short the kernels are: for training, use the vector env.

    Args:
        make: Makes the vector env: a subclass of `JitVectorEnv`, or a function that passes
            `num_envs`, `autoreset_mode` and `num_threads` on to one.
        render_mode: Form of the frames of `render`, as for the vector env.
        **options: For `make`; `mask_infos=True` puts the mask into every info, as "action_mask".

    Raises:
        TypeError: An option that only vector envs have, or one that `make` rejects.

    Example:
        >>> from vecenv.jit.cartpole import CartPoleVectorEnv
        >>> env = JitEnv(CartPoleVectorEnv, debug=True)
        >>> obs, info = env.reset(seed=1)
        >>> obs, reward, terminated, truncated, info = env.step(0)
        >>> obs.shape, reward, terminated, truncated, info
        ((4,), 1.0, False, False, {})
        >>> env.close()
    """

    def __init__(
        self, make: Callable[..., JitVectorEnv], *, render_mode: str | None = None, **options: Any
    ) -> None:
        for name in _OF_VECTORS:
            if name in options:
                raise TypeError(f"{name} is for vector envs; a single env takes none")
        self._make = make
        self._options = options if render_mode is None else {**options, "render_mode": render_mode}
        self._envs = self._make_envs()
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.metadata = {"render_modes": [], **self._envs.metadata}
        del self.metadata["autoreset_mode"]  # belongs to vector envs
        self.render_mode = render_mode

    def _make_envs(self) -> Any:
        return self._make(
            num_envs=1, autoreset_mode=AutoresetMode.DISABLED, num_threads=1, **self._options
        )

    @property
    def action_masks(self) -> Callable[[], np.ndarray]:
        """A function that returns which actions are valid, int8 (width,), a copy.

        Only for kinds with masks. `action_space.sample(mask=...)` of a Discrete space takes this
        array; `mask.view(bool)` is the same as bool.
        """
        if not self._envs.has_action_masks:
            raise AttributeError(f"{self._envs.kernels.name} has no action masks")
        return lambda: self._envs.action_masks()[0].copy()  # noqa: PLW0108  # masks of later

    def observe(self) -> Any:
        """Return the observation of the current state; nothing is stepped."""
        return self._envs.observe()[0]

    def play_in_python(self, seconds: float) -> int | None:
        """Play episodes in plain Python, see `JitVectorEnv.play_in_python`."""
        return self._envs.play_in_python(seconds)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays (copies), the random stream included.

        After `load_state_dict`, an env made with the same arguments continues from it bit for bit.
        The arrays can be stored with `numpy.savez`. Copies (`copy.deepcopy`) and pickles of an env,
        wrapped or not, continue likewise. The stream of `action_space.sample` is not part of the
        state, but copies and pickles include it.
        """
        return self._envs.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state that `state_dict` returned; then `observe` gives its observation.

        Raises:
            KeyError: An entry is missing.
            ValueError: The state is of another kind, or of a vector env of several envs.
        """
        self._envs.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_envs"}
        try:
            return {**kept, _SAVED: self.state_dict()}
        except ResetNeeded:
            return {**kept, _SAVED: None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept.pop(_SAVED)
        vars(self).update(kept)
        self._envs = self._make_envs()
        if state is not None:
            self._envs.load_state_dict(state)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed the random stream continues. There are no options."""
        if options:
            raise ValueError(f"options has {sorted(options)}, but this env knows none")
        super().reset(seed=seed)
        obs, infos = self._envs.reset(seed=seed)
        return obs[0], _of_first(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step.

        Raises:
            ActionError: The action is not one of `action_space`. Nothing was stepped.
            ResetNeeded: Before the first `reset`, or the episode is over.
        """
        space, row = self.action_space, np.asarray(action)
        if isinstance(space, Discrete) and not space.contains(row):  # vector envs tell of rows
            low, high = space.start, space.start + space.n - 1
            raise ActionError(f"action is {action!r}, expected an integer from {low} to {high}")
        if self._envs._over[0]:
            raise ResetNeeded("the episode is over; call reset() before the next step")
        obs, rewards, terminations, truncations, infos = self._envs.step(row[None])
        ended = bool(terminations[0]), bool(truncations[0])
        return obs[0], float(rewards[0]), *ended, _of_first(infos)

    def render(self) -> Any:
        """Return a picture or a text, as `render_mode` says; None without one."""
        frames = self._envs.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the env; may be called twice."""
        self._envs.close()


def _of_first(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return the info of the first env from batched infos."""
    info: dict[str, Any] = {}
    for name, values in infos.items():
        if name.startswith("_") or not infos.get(f"_{name}", (True,))[0]:
            continue
        one = _of_first(values) if isinstance(values, dict) else values[0]
        info[name] = one.item() if isinstance(one, np.generic) else one
    return info


def __getattr__(name: str) -> Any:
    """Return the single-env version of a vector class of this package: "jit.envs.NAME.CLASS".

    Ids of bundled envs have such entry points. Gymnasium passes one set of arguments to an entry
    point and to a vector entry point, so the vector class can't be one of them.
    """
    module, _, class_name = name.rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = getattr(import_module(f"vecenv.{module}"), class_name)
    make: Any = functools.partial(JitEnv, kind)
    make.metadata = kind.metadata  # Gymnasium looks here for the render modes
    return make
