"""Policies of PPO as archives of arrays, which are loaded without torch, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vecenv.files import load_arrays, save_arrays
from vecenv.train.networks import Numbers
from vecenv.train.options import OptionsError

__all__ = ["load_agent", "save_agent"]


def save_agent(file: Path, agent: Any, identity: dict[str, Any]) -> None:
    """Write the agent; `vecenv evaluate` plays it, without torch, if it is one of tanh layers."""
    tensors = {name: tensor.cpu().numpy() for name, tensor in agent.state_dict().items()}
    saved = {"kind": agent.kind, "tensors": tensors, "made_for": identity or None}
    encode = next(iter(agent.encoders.values()))
    is_plain = len(agent.encoders) == 1 and len(agent.trunk) == 0 and agent.memory is None
    is_plain = is_plain and isinstance(agent.actor, nn.Sequential)
    if is_plain and isinstance(encode, Numbers) and not encode.choices:
        names = [name for name in tensors if name.startswith("actor.")]
        saved["layers"] = [
            [tensors[weight].T, tensors[bias]]
            for weight, bias in zip(names[::2], names[1::2], strict=True)
        ]
        saved["scale"] = None
        if encode.moments is not None:
            mean, std = encode.moments.mean, encode.moments.std()
            saved["scale"] = [x.flatten().cpu().numpy() for x in (mean, std)]
    save_arrays(file, saved)


def load_agent(file: Path, agent: Any, identity: dict[str, Any]) -> None:
    """Take over the weights of an earlier run."""
    saved = load_arrays(file)
    if saved["kind"] != agent.kind:
        raise OptionsError(f"{file} is for {saved['kind']}; expected {agent.kind}")
    if (made_for := saved.get("made_for") or identity) != identity:
        print(f"{file} was trained in {made_for}; it goes on in {identity}")
    agent.load_state_dict({name: torch.from_numpy(a) for name, a in saved["tensors"].items()})
