"""The options that trainers share, each of them once, and the envs that they describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from vecenv import VecEnv, make_vec

__all__ = ["EnvOptions", "GradientOptions", "OptionsError", "RunOptions", "is_on_device"]
__all__ += ["make_envs", "named", "placed"]


class OptionsError(ValueError):
    """Options that fit neither the env, nor the machine, nor each other; the message says which."""


@dataclass
class RunOptions:
    """Options of every trainer."""

    total_steps: int = 100_000  # env steps to train for, at most; 0 evaluates only
    learning_rate: float = 1e-3  # of Adam at the start
    gamma: float = 0.99  # discount
    seed: int = 1  # the same seed gives the same curve
    torch_threads: int = 1  # of torch; more are far slower where cores are busy
    eval_episodes: int = 100  # episodes of the deterministic policy at the end
    save: Path = Path("runs")  # folder for policy, checkpoints, learning curve and scalars
    save_every: int = 0  # env steps between two checkpoints; 0: at the end, or when stopped
    resume: bool = False  # go on from the last checkpoint in that folder
    overwrite: bool = False  # or delete an earlier run in it
    tensorboard: bool = False  # write scalars for TensorBoard
    profile: bool = False  # report after the training where its time went


@dataclass
class GradientOptions:
    """How gradients are computed, and where."""

    device: str = "cpu"  # where the networks are: cpu, cuda; there compiled envs are, too
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products in the gradient
    compile: Literal["auto", "on", "off"] = "auto"  # the gradient; "auto": if there are many rows


@dataclass
class EnvOptions:
    """Which envs a single agent acts in."""

    env_id: str = "CartPole-v1"  # registered id, also "module:id"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the env
    num_envs: int = 8  # envs stepped side by side, by all processes of torchrun together
    backend: str | None = None  # of vecenv.make_vec; "jit" keeps compiled envs on the CPU beside
    # networks on a device; with "ray" the policy of PPO acts in actors
    num_workers: int | None = None  # processes (async) or actors (ray) for the envs
    wrappers: tuple[str, ...] = ()  # of every env, "module:name" each, the innermost first
    log_infos: tuple[str, ...] = ()  # numbers in infos whose means are logged, by their names


def placed(
    make: Callable[..., Any], options: Any, *, on_device: bool, can_compile: bool = True
) -> dict[str, Any]:
    """Return `backend` and `device` for `make_vec` or `make_vec_agents`.

    Compiled envs are where the networks are, unless a backend is named; those to play in are not.

    Args:
        make: Makes one env by the keyword argument `backend`; ValueError if it is not compiled.
        options: `backend` and, if there is one, `device` of them count.
        on_device: Whether the envs may be on a device.
        can_compile: Whether the env may be a compiled one.
    """
    backend, device = options.backend, getattr(options, "device", "cpu")
    has_device = torch.device(device).type != "cpu"
    if backend in (None, "auto") and has_device and can_compile:
        try:  # which makes none of another kind
            make(backend="jit").close()
        except ValueError:
            return {"backend": backend}
        backend = "cuda"
    if backend != "cuda":
        return {"backend": backend}
    if not on_device:
        return {"backend": "jit"}
    return {"backend": "cuda", "device": device if has_device else "cuda"}


def make_envs(
    options: EnvOptions, num_envs: int, *, on_device: bool = False, **vector_kwargs: Any
) -> VecEnv:
    """Make the envs that options describe.

    Args:
        options: Those of `EnvOptions` and, if there is one, `device`.
        num_envs: How many.
        on_device: Whether compiled ones may be where the networks are.
        **vector_kwargs: For `make_vec`, `autoreset_mode` and `vector_kwargs` among them.

    Raises:
        OptionsError: A wrapper can't be imported, or the envs are on another device than networks.
    """
    kwargs: Any = options.env_kwargs

    def make(num_envs: int = 1, **given: Any) -> VecEnv:
        return make_vec(options.env_id, num_envs, **given, **kwargs)

    given = placed(make, options, on_device=on_device, can_compile=not options.wrappers)
    if options.wrappers:
        given["wrappers"] = [named(wrapper) for wrapper in options.wrappers]
    envs: Any = make(num_envs, **given, **vector_kwargs)
    device = getattr(options, "device", "cpu")
    wanted = torch.device(device)  # "cuda" is the current one
    if is_on_device(envs) and (
        envs.device.type != wanted.type or wanted.index not in (None, envs.device.index)
    ):
        envs.close()
        raise OptionsError(
            f"--backend cuda with --device {device}: the envs are on {envs.device}, and networks "
            "have to be there, too"
        )
    return envs


def is_on_device(envs: Any) -> bool:
    """Whether results of these envs, or rows of agents, are tensors where they are computed."""
    return hasattr(envs, "device")


def named(name: str) -> Any:
    """Import what "module:name" names.

    Raises:
        OptionsError: There is no such thing.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionsError(f"--wrappers {name}: {error}; expected module:name") from None
