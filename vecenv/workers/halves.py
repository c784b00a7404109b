"""Two halves of a pool, stepped in turn: one half's envs work while the policy thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector.utils import batch_space

from vecenv.core.actions import ActionBatcher
from vecenv.core.arguments import read_timeout
from vecenv.core.base import GymVecEnv, StepResult
from vecenv.core.batches import take_range
from vecenv.core.deadline import Deadline
from vecenv.core.faults import StepTimeoutError, raise_faults, retold
from vecenv.core.masks import MASK_KEY
from vecenv.core.protocol import STEP_OF_A_HALF
from vecenv.core.rows import copy_batch
from vecenv.timing.calls import STEP_ASYNC, STEP_WAIT
from vecenv.workers.layout import COMMANDS, OTHER_HALF

if TYPE_CHECKING:
    from vecenv.workers.actions import ActionWriter
    from vecenv.workers.exchange import Exchange

__all__ = ["Half", "make_halves"]


class Half:
    """Half of the envs of an `AsyncVectorEnv`: the envs `env_ids` in order.

    While a step of a half is pending, the vector env itself takes no calls.

    Attributes:
        num_envs: How many envs this half has.
        env_ids: int64 (num_envs,), which.

    Example:
        for half in halves: half.step_async(policy(obs[half]))
        while True:
            for half in halves:
                obs, *_ = half.step_wait()
                half.step_async(policy(obs))    # meanwhile the other half is being stepped
    """

    def __init__(
        self,
        envs: GymVecEnv,
        exchange: Exchange,
        writer: ActionWriter,
        limit_s: float | None,
        workers: range,
        line: int,
    ) -> None:
        self._envs, self._exchange, self._writer = envs, exchange, writer
        self._limit_s = limit_s  # how long a step may take
        self._workers, self._line = workers, line
        bounds = exchange.pool.bounds
        self._rows = slice(bounds[workers.start], bounds[workers.stop])
        self.env_ids = np.arange(self._rows.start, self._rows.stop)
        self.num_envs = len(self.env_ids)
        space = envs.single_action_space
        batched = batch_space(space, self.num_envs)
        self._actions = ActionBatcher(space, batched, self.num_envs)
        self._others: list[Half] = []
        self._begun_at = -1  # commands given before the pending step
        self.is_pending = False

    def step_async(self, actions: Any) -> None:
        """Start stepping every env of this half; `actions` has one per env of it.

        Raises:
            AlreadyPendingCallError: This half's last step has not been waited for, or another call
                is pending.
            ActionError: As for `step`.
        """
        envs, exchange = self._envs, self._exchange
        envs._calls.require_open("step_async")
        if self.is_pending:
            raise AlreadyPendingCallError(
                "`step_async` of a half whose step is pending; call its `step_wait` first", "step"
            )
        if not self._is_other_pending():
            envs._calls.require_ready("step_async")
        envs._ended.require_reset_ended(self.env_ids.tolist())
        checked = self._actions.check(actions)
        with envs._logged(STEP_ASYNC) as log:
            if log is not None:
                log.note_range(self._rows.start, self._rows.stop)
            envs._own_rows()
            self._writer.write(checked, self.env_ids)
            exchange.steps += 1
            self._begun_at = exchange.num_commands()
            try:
                self.is_pending = True
                envs._calls.begin_async(STEP_OF_A_HALF)
                exchange.post_step(0, self._workers.start, self._workers.stop, self._line)
            except BaseException:
                if not self._has_begun():
                    self._end()
                raise

    def _has_begun(self) -> bool:
        """Whether workers have been asked for the pending step; Ctrl-C may have come before."""
        return self._exchange.num_commands() != self._begun_at

    def _end(self) -> None:
        self.is_pending = False
        if not self._is_other_pending():
            self._envs._calls.end_async()

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for `step_async` and return the results of this half's envs, as `step` does.

        Raises:
            NoAsyncCallError: No step of this half is pending.
            StepTimeoutError: Some env has not answered; the step stays pending.
        """
        envs = self._envs
        envs._calls.require_open("step_wait")
        if self.is_pending and not self._has_begun():
            self._end()
        if not self.is_pending:
            raise NoAsyncCallError(
                "Calling `step_wait` without any prior call to `step_async`.", "step"
            )
        timeout = read_timeout("timeout", timeout)
        with envs._logged(STEP_WAIT) as log:
            if log is not None:
                log.note_range(self._rows.start, self._rows.stop)
                log.note_rows(self.num_envs)
            return self._finish(timeout)

    def _finish(self, timeout: float | None) -> StepResult:
        envs, exchange = self._envs, self._exchange
        doing = f"step {exchange.steps}"
        with envs._waiting():
            deadline = Deadline.of_call(timeout, self._limit_s)
            status = exchange.wait(self._line, self._workers, deadline, doing)
        infos: dict[str, Any] = {}
        if status:
            try:
                with envs._taking_infos():
                    infos, faults, _ = exchange.gather(self._workers, None)
                raise_faults(faults, exchange.steps)
            except Exception as error:
                self.is_pending = False
                envs._calls.forget_reset(retold(error))
                self._settle_others()
                raise
        results = self._results(infos)
        self._end()
        return results

    def _is_other_pending(self) -> bool:
        return any(half.is_pending for half in self._others)

    def _settle_others(self) -> None:
        """Wait for the other half's step, which a caller who gets the fault won't wait for."""
        deadline = Deadline.of_call(None, self._limit_s)
        for half in self._others:
            if half.is_pending:
                try:
                    self._exchange.wait(half._line, half._workers, deadline, "the other half")
                except StepTimeoutError:
                    return  # it stays pending, and the fault is raised
                self._exchange.gather(half._workers, None)
                half.is_pending = False
        self._envs._calls.end_async()

    def _results(self, infos: dict[str, Any]) -> StepResult:
        envs, rows = self._envs, self._envs._rows
        space = envs.single_observation_space
        obs = take_range(space, rows.obs.batch(), self._rows.start, self._rows.stop)
        if envs._is_disabled:
            over = rows.terminations[self._rows] | rows.truncations[self._rows]
            envs._note_ended(over, self.env_ids)
        if envs._masks.is_used or (infos and MASK_KEY in infos):
            over = rows.terminations[self._rows] | rows.truncations[self._rows]
            envs._masks.note(infos, over, self._rows)
        return (
            copy_batch(obs) if envs.copy else obs,
            rows.rewards[self._rows].copy(),
            rows.terminations[self._rows].copy(),
            rows.truncations[self._rows].copy(),
            infos,
        )


def make_halves(
    envs: GymVecEnv, exchange: Exchange, writer: ActionWriter | None, limit_s: float | None
) -> tuple[Half, Half]:
    """Cut a pool into the envs of the first half of its workers and those of the second."""
    num_workers = exchange.num_workers
    if num_workers < 2 or exchange.own is not None:
        raise ValueError(
            f"halves() needs at least two workers and caller_steps=False, this vector env has "
            f"{num_workers} and caller_steps={exchange.own is not None}"
        )
    if writer is None or exchange.objects:
        raise ValueError(
            "halves() needs actions and observations of fixed shape, and actions in the byte order "
            f"of this machine; got {envs.single_action_space} and {envs.single_observation_space}"
        )
    middle = (num_workers + 1) // 2
    first = Half(envs, exchange, writer, limit_s, range(middle), COMMANDS)
    second = Half(envs, exchange, writer, limit_s, range(middle, num_workers), OTHER_HALF)
    first._others, second._others = [second], [first]
    return first, second
