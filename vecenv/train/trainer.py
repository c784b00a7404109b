"""Trainer: the common part of all trainers, from options to an evaluated policy in a run folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import cuda

from vecenv import RayVectorEnv, learn, make_vec
from vecenv.core.arguments import import_object
from vecenv.learn import Gradient, Ranks, Run, evaluate
from vecenv.make import has_compiled_envs
from vecenv.timing.report import as_number
from vecenv.train.options import OptionsError, is_on_device, make_placed
from vecenv.train.policy import env_of, load_agent, save_spaces
from vecenv.wrappers import RecordInfos

__all__ = ["Trainer", "title_of"]


class Trainer:
    """Steps envs and lets an agent learn; `main` does so in a run folder, and evaluates.

    Replace these parts, in a subclass or by `replacing`:

    - `make_agent(envs, options)` returns the agent, an `nn.Module`. It is static, because actors of
      Ray and `vecenv play` call it without a trainer.
    - `loss(agent, batch, options)` returns the loss, a mean over the rows of the batch, and a dict
      of scalars to log. It is static, because the gradient is compiled from it.
    - `collect(self)` steps the envs and stores what they return.
    - `evaluate(self, episodes, seed=None, sample=False)` returns an `EvaluationResult`.

    A new kind of trainer has `start(self)`, which resets the envs; `update(self)`, which collects,
    learns and returns scalars to log; and the static `player(envs, agent, options)`, the
    deterministic policy for `vecenv.learn.evaluate`.

    Args:
        options: An `Options` of the trainer's module; OptionsError if they do not fit the envs.
        envs: The vector env; the caller must close it.
        agent: The module to train, on the device of the options; None makes one.

    `agent` is the module that learns. `steps` counts env steps, without those on which autoreset
    resets; `num_updates` counts updates; `episodes` has the returns ended in the last update.
    """

    Options: ClassVar[type]
    make_agent: Callable[..., Any]
    loss: Callable[..., Any]
    start: Callable[..., Any]
    update: Callable[..., Any]
    player: Callable[..., Any]
    # Options that a resumed run may change.
    MAY_CHANGE: ClassVar = frozenset(
        ("save", "save_every", "overwrite", "tensorboard", "profile", "eval_episodes")
    ).union(("num_workers", "vector_kwargs", "learning_rate"))
    STATE: tuple[str, ...] = ("agent", "optimizer", "envs", "steps", "num_updates")
    BASELINES: ClassVar[dict[str, float] | None] = None  # of other policies, beside the curve
    AUTORESET: ClassVar[str | None] = None  # mode of the envs to train in; None is the default
    ON_DEVICE: ClassVar = True  # whether the training envs may be where the networks are
    LOG_STEPS: ClassVar = 1  # least number of env steps between two lines of the metrics
    NUM_RECENT: ClassVar = 20  # number of episodes in the return that is shown

    ranks = Ranks()  # the processes that learn together
    optimizer: Any = None
    rollout: Any = None  # for trainers that learn from one
    gradient: Any = None
    rollout_steps = 1  # most env steps of an update; the training ends when fewer are left

    def __init__(self, options: Any, envs: Any, agent: Any = None) -> None:
        self.options, self.envs, self.timing = options, envs, envs.timing
        self.steps = self.num_updates = 0
        try:
            self.agent: Any = self.new_agent(envs, options) if agent is None else agent
        except OptionsError as error:
            raise OptionsError(f"{env_of(options)}: {error}") from None
        self.episodes = list[float]()

    @classmethod
    def replacing(cls, **functions: Any) -> type[Self]:
        """Return a subclass of the trainer with some functions replaced.

        These are `make_agent` and `loss`, with the same arguments as here, or any method, such as
        `collect`, whose first argument is the trainer. ValueError if there is none of that name.
        """
        if unknown := sorted(name for name in functions if not hasattr(cls, name)):
            told = f"{cls.__name__} has no {', '.join(unknown)} to be replaced"
            raise ValueError(f"{told}; expected make_agent, loss, collect, evaluate, or a method")
        static = "make_agent", "loss", "make_envs", "player"
        found: Any = {k: staticmethod(f) if k in static else f for k, f in functions.items()}
        made: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, **found})
        return made

    @classmethod
    def new_agent(cls, envs: Any, options: Any) -> Any:
        """Make an agent on the device of the options."""
        return cls.make_agent(envs, options).to(getattr(options, "device", "cpu"))

    @classmethod
    def make_envs(cls, options: Any, num_envs: int, *, on_device: bool = False) -> Any:
        """Make envs to play in, on the CPU, or to train in: compiled ones where networks are."""
        asked = {"num_workers": options.num_workers, **options.vector_kwargs}
        given: Any = {"vector_kwargs": {name: x for name, x in asked.items() if x is not None}}
        if on_device and cls.AUTORESET is not None:
            given["autoreset_mode"] = cls.AUTORESET
        try:
            if options.wrappers:
                given["wrappers"] = [import_object("--wrappers", x) for x in options.wrappers]
        except (ValueError, ImportError) as error:
            raise OptionsError(str(error)) from None
        worlds = {"sampler": options.randomize} if options.randomize else {}
        if worlds and not has_compiled_envs(options.env_id):
            raise OptionsError("--randomize is for compiled envs with parameters (docs/worlds.md)")
        make = partial(make_vec, options.env_id, **worlds, **options.env_kwargs)
        envs = make_placed(make, options, num_envs, on_device=on_device and cls.ON_DEVICE, **given)
        if not (on_device and options.log_infos):
            return envs
        if is_on_device(envs) or isinstance(envs, RayVectorEnv):
            envs.close()
            told = "infos of envs on a device or in Ray's actors stay there; leave it out"
            raise OptionsError(f"--log-infos: {told}, or use another backend")
        return RecordInfos(envs, options.log_infos)

    def make_gradient(self, num_calls: int, num_rows: int, **given: Any) -> Gradient:
        """Return the gradient of the loss, with `gradient_options` where `given` names none."""
        how = {k: given.pop(k) for k in ("num_weights", "may_split") if k in given}
        options, how = self.options, {"num_calls": num_calls, "num_rows": num_rows, **how}
        chosen = learn.gradient_options(getattr(options, "compile", "off"), **how)
        given = {"dtype": getattr(options, "dtype", "float32"), "log": print, **given, **chosen}
        return Gradient(self.agent, partial(self.loss, options=options), **given)

    def train(self, run: Run) -> None:
        """Update until all steps are made, or a signal or callback stops it; then save."""
        if self.restore(run):
            self.start()
        total, size, every = self.options.total_steps, self.rollout_steps, self.LOG_STEPS
        is_shown = self.ranks.rank == 0
        first, begin_s, stops = self.steps, run.seconds, False  # stops: asked for by a callback
        if is_shown and 0 < total < self.steps + size:
            print(f"no update of {size} steps is left at step {self.steps}: more --total-steps")
        with run.progress(title_of(self.options), self.steps, total, is_shown=is_shown) as show:
            while self.steps + size <= total:
                if any(self.ranks.gather(run.should_stop or stops)):
                    break
                before = self.steps
                scalars = self.update()
                run.add_episodes(self.steps, self.episodes)
                speed = (self.steps - first) / (run.seconds - begin_s)
                recent = run.recent_return(self.NUM_RECENT)
                shown = {"charts/episodic_return": recent, "charts/SPS": speed}
                if self.optimizer is not None:
                    shown["charts/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
                stops = any([self.on_update(shown | scalars), *map(self.on_episode, self.episodes)])
                if before // every < self.steps // every:
                    if isinstance(self.envs, RecordInfos):
                        shown |= {f"infos/{name}": x for name, x in self.envs.take().items()}
                    run.log(self.steps, shown | scalars)
                    show(self.steps, f"return {as_number(recent)}, {speed:.0f} steps/s")
                if run.is_due(self.steps):
                    self.save(run)
            show(self.steps)
        self.stop(run)

    def stop(self, run: Run) -> None:
        """Save; if steps are left, print how to resume."""
        if self.ranks.rank == 0 and self.steps + self.rollout_steps <= self.options.total_steps:
            print(f"stopped after {self.steps} steps; go on with\n{run.resume_command}")
        self.save(run)

    def on_update(self, scalars: Mapping[str, Any]) -> bool | None:
        """Called after each update with `metrics.jsonl`'s scalars; return True to stop training.

        Only that file has `infos/...`. `steps`, `num_updates`, `episodes` (new returns) are
        attributes.
        """

    def on_episode(self, episode_return: float) -> bool | None:
        """Called with the return of each episode; return True to stop training."""

    def check(self) -> None:
        """Raise errors that the device has noted since the last call; deferred work raises none."""
        parts: Any = self.gradient, self.envs if is_on_device(self.envs) else None
        for part in filter(None, parts):
            part.check()

    def save(self, run: Run) -> None:
        """Write a checkpoint."""
        self.check()
        run.save({name: getattr(self, name) for name in self.STATE})

    def restore(self, run: Run, *, later: tuple[str, ...] = ()) -> bool | None:
        """Load the run's checkpoint, if there is one; attributes in `later` are not changed.

        Return whether some envs could not be restored and start anew; None without a checkpoint.
        """
        own = {name: getattr(self, name) for name in self.STATE}
        kinds = np.random.Generator, torch.Generator
        parts = {k: x for k, x in own.items() if hasattr(x, "state_dict") or isinstance(x, kinds)}
        state = run.restore({name: x for name, x in parts.items() if name not in later})
        if state is None:
            return None
        for name in own.keys() - parts.keys():
            if torch.is_tensor(own[name]):  # copied in place: a CUDA graph may read it
                own[name].copy_(state[name])
            else:
                setattr(self, name, state[name])
        if isinstance(self.optimizer, learn.Adam):
            self.optimizer.set_lr(self.options.learning_rate)  # the option may have changed
        return bool(run.not_restored)

    def finish(self, run: Run) -> None:
        """Write the files of a finished training, other than its checkpoints."""

    def evaluate(self, episodes: int, seed: int | None = None, *, sample: bool = False) -> Any:
        """Play episodes, or games, with the policy in separate envs.

        The first env gets `seed`; None chooses a seed that the training has not used. With
        `sample`, actions are drawn; then the result is None if the policy has no probabilities.
        """
        options = self.options
        with closing(self.make_envs(options, min(100, episodes))) as envs:
            act = self.player(envs, self.agent, options)
            if sample and "sample" not in inspect.signature(act).parameters:
                return None
            first = 1_000_000 + options.seed if seed is None else seed
            how: Any = {"seed": first, "device": getattr(options, "device", "cpu")}
            found = evaluate(act, envs, episodes, sample=sample, **how)
            return next(iter(found.values())) if isinstance(found, dict) else found  # of one group

    @staticmethod
    def check_options(options: Any) -> None:
        """Raise OptionsError for options that do not fit each other."""

    @classmethod
    def main(cls, options: Any) -> Any:
        """Train, save, evaluate and report; processes other than the first only train."""
        run, trainer = cls.run(options)
        # The run has released the signals, so one Ctrl-C ends the evaluation.
        with learn.evaluating(f"{options.eval_episodes} episodes"):
            result = trainer.evaluate(options.eval_episodes)
            drawn = trainer.evaluate(options.eval_episodes, sample=True)
        facts: Any = {"mean": result.mean, "ci95": result.ci95}
        facts |= {"sampled": {"mean": drawn.mean, "ci95": drawn.ci95}} if drawn else {}
        with _refusing():
            run.write_json("evaluation", facts)
        told = f"{result} (drawn as in the training: {drawn})" if drawn else f"{result}"
        print(f"{title_of(options)}: {told}; {run.seconds:.0f} s, see {options.save}")
        return result

    @classmethod
    def run(cls, options: Any) -> tuple[Run, Self]:
        """Train and save; SystemExit if something does not fit, or on all ranks but the first."""
        torch.empty(2**23 - 2**10)  # freed at once: from now on glibc keeps freed memory
        torch.set_num_threads(options.torch_threads)
        torch.manual_seed(options.seed)
        device, limit = getattr(options, "device", "cpu"), getattr(options, "rank_timeout", None)
        with _refusing():
            if device != "cpu" and not cuda.is_available():
                raise OptionsError(f"--device {device}: torch finds no such device; leave it out")
            cls.check_options(options)
            if limit is None:
                return cls.run_in(options.save, options, Ranks())
            with Ranks.join(device, timeout=limit) as ranks:
                folder = options.save / f"rank{ranks.rank}" if ranks.rank else options.save
                found = cls.run_in(folder, replace(options, device=str(ranks.device)), ranks)
                if ranks.rank > 0:
                    raise SystemExit(0)  # the first rank does the rest
            return found

    @classmethod
    def run_in(cls, folder: Path, options: Any, ranks: Ranks) -> tuple[Run, Self]:
        """Do what `run` does, in a given folder and in one of several processes."""
        count = getattr(options, "num_envs", None) or options.num_games
        if count % ranks.size:
            raise OptionsError(f"--num-envs: {count} is no multiple of the {ranks.size} ranks")
        num_envs = count // ranks.size
        given: Any = {"overwrite": options.overwrite, "save_every": options.save_every}
        given["tensorboard"] = options.tensorboard and ranks.rank == 0
        with Run(folder, options, options.resume, may_change=cls.MAY_CHANGE, **given) as run:
            envs = cls.make_envs(options, num_envs, on_device=True)
            trainer = cls.replacing(ranks=ranks)(options, envs)
            save_spaces(folder, cls, options, envs)
            if ranks.rank == 0:
                print(f"{num_envs} envs of {type(getattr(envs, 'unwrapped', envs)).__name__}")
            if options.profile:
                envs.timing.enable()
            try:
                trainer.train(run)
            except FloatingPointError:  # weights are unchanged
                if trainer.rollout is not None:
                    trainer.rollout.advance()  # to the step that the envs have reached
                trainer.stop(run)
                raise
            if options.profile and envs.timing.log.phases_ns:
                print(envs.timing.report())
            trainer.finish(run)
            if isinstance(envs, RecordInfos) and (missing := envs.missing):
                seen = ", ".join(sorted(envs.seen)) or "none"
                print(f"--log-infos: no number under {', '.join(missing)}; the keys were {seen}")
            envs.close()
            run.draw_curve(title_of(options), cls.BASELINES)
        return run, trainer

    @classmethod
    def load_policy(cls, options: Any, num_envs: int) -> tuple[Any, Callable[..., Any]]:
        """Return envs and the policy of a run, even of a killed one, for `vecenv play`."""
        torch.set_num_threads(options.torch_threads)  # as in the training
        envs = cls.make_envs(options, num_envs)
        agent = cls.new_agent(envs, options)
        load_agent(agent, options.save)
        return envs, cls.player(envs, agent, options)


def title_of(options: Any) -> str:
    """Return the name of a run in pictures and reports."""
    return f"{env_of(options)}, seed {options.seed}"


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors of options, a run or another rank into a SystemExit with their message."""
    try:
        yield
    except (OptionsError, learn.RunError, learn.RankError, FloatingPointError) as error:
        raise SystemExit(str(error)) from None
