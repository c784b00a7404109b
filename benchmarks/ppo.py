"""Steps per second of examples/ppo.py on CartPole-v1, next to a textbook PPO, and on CAGE 2.

    python benchmarks/ppo.py

Both train from scratch for the same number of updates with the same networks (actor and critic
apart, 64-64, tanh) and batches (8 envs x 128 steps, 4 epochs x 4 minibatches). One step is one step
of an episode: the textbook uses same-step autoreset and has no others, and those on which NEXT_STEP
autoreset resets are not counted in the example. Making the envs is inside, compiling is not.

On CAGE 2 the example runs with its default options; the first update, which loads the compiled
code, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import textbook_ppo as textbook
import torch
from measure import alternate, machine, markdown_table, median_ratio

from vecenv.timing.attribution import ENV_SHARES

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
ppo: Any = import_module("ppo")  # the example, whose folder comes first now

EXAMPLE = "example"
CAGE2 = "vecenv:Cage2-v0"


def train_example(num_updates: int, *, is_timed: bool = False) -> tuple[int, dict[str, float]]:
    """Train the example; return the steps made and, if timed, the seconds in each phase."""
    options = ppo.Options(
        env_id=textbook.ENV_ID,
        total_steps=num_updates * textbook.NUM_ENVS * textbook.NUM_STEPS,
        num_envs=textbook.NUM_ENVS,
        num_steps=textbook.NUM_STEPS,
        num_epochs=textbook.NUM_EPOCHS,
        num_minibatches=textbook.NUM_MINIBATCHES,
        learning_rate=textbook.LEARNING_RATE,
        entropy_weight=textbook.ENTROPY_WEIGHT,
    )
    torch.manual_seed(options.seed)
    envs = ppo.make_vec(options.env_id, options.num_envs, backend="sync")  # as the textbook
    if is_timed:
        envs.timing.enable()
    trainer = ppo.Trainer(options, envs, ppo.Agent(envs, options))
    for _ in range(num_updates):
        trainer.update()
    envs.close()
    return trainer.steps, seconds_by_phase(envs) if is_timed else {}


def seconds_by_phase(envs: Any) -> dict[str, float]:
    """Seconds of the training in the envs, and in each phase of the example."""
    report = envs.timing.report()
    spent = {name: share * report.wall_s for name, share in report.shares.items()}
    env = sum(spent.pop(name, 0.0) for name in ENV_SHARES)
    return {"env": env, "policy": spent["policy"], "update": spent["learner"]}


def breakdown(num_updates: int) -> str:
    """Microseconds per env step in each phase of both, with one thread of torch."""
    torch.set_num_threads(1)
    begin = perf_counter()
    clock = textbook.Clock()
    num_steps, _ = textbook.train(num_updates, clock=clock)
    phases = {"textbook": (num_steps, perf_counter() - begin, clock.seconds)}
    begin = perf_counter()
    num_steps, seconds = train_example(num_updates, is_timed=True)
    phases[EXAMPLE] = (num_steps, perf_counter() - begin, seconds)
    header = ["us per env step", "env", "policy", "advantages", "update", "rest", "all"]
    rows = []
    for name, (steps, whole, spent) in phases.items():
        parts = [spent.get(phase, 0.0) for phase in header[1:5]]
        numbers = [*parts, whole - sum(parts), whole]
        rows.append([name, *(f"{1e6 * number / steps:.1f}" for number in numbers)])
    return markdown_table(header, rows)


def measure_cage2(num_updates: int, repetitions: int) -> str:
    """Steps per second on CAGE 2, all inside, and microseconds per env step in each phase."""
    torch.set_num_threads(1)
    options = ppo.Options(CAGE2, **ppo.DEFAULTS[CAGE2])
    torch.manual_seed(options.seed)
    envs = ppo.make_vec(options.env_id, options.num_envs)
    trainer = ppo.Trainer(options, envs, ppo.Agent(envs, options))
    trainer.update()
    envs.timing.enable()
    rates, first = [], trainer.steps
    for _ in range(repetitions):
        begin, before = perf_counter(), trainer.steps
        for _ in range(num_updates):
            trainer.update()
        rates.append((trainer.steps - before) / (perf_counter() - begin))
    envs.close()
    steps = trainer.steps - first
    phases = {name: 1e6 * spent / steps for name, spent in seconds_by_phase(envs).items()}
    header = ["PPO on CAGE 2", "steps/s", "lowest - highest", *(f"{name}, us" for name in phases)]
    spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
    name = f"{options.num_envs} envs x {options.num_steps}"
    row = [name, f"{statistics.median(rates):,.0f}", spread]
    return markdown_table(header, [[*row, *(f"{spent:.2f}" for spent in phases.values())]])


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=40, help="updates in one repetition")
    parser.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    options = parser.parse_args()
    default_threads = torch.get_num_threads()

    def train_textbook(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        textbook.train(options.updates)

    def train_ours() -> None:
        torch.set_num_threads(1)
        train_example(options.updates)

    example_steps, _ = train_example(options.updates)
    textbook_steps = options.updates * textbook.NUM_ENVS * textbook.NUM_STEPS
    base = "textbook, 1 torch thread"
    cases = {base: lambda: train_textbook(1), f"{EXAMPLE}, 1 torch thread": train_ours}
    if default_threads > 1:
        cases[f"textbook, {default_threads} torch threads"] = lambda: train_textbook(
            default_threads
        )
    units = {name: example_steps if name.startswith(EXAMPLE) else textbook_steps for name in cases}
    rates = alternate(cases, units, options.repetitions)
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
    print(measure_cage2(5, options.repetitions))


if __name__ == "__main__":
    main()
