"""Trainer: what all trainers share, from options to an evaluated policy in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vecenv.learn import (
    Graph,
    RankError,
    Run,
    RunError,
    describe_graphs,
    evaluate,
    evaluating,
    load_checkpoint,
)
from vecenv.train.envs import make_envs, require_device
from vecenv.train.options import OptionsError

__all__ = ["Trainer", "means_of", "prepare", "refusing", "title_of"]


class Trainer:
    """Steps envs and lets an agent learn; `main` does so in a run folder, and evaluates.

    What to change are these, by a subclass or by `replacing`:

    - `make_agent(envs, options)` returns the agent, an `nn.Module`. Static, as actors of Ray and
      `vecenv play` call it without a trainer.
    - `loss(agent, batch, options)` returns the loss, a mean over the rows of the batch, and a dict
      of scalars to be logged. Static, as the gradient is compiled of it.
    - `collect(self)` steps the envs and stores what they return.
    - `evaluate(self, episodes, seed)` returns an `EvaluationResult`.

    Args:
        options: An `Options` of the trainer's module.
        envs: The caller's to close.
        agent: On the device of the options; None makes one.
        earlier: `Gradient.describe` of the run that goes on, as `Run.read_json("gradient")` has it.

    Attributes:
        agent: The module that learns.
        steps: Env steps made; those on which autoreset resets do not count.
        graphs: CUDA graphs by the names of the methods that they replay.

    Raises:
        OptionsError: The options do not fit the envs.
    """

    Options: ClassVar[type]
    make_agent: Callable[..., Any]
    loss: Callable[..., Any]
    MAY_CHANGE: ClassVar = frozenset({"save", "save_every", "overwrite", "tensorboard", "profile"})
    """Options that a resumed run may be given other values of."""

    def __init__(self, options: Any, envs: Any, agent: Any = None, earlier: Any = None) -> None:
        self.options, self.envs, self.earlier = options, envs, earlier
        if agent is None:
            try:
                agent = self.make_agent(envs, options).to(getattr(options, "device", "cpu"))
            except OptionsError as error:
                raise OptionsError(f"{options.env_id}: {error}") from None
        self.agent: Any = agent
        self.steps = self.num_updates = 0
        self.graphs = dict[str, Graph[Any]]()

    @classmethod
    def replacing(cls, **functions: Callable[..., Any]) -> type[Self]:
        """Return a trainer with other functions in place of its own.

        Args:
            **functions: `make_agent` and `loss`, which are called as they are here, or any method,
                such as `collect`, whose first argument is the trainer.

        Raises:
            ValueError: The trainer has no such function.
        """
        if unknown := sorted(name for name in functions if not hasattr(cls, name)):
            raise ValueError(
                f"{cls.__name__} has no {', '.join(unknown)} to be replaced; expected make_agent, "
                "loss, collect, evaluate, or another method"
            )
        static = "make_agent", "loss", "make_envs", "player"
        found = {k: staticmethod(f) if k in static else f for k, f in functions.items()}
        made: Any = type(cls.__name__, (cls,), found)
        return made

    @staticmethod
    def make_envs(options: Any, num_envs: int, *, on_device: bool = False) -> Any:
        """Make envs to train in, or (not `on_device`) to play in, which are on the CPU."""
        return make_envs(options, num_envs, on_device=on_device)

    @staticmethod
    def player(envs: Any, agent: Any, options: Any) -> Callable[..., Any]:
        """Return the deterministic policy as `vecenv.learn.evaluate` calls it."""
        raise NotImplementedError

    def train(self, run: Run) -> None:
        """Train until the steps are made, or until `run.should_stop`, and save."""
        raise NotImplementedError

    def finish(self, run: Run) -> None:
        """Leave in the folder what a finished training has beside its checkpoints."""

    def evaluate(self, episodes: int, seed: int | None = None) -> Any:
        """Play the deterministic policy in envs of its own; return an `EvaluationResult`."""
        options = self.options
        envs = self.make_envs(options, min(100, episodes))
        try:
            act = self.player(envs, self.agent, options)
            device = getattr(options, "device", "cpu")
            seed = 1_000_000 if seed is None else seed
            return evaluate(act, envs, episodes, seed=seed, device=device)
        finally:
            envs.close()

    def report(self) -> str:
        """Say where the time went; of graphs the device says it."""
        told = describe_graphs(self.graphs)
        note = told and f"\nof these the table has the first calls only:\n{told}"
        return f"{self.envs.timing.report()}{note}"

    @classmethod
    def check_options(cls, options: Any) -> None:
        """Refuse options before anything is made.

        Raises:
            OptionsError: They do not fit each other, or the machine.
        """
        require_device(getattr(options, "device", "cpu"))

    @staticmethod
    def num_envs_of(options: Any) -> int:
        """Return how many envs, or games, are stepped side by side."""
        return getattr(options, "num_envs", None) or options.num_games

    @classmethod
    def begin(cls, options: Any) -> None:
        """Prepare the folder of the run and the process, before anything is made."""

    @classmethod
    def main(cls, options: Any) -> Any:
        """Train, save, evaluate and report; of several processes all but the first only train."""
        run, trainer = cls.run(options)
        # The run has given back the signals: one is enough now.
        with evaluating(f"{options.eval_episodes} episodes"):
            result = trainer.evaluate(options.eval_episodes)
        with refusing():
            run.write_json("evaluation", {"mean": result.mean, "ci95": result.ci95})
        print(f"{title_of(options)}: {result}; {run.seconds:.0f} s, see {options.save}")
        return result

    @classmethod
    def run(cls, options: Any, baselines: dict[str, float] | None = None) -> tuple[Run, Self]:
        """Train in the folder of the options, and save.

        Args:
            options: An `Options`.
            baselines: Returns of other policies by their names, lines beside the learning curve.

        Raises:
            SystemExit: The options, the folder or the device do not fit, or a loss is not finite;
                it has a sentence that says so.
        """
        prepare(options)
        with refusing():
            cls.check_options(options)
            return cls.run_in(options.save, options, cls.num_envs_of(options), baselines)

    @classmethod
    def run_in(
        cls, folder: Path, options: Any, num_envs: int, baselines: Any = None, **given: Any
    ) -> tuple[Run, Self]:
        """Do what `run` does in a folder, with so many envs; `given` is for the constructor."""
        settings: Any = {"tensorboard": options.tensorboard, "overwrite": options.overwrite}
        settings |= {"save_every": options.save_every, "may_change": cls.MAY_CHANGE}
        with Run(folder, options, options.resume, **settings) as run:
            earlier = run.read_json("gradient") if options.resume else None
            cls.begin(options)
            envs = cls.make_envs(options, num_envs, on_device=True)
            trainer = cls(options, envs, earlier=earlier, **given)
            profiles = getattr(options, "profile", False)
            if profiles:
                envs.timing.enable()
            trainer.train(run)
            if profiles and envs.timing.total_ns:
                print(trainer.report())
            trainer.finish(run)
            envs.close()
            run.draw_curve(title_of(options), baselines)
        return run, trainer

    @classmethod
    def load_policy(cls, options: Any, num_envs: int) -> tuple[Any, Callable[..., Any]]:
        """Return envs and the policy of a run, for `vecenv play`; also of one that was killed.

        Raises:
            FileNotFoundError: The run has no checkpoint yet.
        """
        envs = cls.make_envs(options, num_envs)
        agent = cls.make_agent(envs, options).to(getattr(options, "device", "cpu"))
        saved = load_checkpoint(cls.checkpoint_of(options.save))
        agent.load_state_dict(saved["state"]["agent"])
        return envs, cls.player(envs, agent, options)

    @staticmethod
    def checkpoint_of(folder: Path) -> Path:
        """Return the checkpoint that has the policy of a run."""
        return folder / "checkpoint" / "last.pt"


def means_of(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each of the scalars that several gradients have returned."""
    return {name: torch.stack([scalars[name] for scalars in found]).mean() for name in found[0]}


def title_of(options: Any) -> str:
    """Return what a run is called in pictures and reports."""
    name = getattr(options, "env_id", None) or getattr(options, "env", options.save.name)
    return f"{name}, seed {options.seed}"


def prepare(options: Any) -> None:
    """Set torch's threads and seed."""
    torch.set_num_threads(options.torch_threads)
    torch.manual_seed(options.seed)


@contextmanager
def refusing() -> Iterator[None]:
    """End the program with a sentence where options, a run or another rank say it can't go on."""
    try:
        yield
    except (OptionsError, RunError, RankError, FloatingPointError) as error:
        raise SystemExit(str(error)) from None
