"""Tensors that lie on the device of the rows, to be added without the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from buffers.core.arguments import tree_leaves
from buffers.core.columns import torch_dtype
from buffers.core.rows import RowLayout

__all__ = ["read_tensors"]


def read_tensors(
    columns: Mapping[str, Any], layout: RowLayout, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Columns by path, if all are tensors on the device and as they are stored; else None."""
    own = ("actions", "rewards", "terminations", "truncations", *layout.extras)
    if columns.keys() != {"obs", "next_obs", *own} or not len(columns["rewards"]):
        return None
    count, fields = len(columns["rewards"]), layout.fields
    found: dict[str, Any] = {}
    kinds = [(name, columns[name], fields[name]) for name in own]
    for prefix in ("", "next_"):
        leaves = tree_leaves(layout.observation_space, columns[f"{prefix}obs"], f"{prefix}obs")
        paired = zip(layout.obs, leaves, strict=True)
        kinds += [(prefix + path, leaf, fields[path]) for path, leaf in paired]
    for path, tensor, field in kinds:
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            return None
        if tensor.dtype != torch_dtype(field.dtype) or tensor.shape != (count, *field.shape):
            return None
        found[path] = tensor.detach()
    return found
