"""Steps per second of whole PPO updates on a CUDA device, envs and learner there.

    python benchmarks/gpu_ppo.py

Without a CUDA device it says so and measures nothing. CAGE 2, 64-64 networks, without masks; the
trainer is that of `vecenv.train.ppo`, with CUDA graphs and gradients by autograd. The first five
updates are not counted; then whole updates, and the parts by themselves, are timed nine times each,
until the device is done (medians). A step is one step of one env in whole updates.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_envs import time_calls
from measure import machine, markdown_table

from vecenv.train import ppo

WARM_UP = 5  # updates, until all is captured
# Products, envs, steps, passes, minibatches of a pass.
CASES: tuple[tuple[Any, int, int, int, int], ...] = (
    ("float32", 16_384, 64, 4, 8),
    ("bfloat16", 16_384, 64, 4, 8),
    ("float32", 16_384, 64, 1, 8),
    ("bfloat16", 16_384, 64, 1, 8),
)


def time_case(dtype: Any, num_envs: int, num_steps: int, epochs: int, batches: int) -> list[str]:
    options = ppo.Options(
        "vecenv:Cage2-v0", num_envs=num_envs, num_steps=num_steps, total_steps=10**9,
        num_epochs=epochs, num_minibatches=batches, masks=False, dtype=dtype, device="cuda",
        compile="off",
    )  # fmt: skip
    envs = ppo.PPO.make_envs(options, num_envs, on_device=True)
    trainer = ppo.PPO(options, envs)
    for _ in range(WARM_UP):
        trainer.update()
    calls = trainer.update, trainer.collect, trainer.learn
    times = [time_calls(call, torch.cuda.synchronize)[1] for call in calls]
    envs.close()
    rate = num_envs * num_steps / times[0] / 1e6
    sizes = f"{num_envs:,} × {num_steps}", str(epochs), str(batches)
    return [dtype, *sizes, *(f"{1e3 * one:.1f}" for one in times), f"{rate:.1f}"]


def main() -> None:
    argparse.ArgumentParser(description="Time PPO updates on a CUDA device.").parse_known_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured")
        return
    print(torch.cuda.get_device_name(), machine("numpy", "torch", "numba"), sep="\n")
    header = ["products", "rollout", "passes", "minibatches"]
    header += ["update, ms", "rollout, ms", "passes, ms", "M steps/s"]
    print(markdown_table(header, [time_case(*case) for case in CASES]))


if __name__ == "__main__":
    main()
