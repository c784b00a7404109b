"""Time and memory of PPO's storage: collecting, advantages, minibatches; against the usual ways.

    python benchmarks/rollout.py

An update lays in T = 128 steps of N = 2048 envs (52 float32 observed), estimates advantages, and
goes through 16 minibatches four times. "fixed" are minibatches of one size with weights and
normalised advantages, "sequences" those of 32 steps. What environment and policy would return is
there beforehand, and nobody looks at the minibatches. "floor" does no more than it must: slice
copies into tensors allocated once, `buffers.gae`, `randperm(out=)` and `index_select(out=)`.
"zip + cat" keeps each step in a list, transposes and concatenates, loops over time in torch, and
indexes by a permutation; "zip + cat, buffers.gae" differs in the advantages alone. "CleanRL style"
has tensors allocated once, and is the same otherwise. stable-baselines3 is measured if it is
installed.

Peak: how far the resident memory rises above what it is before, in one update. Growth: how much
more is allocated after update 200 than after update 2.

Laying in: what 16 workers collected in an update, trajectories of different lengths with all
fields. "zip + cat" transposes the list of lists and concatenates each field, while the old tensors
are still alive, as training code does.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import Rates, alternate, machine, markdown_table, median_ratio
from work import Steps

from buffers import RolloutBuffer, TrajectoryBuffer, gae

OBS, ACTIONS = Box(-np.inf, np.inf, (52,), np.float32), Discrete(7)
GAMMA, LAMBDA = 0.99, 0.95
NUM_EPOCHS, NUM_MINIBATCHES = 4, 16
OURS, FLOOR, ZIP = "RolloutBuffer", "floor", "zip + cat"
OURS_FIXED, OURS_SEQUENCES = f"{OURS}, fixed", f"{OURS}, sequences"


def drain(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def run_ours(
    steps: Steps, draw: Callable[[RolloutBuffer], Iterator[Any]] | None = None
) -> Callable[[], None]:
    num_steps, num_envs = steps.shape
    rollout = RolloutBuffer(
        num_steps, num_envs, OBS, ACTIONS, autoreset_mode="Disabled", seed=0,
        gamma=GAMMA, gae_lambda=LAMBDA,
    )  # fmt: skip
    rollout.start(steps.obs[0])

    def update() -> None:
        steps.fill(rollout)
        rollout.compute_advantages(steps.values[-1])
        for _ in range(NUM_EPOCHS):
            drain(draw(rollout) if draw else rollout.minibatches(NUM_MINIBATCHES))
        rollout.advance()

    return update


def draw_fixed(rollout: RolloutBuffer) -> Iterator[Any]:
    return rollout.minibatches(NUM_MINIBATCHES, fixed=True, normalize_advantages=True)


def draw_sequences(rollout: RolloutBuffer) -> Iterator[Any]:
    return rollout.sequences(NUM_MINIBATCHES, length=min(32, rollout.num_steps))


def run_floor(steps: Steps) -> Callable[[], None]:
    num_rows, size = steps.rewards.size, steps.rewards.size // NUM_MINIBATCHES
    kept = steps.stacked()
    values = steps.values.clone()
    advantages, returns, final_values = (torch.zeros(steps.shape) for _ in range(3))
    fields = [*kept[:4], advantages, returns]
    flat = [field.flatten(0, 1) for field in fields]
    targets = [field[:size].clone() for field in flat]
    order = torch.empty(num_rows, dtype=torch.int64)

    def update() -> None:
        for t in range(len(steps.rewards)):
            for target, source in zip(kept, steps.step(t), strict=True):
                target[t] = source
        inputs = kept[4], values, kept[5], kept[6]
        found = gae(*inputs, final_values=final_values, gamma=GAMMA, gae_lambda=LAMBDA)
        for column, target in zip(found, (advantages, returns), strict=True):
            target.copy_(column)
        for _ in range(NUM_EPOCHS):
            torch.randperm(num_rows, out=order)
            for begin in range(0, num_rows, size):
                chosen = order[begin : begin + size]
                for source, target in zip(flat, targets, strict=True):
                    torch.index_select(source, 0, chosen, out=target)

    return update


def torch_gae(rewards, values, dones) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        continues = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * values[t + 1] * continues - values[t]
        advantages[t] = last = delta + GAMMA * LAMBDA * continues * last
    return advantages, advantages + values[:-1]


def index_all(fields: list[torch.Tensor]) -> None:
    """Go through minibatches the usual way, by a permutation for each epoch."""
    flat = [field.flatten(0, 1) for field in fields]
    size = len(flat[0]) // NUM_MINIBATCHES
    for _ in range(NUM_EPOCHS):
        order = torch.randperm(len(flat[0]))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            batch = [field[chosen] for field in flat]
            assert len(batch[0]) == size


def run_zip(steps: Steps, is_compiled: bool) -> Callable[[], None]:
    final_values, last = torch.zeros(steps.shape), {}

    def update() -> None:
        collected = [[x[None].clone() for x in steps.step(t)] for t in range(len(steps.rewards))]
        columns = [torch.cat(x, dim=0) for x in map(list, zip(*collected, strict=True))]
        obs, actions, log_probs, values, rewards, terminations, truncations = columns
        longer = torch.cat([values, steps.values[-1:]])
        if is_compiled:
            inputs = rewards, longer, terminations, truncations
            found = gae(*inputs, final_values=final_values, gamma=GAMMA, gae_lambda=LAMBDA)
        else:
            found = torch_gae(rewards, longer, (terminations | truncations).float())
        last["columns"] = columns  # live until the next ones are there
        index_all([obs, actions, log_probs, values, *found])

    return update


def run_cleanrl(steps: Steps) -> Callable[[], None]:
    kept = steps.stacked()
    values = steps.values.clone()

    def update() -> None:
        for t in range(len(steps.rewards)):
            for target, source in zip(kept, steps.step(t), strict=True):
                target[t] = source
        dones = (kept[5] | kept[6]).float()
        index_all([*kept[:4], *torch_gae(kept[4], values, dones)])

    return update


def run_sb3(steps: Steps) -> Callable[[], None]:
    from stable_baselines3.common import buffers  # pyright: ignore[reportMissingImports]

    num_steps, num_envs = steps.shape
    rollout = buffers.RolloutBuffer(num_steps, OBS, ACTIONS, "cpu", LAMBDA, GAMMA, num_envs)
    dones = steps.terminations | steps.truncations
    size = steps.rewards.size // NUM_MINIBATCHES

    def update() -> None:
        rollout.reset()
        for t in range(num_steps):
            actions = steps.actions[t].numpy()[:, None]
            policy = steps.values[t], steps.log_probs[t]
            rollout.add(steps.obs[t], actions, steps.rewards[t], dones[t - 1], *policy)
        rollout.compute_returns_and_advantage(steps.values[-1], dones[-1])
        for _ in range(NUM_EPOCHS):
            drain(rollout.get(size))

    return update


def make_updates(steps: Steps) -> dict[str, Callable[[], Callable[[], None]]]:
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        OURS: partial(run_ours, steps),
        OURS_FIXED: partial(run_ours, steps, draw_fixed),
        OURS_SEQUENCES: partial(run_ours, steps, draw_sequences),
        FLOOR: partial(run_floor, steps),
        ZIP: partial(run_zip, steps, False),
        ZIP + ", buffers.gae": partial(run_zip, steps, True),
        "CleanRL style": partial(run_cleanrl, steps),
    }
    try:
        run_sb3(steps)
    except ImportError:
        return makers
    return {**makers, "stable-baselines3": partial(run_sb3, steps)}


def status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def peak_bytes(call: Callable[[], object]) -> int:
    """How far the resident memory rises during a call; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_kb("VmRSS")
    call()
    return 1024 * (status_kb("VmHWM") - before)


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Bytes that malloc has given out and not got back; glibc only."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def time_updates(steps: Steps, repetitions: int, growth_updates: int) -> None:
    makers = make_updates(steps)
    updates = {name: make() for name, make in makers.items()}
    rates = alternate(updates, 1, repetitions)
    updates.clear()
    rows = []
    for name, make in makers.items():
        update = make()
        update()
        peak = statistics.median(peak_bytes(update) for _ in range(3))
        growth = ""
        if name == OURS:
            before = allocated_bytes()
            for _ in range(growth_updates):
                update()
            growth = f"{allocated_bytes() - before}"
        rows.append([*time_row(rates, name, OURS), f"{peak / 1e6:.2f}", growth])
        del update
    title = f"PPO update, {steps.shape[0]} x {steps.shape[1]}"
    header = [title, "ms", "spread", f"time / {OURS}", "peak MB", "growth bytes"]
    print(f"\n{markdown_table(header, rows)}", flush=True)


def time_row(rates: Rates, name: str, base: str) -> list[str]:
    times = sorted(1e3 / rate for rate in rates[name])
    spread = f"{times[0]:.4g} to {times[-1]:.4g}"
    ratio = f"{median_ratio(rates, base, name):.2f}"
    return [name, f"{statistics.median(times):.4g}", spread, ratio]


def make_trajectories(mean_length: int, seed: int) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    trajectories = []
    for _ in range(16):
        steps = int(mean_length * rng.uniform(0.75, 1.25))
        arrays = {
            "obs": rng.standard_normal((steps, 52), np.float32),
            "actions": rng.integers(0, 7, steps),
            "rewards": rng.standard_normal(steps, np.float32),
            "terminations": rng.random(steps) < 0.01,
            "truncations": np.zeros(steps, np.bool_),
            "log_probs": rng.standard_normal(steps, np.float32),
        }
        trajectories.append({name: torch.from_numpy(array) for name, array in arrays.items()})
    return trajectories


def time_trajectories(mean_length: int, repetitions: int) -> None:
    given = [make_trajectories(mean_length, seed) for seed in range(3)]
    lists = itertools.cycle([[list(t.values()) for t in update] for update in given])
    dicts = itertools.cycle(given)
    buffer = TrajectoryBuffer(
        1, OBS, ACTIONS, extra_columns={"log_probs": Box(-np.inf, np.inf, ())}
    )
    kept: dict[str, Any] = {}

    def zip_and_cat() -> None:
        fields = [torch.cat(field, dim=0) for field in map(list, zip(*next(lists), strict=True))]
        kept["fields"], kept["mean"] = fields, fields[2].mean().item()

    cases = {"update": lambda: buffer.update(next(dicts)), ZIP: zip_and_cat}
    rates = alternate(cases, 1, repetitions)
    rows = []
    for name, run in cases.items():
        peak = statistics.median(peak_bytes(run) for _ in range(3))
        rows.append([*time_row(rates, name, "update"), f"{peak / 1e6:.2f}"])
    title = f"laying in 16 x {mean_length} steps, {sum(buffer.memory().values()) / 1e6:.0f} MB held"
    header = [title, "ms", "spread", "time / update", "peak MB"]
    print(f"\n{markdown_table(header, rows)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rollouts and trajectories.")
    parser.add_argument("--repetitions", type=int, default=9, help="rounds, after one to warm up")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--envs", type=int, default=2048)
    parser.add_argument("--growth-updates", type=int, default=198)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine("numpy", "numba", "torch"))
    print(f"median and spread over {options.repetitions} alternating rounds")
    steps = Steps(options.steps, options.envs)
    time_updates(steps, options.repetitions, options.growth_updates)
    for mean_length in (256, 2048, 16384):
        time_trajectories(mean_length, options.repetitions)


if __name__ == "__main__":
    main()
