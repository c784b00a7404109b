"""Steps per second of vecenv.train.ppo on CartPole-v1, next to a textbook PPO, and on CAGE 2.

    python benchmarks/ppo.py

Both train from scratch for the same number of updates with the same networks (actor and critic
apart, 64-64, tanh) and batches (8 envs x 128 steps, 4 epochs x 4 minibatches). One step is one step
of an episode: the textbook uses same-step autoreset and has no others, and those on which NEXT_STEP
autoreset resets are not counted in the example. Compiling is not inside.

On CAGE 2 the gradient is compiled, in float32 with 4 epochs and in bfloat16 with 2; the first
update, which compiles, is left out. `--against` names a checkout of another version, such as one of
79f7096 with its gradients written by hand, whose example takes turns with this one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter
from typing import Any

import textbook_ppo as textbook
import torch
from measure import machine, markdown_table, median_ratio

from vecenv import make_vec
from vecenv.timing.recording import Share
from vecenv.train import ppo

EXAMPLE = "example"
CAGE2 = "vecenv:Cage2-v0"


def load_example(checkout: Path) -> Any:
    """Import PPO of another checkout, over this one's packages."""
    path = checkout / "vecenv" / "train" / "ppo.py"
    path = path if path.exists() else checkout / "examples" / "ppo.py"
    spec = spec_from_file_location("ppo_of_another_version", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_trainer(module: Any, env_id: str, backend: str = "auto", **options: Any) -> Any:
    """Make envs, policy and trainer of an example; leave out options that it does not have."""
    known = {k: v for k, v in options.items() if k in module.Options.__dataclass_fields__}
    settings = module.Options(env_id, **known)
    torch.manual_seed(settings.seed)
    envs = make_vec(env_id, settings.num_envs, backend=backend)
    if hasattr(module, "PPO"):
        return module.PPO(settings, envs)
    policy = module.Agent if hasattr(module, "Agent") else module.Policy
    return module.Trainer(settings, envs, policy(envs, settings))


def cartpole_trainer(module: Any, num_updates: int, compile: str) -> Any:
    """Make the trainer of an example with the textbook's settings."""
    return make_trainer(
        module,
        textbook.ENV_ID,
        backend="sync",  # as the textbook
        total_steps=num_updates * textbook.NUM_ENVS * textbook.NUM_STEPS,
        num_envs=textbook.NUM_ENVS,
        num_steps=textbook.NUM_STEPS,
        num_epochs=textbook.NUM_EPOCHS,
        num_minibatches=textbook.NUM_MINIBATCHES,
        learning_rate=textbook.LEARNING_RATE,
        entropy_weight=textbook.ENTROPY_WEIGHT,
        compile=compile,
    )


def updates_of(trainer: Any, num_updates: int) -> int:
    """Make some updates; return the steps made."""
    before = trainer.steps
    for _ in range(num_updates):
        trainer.update()
    return trainer.steps - before


def race(cases: dict[str, Callable[[], int]], repetitions: int) -> dict[str, list[float]]:
    """Run the cases in turn, after a round that does not count; return their steps per second."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, run in cases.items():
            begin = perf_counter()
            steps = run()
            if repetition:
                rates[name].append(steps / (perf_counter() - begin))
    return rates


def seconds_by_phase(envs: Any) -> dict[str, float]:
    """Seconds of the training in the envs, and in each phase of the example."""
    report = envs.timing.report()
    spent = {name: share * report.wall_s for name, share in report.shares.items()}
    env = sum(spent.pop(name, 0.0) for name in Share)
    return {"env": env, "policy": spent["policy"], "update": spent["learner"]}


def breakdown(num_updates: int) -> str:
    """Microseconds per env step in each phase of both, with one thread of torch."""
    torch.set_num_threads(1)
    begin = perf_counter()
    clock = textbook.Clock()
    num_steps, _ = textbook.train(num_updates, clock=clock)
    phases = {"textbook": (num_steps, perf_counter() - begin, clock.seconds)}
    for compile in ("off", "on"):
        trainer = cartpole_trainer(ppo, 2 * num_updates, compile)
        trainer.update()
        trainer.envs.timing.enable()
        begin = perf_counter()
        num_steps = updates_of(trainer, num_updates)
        name = "example, compiled" if compile == "on" else "example, autograd"
        phases[name] = num_steps, perf_counter() - begin, seconds_by_phase(trainer.envs)
        trainer.envs.close()
    header = ["us per env step", "env", "policy", "advantages", "update", "rest", "all"]
    rows = []
    for name, (steps, whole, spent) in phases.items():
        parts = [spent.get(phase, 0.0) for phase in header[1:5]]
        numbers = [*parts, whole - sum(parts), whole]
        rows.append([name, *(f"{1e6 * number / steps:.1f}" for number in numbers)])
    return markdown_table(header, rows)


def measure_cage2(num_updates: int, repetitions: int, other: Any) -> str:
    """Steps per second on CAGE 2, all inside, and microseconds per env step in each phase."""
    torch.set_num_threads(1)
    common = {"num_envs": 256, "total_steps": 10**9, "masks": False, "compile": "on"}
    trainers = {} if other is None else {"the other version": make_trainer(other, CAGE2, **common)}
    trainers["float32, 4 epochs"] = make_trainer(ppo, CAGE2, **common)
    trainers["bfloat16, 2 epochs"] = make_trainer(
        ppo, CAGE2, **common, dtype="bfloat16", num_epochs=2
    )
    for trainer in trainers.values():
        trainer.update()
        trainer.envs.timing.enable()
    first = {name: trainer.steps for name, trainer in trainers.items()}
    cases = {name: partial(updates_of, x, num_updates) for name, x in trainers.items()}
    rates = race(cases, repetitions)
    rows, base = [], next(iter(trainers))
    for name, trainer in trainers.items():
        steps, rate = trainer.steps - first[name], rates[name]
        spent = [f"{1e6 * s / steps:.2f}" for s in seconds_by_phase(trainer.envs).values()]
        trainer.envs.close()
        spread = f"{min(rate):,.0f} - {max(rate):,.0f}"
        ratio = f"{median_ratio(rates, name, base):.2f}"
        rows.append([name, f"{statistics.median(rate):,.0f}", spread, ratio, *spent])
    phases = [f"{phase}, us" for phase in ("env", "policy", "update")]
    header = ["PPO on CAGE 2, 256 envs x 128", "steps/s", "lowest - highest", "ratio", *phases]
    return markdown_table(header, rows)


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=40, help="updates in one repetition")
    parser.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    options = parser.parse_args()
    default_threads = torch.get_num_threads()
    other = None if options.against is None else load_example(options.against)
    examples: dict[str, Any] = {"example, autograd": (ppo, "off"), "example, compiled": (ppo, "on")}
    if other is not None:
        examples["the other version"] = other, "off"

    def train_textbook(num_threads: int) -> int:
        torch.set_num_threads(num_threads)
        textbook.train(options.updates)
        torch.set_num_threads(1)
        return options.updates * textbook.NUM_ENVS * textbook.NUM_STEPS

    torch.set_num_threads(1)
    base = "textbook, 1 torch thread"
    cases: dict[str, Any] = {base: partial(train_textbook, 1)}
    for name, (module, compile) in examples.items():
        total = options.updates * (options.repetitions + 2)
        trainer = cartpole_trainer(module, total, compile)
        cases[name] = partial(updates_of, trainer, options.updates)
    if default_threads > 1:
        name = f"textbook, {default_threads} torch threads"
        cases[name] = partial(train_textbook, default_threads)
    rates = race(cases, options.repetitions)
    rows = [
        [
            name,
            f"{statistics.median(rate):,.0f}",
            f"{min(rate):,.0f} - {max(rate):,.0f}",
            f"{median_ratio(rates, name, base):.2f}",
        ]
        for name, rate in rates.items()
    ]
    print(machine("torch", "gymnasium", "numpy"))
    print()
    print(markdown_table(["PPO on CartPole-v1", "steps/s", "lowest - highest", "ratio"], rows))
    print()
    print(breakdown(options.updates))
    print()
    print(measure_cage2(5, options.repetitions, other))


if __name__ == "__main__":
    main()
