"""Options that trainers share, and the envs that these options describe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["EnvOptions", "GradientOptions", "OptionsError", "RunOptions", "is_on_device"]


class OptionsError(ValueError):
    """Options don't fit the env, the machine or each other; the message says which."""


@dataclass
class RunOptions:
    """Options of every trainer."""

    total_steps: int = 100_000  # env steps to train for, at most; 0 evaluates only
    learning_rate: float = 1e-3  # Adam's at the start
    gamma: float = 0.99  # discount
    seed: int = 1  # the same seed gives the same curve
    torch_threads: int = 1  # threads of torch; more are far slower on busy cores
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs")  # folder for policy, checkpoints, learning curve and scalars
    save_every: int = 0  # env steps between two checkpoints; 0: at the end, or when stopped
    resume: bool = False  # go on from the last checkpoint in that folder
    overwrite: bool = False  # or delete an earlier run in it
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


@dataclass
class GradientOptions:
    """How and where gradients are computed."""

    device: str = "cpu"  # of networks and compiled envs: cpu, cuda
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products in the gradient
    compile: Literal["auto", "on", "off"] = "auto"  # the gradient; "auto": if there are many rows


@dataclass
class EnvOptions:
    """The envs of a single agent."""

    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    num_envs: int = 8  # envs stepped side by side, by all processes of torchrun together
    backend: str | None = None  # of vecenv.make_vec; "jit" steps compiled envs on the CPU
    num_workers: int | None = None  # processes (async) or actors (ray) for the envs
    vector_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of its class
    randomize: tuple[str, ...] = ()  # drawn per episode of compiled envs: "pole_length 0.3 1.5"
    wrappers: tuple[str, ...] = ()  # of every env, "module:name" each, the innermost first
    log_infos: tuple[str, ...] = ()  # numbers in infos whose means are logged, by their names


def make_placed(
    make: Callable[..., Any], options: Any, num_envs: int, *, on_device: bool, **given: Any
) -> Any:
    """Make envs: compiled ones on the networks' device, unless a backend is named.

    `make(num_envs, backend=..., **given)` returns them; it raises ValueError if no compiled envs
    exist. Only `backend` and `device` of `options` are read; `on_device` allows envs on the device.
    Envs with `wrappers` are not compiled. OptionsError if envs and networks are apart.
    """
    backend, wanted = options.backend, torch.device(getattr(options, "device", "cpu"))
    if backend in (None, "auto") and wanted.type != "cpu" and "wrappers" not in given:
        with suppress(ValueError):  # try compiled envs first
            make(1, backend="jit").close()
            backend = "cuda"
    if backend == "cuda" and not on_device:
        backend = "jit"
    elif backend == "cuda":
        given["device"] = str(wanted) if wanted.type != "cpu" else "cuda"
    envs = make(num_envs, backend=backend, **given)
    found = envs.device if is_on_device(envs) else wanted
    if found.type != wanted.type or wanted.index not in (None, found.index):
        envs.close()
        told = f"the envs are on {found}, and networks have to be there, too"
        raise OptionsError(f"--backend cuda with --device {wanted}: {told}")
    return envs


def is_on_device(envs: Any) -> bool:
    """Return whether these envs, or rows of agents, return tensors on their device."""
    return hasattr(envs, "device")
