"""Parts of a training that have a state: how it is taken, compared and restored, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from vecenv.core.errors import EnvStateError
from vecenv.learn.checkpoint import CheckpointError, why_not_numpy_state

__all__ = ["describe_parts", "mismatch", "restore_part"]


def describe_parts(
    parts: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return kinds and states of parts by name, and why some envs have none.

    Raises:
        CheckpointError: A module has NaN or infinity in it.
    """
    kinds, states, unsaved = {}, {}, {}
    for name, part in parts.items():
        kind = _kind_of(part)
        if kind is not None:
            kinds[name] = kind
        try:
            states[name] = _state_of(name, part)
        except EnvStateError as error:
            states[name], unsaved[name] = None, str(error)
    return kinds, states, unsaved


def mismatch(part: Any, kind: Any, state: Any) -> str | None:
    """Return what a checkpoint has that does not fit a part, and what was expected; or None."""
    own = _kind_of(part)
    if own is None:
        return f"a state for {type(part).__name__}, which has no load_state_dict"
    for key in own:
        found = kind.get(key) if isinstance(kind, dict) else None
        if found != own[key]:
            return f"{key} {found!s:.300}, expected {own[key]!s:.300}"
    if isinstance(part, nn.Module):
        return _other_tensors(part, state)
    if isinstance(part, torch.optim.Optimizer):
        return _other_optimizer(part, state)
    if isinstance(part, np.random.Generator):
        return why_not_numpy_state(state)
    return None


def restore_part(part: Any, state: Any) -> str | None:
    """Bring a part into a state; return why that can't be, of envs that have to be reset."""
    if isinstance(part, VectorEnv):
        try:
            _stateful(part).load_state_dict(state)
        except EnvStateError as error:
            return str(error)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    else:
        part.load_state_dict(state)
    return None


def _kind_of(part: Any) -> dict[str, Any] | None:
    """What a part has to have in common with the one of a checkpoint; None of plain values."""
    if isinstance(part, nn.Module):
        return {"kind": "module"}
    if isinstance(part, VectorEnv):
        return {
            "kind": "envs",
            "number of envs": part.num_envs,
            "observation space": str(part.single_observation_space),
            "action space": str(part.single_action_space),
            "autoreset mode": str(part.metadata.get("autoreset_mode")),
        }
    if isinstance(part, torch.Generator):
        return {"kind": "torch generator", "device": part.device.type}
    if isinstance(part, np.random.Generator):
        return {"kind": f"NumPy generator {type(part.bit_generator).__name__}"}
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return {"kind": "state"}
    return None


def _state_of(name: str, part: Any) -> Any:
    if isinstance(part, nn.Module):
        state = part.state_dict()
        for tensor_name, tensor in state.items():
            is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if is_float and not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"{name} has NaN or infinity in {tensor_name}, so no checkpoint is written; "
                    "the one before is kept: go on from it with other options (a lower learning "
                    "rate)"
                )
        return state
    if isinstance(part, VectorEnv):
        return _stateful(part).state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    return part if _kind_of(part) is None else part.state_dict()


def _stateful(envs: Any) -> Any:
    """Return vector envs if they have a state.

    Raises:
        EnvStateError: They haven't.
    """
    if hasattr(envs, "state_dict") and hasattr(envs, "load_state_dict"):
        return envs
    raise EnvStateError(f"{type(envs).__name__} has no state_dict")


def _other_tensors(module: nn.Module, state: Any) -> str | None:
    """Say in what the tensors of a state differ from a module's."""
    own = module.state_dict()
    found = dict(state) if isinstance(state, dict) else {}
    if missing := [name for name in own if name not in found]:
        return f"no {missing[0]}, which the module has"
    if unknown := [name for name in found if name not in own]:
        return f"{unknown[0]}, which the module lacks"
    for name, tensor in own.items():
        if (had := _shown(found[name])) != (has := _shown(tensor)):
            return f"{name} {had}, expected {has}"
    return None


def _other_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> str | None:
    """Say in what a state differs from an optimizer's parameters.

    torch looks at the number of parameters alone, and its fused kernels not even at lengths.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        indices = [index for group in state["param_groups"] for index in group["params"]]
        tensors = [dict(state["state"].get(index, {})) for index in indices]
    except (LookupError, TypeError, ValueError, AttributeError):
        return "something else than an optimizer's state"
    if len(tensors) != len(parameters):
        return f"{len(tensors)} parameters, expected {len(parameters)}"
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name, value in own.items():
            if name != "params" and not _is_like(group.get(name), value):
                return f"{name} {group.get(name)!s:.100}, expected something like {value!s:.100}"
    for number, (parameter, own) in enumerate(zip(parameters, tensors, strict=True)):
        for name, tensor in own.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            is_count = name == "step" and tensor.numel() == 1 and tensor.dtype == torch.float32
            if not is_count and (name == "step" or tensor.shape != parameter.shape):
                expected = "float32 ()" if name == "step" else f"{tuple(parameter.shape)}"
                return f"{name} {_shown(tensor)} for parameter {number}, expected {expected}"
    return None


def _is_like(value: Any, own: Any) -> bool:
    """Whether a setting may take the place of another one."""
    if isinstance(own, tuple | list):
        is_nest = isinstance(value, tuple | list) and len(value) == len(own)
        return is_nest and all(map(_is_like, value, own))
    kinds = int | float | torch.Tensor
    if isinstance(own, kinds) and not isinstance(own, bool):
        return isinstance(value, kinds) and not isinstance(value, bool)
    return value is None or own is None or type(value) is type(own)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
