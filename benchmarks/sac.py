"""Updates and env steps per second of vecenv.train.sac, next to earlier code and stable-baselines3.

    python benchmarks/sac.py --updates                                     # 17-256-256-6
    python benchmarks/sac.py                                               # Pendulum-v1, one env
    python benchmarks/sac.py --env-id HalfCheetah-v5 --num-envs 8          # needs gymnasium[mujoco]
    python benchmarks/sac.py --train-sb3 --total-steps 20000 --seed 1      # return and minutes

All have 256-256 networks, batches of 256, --update-ratio updates per env step, float32 unless said
otherwise, and have filled their buffers with the first steps, which are not counted. They take
turns. The earlier code is that of --rev, whose gradients were written by hand; it is left out
without git. Without stable-baselines3 (pip install stable-baselines3) it is left out as well.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from measure import alternate, machine, markdown_table, median_ratio

from vecenv import make_vec
from vecenv.train import sac

ROOT = Path(__file__).parents[1]
WARM_UP = 1000  # steps before those that count
SB3 = "stable-baselines3, {} threads"


class Noise(gym.Env):
    """Random observations of the size of HalfCheetah's, for updates alone."""

    metadata = {"render_modes": ["rgb_array"]}  # stable-baselines3 asks for it
    observation_space, action_space = Box(-np.inf, np.inf, (17,)), Box(-1, 1, (6,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=17).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        obs = self.np_random.normal(size=17).astype(np.float32)
        return obs, float(obs[0]), False, False, {}


gym.register("Noise-v0", lambda **_: Noise(), max_episode_steps=1000)


def load(folder: Path, name: str) -> Any:
    """Import examples/<name>.py of a folder, and its neighbours with it."""
    sys.path.insert(0, str(folder))
    for module in ("sac", "ppo"):
        sys.modules.pop(module, None)
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(folder))


def load_earlier(rev: str) -> Any:
    """Import examples/sac.py of a revision; None without git or that revision."""
    command = ["git", "-C", str(ROOT), "archive", rev, "examples"]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        print(f"{rev} is left out: {found.stderr.decode().strip()}")
        return None
    folder = tempfile.mkdtemp(prefix="sac_earlier_")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return load(Path(folder) / "examples", "sac")


def make_trainer(example: Any, arguments: Any, **options: Any) -> Any:
    """A trainer of an example with a filled buffer, ready to learn."""
    settings: Any = {"env_id": arguments.env_id, "num_envs": arguments.num_envs, "backend": "sync"}
    made = example.Options(**settings, learning_starts=WARM_UP, **options)
    torch.manual_seed(made.seed)
    envs = make_vec(made.env_id, made.num_envs, backend="sync", autoreset_mode="SameStep")
    if hasattr(example, "Learner"):  # gradients written by hand
        trainer = example.Trainer(made, envs, example.Learner(envs, made))
        trainer.learn = trainer.learner.learn
    elif hasattr(example, "SAC"):
        trainer = example.SAC(made, envs)
    else:
        trainer = example.Trainer(made, envs, log=print)
    trainer.start()
    while trainer.steps < WARM_UP:
        trainer.collect()
    return trainer


def train(
    trainer: Any, count: int, num_threads: int, *, steps_envs: bool, ratio: float = 1.0
) -> None:
    """Make updates, and `1 / ratio` env steps for each unless updates alone are measured."""
    torch.set_num_threads(num_threads)
    with torch.inference_mode(hasattr(trainer, "learner")):
        num_made = 0
        while num_made < count:
            before = trainer.steps
            if steps_envs:
                trainer.collect()
            for _ in range(round(ratio * (trainer.steps - before)) or 1):
                trainer.learn()
                num_made += 1


def make_sb3(arguments: Any, seed: int = 1, **settings: Any) -> Any:
    """stable-baselines3's SAC with the settings of the example."""
    make = import_module("stable_baselines3.common.env_util").make_vec_env
    envs = make(arguments.env_id, n_envs=arguments.num_envs, seed=seed)
    updates = {
        "train_freq": 1,
        "gradient_steps": round(arguments.update_ratio * arguments.num_envs),
    }
    return import_module("stable_baselines3").SAC(
        "MlpPolicy", envs, **updates, seed=seed, device="cpu", **settings
    )


def train_sb3(arguments: Any) -> None:
    """Train stable-baselines3's SAC from scratch; print return and minutes."""
    torch.set_num_threads(max(arguments.threads))
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
    half = 1.96 * np.std(returns, ddof=1) / count**0.5
    score = f"return {np.mean(returns):.1f} ± {half:.1f} (95 %) over {count} episodes"
    print(f"stable-baselines3, {arguments.env_id}, seed {arguments.seed}: {score}")
    print(f"{model.num_timesteps} steps, {model._n_updates} updates, {minutes:.1f} minutes")


def list_cases(arguments: Any, trainers: dict[str, Any], model: Any) -> dict[str, Any]:
    """What takes turns: each makes the same number of updates."""
    cases: dict[str, Callable[[], None]] = {}
    steps_envs, ratio = not arguments.updates, arguments.update_ratio
    for threads in arguments.threads:
        if model is not None:

            def learn(threads: int = threads) -> None:
                torch.set_num_threads(threads)
                if steps_envs:
                    model.learn(int(arguments.steps / ratio), reset_num_timesteps=False)
                else:
                    model.train(arguments.steps, batch_size=256)

            cases[SB3.format(threads)] = learn
        for name, trainer in trainers.items():
            cases[f"{name}, {threads} threads"] = lambda trainer=trainer, threads=threads: train(
                trainer, arguments.steps, threads, steps_envs=steps_envs, ratio=ratio
            )
    return cases


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--env-id", default="Pendulum-v1")
    add("--num-envs", type=int, default=1)
    add("--update-ratio", type=float, default=1.0, help="updates per env step")
    add("--steps", type=int, default=400, help="updates in one repetition")
    add("--repetitions", type=int, default=5, help="counted repetitions")
    add("--updates", action="store_true", help="no env steps between updates")
    add("--autograd", action="store_true", help="the uncompiled update, too")
    add("--rev", default="79f7096", help="of the earlier code; '' for none")
    add("--no-sb3", action="store_true", help="leave stable-baselines3 out")
    add("--no-bfloat16", action="store_true", help="leave bfloat16 out: slow without instructions")
    add("--threads", type=int, nargs="*", default=[1, 2], help="of torch")
    add("--train-sb3", action="store_true", help="train, instead of measuring")
    add("--total-steps", type=int, default=20_000, help="of --train-sb3")
    add("--learning-rate", type=float, default=1e-3, help="of --train-sb3")
    add("--starts", type=int, default=1000, help="of --train-sb3")
    add("--episodes", type=int, default=100, help="of --train-sb3")
    add("--seed", type=int, default=1, help="of --train-sb3")
    arguments = parser.parse_args()
    per_step = arguments.update_ratio * arguments.num_envs
    if per_step < 1 or per_step != int(per_step):
        parser.error(f"--update-ratio times --num-envs is {per_step:g}, expected 1, 2, 3 ...")
    if arguments.updates:
        arguments.env_id, arguments.update_ratio = "Noise-v0", 1.0
    return arguments


def make_trainers(arguments: Any) -> dict[str, Any]:
    """What is measured but stable-baselines3, by name."""
    trainers = {}
    if arguments.rev and (earlier := load_earlier(arguments.rev)):
        trainers[f"{arguments.rev}, float32"] = make_trainer(earlier, arguments)
        if not arguments.no_bfloat16:
            trainers[f"{arguments.rev}, bfloat16"] = make_trainer(earlier, arguments, bfloat16=True)
    # With one thread of torch the trainer splits rows over threads of its own, where it pays.
    kinds: list[Any] = [
        ("compiled, float32", {"torch_threads": 2}),
        ("compiled, float32, rows split", {"torch_threads": 1}),
    ]
    if not arguments.no_bfloat16:
        kinds.append(("compiled, bfloat16, rows split", {"torch_threads": 1, "dtype": "bfloat16"}))
    if arguments.autograd:
        kinds.insert(0, ("autograd, float32", {"compile": "off"}))
    for name, options in kinds:
        trainer = make_trainer(sac, arguments, **{"compile": "on", **options})
        trainer.learn()
        print(trainer.gradient.describe())
        trainers[name] = trainer
    return trainers


def main() -> None:
    """Measure and print Markdown."""
    arguments = read_arguments()
    torch.set_flush_denormal(True)
    torch.empty(2**23 - 2**10)  # as in the example; for the others as well
    torch.set_num_threads(arguments.threads[0])
    if arguments.train_sb3:
        return train_sb3(arguments)
    trainers, model = make_trainers(arguments), None
    if find_spec("stable_baselines3") and not arguments.no_sb3:
        model = make_sb3(arguments, learning_starts=WARM_UP)
        model.learn(WARM_UP)
    cases = list_cases(arguments, trainers, model)
    rates = alternate(cases, arguments.steps, arguments.repetitions)
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    others = [name for name in rates if name.startswith("stable")]
    bases = [max(others, key=medians.__getitem__)] if others else []
    earlier = f"{arguments.rev}, float32, {arguments.threads[0]} threads"
    bases += [earlier] if earlier in rates else []
    rows = [
        [
            name,
            f"{medians[name]:.0f}",
            f"{min(rate):.0f} - {max(rate):.0f}",
            *(f"{median_ratio(rates, name, base):.2f}" for base in bases),
        ]
        for name, rate in rates.items()
    ]
    print(machine("torch", "gymnasium", "numpy"))
    what = "updates" if arguments.updates else f"{arguments.env_id}, {arguments.num_envs} envs"
    header = [f"SAC, {what}", "per second", "lowest - highest", *(f"over {base}" for base in bases)]
    print("\n" + markdown_table(header, rows) + "\n")


if __name__ == "__main__":
    main()
