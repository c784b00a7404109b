"""PPO of vecenv.train beside that of stable-baselines3, with the same settings.

    pip install stable-baselines3 'gymnasium[box2d]'
    python benchmarks/ppo_sb3.py --env-id LunarLander-v3                     # steps per second
    python benchmarks/ppo_sb3.py --env-id LunarLander-v3 --train 1 --seed 1  # a complete run

Both get the settings of `SETTINGS`: envs, steps of each between updates, epochs, minibatches,
learning rate falling linearly to 0, discounts, clipping, entropy, orthogonal 64-64 tanh networks
for actor and critic each, Adam with eps 1e-5. Where the example normalises, stable-baselines3 gets
its VecNormalize, whose moments are updated in every step instead of every rollout.

Speeds are of whole updates, collecting and learning, on envs and networks made before; rounds
alternate. One step is one step of an episode; those on which NEXT_STEP autoreset resets do not
count. `--processor-time` is for a machine that is busy: it compares what both take of one core.

With `--train` stable-baselines3 trains for all steps, and its deterministic policy plays 100
episodes. The example's complete runs are made with the command that is printed first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from measure import alternate, machine, markdown_table, median_ratio

from vecenv import make_vec
from vecenv.timing.recording import Share
from vecenv.train import ppo

SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Acrobot-v1": {
        "total_steps": 500_000,
        "num_envs": 16,
        "num_minibatches": 4,
        "normalize": True,
        "learning_rate": 1e-3,
    },
    "LunarLander-v3": {
        "total_steps": 1_000_000,
        "num_envs": 16,
        "num_steps": 1024,
        "num_minibatches": 256,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "entropy_weight": 0.01,
        "learning_rate": 6e-4,
    },
}
Case = tuple[int, Callable[[], object]]  # env steps in a call; what is called


def options_of(env_id: str, **changes: Any) -> Any:
    """Return the example's options for an env."""
    return ppo.Options(env_id, **{**SETTINGS[env_id], **changes})


def command_of(env_id: str) -> str:
    """Return the command that trains the example with the same settings."""
    flags = [f"--env-id {env_id}"]
    for name, value in SETTINGS[env_id].items():
        flag = name.replace("_", "-")
        flags.append(f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join(["python examples/ppo.py", *flags, "--seed S"])


def make_sb3(options: Any, kind: str) -> Any:
    """Make stable-baselines3's PPO; kind is "DummyVecEnv" or "SubprocVecEnv"."""
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common import vec_env  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import (  # pyright: ignore[reportMissingImports]
        make_vec_env,
    )

    envs = make_vec_env(
        options.env_id, options.num_envs, seed=options.seed, vec_env_cls=getattr(vec_env, kind)
    )
    if options.normalize:
        envs = vec_env.VecNormalize(envs, gamma=options.gamma)
    hidden = list(options.hidden)
    return PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda remaining: remaining * options.learning_rate,
        n_steps=options.num_steps,
        batch_size=options.num_envs * options.num_steps // options.num_minibatches,
        n_epochs=options.num_epochs,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
        clip_range=options.clip,
        ent_coef=options.entropy_weight,
        max_grad_norm=options.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}},  # tanh and eps 1e-5 by default
        seed=options.seed,
        device="cpu",
    )


def train_sb3(options: Any, kind: str) -> None:
    """Train stable-baselines3 for all steps, evaluate 100 episodes, print the result."""
    torch.set_num_threads(options.torch_threads)
    model = make_sb3(options, kind)
    begin, cpu = time.perf_counter(), time.process_time()
    # Whole rollouts that fit into the steps, as in the example.
    size = options.num_envs * options.num_steps
    model.learn(options.total_steps // size * size)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    returns = evaluate_sb3(model, options)
    print(
        f"stable-baselines3, {kind}, {options.env_id}, seed {options.seed}: return "
        f"{returns.mean():.1f} ± {returns.std():.1f} over {len(returns)} episodes; "
        f"{model.num_timesteps} steps, {seconds:.0f} s, {cpu:.0f} s of processor time"
    )
    model.get_env().close()


def evaluate_sb3(model: Any, options: Any) -> np.ndarray:
    """Return the returns of an episode from each of the seeds that the example evaluates from."""
    scaled = model.get_vec_normalize_env()
    env, returns = gym.make(options.env_id), np.zeros(options.eval_episodes)
    for k in range(len(returns)):
        obs, _ = env.reset(seed=options.seed + 1_000_000 + k)
        is_over = False
        while not is_over:
            action, _ = model.predict(
                scaled.normalize_obs(obs) if scaled else obs, None, None, True
            )
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[k] += float(reward)
            is_over = terminated or truncated
    return returns


def sb3_case(env_id: str, kind: str, num_threads: int, num_updates: int) -> Case:
    """Prepare updates of stable-baselines3."""
    options = options_of(env_id, total_steps=10**9)
    model = make_sb3(options, kind)
    steps = num_updates * options.num_envs * options.num_steps

    def run() -> None:
        torch.set_num_threads(num_threads)
        model.learn(steps, reset_num_timesteps=False)

    return steps, run


def make_trainer(env_id: str, backend: str) -> Any:
    """Make the example's trainer, and its envs."""
    options = options_of(env_id, total_steps=10**9, backend=backend)
    torch.manual_seed(options.seed)
    envs = make_vec(env_id, options.num_envs, backend=backend)
    return ppo.PPO(options, envs)


def example_case(env_id: str, backend: str, num_updates: int) -> Case:
    """Prepare updates of the example, with one torch thread."""
    trainer = make_trainer(env_id, backend)

    def run() -> None:
        torch.set_num_threads(1)
        for _ in range(num_updates):
            trainer.update()

    run()
    return trainer.steps, run  # about as many in later calls


def sb3_phases(env_id: str, num_updates: int) -> list[float]:
    """Return microseconds per step of stable-baselines3 in envs, learner, and all together."""
    torch.set_num_threads(1)
    options = options_of(env_id, total_steps=10**9)
    model = make_sb3(options, "DummyVecEnv")
    spent = {"step": 0.0, "train": 0.0}

    def time_calls(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = method(*arguments)
            spent[name] += time.perf_counter() - begin
            return result

        setattr(owner, name, timed)

    time_calls(model.get_env(), "step")
    time_calls(model, "train")
    num_steps = num_updates * options.num_envs * options.num_steps
    begin = time.perf_counter()
    model.learn(num_steps)
    whole = time.perf_counter() - begin
    return [1e6 * seconds / num_steps for seconds in (spent["step"], spent["train"], whole)]


def example_phases(env_id: str, backend: str, num_updates: int) -> list[float]:
    """Return microseconds per step of the example in envs, learner, and all together."""
    torch.set_num_threads(1)
    trainer = make_trainer(env_id, backend)
    trainer.update()
    trainer.envs.timing.enable()
    before, begin = trainer.steps, time.perf_counter()
    for _ in range(num_updates):
        trainer.update()
    whole, num_steps = time.perf_counter() - begin, trainer.steps - before
    report = trainer.envs.timing.report()
    trainer.envs.close()
    envs = sum(report.shares.get(name, 0.0) for name in Share) * report.wall_s
    learner = report.shares["learner"] * report.wall_s
    return [1e6 * seconds / num_steps for seconds in (envs, learner, whole)]


def breakdown(env_id: str, num_updates: int) -> str:
    """Return a table of where the time goes, with one torch thread."""
    cases = {
        "stable-baselines3, DummyVecEnv": sb3_phases(env_id, num_updates),
        "example, sync": example_phases(env_id, "sync", num_updates),
        "example, async": example_phases(env_id, "async", num_updates),
    }
    rows = [
        [name, *(f"{number:.1f}" for number in (envs, learner, whole - envs - learner, whole))]
        for name, (envs, learner, whole) in cases.items()
    ]
    return markdown_table(["us per step", "envs", "learner", "policy and rest", "all"], rows)


def env_alone(env_id: str, num_steps: int = 20_000) -> float:
    """Return the microseconds of a step of one env, wrappers of `gymnasium.make` included."""
    env = gym.make(env_id)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(num_steps)]
    begin = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return 1e6 * (time.perf_counter() - begin) / num_steps


def compare(env_id: str, num_updates: int, repetitions: int) -> None:
    """Print the speeds of both."""
    base = "stable-baselines3, DummyVecEnv, 1 torch thread"
    threads = torch.get_num_threads()
    cases = {
        base: sb3_case(env_id, "DummyVecEnv", 1, num_updates),
        f"stable-baselines3, DummyVecEnv, {threads} torch threads": sb3_case(
            env_id, "DummyVecEnv", threads, num_updates
        ),
        "stable-baselines3, SubprocVecEnv, 1 torch thread": sb3_case(
            env_id, "SubprocVecEnv", 1, num_updates
        ),
        "example, sync": example_case(env_id, "sync", num_updates),
        "example, async": example_case(env_id, "async", num_updates),
    }
    alone = env_alone(env_id)
    units = {name: steps for name, (steps, _) in cases.items()}
    rates = alternate({name: run for name, (_, run) in cases.items()}, units, repetitions)
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    best = max((name for name in rates if name.startswith("stable")), key=medians.__getitem__)
    rows = [
        [
            name,
            f"{medians[name]:,.0f}",
            f"{min(rate):,.0f} - {max(rate):,.0f}",
            f"{1e6 / medians[name]:.1f}",
            f"{median_ratio(rates, name, best):.2f}",
        ]
        for name, rate in rates.items()
    ]
    print(machine("stable-baselines3", "torch", "gymnasium", "numpy"))
    print(f"\n{command_of(env_id)}\n")
    print(markdown_table([env_id, "steps/s", "lowest - highest", "us per step", "ratio"], rows))
    print(f"\nOne env alone, stepped at random: {alone:.1f} us per step.\n", flush=True)
    print(breakdown(env_id, num_updates))


def compare_processor_time(env_id: str, num_updates: int, repetitions: int) -> None:
    """Print processor time per step of both, in one process with one torch thread each."""
    cases = {
        "stable-baselines3, DummyVecEnv": sb3_case(env_id, "DummyVecEnv", 1, num_updates),
        "example, sync": example_case(env_id, "sync", num_updates),
    }
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, (steps, run) in cases.items():
            begin = time.process_time()
            run()
            if repetition:
                spent[name].append(1e6 * (time.process_time() - begin) / steps)
    base, example = spent.values()
    ratios = [a / b for a, b in zip(base, example, strict=True)]
    rows = [
        [name, f"{statistics.median(us):.1f}", f"{min(us):.1f} - {max(us):.1f}"]
        for name, us in spent.items()
    ]
    print(machine("stable-baselines3", "torch", "gymnasium", "numpy"))
    print(f"\n{command_of(env_id)}\n")
    header = [env_id, "processor time, us per step", "lowest - highest"]
    print(markdown_table(header, rows))
    print(f"\nratio {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")


def main() -> None:
    """Compare speeds, or train stable-baselines3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", choices=SETTINGS, default="CartPole-v1")
    parser.add_argument("--train", type=int, default=0, help="torch threads; 0 compares speeds")
    parser.add_argument("--seed", type=int, default=1, help="of the training")
    parser.add_argument("--vec-env", default="DummyVecEnv", help="or SubprocVecEnv")
    parser.add_argument("--updates", type=int, default=4, help="updates in one repetition")
    parser.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    parser.add_argument("--processor-time", action="store_true", help="for a machine that is busy")
    arguments = parser.parse_args()
    if arguments.processor_time:
        compare_processor_time(arguments.env_id, arguments.updates, arguments.repetitions)
    elif arguments.train:
        options = options_of(arguments.env_id, seed=arguments.seed, torch_threads=arguments.train)
        print(command_of(arguments.env_id), flush=True)
        train_sb3(options, arguments.vec_env)
    else:
        compare(arguments.env_id, arguments.updates, arguments.repetitions)


if __name__ == "__main__":
    main()
