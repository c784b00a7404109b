"""Envs from options: where they are stepped, with which wrappers, and what they tell of that."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from vecenv import VecEnv, make_vec
from vecenv.train.options import EnvOptions, OptionsError

__all__ = ["is_on_device", "make_envs", "named", "placed", "require_device"]


def require_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        OptionsError: torch finds none.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise OptionsError(f"--device {device}: torch finds no such device; leave it out")


def placed(
    make: Callable[..., Any], options: Any, *, on_device: bool, can_compile: bool = True
) -> dict[str, Any]:
    """Return `backend` and `device` for `make_vec` or `make_vec_agents`.

    Compiled envs are where the networks are, unless a backend is named; those to play in are not.

    Args:
        make: Makes one env by the keyword argument `backend`; ValueError if it is not compiled.
        options: `backend` and `device` of them count.
        on_device: Whether the envs may be on a device.
        can_compile: Whether the env may be a compiled one.
    """
    backend, has_device = options.backend, torch.device(options.device).type != "cpu"
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
    return {"backend": "cuda", "device": options.device if has_device else "cuda"}


def make_envs(
    options: EnvOptions,
    num_envs: int,
    *,
    on_device: bool = False,
    wrappers: tuple[str, ...] = (),
    **vector_kwargs: Any,
) -> VecEnv:
    """Make the envs that options describe.

    Args:
        options: `env_id`, `env_kwargs`, `backend` and, if there is one, `device`.
        num_envs: How many.
        on_device: Whether compiled ones may be where the networks are.
        wrappers: Of every env, "module:name" each, the innermost first.
        **vector_kwargs: For `make_vec`, `autoreset_mode` and `vector_kwargs` among them.

    Raises:
        OptionsError: A wrapper can't be imported, or the envs are on another device than networks.
    """
    kwargs: Any = options.env_kwargs
    given: dict[str, Any] = {"backend": options.backend}
    device = getattr(options, "device", "cpu")
    if hasattr(options, "device"):
        given = placed(
            lambda backend: make_vec(options.env_id, 1, backend=backend, **kwargs),
            options,
            on_device=on_device,
            can_compile=not wrappers,
        )
    if wrappers:
        given["wrappers"] = [named(wrapper) for wrapper in wrappers]
    envs = make_vec(options.env_id, num_envs, **given, **vector_kwargs, **kwargs)
    if is_on_device(envs):
        found: Any = getattr(envs, "device", None)
        wanted = torch.device(device)  # "cuda" is the current one
        if found.type != wanted.type or wanted.index not in (None, found.index):
            envs.close()
            raise OptionsError(
                f"--backend cuda with --device {device}: the envs are on {found}, and networks "
                "have to be there, too"
            )
    return envs


def is_on_device(envs: Any) -> bool:
    """Whether results of these envs are tensors where they are computed."""
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
