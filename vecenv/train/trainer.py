"""Trainer: what all trainers share, from options to an evaluated policy in a run folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, cuda

from vecenv import RayVectorEnv, learn, make_vec
from vecenv.agents import AgentsVecEnv
from vecenv.learn import Gradient, Graph, Ranks, Run, evaluate, evaluate_games
from vecenv.train.options import OptionsError, is_on_device, make_placed, named
from vecenv.train.policy import env_of, load_agent, save_spaces
from vecenv.wrappers import RecordInfos

__all__ = ["Trainer", "means_of", "title_of"]


class Trainer:
    """Steps envs and lets an agent learn; `main` does so in a run folder, and evaluates.

    What to change are these, by a subclass or by `replacing`:

    - `make_agent(envs, options)` returns the agent, an `nn.Module`. Static, as actors of Ray and
      `vecenv play` call it without a trainer.
    - `loss(agent, batch, options)` returns the loss, a mean over the rows of the batch, and a dict
      of scalars to be logged. Static, as the gradient is compiled of it.
    - `collect(self)` steps the envs and stores what they return.
    - `evaluate(self, episodes, seed=None, sample=False)` returns an `EvaluationResult`.

    A trainer of another kind has `start(self)`, which resets the envs, `update(self)`, which
    collects and learns and returns scalars to be logged, and the static method
    `player(envs, agent, options)`, which returns the deterministic policy as
    `vecenv.learn.evaluate` calls it.

    Args:
        options: An `Options` of the trainer's module.
        envs: The caller's to close.
        agent: On the device of the options; None makes one.

    Attributes:
        agent: The module that learns.
        steps: Env steps made; those on which autoreset resets do not count.
        num_updates: Updates made.
        episodes: Returns of the episodes that ended in the last update.

    Raises:
        OptionsError: The options do not fit the envs.
    """

    Options: ClassVar[type]
    make_agent: Callable[..., Any]
    loss: Callable[..., Any]
    start: Callable[..., Any]
    update: Callable[..., Any]
    player: Callable[..., Any]
    # Options that a resumed run may be given other values of.
    MAY_CHANGE: ClassVar = frozenset(
        ("save", "save_every", "overwrite", "tensorboard", "profile", "eval_episodes")
    )
    STATE: tuple[str, ...] = ("agent", "optimizer", "envs", "steps", "num_updates")
    BASELINES: ClassVar[dict[str, float] | None] = None  # returns of others, beside the curve
    AUTORESET: ClassVar[str | None] = None  # mode of the envs to train in; None is the default
    RETURN: ClassVar = "charts/episodic_return"  # names in the metrics
    SPEED: ClassVar = "charts/SPS"
    LOG_STEPS: ClassVar = 1  # env steps between two lines of the metrics, at least
    NUM_RECENT: ClassVar = 20  # episodes of the return that is shown
    KEEPS_BEST: ClassVar = True  # the checkpoint with the highest of these

    earlier: Any = None  # `Gradient.describe` of the run that goes on
    ranks = Ranks()  # processes that learn together
    optimizer: Any = None
    gradient: Any = None
    rollout_steps = 1  # env steps that an update takes, at most; where fewer are left it ends

    def __init__(self, options: Any, envs: Any, agent: Any = None) -> None:
        self.options, self.envs, self.timing = options, envs, envs.timing
        self.steps = self.num_updates = 0
        try:
            self.agent: Any = self.new_agent(envs, options) if agent is None else agent
        except OptionsError as error:
            raise OptionsError(f"{name_of(options)}: {error}") from None
        self.episodes = list[float]()
        self.graphs = dict[str, Graph[Any]]()

    @classmethod
    def replacing(cls, **functions: Any) -> type[Self]:
        """Return a trainer with other functions in place of its own.

        These are `make_agent` and `loss`, which are called as they are here, or any method, such as
        `collect`, whose first argument is the trainer; ValueError if it has none of that name.
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
        asked = {"num_workers": options.num_workers, **cls.vector_kwargs(options)}
        given: Any = {"vector_kwargs": {name: value for name, value in asked.items() if value}}
        if on_device and cls.AUTORESET is not None:
            given["autoreset_mode"] = cls.AUTORESET
        if options.wrappers:
            given["wrappers"] = [named(wrapper) for wrapper in options.wrappers]

        def make(num_envs: int, **given: Any) -> Any:
            return make_vec(options.env_id, num_envs, **given, **options.env_kwargs)

        envs = make_placed(make, options, num_envs, on_device=on_device, **given)
        if on_device and (names := getattr(options, "log_infos", ())):
            if is_on_device(envs) or isinstance(envs, RayVectorEnv):
                envs.close()
                raise OptionsError(
                    f"--log-infos {' '.join(names)}: infos of envs on a device or in Ray's actors "
                    "stay there; leave it out, or use another backend"
                )
            envs = RecordInfos(envs, names)
        return envs

    @staticmethod
    def vector_kwargs(options: Any) -> dict[str, Any]:
        """Return further arguments of the backend's class, of which those that are set count."""
        return {}

    def make_gradient(self, num_calls: int, num_rows: int, **given: Any) -> Gradient:
        """Return the gradient of the loss, for so many calls with batches of so many rows.

        `given` are `num_weights` and `may_split` of `gradient_options`, and as of `Gradient`.
        """
        options, how = self.options, dict[str, Any](num_calls=num_calls, num_rows=num_rows)
        how |= {k: given.pop(k) for k in ("num_weights", "may_split") if k in given}
        given |= learn.gradient_options(options.compile, earlier=self.earlier, **how)
        given = {"dtype": getattr(options, "dtype", "float32"), "log": print, **given}
        return Gradient(self.agent, partial(self.loss, options=options), **given)

    def capture(self, *names: str, **given: Any) -> None:
        """Let methods be replayed as CUDA graphs from here on; `given` as of `Graph`."""
        given |= {"log": print}
        for name in names:
            self.graphs[name] = Graph(getattr(self, name), self.options.device, **given)
            setattr(self, name, self.graphs[name])

    def train(self, run: Run) -> None:
        """Update until the steps are made, or until a signal says to stop, and save."""
        if self.restore(run):
            self.start()
        total, size, every = self.options.total_steps, self.rollout_steps, self.LOG_STEPS
        how: Any = {"rollout_steps": size, "is_shown": self.ranks.rank == 0}
        stops = False  # as a callback has asked
        with run.progress(title_of(self.options), self.steps, total, **how) as progress:
            while self.steps + size <= total:
                if any(self.ranks.gather(run.should_stop or stops)):
                    break
                before = self.steps
                with run.updating(self.num_updates + 1, before):
                    scalars = self.update()
                run.add_episodes(self.steps, self.episodes)
                stops = any([self.on_update(scalars), *map(self.on_episode, self.episodes)])
                if before // every < self.steps // every:
                    recent, speed = run.recent_return(self.NUM_RECENT), progress.speed(self.steps)
                    shown = {self.RETURN: recent, self.SPEED: speed}
                    if self.optimizer is not None:
                        shown["charts/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
                    run.log(self.steps, shown | self.recorded_infos() | scalars)
                    progress.show(self.steps, f"return {recent:.1f}, {speed:.0f} steps/s")
                self.save_if_due(run, before)
            else:
                progress.fill(self.steps)  # what no rollout fits into is left out
            progress.show(self.steps)
        if how["is_shown"] and self.steps + size <= total:  # the bar would break the line
            print(f"stopped after {self.steps} steps; go on with {run.resume_command}")
        self.save(run)

    def recorded_infos(self) -> dict[str, float]:
        """Return the means of the infos that the options name, since the last time."""
        if not isinstance(self.envs, RecordInfos):
            return {}
        return {f"infos/{name}": mean for name, mean in self.envs.take().items()}

    def on_update(self, scalars: Mapping[str, Any]) -> bool | None:
        """Do something after each update, with what it logs; return True to stop the training."""

    def on_episode(self, episode_return: float) -> bool | None:
        """Do something with the return of each episode; return True to stop the training."""

    def save_if_due(self, run: Run, before: int) -> None:
        """Save from time to time; `before` is the steps made before the last update."""
        if run.is_due(self.steps):
            self.save(run, run.recent_return(self.NUM_RECENT) if self.KEEPS_BEST else None)

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint has, by its name there."""
        return {name: getattr(self, name) for name in self.STATE}

    def describe(self) -> Any:
        """Return how gradients are computed, which a resumed run keeps."""
        return self.gradient and self.gradient.describe()

    def check(self) -> None:
        """Raise what was found on the device since the last time, for which nobody has waited."""
        if self.gradient is not None:
            self.gradient.check()
        if is_on_device(self.envs):
            self.envs.check()

    def save(self, run: Run, score: float | None = None) -> None:
        """Write a checkpoint, as the best one too if no score was higher."""
        self.check()
        if how := self.describe():
            run.write_json("gradient", how)
        run.save(self.snapshot(), score=score)

    def restore(self, run: Run, *, later: tuple[str, ...] = ()) -> bool | None:
        """Go on where the run's checkpoint was made; attributes in `later` are left as they are.

        Returns:
            Whether envs could not be restored, and begin anew; None if there is no checkpoint.
        """
        own, kinds = self.snapshot(), (np.random.Generator, torch.Generator)
        parts = {k: x for k, x in own.items() if hasattr(x, "state_dict") or isinstance(x, kinds)}
        state = run.restore({name: x for name, x in parts.items() if name not in later})
        if state is None:
            return None
        for name in own.keys() - parts.keys():
            if torch.is_tensor(own[name]):  # which a graph may read
                own[name].copy_(state[name])
            else:
                setattr(self, name, state[name])
        return bool(run.not_restored)

    def finish(self, run: Run) -> None:
        """Leave in the folder what a finished training has beside its checkpoints."""

    def evaluate(self, episodes: int, seed: int | None = None, *, sample: bool = False) -> Any:
        """Play the policy in envs of its own.

        Args:
            episodes: How many, or how many games.
            seed: Of the first env; None for another one than any of the training.
            sample: Draw from the policy, as in the training, not the likeliest actions.

        Returns:
            An `EvaluationResult`; of several agents one for each group. None if `sample` is asked
            of a policy without probabilities.
        """
        options = self.options
        with closing(self.make_envs(options, min(100, episodes))) as envs:
            act = self.player(envs, self.agent, options)
            if sample and "sample" not in inspect.signature(act).parameters:
                return None
            act = partial(act, sample=True) if sample else act
            first = 1_000_000 + options.seed if seed is None else seed
            play = evaluate_games if isinstance(envs, AgentsVecEnv) else evaluate
            return play(act, envs, episodes, seed=first, device=getattr(options, "device", "cpu"))

    @staticmethod
    def check_options(options: Any) -> None:
        """Raise OptionsError for options that do not fit each other."""

    @classmethod
    def main(cls, options: Any) -> Any:
        """Train, save, evaluate and report; of several processes all but the first only train."""
        run, trainer = cls.run(options)
        # The run has given back the signals: one is enough now.
        with learn.evaluating(f"{options.eval_episodes} episodes"):
            result = trainer.evaluate(options.eval_episodes)
            sampled = trainer.evaluate(options.eval_episodes, sample=True)
        numbers, told = _facts_of(result)
        if sampled is not None:
            numbers["sampled"], drawn = _facts_of(sampled)
            told += f" (drawn as in the training: {drawn})"
        with _refusing():
            run.write_json("evaluation", numbers)
        print(f"{title_of(options)}: {told}; {run.seconds:.0f} s, see {options.save}")
        return result

    @classmethod
    def run(cls, options: Any) -> tuple[Run, Self]:
        """Train in the folder of the options, and save; what does not fit is a SystemExit."""
        torch.empty(2**23 - 2**10)  # freed at once, which makes glibc keep memory freed later
        torch.set_num_threads(options.torch_threads)
        torch.manual_seed(options.seed)
        with _refusing():
            if (device := getattr(options, "device", "cpu")) != "cpu" and not cuda.is_available():
                raise OptionsError(f"--device {device}: torch finds no such device; leave it out")
            cls.check_options(options)
            num_envs = getattr(options, "num_envs", None) or options.num_games
            return cls.run_in(options.save, options, num_envs)

    @classmethod
    def run_in(cls, folder: Path, options: Any, num_envs: int) -> tuple[Run, Self]:
        """Do what `run` does in a folder, with so many envs."""
        settings: Any = {"tensorboard": options.tensorboard, "overwrite": options.overwrite}
        settings |= {"save_every": options.save_every, "may_change": cls.MAY_CHANGE}
        with Run(folder, options, options.resume, **settings) as run:
            earlier = run.read_json("gradient") if options.resume else None
            envs = cls.make_envs(options, num_envs, on_device=True)
            trainer = cls.replacing(earlier=earlier)(options, envs)
            save_spaces(folder, cls, options, envs)
            if trainer.ranks.rank == 0:
                print(f"{num_envs} envs of {type(getattr(envs, 'unwrapped', envs)).__name__}")
            if options.profile:
                envs.timing.enable()
            trainer.train(run)
            if options.profile and envs.timing.log.phases_ns:
                names = ", ".join(trainer.graphs)  # calls that are replayed are not timed
                note = names and f"\nof {names}, CUDA graphs, the table has the first calls only"
                print(f"{envs.timing.report()}{note}")
            trainer.finish(run)
            if isinstance(envs, RecordInfos) and (missing := envs.missing):
                seen = ", ".join(sorted(envs.seen)) or "none"
                print(f"--log-infos: no number under {', '.join(missing)}; the keys were {seen}")
            envs.close()
            run.draw_curve(title_of(options), cls.BASELINES)
        return run, trainer

    @classmethod
    def load_policy(cls, options: Any, num_envs: int) -> tuple[Any, Callable[..., Any]]:
        """Return envs and the policy of a run, also of one that was killed, for `vecenv play`."""
        torch.set_num_threads(options.torch_threads)  # those of the training
        envs = cls.make_envs(options, num_envs)
        agent = cls.new_agent(envs, options)
        load_agent(agent, cls.checkpoint_of(options.save))
        return envs, cls.player(envs, agent, options)

    @staticmethod
    def checkpoint_of(folder: Path) -> Path:
        """Return the checkpoint that has the policy of a run."""
        return folder / "checkpoint" / "last.pt"


def _facts_of(result: Any) -> tuple[dict[str, Any], str]:
    groups = result if isinstance(result, dict) else {"": result}
    numbers: dict[str, Any] = {k: {"mean": x.mean, "ci95": x.ci95} for k, x in groups.items()}
    told = "; ".join(f"{name} {found}".strip() for name, found in groups.items())
    return numbers.get("", numbers), told


def means_of(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each of the scalars that several gradients have returned."""
    return {name: torch.stack([scalars[name] for scalars in found]).mean() for name in found[0]}


def name_of(options: Any) -> str:
    """Return what the options call the env."""
    return env_of(options) or options.save.name


def title_of(options: Any) -> str:
    """Return what a run is called in pictures and reports."""
    return f"{name_of(options)}, seed {options.seed}"


@contextmanager
def _refusing() -> Iterator[None]:
    """End the program with a sentence where options, a run or another rank say it can't go on."""
    try:
        yield
    except (OptionsError, learn.RunError, learn.RankError, FloatingPointError) as error:
        raise SystemExit(str(error)) from None
