"""Rules for every result of a vector env or of a game's agents, and the findings of a check."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.agents import AgentRowsVecEnv, AgentsVecEnv
from vecenv.core.masks import sample_actions
from vecenv.core.spaces import is_same, short, take_row, why_outside

__all__ = ["Findings", "Frame", "GiveUpError", "Watch", "check_agents"]


_FIELDS = ("observations", "rewards", "terminations", "truncations")


class GiveUpError(Exception):
    """The rest of a part of the check is pointless; the reason has been noted."""


class Findings:
    """Collects kept and broken rules; for each broken rule the first instance.

    Attributes:
        where: The call whose results are being checked; begins every message.
        tried: Rules that were tried, in order.
        failures: Rule -> what was wrong.
        skipped: Rule -> why it could not be tried.
        remarks: Facts that break no rule.
        cause: The first unexpected exception.
    """

    def __init__(self) -> None:
        self.where = ""
        self.tried: dict[str, None] = {}
        self.failures: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.remarks: dict[str, None] = {}
        self.cause: Exception | None = None

    def require(self, rule: str, is_kept: Any, message: str, **values: Any) -> bool:
        """Note that `rule` was tried; if it was broken, say how.

        Args:
            rule: What should hold.
            is_kept: Whether it holds.
            message: What happened instead and what to do; a template, filled only if needed.
            values: For the template; values other than strings are shown by their repr.
        """
        self.tried[rule] = None
        if not is_kept and rule not in self.failures:
            shown = {k: v if isinstance(v, str) else short(v) for k, v in values.items()}
            self.failures[rule] = f"{self.where}: {message.format(**shown)}"
        return bool(is_kept)

    def require_raises(
        self, rule: str, expected: type[Exception], call: Callable[..., Any], *args: Any
    ) -> None:
        """Require that the call raises an error of the expected type."""
        came = "nothing was raised"
        try:
            call(*args)
        except expected:
            came = ""
        except Exception as error:
            came = f"{type(error).__name__} was: {error}"
        self.require(
            rule, not came, "{name} must raise {wanted}, but {came}",
            name=call.__name__, wanted=expected.__name__, came=came,
        )  # fmt: skip

    def attempt(self, what: str, part: Callable[..., Any], *args: Any) -> None:
        """Run a part of the check; an exception is a failure and ends this part."""
        self.where = what
        try:
            part(*args)
        except GiveUpError:
            pass
        except Exception as error:
            self.cause = self.cause or error
            text = f"{type(error).__name__}: {error}"
            if self.failures:  # it probably follows from these
                self.skipped[what] = f"broke off at {self.where} with {text}"
            else:
                self.require(f"{what} ends without an error", False, "{text}", text=text)


class Frame(NamedTuple):
    """Copies of the results of a reset (observations only) or of a step."""

    observations: Any
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    restarted: Any = None  # observations after the caller's reset of ended envs


class Watch:
    """Follows a run; checks every result against the rules.

    Args:
        envs: The vector env of the run.
        mode: Its autoreset mode, None if unknown.
        starts: For each env, the observation that every reset returns; None if it varies.
        found: Collects the findings.

    Attributes:
        num_ends: Number of episodes that ended.
    """

    def __init__(
        self, envs: VectorEnv, mode: AutoresetMode | None, starts: list[Any], found: Findings
    ) -> None:
        self._num_envs = envs.num_envs
        self._space = envs.observation_space
        self._single_space = envs.single_observation_space
        self._may_return_views = getattr(envs.unwrapped, "copy", True) is False
        self._mode = mode
        self._starts = starts
        self._found = found
        self._require = found.require
        self._over = np.zeros(envs.num_envs, dtype=np.bool_)  # after the last step
        self._returned: deque[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = deque(maxlen=3)
        self._last_obs: Any = None
        self._stale: list[str] = []  # ends after which the observation was still the final one
        self._num_varying = 0  # ends of envs with varying starts
        self.num_ends = 0

    def saw_reset(self, result: Any) -> None:
        """Check the results of a reset of all or some envs."""
        is_pair = isinstance(result, tuple) and len(result) == 2
        rule = "reset returns observations and infos"
        if not self._require(rule, is_pair, "returned {result}", result=result):
            raise GiveUpError
        self._check_obs(result[0])
        check_infos(self._found, result[1], self._num_envs)
        self._check_memory(result[:1])

    def saw_step(self, result: Any) -> None:
        """Check the results of a step."""
        is_five = isinstance(result, tuple) and len(result) == 5
        rule = "step returns five values"
        if not self._require(rule, is_five, "returned {result}", result=result):
            raise GiveUpError
        obs, rewards, terminations, truncations, infos = result
        self._check_obs(obs)
        self._check_array("rewards", rewards, "f")
        self._check_array("terminations", terminations, "b")
        self._check_array("truncations", truncations, "b")
        check_infos(self._found, infos, self._num_envs)
        if any(np.shape(array) != (self._num_envs,) for array in result[1:4]):
            raise GiveUpError
        over = np.logical_or(terminations, truncations)
        self.num_ends += int(over.sum())
        if self._mode is AutoresetMode.NEXT_STEP:
            self._check_dead_step(obs, rewards, over)
        elif self._mode is AutoresetMode.SAME_STEP:
            self._check_final_infos(obs, infos, over)
        self._check_memory(result[:4])
        self._over = over

    def finish(self) -> None:
        """Check the rules that need the whole run."""
        if self._num_varying > 1:
            self._require(
                "an ended episode is followed by a new one",
                len(self._stale) < self._num_varying,
                "after each of {num} ends, what should be the first observation of a new episode "
                "is the last one of the old ({first}); reset the env",
                num=self._num_varying, first=(self._stale or [""])[0],
            )  # fmt: skip

    def _check_obs(self, obs: Any) -> None:
        reason = why_outside(self._space, obs, "obs")
        self._require(
            "observations are in observation_space",
            reason is None,
            "{reason} (the first index of arrays is the env's); correct the env or its spaces",
            reason=reason,
        )

    def _check_array(self, name: str, array: Any, kind: str) -> None:
        wanted = {"f": "floating", "b": "bool"}[kind]
        is_array = isinstance(array, np.ndarray)
        self._require(
            f"{name} are a {wanted} array with one entry per env",
            is_array and array.dtype.kind == kind and array.shape == (self._num_envs,),
            "got {came}, expected a NumPy array of shape {shape}",
            came=f"{array.dtype} {array.shape}" if is_array else type(array).__name__,
            shape=(self._num_envs,),
        )
        if is_array and array.dtype.kind == "f":
            is_number = not np.isnan(array).any()
            self._require(f"{name} are numbers", is_number, "got {array}", array=array)

    def _check_dead_step(self, obs: Any, rewards: np.ndarray, over: np.ndarray) -> None:
        """NEXT_STEP: the step after an end only resets; it is not a transition."""
        for i in np.flatnonzero(self._over).tolist():
            self._require(
                "NEXT_STEP: the reward of the step after an end is 0",
                rewards[i] == 0,
                "env {i} got {reward}; its episode ended a step earlier, this step only resets it",
                i=i, reward=rewards[i],
            )  # fmt: skip
            self._require(
                "NEXT_STEP: the flags of the step after an end are False",
                not over[i],
                "env {i} is flagged; its episode ended a step earlier, this step only resets it",
                i=i,
            )
            final = take_row(self._single_space, self._last_obs, i)
            self._check_start(i, take_row(self._single_space, obs, i), final)

    def _check_final_infos(self, obs: Any, infos: dict[str, Any], over: np.ndarray) -> None:
        """SAME_STEP: infos have the last observation and info of the ended episode."""
        for key in ("final_obs", "final_info"):
            mask = infos.get(f"_{key}", np.zeros(self._num_envs, dtype=np.bool_))
            is_there = key in infos or not over.any()
            if not self._require(
                f"SAME_STEP: infos have {key} of the envs that ended",
                is_there and np.array_equal(mask, over),
                "the episodes of envs {ended} ended; infos['_{key}'] marks {marked}",
                ended=np.flatnonzero(over), key=key, marked=np.flatnonzero(mask),
            ):  # fmt: skip
                return
        for i in np.flatnonzero(over).tolist():
            final = infos["final_obs"][i]
            reason = why_outside(self._single_space, final, f"infos['final_obs'][{i}]")
            rule = "SAME_STEP: final_obs are in single_observation_space"
            self._require(rule, reason is None, "{reason}", reason=reason)
            self._check_start(i, take_row(self._single_space, obs, i), final)

    def _check_start(self, index: int, obs: Any, final: Any) -> None:
        """Check an observation that should be the first one of a new episode."""
        start = self._starts[index]
        if start is None:
            self._num_varying += 1
            if is_same(_as_array(obs), _as_array(final)):
                self._stale.append(f"first seen in env {index} at {self._found.where}")
            return
        self._require(
            "an ended episode is followed by a new one",
            is_same(obs, start),
            "env {i}, whose episode ended, is at {obs}, every reset gave {start}; reset the env",
            i=index, obs=obs, start=start,
        )  # fmt: skip

    def _check_memory(self, arrays: tuple[Any, ...]) -> None:
        """Check that the results of earlier calls have not changed."""
        for earlier, returned, copies in self._returned:
            for name, array, copy in zip(_FIELDS, returned, copies, strict=False):
                is_kept = is_same(array, copy)
                if name == "observations" and self._may_return_views:
                    if not is_kept:
                        self._found.remarks["observations are views (copy=False)"] = None
                    continue
                self._require(
                    f"{name} returned earlier don't change",
                    is_kept,
                    "changed what {earlier} had returned; return copies, or say so by an attribute "
                    "copy=False",
                    earlier=earlier,
                )
        copies = deepcopy(arrays)
        self._returned.append((self._found.where, arrays, copies))
        self._last_obs = copies[0]


def _as_array(obs: Any) -> Any:
    """Make observations comparable: a final one may be an int where a batch has an int64."""
    return np.asarray(obs) if isinstance(obs, int | float | np.generic) else obs


def check_infos(found: Findings, infos: Any, num_envs: int, path: str = "infos") -> None:
    """Check that every value has one row per env and a mask.

    In nested dicts, masks are checked only if there are any: Gymnasium's vector envs make them, its
    vector wrappers (RecordEpisodeStatistics) do not.
    """
    rule = "infos have a row per env and bool masks"
    if not found.require(rule, isinstance(infos, dict), "infos are {infos}", infos=infos):
        raise GiveUpError
    for key, value in infos.items():
        name = f"{path}[{key!r}]"
        is_array = isinstance(value, np.ndarray)
        shape = value.shape if is_array else ()
        if isinstance(key, str) and key[:1] == "_" and key[1:] in infos:
            is_mask = is_array and value.dtype == np.bool_ and shape == (num_envs,)
            message = "{name} is {value}, expected a mask: bool, one per env"
            found.require(rule, is_mask, message, name=name, value=value)
            continue
        if path == "infos":
            message = "{name} has no mask infos['_{key}']; enter infos by VectorEnv._add_info"
            found.require(rule, f"_{key}" in infos, message, name=name, key=str(key))
        if isinstance(value, dict):
            check_infos(found, value, num_envs, name)
        else:
            message = "{name} is {value}, expected a NumPy array with one row per env"
            found.require(rule, shape[:1] == (num_envs,), message, name=name, value=value)


_AGENT_FIELDS = "observations", "rewards", "terminations", "truncations", "valid", "alive"


def check_agents(
    envs: AgentsVecEnv | AgentRowsVecEnv, num_steps: int, seed: int, found: Findings
) -> None:
    """Play games twice with the same random actions; see `check_vector_env`."""
    games = envs.agents if isinstance(envs, AgentRowsVecEnv) else envs
    first = _play(games, num_steps, seed, found)
    second = _play(games, num_steps, seed, Findings())
    rule = "the same seed gives the same run"
    message = "{name} were {a} in the first run and are {b} now"
    for step, (results, others) in enumerate(zip(first, second, strict=True)):
        found.where = f"step {step - 1}" if step else "reset"
        for name, one, other in zip(_AGENT_FIELDS, results, others, strict=True):
            if not found.require(rule, is_same(one, other), message, name=name, a=one, b=other):
                return


def _play(games: AgentsVecEnv, num_steps: int, seed: int, found: Findings) -> list[Any]:
    """Play a run, and check it; return copies of all results."""
    rng, found.where = np.random.default_rng(seed), "reset"
    for group in games.groups.values():
        group.action_space.seed(seed)
    obs, _ = games.reset(seed=seed)
    run, num_ends = [_checked(games, (obs, {}, {}, {}), found)], 0
    for step in range(num_steps):
        found.where = f"step {step}"
        actions = {name: _draw(group, rng) for name, group in games.groups.items()}
        run.append(_checked(games, games.step(actions)[:4], found))
        num_ends += sum(int((run[-1][2][name] | run[-1][3][name]).sum()) for name in games.groups)
        alive = [x.reshape(games.num_games, -1).any(axis=1) for x in games.alive.values()]
        over = ~np.any(alive, axis=0)
        if games.autoreset_mode is AutoresetMode.DISABLED and over.any():
            games.reset(options={"reset_mask": over})
    if not num_ends:
        why = f"no agent ended in {num_steps} steps; raise num_steps"
        found.skipped["games after the end of an agent"] = why
    return run


def _checked(games: AgentsVecEnv, results: Any, found: Findings) -> Any:
    """Check what agents got; return copies of it, and of who acted and who acts next."""
    for name, group in games.groups.items():
        bad = np.isnan(results[1].get(name, np.zeros(0)))
        message = "not so in {name}'s rows {rows}"
        found.require(
            "rewards are numbers", not bad.any(), message, name=name, rows=np.flatnonzero(bad)
        )
        for row in np.flatnonzero(group.alive).tolist():
            space = group.single_observation_space
            obs, message = take_row(space, results[0][name], row), "row {row} is {obs}, of {space}"
            rule = "observations of agents that act next are in their space"
            found.require(rule, obs in space, message, row=row, obs=obs, space=space)
    return deepcopy((*results, games.valid, games.alive))


def _draw(group: Any, rng: np.random.Generator) -> np.ndarray:
    """Return random actions, allowed ones if there are masks."""
    if group.has_action_masks:
        return sample_actions(group.single_action_space, group.action_masks(), rng)
    return group.action_space.sample()
