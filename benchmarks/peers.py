"""vecenv beside other libraries: env steps per second, and time to the score of CAGE 2's winner.

    pip install stable-baselines3 envpool torchrl tianshou
    python benchmarks/peers.py --out peers.png
    python benchmarks/peers.py --only steps

*Steps*: CartPole-v1 with random actions, each library's own ways, in turn, made anew for every
repetition, as processes of some are busy while they wait. One step is one step of an episode; those
on which NEXT_STEP autoreset only resets do not count. Compiling and starting are not inside.

*Score*: PPO learns to defend CAGE 2, by vecenv.train and by stable-baselines3 with
the same settings on the same envs, one after the other, `--minutes` each at most. The clock stands
still while the policy plays the nine cells of the challenge, in between; compiling is inside. No
other library that installs from PyPI has the challenge.

Libraries that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from measure import machine, markdown_table

from vecenv import make_vec
from vecenv.cage import cage2_scenario, evaluate, save_defender
from vecenv.train import cage2_defender

ENV_ID, WINNER = "CartPole-v1", -54.57
Step = tuple[Callable[[np.ndarray], Any], Callable[[], Any]]  # step all envs once; close
Curve = list[tuple[float, int, float]]  # seconds, env steps, score


def of_gymnasium(envs: Any, dtype: Any = np.int64) -> Step:
    """Return how envs are stepped that are Gymnasium's, or like these."""
    envs.reset(seed=0) if isinstance(envs, gym.vector.VectorEnv) else envs.reset()
    return lambda actions: envs.step(actions.astype(dtype, copy=False)), envs.close


def envpool_envs(num_envs: int) -> Step:
    import envpool  # type: ignore[import-not-found]  # not among the extras

    return of_gymnasium(envpool.make_gymnasium(ENV_ID, num_envs=num_envs), np.int32)


def stable_baselines3_envs(num_envs: int, kind: str) -> Step:
    from stable_baselines3.common import vec_env  # pyright: ignore[reportMissingImports]

    return of_gymnasium(getattr(vec_env, kind)([lambda: gym.make(ENV_ID)] * num_envs))


def tianshou_envs(num_envs: int) -> Step:
    from tianshou import env  # pyright: ignore[reportMissingImports]

    envs, ends = env.ShmemVectorEnv([lambda: gym.make(ENV_ID)] * num_envs), np.zeros(num_envs, bool)
    envs.reset()

    def step(actions: np.ndarray) -> None:  # it resets nothing by itself
        if ends.any():
            envs.reset(np.flatnonzero(ends))
        _, _, terminations, truncations, _ = envs.step(actions)
        np.logical_or(terminations, truncations, out=ends)

    return step, envs.close


def torchrl_envs(num_envs: int) -> Step:
    from torchrl.envs import GymEnv, ParallelEnv  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    envs = ParallelEnv(num_envs, lambda: GymEnv(ENV_ID, categorical_action_encoding=True))
    state = envs.reset()

    def step(actions: np.ndarray) -> None:
        nonlocal state
        state["action"] = torch.from_numpy(actions)
        _, state = envs.step_and_maybe_reset(state)

    return step, envs.close


# Whether rows on which autoreset only resets are among those that a call returns.
WAYS: dict[str, tuple[Callable[[int], Step], bool]] = {
    "vecenv, compiled": (lambda n: of_gymnasium(make_vec(f"Jit{ENV_ID}", n)), True),
    "vecenv, auto": (lambda n: of_gymnasium(make_vec(ENV_ID, n, backend="auto")), True),
    "vecenv, workers": (lambda n: of_gymnasium(make_vec(ENV_ID, n, backend="async")), True),
    "EnvPool": (envpool_envs, True),
    "Gymnasium, in NumPy": (lambda n: of_gymnasium(gym.make_vec(ENV_ID, n)), True),
    "Gymnasium, sync": (
        lambda n: of_gymnasium(gym.make_vec(ENV_ID, n, vectorization_mode="sync")),
        True,
    ),
    "Gymnasium, async": (
        lambda n: of_gymnasium(gym.make_vec(ENV_ID, n, vectorization_mode="async")),
        True,
    ),
    "SB3 DummyVecEnv": (lambda n: stable_baselines3_envs(n, "DummyVecEnv"), False),
    "SB3 SubprocVecEnv": (lambda n: stable_baselines3_envs(n, "SubprocVecEnv"), False),
    "Tianshou ShmemVectorEnv": (tianshou_envs, False),
    "TorchRL ParallelEnv": (torchrl_envs, False),
}


def share_of_steps(rows: np.ndarray) -> float:
    """Return the share of rows that are steps, and no resets, under these actions."""
    envs = make_vec(f"Jit{ENV_ID}", rows.shape[1])
    envs.reset(seed=0)
    count, ends = 0, np.zeros(rows.shape[1], bool)
    for actions in rows:
        count += rows.shape[1] - ends.sum()
        _, _, terminations, truncations, _ = envs.step(actions)
        ends = terminations | truncations
    envs.close()
    return count / rows.size


def rate(step: Callable[[np.ndarray], Any], rows: np.ndarray, seconds: float) -> float:
    """Return rows per second."""
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        step(rows[count % len(rows)])
        count += 1
    return count * rows.shape[1] / elapsed


def measure_steps(num_envs: int, repetitions: int, seconds: float) -> dict[str, list[float]]:
    """Return steps per second of every way that can be had, one number per repetition."""
    rows = np.random.default_rng(0).integers(0, 2, (256, num_envs))
    share, rates = share_of_steps(rows), {}
    for number in range(repetitions):
        for name, (make, resets) in WAYS.items():
            if number and name not in rates:
                continue
            try:
                step, close = make(num_envs)
            except ImportError as error:
                print(f"left out: {name} ({error})")
                continue
            rate(step, rows, seconds / 2)
            rates.setdefault(name, []).append(rate(step, rows, seconds) * (share if resets else 1))
            with contextlib.suppress(Exception):  # nobody else's processes are there meanwhile
                close()
    return rates


class Clock:
    """Seconds of training, and the scores of the challenge meanwhile."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.curve = name, options, Curve()
        self.begin, self.due = time.perf_counter(), 0.0

    def is_over(self, steps: int, layers: Callable[[], Any]) -> bool:
        """Score the policy if that is due; whether the goal or the limit is reached."""
        now = time.perf_counter()
        spent, limit = now - self.begin, 60 * self.options.minutes
        if spent < min(self.due, limit):
            return False
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "policy.npz"
            save_defender(file, layers(), cage2_scenario())
            score = evaluate(str(file), episodes=self.options.episodes, seed=1).total
        self.curve.append((spent, steps, score))
        print(f"{self.name}: {spent:.0f} s, {steps} steps, {score:.2f}", flush=True)
        self.begin += time.perf_counter() - now
        self.due = spent + self.options.every
        return score >= WINNER or spent >= limit


def layers_of(modules: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return weights and biases of the linear ones."""
    linear = [one for one in modules if isinstance(one, torch.nn.Linear)]
    return [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in linear]


def train_example(options: Any, clock: Clock) -> None:
    """Train the example's defender."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    envs = cage2_defender.Cage2Defender.make_envs(options, options.num_envs)
    trainer = cage2_defender.Cage2Defender(options, envs)
    size = options.num_envs * options.num_steps
    while not clock.is_over(trainer.steps, lambda: layers_of(trainer.agent.actor)):
        if trainer.steps + size > options.total_steps:
            break
        trainer.update()
    envs.close()


def train_stable_baselines3(options: Any, clock: Clock) -> None:
    """Train PPO of stable-baselines3 with the same settings, but a constant weight of entropy."""
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.callbacks import (  # pyright: ignore[reportMissingImports]
        BaseCallback,
    )
    from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
        VecEnvWrapper,
    )

    from vecenv.adapters.sb3 import make_sb3_env

    column, cells = cage2_defender.STEP_COLUMN, cage2_defender.CELLS
    counts = np.array([sum(step < end for end in cells) for step in range(cells[-1] + 1)])

    class Weighted(VecEnvWrapper):
        """Weighs rewards as the score does, and ends episodes for good, as the example does."""

        def reset(self) -> Any:
            self.last = self.venv.reset()
            return self.last

        def step_wait(self) -> Any:
            obs, rewards, ends, infos = self.venv.step_wait()
            steps = (self.last[:, column] * cells[-1]).round().astype(int)
            for i in np.flatnonzero(ends):
                infos[i]["TimeLimit.truncated"] = False
            self.last = obs
            return obs, rewards * counts[steps] / len(cells), ends, infos

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return not self.is_over

        def _on_rollout_start(self) -> None:
            actor = [*self.model.policy.mlp_extractor.policy_net, self.model.policy.action_net]
            self.is_over = clock.is_over(self.num_timesteps, lambda: layers_of(actor))

    envs = make_sb3_env(options.env_id, options.num_envs, **options.env_kwargs)
    num_steps, hidden = cells[-1], list(options.hidden)
    model = PPO(
        "MlpPolicy",
        Weighted(envs),
        learning_rate=lambda remaining: remaining * options.learning_rate,
        n_steps=num_steps,  # episodes, without the step that only resets
        batch_size=options.num_envs * num_steps // options.num_minibatches,
        n_epochs=options.num_epochs,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
        clip_range=options.clip,
        ent_coef=options.entropy_weight,
        vf_coef=options.value_weight / 2,
        max_grad_norm=options.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}},  # tanh and eps 1e-5 by default
        seed=options.seed,
        device="cpu",
    )
    model.learn(options.total_steps, callback=Watch())
    envs.close()


TRAINERS = {"vecenv": train_example, "stable-baselines3": train_stable_baselines3}


def measure_scores(options: argparse.Namespace) -> dict[str, Curve]:
    """Return the scores of the challenge over time, of every library that can be had."""
    curves = {}
    env_kwargs: Any = {"observation": "memory", "red_agent": "mixed", "rules": "faithful"}
    settings = cage2_defender.Options(
        total_steps=options.total_steps, seed=options.seed, env_kwargs=env_kwargs
    )
    evaluate("sleep", episodes=2)  # compiles what the policies are scored by
    for name, train in TRAINERS.items():
        clock = Clock(name, options)
        try:
            train(settings, clock)
        except ImportError as error:
            print(f"left out: {name} ({error})")
        if clock.curve:
            curves[name] = clock.curve
    return curves


def draw(rates: dict[str, list[float]], curves: dict[str, Curve], num_envs: int, out: Path) -> None:
    """Write both as one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    count = bool(rates) + bool(curves)
    figure, found = plt.subplots(count, 1, figsize=(5.5, 3.8 * count), squeeze=False)
    axes = list(found[:, 0])
    if rates:
        names = sorted(rates, key=lambda name: statistics.median(rates[name]))
        medians = [statistics.median(rates[name]) for name in names]
        colours = ["tab:blue" if name.startswith("vecenv") else "0.65" for name in names]
        axes[0].scatter(medians, names, color=colours)  # a log axis has no zero for bars
        for row, x in enumerate(medians):
            axes[0].text(x, row, f"   {x:,.0f}", va="center", fontsize=8)
        axes[0].grid(axis="x", alpha=0.3)
        axes[0].set(xscale="log", xlabel=f"env steps per second, {num_envs} x {ENV_ID}")
        axes[0].set_xlim(right=max(medians) * 12)
    for name, curve in curves.items():
        seconds, _, scores = zip(*curve, strict=True)
        axes[-1].plot(seconds, scores, label=name, marker=".")
    if curves:
        best = max(score for curve in curves.values() for *_, score in curve)
        axes[-1].axhline(WINNER, color="0.3", linestyle=":", label="the challenge's winner")
        axes[-1].set(xlabel="seconds of training", ylabel="score of CAGE 2", ylim=(-150, best + 8))
        axes[-1].legend()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Measure, print both tables, and draw."""
    parser = argparse.ArgumentParser(description="vecenv beside other libraries.")
    parser.add_argument("--only", choices=["steps", "score"], help="one of the two")
    parser.add_argument("--num-envs", type=int, default=64, help="of the steps")
    parser.add_argument("--seconds", type=float, default=0.5, help="per way and repetition")
    parser.add_argument("--repetitions", type=int, default=5, help="of the steps")
    parser.add_argument("--minutes", type=float, default=12, help="of training, each")
    parser.add_argument("--total-steps", type=int, default=40_000_000, help="of training")
    parser.add_argument("--every", type=float, default=15, help="seconds between two scores")
    parser.add_argument("--episodes", type=int, default=1000, help="per cell of the challenge")
    parser.add_argument("--seed", type=int, default=1, help="of the training")
    parser.add_argument("--out", type=Path, help="a picture of both")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine("gymnasium", "numpy", "torch"), end="\n\n", flush=True)
    rates, curves = {}, {}
    if options.only != "score":
        rates = measure_steps(options.num_envs, options.repetitions, options.seconds)
        rows = [
            [name, f"{statistics.median(x):,.0f}", f"{min(x):,.0f} - {max(x):,.0f}"]
            for name, x in rates.items()
        ]
        print(markdown_table([f"{options.num_envs} x {ENV_ID}", "steps/s", "least - most"], rows))
    if options.only != "steps":
        curves = measure_scores(options)
        rows = []
        for name, curve in curves.items():
            seconds, steps, score = curve[-1]
            told = f"{seconds:.0f}" if score >= WINNER else f"not in {seconds:.0f}"
            rows.append([name, told, f"{score:.2f}", f"{steps:,}", f"{steps / seconds:,.0f}"])
        header = ["PPO on CAGE 2", f"seconds to {WINNER}", "score at the end", "steps", "steps/s"]
        print(markdown_table(header, rows))
    if options.out is not None:
        draw(rates, curves, options.num_envs, options.out)


if __name__ == "__main__":
    main()
