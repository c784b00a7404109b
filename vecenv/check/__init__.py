"""check_vector_env: does a vector env follow Gymnasium's interface?"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gymnasium.spaces import Dict
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.check.calls import CallChecks, check_before_reset, check_closed
from vecenv.check.rules import Findings, GiveUpError, check_agents
from vecenv.check.runs import Runs
from vecenv.core.base import VecEnv
from vecenv.sync import SyncVectorEnv

__all__ = ["CheckReport", "VectorEnvCheckError", "check_vector_env"]

_PYTHON_SECONDS = 5.0  # for whole episodes of kernels
_SPACES = ("observation_space", "single_observation_space", "action_space", "single_action_space")


class CheckReport(NamedTuple):
    """Outcome of `check_vector_env`.

    Attributes:
        passed: Rules that were tried and kept.
        skipped: Rules that could not be tried, each with the reason.
        remarks: Facts that a user should know, though they break no rule.
    """

    passed: tuple[str, ...]
    skipped: tuple[str, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        """Return a short text: how many rules passed, and everything else line by line."""
        counted = f"{len(self.passed)} rules passed"
        if self.skipped:
            counted += f", {len(self.skipped)} could not be tried"
        return "\n".join([counted, *self._lines(skipped=self.skipped, remark=self.remarks)])

    def full(self) -> str:
        """Return the full text, including the names of passed rules."""
        kinds = {"passed": self.passed, "skipped": self.skipped, "remark": self.remarks}
        return "\n".join(self._lines(**kinds))

    @staticmethod
    def _lines(**kinds: tuple[str, ...]) -> Iterator[str]:
        for kind, texts in kinds.items():
            for text in texts:
                yield textwrap.fill(f"{kind}: {text}", 79, subsequent_indent="  ")


class VectorEnvCheckError(AssertionError):
    """A vector env breaks rules of the interface; the message numbers them.

    Attributes:
        failures: Rule -> what was expected, what came, where, and what to do.
        report: Rules that passed, rules that could not be tried, and remarks.
    """

    def __init__(self, name: str, failures: dict[str, str], report: CheckReport) -> None:
        lines = [f"{k}. {rule}: {text}" for k, (rule, text) in enumerate(failures.items(), 1)]
        rules = "a rule" if len(lines) == 1 else f"{len(lines)} rules"
        title = f"{name} breaks {rules} of vector envs:"
        super().__init__("\n".join([title, *lines, "", str(report)]))
        self.failures = failures
        self.report = report


def check_vector_env(
    envs: VectorEnv | AgentsVecEnv, *, num_steps: int = 200, seed: int = 0
) -> CheckReport:
    """Check that a vector env keeps the rules of Gymnasium's interface, and those of `VecEnv`.

    Checked are: spaces, shapes and dtypes, infos and their masks, the autoreset mode of the
    metadata, repetition under a seed, the memory of earlier results, refusal of wrong actions, and
    `close`. For a `VecEnv` also: `send` and `recv`, `out=`, seeds of single envs, partial resets,
    action masks, and the order of calls. For games with several agents: observations, rewards and
    the seed. For your own compiled envs, three episodes are first played in plain Python, for at
    most five seconds, with a check of every index. If one is out of range, no compiled code is run.

    Args:
        envs: The vector env, without vector wrappers that change between runs, such as normalizers.
            It is reset with other seeds, stepped, and closed.
        num_steps: Length of a run; there are up to five. If no episode ends in a run, rules about
            ends are skipped. The observations of one run are kept in memory.
        seed: Seed of resets and random actions.

    Returns:
        The rules that passed, and those that could not be tried.

    Raises:
        VectorEnvCheckError: Some rules are broken; lists all of them.
        TypeError: `envs` is not a vector env.
        ValueError: `num_steps` is below 1.

    Example:
        >>> from vecenv import make_vec
        >>> report = check_vector_env(make_vec("CartPole-v1", num_envs=2), num_steps=50)
        >>> "send and recv give what step gives" in report.passed
        True
    """
    if not isinstance(envs, VectorEnv | AgentsVecEnv):
        raise TypeError(f"expected a gymnasium.vector.VectorEnv, got {type(envs).__name__}")
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, expected at least 1")
    found = Findings()
    if not _check_kernels(_games_of(envs), found):
        found.skipped["all other rules"] = "compiled code would use other memory, and may crash"
        envs.close()
    else:
        is_game = isinstance(envs, AgentsVecEnv | AgentRowsVecEnv)
        what = "run with random actions" if is_game else "attributes"
        check = check_agents if is_game else _check_all
        try:
            found.attempt(what, check, envs, num_steps, seed, found)
        finally:
            found.attempt("close may be called twice", _check_close, envs, found)
    passed = tuple(rule for rule in found.tried if rule not in found.failures)
    skipped = tuple(f"{rule}: {why}" for rule, why in found.skipped.items())
    report = CheckReport(passed, skipped, tuple(found.remarks))
    if found.failures:
        raise VectorEnvCheckError(type(envs).__name__, found.failures, report) from found.cause
    return report


def _check_kernels(envs: Any, found: Findings) -> bool:
    """Play whole episodes of a compiled env with indices checked; skip other envs.

    Returns:
        Whether compiled code may be run.
    """
    if isinstance(envs, SyncVectorEnv):  # it may step compiled envs one by one
        envs = envs.envs[0].unwrapped
    if not hasattr(envs, "play_in_python"):
        return True
    rule = "kernels keep to their arrays for whole episodes"
    found.where = "episodes played in plain Python"
    try:
        num_episodes = envs.play_in_python(_PYTHON_SECONDS)
    except (IndexError, RuntimeError) as error:
        found.require(rule, False, "{text}", text=str(error))
        return False
    if num_episodes is None:  # kernels of this package
        return True
    found.require(rule, True, "")
    if num_episodes == 0:
        found.remarks[
            f"in {_PYTHON_SECONDS:.0f} s of plain Python no episode ended: indices are unchecked "
            "after that; step the env for longer with debug=True"
        ] = None
    return True


def _games_of(envs: Any) -> Any:
    """Return the vector env that steps games, or the env inside the wrappers."""
    if isinstance(envs, AgentRowsVecEnv):
        envs = envs.agents
    return envs.games if isinstance(envs, AgentsVecEnv) else envs.unwrapped


def _check_all(envs: VectorEnv, num_steps: int, seed: int, found: Findings) -> None:
    _check_spaces(envs, found)
    mode = _check_autoreset_mode(envs, found)
    attempt = found.attempt
    if isinstance(envs, VecEnv):
        attempt("step before reset", check_before_reset, envs, found)
    runs = Runs(envs, mode, num_steps, seed=seed, found=found)
    attempt("first reset", runs.check_first_reset)
    attempt("resets", runs.check_starts)
    attempt("run with random actions", runs.check_run)
    if runs.frames:
        attempt("second run", runs.check_repetition)
    if runs.is_repeatable:
        attempt("actions of steps after ends", runs.check_dead_actions)
    if isinstance(envs, VecEnv) and runs.frames:
        CallChecks(envs, runs, seed, found).check_all()
        attempt("observations of single envs", _check_parts, envs, seed, found)
        return
    if mode is AutoresetMode.DISABLED:
        attempt("partial reset", runs.check_partial_reset)
    attempt("wrong actions", runs.check_wrong_counts, Exception)


def _check_parts(envs: VecEnv, seed: int, found: Findings) -> None:
    """Look for parts of observations that no space declares: batches lack them."""
    for i, env in enumerate(envs.envs if isinstance(envs, SyncVectorEnv) else ()):
        obs, _ = env.reset(seed=seed)
        extra = _undeclared(envs.single_observation_space, obs, "obs")
        found.require(
            "observations have no parts but those of the space",
            not extra,
            "{extra} of env {i} is not in its observation_space, so the vector env leaves it out; "
            "declare it, or put it into the info",
            extra=extra, i=i,
        )  # fmt: skip


def _undeclared(space: Any, obs: Any, name: str) -> str:
    """Return the first key of Dict observations that their space lacks; "" if none."""
    if not isinstance(space, Dict) or not isinstance(obs, Mapping):
        return ""
    extra = [f"{name}[{key!r}]" for key in obs if key not in space.spaces]
    parts = ((part, key) for key, part in space.spaces.items() if key in obs)
    extra += [_undeclared(part, obs[key], f"{name}[{key!r}]") for part, key in parts]
    return next(filter(None, extra), "")


def _check_spaces(envs: VectorEnv, found: Findings) -> None:
    missing = ", ".join(name for name in ("num_envs", *_SPACES) if not hasattr(envs, name))
    if not found.require("attributes are there", not missing, "no {names}", names=missing):
        raise GiveUpError
    num_envs = envs.num_envs
    is_count = isinstance(num_envs, int) and num_envs > 0
    if not found.require("num_envs is a positive int", is_count, "it is {n}", n=num_envs):
        raise GiveUpError
    mode = getattr(envs.unwrapped, "observation_mode", "same")
    for kind in ("observation", "action"):
        batched = getattr(envs, f"{kind}_space")
        wanted = batch_space(getattr(envs, f"single_{kind}_space"), num_envs)
        rule = f"{kind}_space is the batch of single_{kind}_space"
        if kind == "observation" and isinstance(mode, tuple):
            found.skipped[rule] = "the vector env was given a batched space of its own"
            continue
        is_alike = kind == "observation" and mode == "different"  # bounds may differ
        found.require(
            rule,
            is_space_dtype_shape_equiv(batched, wanted) if is_alike else batched == wanted,
            "it is {batched}, expected {wanted}; use gymnasium.vector.utils.batch_space",
            batched=batched, wanted=wanted,
        )  # fmt: skip


def _check_autoreset_mode(envs: VectorEnv, found: Findings) -> AutoresetMode | None:
    mode = envs.metadata.get("autoreset_mode")
    message = (
        "metadata['autoreset_mode'] is {mode}, expected a gymnasium.vector.AutoresetMode; learners "
        "depend on it, set it in the metadata of the class or the instance"
    )
    is_mode = isinstance(mode, AutoresetMode)
    if not found.require("metadata has the autoreset mode", is_mode, message, mode=repr(mode)):
        found.skipped["autoreset"] = "the mode is unknown"
    return mode if is_mode else None


def _check_close(envs: VectorEnv | AgentsVecEnv, found: Findings) -> None:
    envs.close()
    envs.close()
    found.require("close may be called twice", True, "")
    if isinstance(envs, VecEnv):
        check_closed(envs, found)
