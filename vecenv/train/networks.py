"""Networks for any space: observations into vectors, vectors through hidden layers, into actions.

```
observation, or each part of a Dict --- encode ---> features of all parts side by side
    numbers: as they are, or normalised             |
    choices: a one and zeros                        v
    pictures: convolutions                      hidden layers ---> actions, values
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from vecenv.learn import Moments
from vecenv.train.options import OptionsError

__all__ = ["Choices", "Encoders", "Memory", "Normals", "Numbers", "Pictures", "Tanh", "linear"]
__all__ += ["mlp", "rectified", "sizes_of"]

# Convolutions (channels, size, stride) for pictures whose shorter side has at least so many cells.
# Of a side of 5 to 96 cells they leave 1 to 9. The first row is that of Mnih et al., "Human-level
# control through deep reinforcement learning", 2015, the last that of Young and Tian, "MinAtar".
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
        return found.clamp(max=sums.shape[-1] - 1)  # of NaN there is none, which the loss will say

    @property
    def mode(self) -> Tensor:
        """The likeliest actions (B, K)."""
        return self.logits.argmax(-1)


class Normals(Normal):
    """K independent normal distributions; actions are float32 (B, K)."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-densities (B,) of actions (B, K)."""
        return super().log_prob(value).sum(-1)

    def entropy(self) -> Tensor:
        """Return entropies (B,)."""
        return super().entropy().sum(-1)


class Tanh(nn.Tanh):
    """`nn.Tanh`; of many numbers on a processor, while nothing is differentiated, NumPy's.

    NumPy takes a tenth of the time for each number, and torch has less to do for a few.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the tangents, in the shape of the input."""
        is_small = input.numel() <= 1024 or input.device.type != "cpu"
        if is_small or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        return torch.from_numpy(np.tanh(input.numpy()))


def linear(num_inputs: int, num_outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Return a layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(*widths: int, gain: float) -> nn.Sequential:
    """Return orthogonal layers with tanh between them; `gain` is of the last one."""
    *inner, last = pairwise(widths)
    hidden = [part for a, b in inner for part in (linear(a, b), Tanh())]
    return nn.Sequential(*hidden, linear(*last, gain))


def rectified(*widths: int, layer: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
    """Return layers with a ReLU behind each."""
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (layer(a, b), nn.ReLU())))


class Memory(nn.Module):
    """A GRU or LSTM; its state (B, S) is one vector, of which the first numbers are the output."""

    def __init__(self, num_inputs: int, size: int, kind: str) -> None:
        super().__init__()
        self.is_lstm, self.size = kind == "lstm", size
        self.state_size = 2 * size if self.is_lstm else size
        self.cell = (nn.LSTMCell if self.is_lstm else nn.GRUCell)(num_inputs, size)
        for name, parameter in self.cell.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)

    def forward(self, x: Tensor, state: Tensor, is_first: Tensor) -> Tensor:
        """Return states (B, S) after x (B, F); where `is_first` (B,) it begins anew."""
        state = state.masked_fill(is_first[:, None], 0.0)
        if self.is_lstm:
            return torch.cat(self.cell(x, tuple(state.chunk(2, 1))), 1)
        return self.cell(x, state)

    def features(self, state: Tensor) -> Tensor:
        """Return the outputs (B, size) of states (B, S)."""
        return state[:, : self.size]


class Numbers(nn.Module):
    """Numbers as they are, or normalised; choices as a one for each and zeros: (B, ...) to (B, F).

    Choices below the first one, as zeros in rows of agents that are dead, are taken for that one.
    """

    def __init__(self, space: Any, normalizes: bool = False) -> None:
        super().__init__()
        self.choices: list[tuple[int, int]] = []  # the first of them, how many
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

    How many, and their strides, follow from the shorter side, 5 at least, so that 1 to 9 cells of
    it are left; `docs/learning.md` has a table. uint8 is divided by 255.
    """

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.is_last = space.shape[-1] < space.shape[0]
        self.scale = 255.0 if space.dtype == np.uint8 else 1.0
        height, width, channels = np.roll(space.shape, 0 if self.is_last else -1).tolist()
        side = min(height, width)
        if side < 5:
            wanted = "5 cells a side at least; --wrappers gymnasium.wrappers:FlattenObservation"
            raise OptionsError(f"pictures are {space.shape}, expected {wanted}")
        modules: list[nn.Module] = []
        for count, size, stride in next(rows for least, rows in _CONVOLUTIONS if side >= least):
            modules += [nn.Conv2d(channels, count, size, stride), nn.ReLU()]
            height, width, channels = *((n - size) // stride + 1 for n in (height, width)), count
        self.layers = nn.Sequential(*modules, nn.Flatten())
        self.num_features = channels * height * width

    def forward(self, image: Tensor) -> Tensor:
        """Return vectors float32 (B, num_features)."""
        image = image.permute(0, 3, 1, 2) if self.is_last else image
        return self.layers(image.float() / self.scale)


class Encoders(nn.ModuleDict):
    """An encoder for an observation ("obs"), or one for each part of a Dict but "action_mask".

    If it normalizes, numbers that are no pictures get mean 0 and variance 1. OptionsError for a
    part that is none of Box, Discrete, MultiDiscrete and MultiBinary.
    """

    def __init__(self, space: Any, normalizes: bool = False) -> None:
        parts = dict(space) if isinstance(space, Dict) else {"obs": space}
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Box) and len(part.shape) == 3:
                self[name] = Pictures(part)
            elif isinstance(part, Box | Discrete | MultiDiscrete | MultiBinary):
                if name != "action_mask":
                    self[name] = Numbers(part, normalizes)
            else:
                told = f"the observation {name!r} is {part}, expected Box, Discrete, MultiDiscrete"
                raise OptionsError(f"{told}, MultiBinary or a Dict of these; use a wrapper")
        encoders: Any = self.values()
        self.num_features = sum(encode.num_features for encode in encoders)
        self.has_pictures = any(isinstance(encode, Pictures) for encode in self.values())

    def forward(self, obs: Any) -> Tensor:
        """Return vectors (B, num_features) of observations (B, ...), or a dict of these."""
        parts = obs if isinstance(obs, Mapping) else {"obs": obs}
        encoded = [encode(parts[name]) for name, encode in self.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, 1)

    def absorb(self, obs: Any, **ranks: Any) -> None:
        """Take observations (B, ...) into the moments that normalise them."""
        parts = obs if isinstance(obs, Mapping) else {"obs": obs}
        for name, encode in self.items():
            if isinstance(encode, Numbers) and encode.moments is not None:
                encode.moments.update(parts[name], **ranks)


def sizes_of(space: Any) -> list[int]:
    """Return how many choices each part of an action has, 1 for a real number."""
    if isinstance(space, Discrete | MultiDiscrete):
        return np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return [1] * math.prod(space.shape)
    wanted = "Discrete, MultiDiscrete or a Box of floats; use a wrapper"
    raise OptionsError(f"actions are {space}, expected {wanted}")
