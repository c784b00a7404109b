"""Envs from options: where they are stepped, with which wrappers, and what they tell of that."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from vecenv import VecEnv, make_vec
from vecenv.train.options import EnvOptions, OptionsError

__all__ = ["is_on_device", "make_envs", "named", "placed"]


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

    def make(num_envs: int = 1, **given: Any) -> VecEnv:
        return make_vec(options.env_id, num_envs, **given, **options.env_kwargs)

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
