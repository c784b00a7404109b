"""Networks for any space: from observations to vectors, and through layers to actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from vecenv.learn import Moments
from vecenv.train.options import OptionsError

__all__ = ["Choices", "Encoders", "Memory", "Normals", "Numbers", "Pictures", "linear", "mlp"]
__all__ += ["rectified", "sizes_of"]

# Convolutions (channels, size, stride), by the least number of cells on a picture's shorter side;
# sides of 5 to 96 become 1 to 9. First row: Mnih et al., 2015; last row: MinAtar.
_CONVOLUTIONS = (
    (36, ((32, 8, 4), (64, 4, 2), (64, 3, 1))),
    (18, ((32, 4, 2), (64, 4, 2), (64, 3, 1))),
    (12, ((32, 4, 2), (64, 3, 1))),
    (5, ((16, 3, 1),)),
)


class Choices:
    """K independent categorical distributions of logits (B, K, A); actions are int64 (B, K)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-probabilities (B,) of actions (B, K)."""
        return self.logits.log_softmax(-1).gather(-1, actions[..., None]).sum((-2, -1))

    def entropy(self) -> Tensor:
        """Return entropies (B,)."""
        log_p = self.logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum((-2, -1))

    def icdf(self, quantiles: Tensor) -> Tensor:
        """Return the actions (B, K) at quantiles (B, K) in 0..1."""
        sums = self.logits.softmax(-1).cumsum(-1)
        found = torch.searchsorted(sums, (quantiles * sums[..., -1])[..., None]).squeeze(-1)
        return found.clamp(max=sums.shape[-1] - 1)  # NaN: no count fits, and the loss reports it

    @property
    def mode(self) -> Tensor:
        """Return the likeliest actions (B, K)."""
        return self.logits.argmax(-1)


class Normals(Normal):
    """K independent normal distributions, (B, K); log-densities and entropies are sums, (B,)."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-densities (B,) of actions (B, K)."""
        return super().log_prob(value).sum(-1)

    def entropy(self) -> Tensor:
        """Return entropies (B,)."""
        return super().entropy().sum(-1)


def linear(num_inputs: int, num_outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Return a layer with orthogonal weights and zero bias."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Tanh(nn.Tanh):
    """`nn.Tanh`; in inference mode on the CPU by NumPy, which takes a fifth of the time."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cpu and input.dtype == torch.float32 and torch.is_inference_mode_enabled():
            return torch.from_numpy(np.tanh(input.numpy()))
        return super().forward(input)  # also where a user exports a policy


def mlp(*widths: int, gain: float) -> nn.Sequential:
    """Return orthogonal layers with tanh between them; `gain` is for the last one."""
    *inner, last = pairwise(widths)
    hidden = [part for a, b in inner for part in (linear(a, b), Tanh())]
    return nn.Sequential(*hidden, linear(*last, gain))


def rectified(*widths: int, layer: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
    """Return layers, each with a ReLU behind it."""
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (layer(a, b), nn.ReLU())))


class Memory(nn.GRUCell):
    """A GRU whose state (B, S) is also its output; an episode begins with state zero."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__(num_inputs, size)
        for name, parameter in self.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def after(self, x: Tensor, state: Tensor, is_first: Tensor) -> Tensor:
        """Return states (B, S) after x (B, F); rows with `is_first` (B,) start from zeros."""
        return self(x, state.masked_fill(is_first[:, None], 0.0))


class Numbers(nn.Module):
    """Numbers unchanged or normalised; choices one-hot: (B, ...) to (B, F).

    Choices below the first one (zeros in rows of dead agents) count as the first one.
    """

    def __init__(self, space: Any, normalizes: bool = False) -> None:
        super().__init__()
        self.choices: list[tuple[int, int]] = []  # for each: its first choice, and how many
        if isinstance(space, Discrete | MultiDiscrete):
            self.choices = list(zip(np.ravel(space.start).tolist(), sizes_of(space), strict=True))
        shape: Any = space.shape
        self.num_features = sum(n for _, n in self.choices) or math.prod(shape)
        self.moments = Moments(shape) if normalizes and not self.choices else None

    def forward(self, numbers: Tensor) -> Tensor:
        """Return vectors float32 (B, num_features)."""
        if not self.choices:
            x = numbers.float() if self.moments is None else self.moments(numbers.float())
            return x.flatten(1) if x.ndim > 1 else x[:, None]
        columns = zip(numbers.reshape(len(numbers), -1).long().unbind(1), self.choices, strict=True)
        found = [F.one_hot((x - start).clamp(min=0), n) for x, (start, n) in columns]
        return torch.cat(found, 1).float()


class Pictures(nn.Module):
    """Convolutions over pictures (B, H, W, C) or (B, C, H, W), whichever has fewer channels.

    Their layers depend on the shorter side, see docs/learning.md. uint8 is divided by 255.
    """

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.is_last = space.shape[-1] < space.shape[0]
        self.scale = 255.0 if space.dtype == np.uint8 else 1.0
        height, width, channels = np.roll(space.shape, 0 if self.is_last else -1).tolist()
        if (side := min(height, width)) < 5:
            wanted = "5 cells a side at least; --wrappers gymnasium.wrappers:FlattenObservation"
            raise OptionsError(f"pictures are {space.shape}, expected {wanted}")
        self.layers = nn.Sequential()
        for count, size, stride in next(rows for least, rows in _CONVOLUTIONS if side >= least):
            self.layers.extend([nn.Conv2d(channels, count, size, stride), nn.ReLU()])
            height, width, channels = *((n - size) // stride + 1 for n in (height, width)), count
        self.layers.append(nn.Flatten())
        self.num_features = channels * height * width

    def forward(self, image: Tensor) -> Tensor:
        """Return vectors float32 (B, num_features)."""
        image = image.permute(0, 3, 1, 2) if self.is_last else image
        return self.layers(image.float() / self.scale)


class Encoders(nn.ModuleDict):
    """An encoder for an observation ("obs"), or one per part of a Dict, except "action_mask".

    With `normalizes`, numbers outside of pictures are scaled to mean 0 and variance 1.
    """

    def __init__(self, space: Any, normalizes: bool = False) -> None:
        super().__init__()
        for name, part in _parts(space).items():
            if not isinstance(part, Box | Discrete | MultiDiscrete | MultiBinary):
                told = f"the observation {name!r} is {part}, expected Box, Discrete, MultiDiscrete"
                raise OptionsError(f"{told}, MultiBinary or a Dict of these; use a wrapper")
            if isinstance(part, Box) and len(part.shape) == 3:
                self[name] = Pictures(part)
            elif name != "action_mask":
                self[name] = Numbers(part, normalizes)
        encoders: Any = self.values()
        self.num_features = sum(encode.num_features for encode in encoders)
        self.has_pictures = any(isinstance(encode, Pictures) for encode in encoders)

    def forward(self, obs: Any) -> Tensor:
        """Return vectors (B, num_features) of observations (B, ...), or a dict of these."""
        encoded = [encode(_parts(obs)[name]) for name, encode in self.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, 1)

    def absorb(self, obs: Any, **ranks: Any) -> None:
        """Update the moments for normalising with observations (B, ...)."""
        for name, encode in self.items():
            if (moments := getattr(encode, "moments", None)) is not None:
                moments.update(_parts(obs)[name], **ranks)


def _parts(obs: Any) -> Mapping[str, Any]:
    """Return the parts of an observation, or of its space, by name."""
    return obs if isinstance(obs, Mapping) else {"obs": obs}


def sizes_of(space: Any) -> list[int]:
    """Return the number of choices for each part of an action, 1 for a real number."""
    if isinstance(space, Discrete | MultiDiscrete):
        return np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return [1] * math.prod(space.shape)
    wanted = "Discrete, MultiDiscrete or a Box of floats; use a wrapper"
    raise OptionsError(f"actions are {space}, expected {wanted}")
