"""Steps per second of examples/sac.py next to stable-baselines3's SAC, and its updates taken apart.

    python benchmarks/sac.py                                               # Pendulum-v1, one env
    python benchmarks/sac.py --env-id HalfCheetah-v5 --num-envs 8          # needs gymnasium[mujoco]
    python benchmarks/sac.py --train-sb3 --total-steps 20000 --seed 1      # return and minutes
    python benchmarks/sac.py --picture docs/sac.png runs/*/sac.npz         # curves of checkpoints

Both have 256-256 networks, batches of 256, one update per env step, float32 unless said otherwise,
and have filled their buffers with the first steps, which are not counted. They take turns. Without
stable-baselines3 (pip install stable-baselines3) only the example is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measure import alternate, machine, markdown_table, median_ratio

from vecenv.files import load_arrays

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sac: Any = import_module("sac")  # the example, whose folder comes first now

WARM_UP = 1000  # steps before those that count
SB3 = "sb3, {} threads"
PARTS = ("sample", "actor", "critics", "target critics", "Adam", "rest", "all", "products alone")


def make_trainer(arguments: Any, *, bfloat16: bool) -> Any:
    """The example, ready to learn."""
    options = sac.Options(
        env_id=arguments.env_id,
        num_envs=arguments.num_envs,
        learning_starts=WARM_UP,
        backend="sync",
        bfloat16=bfloat16,
    )
    torch.manual_seed(options.seed)
    settings: Any = {"backend": options.backend, "autoreset_mode": "SameStep"}
    envs = sac.make_vec(options.env_id, options.num_envs, **settings)
    trainer = sac.Trainer(options, envs, sac.Learner(envs, options))
    trainer.start()
    while trainer.steps < WARM_UP:
        trainer.collect()
    return trainer


@torch.inference_mode()
def train(trainer: Any, num_steps: int, num_threads: int) -> None:
    """Make env steps, and an update for each."""
    torch.set_num_threads(num_threads)
    end = trainer.steps + num_steps
    while trainer.steps < end:
        trainer.collect()
        while trainer.learner.num_updates < trainer.steps - WARM_UP:
            trainer.learner.learn()


def make_sb3(arguments: Any, seed: int = 1, **settings: Any) -> Any:
    """stable-baselines3's SAC with the settings of the example."""
    make = import_module("stable_baselines3.common.env_util").make_vec_env
    envs = make(arguments.env_id, n_envs=arguments.num_envs, seed=seed)
    return import_module("stable_baselines3").SAC(
        "MlpPolicy", envs, train_freq=1, gradient_steps=-1, seed=seed, device="cpu", **settings
    )


def train_sb3(arguments: Any) -> None:
    """Train stable-baselines3's SAC from scratch; print return and minutes."""
    settings = {"learning_rate": arguments.learning_rate}
    model = make_sb3(arguments, arguments.seed, learning_starts=arguments.starts, **settings)
    begin = perf_counter()
    model.learn(arguments.total_steps)
    minutes = (perf_counter() - begin) / 60
    make = import_module("stable_baselines3.common.env_util").make_vec_env
    evaluate = import_module("stable_baselines3.common.evaluation").evaluate_policy
    envs = make(arguments.env_id, n_envs=10, seed=arguments.seed + 1_000_000)
    count = arguments.episodes
    returns, _ = evaluate(model, envs, n_eval_episodes=count, return_episode_rewards=True)
    score = f"return {np.mean(returns):.1f} ± {np.std(returns):.1f} over {count} episodes"
    print(f"stable-baselines3, {arguments.env_id}, seed {arguments.seed}: {score}")
    print(f"{model.num_timesteps} steps, {model._n_updates} updates, {minutes:.1f} minutes")


def products(learner: Any) -> Callable[[], None]:
    """Return what makes the 16 products of hidden layers in an update, and nothing else."""
    rows, width = learner.options.batch_size, learner.options.hidden[0]
    dtype = torch.bfloat16 if learner.options.bfloat16 else torch.float32
    a, b = torch.randn(2, rows, width, dtype=dtype), torch.randn(2, width, width, dtype=dtype)
    out = torch.empty(2, rows, width, dtype=dtype)

    def multiply() -> None:
        for _ in range(8):
            torch.bmm(a, b, out=out)

    return multiply


@torch.inference_mode()
def take_apart(trainer: Any, num_updates: int, num_threads: int) -> dict[str, float]:
    """Median microseconds of each part of an update."""
    torch.set_num_threads(num_threads)
    learner, spent = trainer.learner, defaultdict(float)

    def timed(function: Callable, part: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter()
            result = function(*args, **kwargs)
            spent[part] += perf_counter() - begin
            return result

        return call

    nets = {"actor": learner.actor, "critics": learner.critics, "target critics": learner.targets}
    for part, net in nets.items():
        net.forward, net.backward = timed(net.forward, part), timed(net.backward, part)
        net.step_adam = timed(net.step_adam, "Adam")
    sample = learner.buffer.sample
    learner.buffer.sample = timed(sample, "sample")
    multiply = timed(products(learner), "products alone")
    learn, rounds = timed(learner.learn, "all"), []
    for _ in range(num_updates):
        spent.clear()
        learn()
        spent["rest"] = 2 * spent["all"] - sum(spent.values())
        multiply()
        rounds.append(dict(spent))
    learner.buffer.sample = sample
    for net in nets.values():
        del net.forward, net.backward, net.step_adam
    return {part: 1e6 * statistics.median(row[part] for row in rounds) for part in PARTS}


def draw(paths: list[Path], file: Path) -> None:
    """Draw the returns of the runs that checkpoints are of, one axis per env."""
    curves = defaultdict(list)
    for path in paths:
        saved = load_arrays(path)
        env_id = saved["kind"].split(",")[0].split()[-1]
        curves[env_id].append(np.array(saved["progress"][2]).T)
    figure = import_module("matplotlib.figure").Figure(
        (4.5 * len(curves), 3.2), layout="constrained"
    )
    rows = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (env_id, found) in zip(rows, curves.items(), strict=True):
        for steps, returns in found:
            window = min(10, len(returns))
            means = np.convolve(returns, np.full(window, 1 / window), "valid")
            ends = steps[window - 1 :]
            is_last = np.append(np.diff(ends) > 0, True)  # of those that ended in the same step
            axes.plot(ends[is_last] / 1000, means[is_last])
        axes.set(title=env_id, xlabel="thousand env steps", ylabel="return, mean of 10 episodes")
    figure.savefig(file, dpi=120)


def list_cases(arguments: Any, trainers: dict[str, Any], model: Any) -> dict[str, Any]:
    """What takes turns: each makes the same number of env steps, and an update for each."""
    cases: dict[str, Any] = {}
    for threads in arguments.threads:
        if model is not None:

            def learn(threads: int = threads) -> None:
                torch.set_num_threads(threads)
                model.learn(arguments.steps, reset_num_timesteps=False)

            cases[SB3.format(threads)] = learn
        for name, trainer in trainers.items():
            cases[f"{name}, {threads} threads"] = lambda trainer=trainer, threads=threads: train(
                trainer, arguments.steps, threads
            )
    return cases


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="Pendulum-v1")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400, help="env steps in one repetition")
    parser.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    parser.add_argument("--train-sb3", action="store_true", help="train, instead of measuring")
    parser.add_argument("--total-steps", type=int, default=20_000, help="of --train-sb3")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of --train-sb3")
    parser.add_argument("--starts", type=int, default=1000, help="of --train-sb3")
    parser.add_argument("--episodes", type=int, default=100, help="of --train-sb3")
    parser.add_argument("--seed", type=int, default=1, help="of --train-sb3")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of torch")
    parser.add_argument("--picture", type=Path, help="file for the curves of checkpoints")
    parser.add_argument("checkpoints", type=Path, nargs="*", help="of --picture")
    arguments = parser.parse_args()
    if arguments.picture:
        return draw(arguments.checkpoints, arguments.picture)
    torch.set_flush_denormal(True)
    torch.empty(2**23 - 2**10)  # as in the example; for stable-baselines3 as well
    if arguments.train_sb3:
        torch.set_num_threads(arguments.threads[0])
        return train_sb3(arguments)
    kinds = {"float32": False, "bfloat16": True}
    trainers = {name: make_trainer(arguments, bfloat16=is_half) for name, is_half in kinds.items()}
    model = None
    if find_spec("stable_baselines3"):
        model = make_sb3(arguments, learning_starts=WARM_UP)
        model.learn(WARM_UP)
    rates = alternate(
        list_cases(arguments, trainers, model), arguments.steps, arguments.repetitions
    )
    references = [SB3.format(threads) for threads in arguments.threads if model is not None]
    rows = [
        [
            name,
            f"{statistics.median(rate):.0f}",
            f"{min(rate):.0f} - {max(rate):.0f}",
            *(f"{median_ratio(rates, name, reference):.2f}" for reference in references),
        ]
        for name, rate in rates.items()
    ]
    over = [f"over {reference}" for reference in references]
    print(machine("torch", "gymnasium", "numpy"))
    title = f"SAC on {arguments.env_id}, {arguments.num_envs} envs"
    print("\n" + markdown_table([title, "steps/s", "lowest - highest", *over], rows) + "\n")
    rows = []
    for threads in arguments.threads:
        for name, trainer in trainers.items():
            spent = take_apart(trainer, 200, threads)
            rows.append([f"{name}, {threads} threads", *(f"{spent[part]:.0f}" for part in PARTS)])
    print(markdown_table(["us per update, medians of 200", *PARTS], rows))


if __name__ == "__main__":
    main()
