"""Eigenvectors of a graph Laplacian, learned from a random walk: |cosine| above 0.98, a minute.

    python examples/laplacian.py

A compiled env is walked at random, an EpisodicReplayBuffer draws pairs of positions a geometric
number of steps apart, and a network learns the first eigenvectors from them (docs/laplacian.md), as
in Gomez et al., "Proper Laplacian Representation Learning", ICLR 2024 (arXiv 2310.10833).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from buffers import EpisodicReplayBuffer, TransitionWriter
from vecenv.jit import EnvKernels, JitVectorEnv, pack_record
from vecenv.jit.random import integers

# Rooms of different sizes, so that no two of the first 13 eigenvalues are close. `#` is a wall.
ROOMS = """
###############
#.............#
#.......#.....#
#.......#.....#
#.......#.....#
#.......##.####
#.#######.....#
#.............#
#.......#.....#
#.......#.....#
###############
"""
IS_WALL = np.array([[char == "#" for char in line] for line in ROOMS.split()])
PENALTY, DUAL_RATE = 2.0, 0.02  # b, of what is not orthonormal; of the gradient ascent on B
CELLS = np.argwhere(~IS_WALL).astype(np.int32)  # (S, 2), rows and columns


@dataclass
class Options:
    num_dims: int = 10  # eigenvectors to learn, the constant one included
    discount: float = 0.9  # pairs are k steps apart with probability ~ discount^k; 0: always one
    num_envs: int = 500  # envs stepped side by side, 10 episodes of 200 steps each
    num_updates: int = 25_000  # gradient steps
    batch_size: int = 256  # pairs in one of them
    learning_rate: float = 2e-3  # of Adam at the start; it falls linearly to 0
    seed: int = 1  # the same seed gives the same eigenvectors
    save: Path = Path("runs/laplacian")  # folder for the picture


def reset(state, rng, params):
    cell = integers(rng, params.cells.shape[0])  # begin anywhere
    state.row, state.column = params.cells[cell, 0], params.cells[cell, 1]


def step(state, action, rng, params):
    row = state.row + (action == 2) - (action == 3)
    column = state.column + (action == 0) - (action == 1)
    if not params.is_wall[row, column]:  # else it stays
        state.row, state.column = row, column
    return 0.0, False, False


def observe(state, out, params):
    out[0] = 2 * state.row / (params.is_wall.shape[0] - 1) - 1
    out[1] = 2 * state.column / (params.is_wall.shape[1] - 1) - 1


KERNELS = EnvKernels(
    name="Rooms",
    state_dtype=[("row", np.int32), ("column", np.int32)],
    observation_space=Box(-1.0, 1.0, (2,), np.float32),
    action_space=Discrete(4),
    reset=reset,
    step=step,
    observe=observe,
)
PARAMS = pack_record(is_wall=IS_WALL.astype(np.int8), cells=CELLS)


def placed(repeats: int) -> JitVectorEnv:
    """Return envs that are in each cell `repeats` times."""
    envs = JitVectorEnv(KERNELS, repeats * len(CELLS), params=PARAMS)
    envs.reset(seed=0)
    envs.states["row"], envs.states["column"] = np.repeat(CELLS, repeats, axis=0).T
    return envs


def transition_matrix() -> np.ndarray:
    """Return P (S, S) of the uniformly random policy, by every action in every cell."""
    envs, count, numbers = placed(4), len(CELLS), np.full(IS_WALL.shape, -1)
    envs.step(np.tile(np.arange(4), count))
    numbers[tuple(CELLS.T)] = np.arange(count)
    matrix = np.zeros((count, count))
    reached = np.repeat(np.arange(count), 4), numbers[envs.states["row"], envs.states["column"]]
    np.add.at(matrix, reached, 0.25)
    return matrix


def offset_weights(discount: float, episode_steps: int) -> np.ndarray:
    """Return the shares (T - 1,) of pairs 1, ... T - 1 steps apart among those drawn."""
    powers = float(discount) ** np.arange(episode_steps - 1)
    return powers * np.cumsum(1 / np.cumsum(powers)[::-1])[::-1] / (episode_steps - 1)


def exact_eigensystem(matrix: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values (S,) and vectors (S, S), of mean square 1, of 1 - sum_k weights[k-1] P^k."""
    found, vectors = np.linalg.eigh(matrix)
    values = 1 - np.polynomial.polynomial.polyval(found, np.concatenate([[0.0], weights]))
    order = np.argsort(values, kind="stable")
    return values[order], vectors[:, order] * math.sqrt(len(matrix))


def collect(num_envs: int, num_rounds: int, length: int, seed: int) -> EpisodicReplayBuffer:
    """Walk at random for `num_rounds` episodes of each env; return a buffer with the episodes."""
    kwargs: Any = {"max_episode_steps": length, "autoreset_mode": "SameStep"}
    envs, size = JitVectorEnv(KERNELS, num_envs, params=PARAMS, **kwargs), num_rounds * length
    spaces = KERNELS.observation_space, KERNELS.action_space
    buffer = EpisodicReplayBuffer(size * num_envs, *spaces, num_envs=num_envs, seed=seed)
    writer, rng = TransitionWriter(envs, buffer), np.random.default_rng(seed)
    writer.reset(envs.reset(seed=seed)[0])
    for actions in rng.integers(4, size=(size, num_envs)):
        writer.step(actions, *envs.step(actions))
    return buffer


class Network(nn.Sequential):
    """Observations (B, 2) to u (B, d). As cosines, coordinates let a small net draw walls."""

    def __init__(self, num_dims: int) -> None:
        first, second, last = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, num_dims)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last)
        self.waves = 0.5 * math.pi * torch.arange(1, 7)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.cos((input[..., None] + 1) * self.waves).flatten(1))


def learn(network: Network, buffer: EpisodicReplayBuffer, options: Options) -> Tensor:
    """Make gradient steps down for the network and up for B; return B."""
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    duals, one = torch.zeros(options.num_dims, options.num_dims), torch.eye(options.num_dims)
    for update in range(options.num_updates):
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - update / options.num_updates)
        batch = buffer.sample(options.batch_size, options.discount)
        here, later = network(torch.cat([batch.obs, batch.future_obs])).chunk(2)
        graph_loss = 0.5 * (here - later).square().sum(1).mean()  # of the sum of <u_i, L u_i>
        # The two halves of the pairs are independent, so e * e has the mean that e^2 should have.
        halves = map(torch.cat, zip(here.chunk(2), later.chunk(2), strict=True))
        first, second = ((u.T @ u.detach() / len(u) - one).tril() for u in halves)  # of e (d, d)
        mean, penalty = 0.5 * (first + second), PENALTY * (first * second).sum()
        optimizer.zero_grad()
        (graph_loss + (duals * mean).sum() + penalty).backward()
        optimizer.step()
        duals.add_(mean.detach(), alpha=DUAL_RATE)
        if update % 2500 == 2499:
            print(f"{update + 1} updates: graph loss {graph_loss.item():.3f}", flush=True)
    return duals


def draw(values: np.ndarray, exact: np.ndarray, learned: np.ndarray, path: Path) -> None:
    """Draw the exact eigenvectors over the rooms, and below each the learned one."""
    from matplotlib.figure import Figure  # pip install "vecenv[plots]"

    figure = Figure(figsize=(1.5 * len(values), 2.4), layout="constrained")
    axes = figure.subplots(2, len(values), squeeze=False)
    learned = learned * np.sign((learned * exact).sum(0))  # an eigenvector has no sign of its own
    for axis, k in zip(axes.flat, 2 * [*range(len(values))], strict=True):
        grid = np.full(IS_WALL.shape, np.nan)
        grid[tuple(CELLS.T)] = (exact if axis in axes[0] else learned)[:, k]
        axis.set(xticks=[], yticks=[], facecolor="0.3", title=f"λ = {values[k]:.3f}")
        axis.imshow(grid, cmap="RdBu", vmin=-2.5, vmax=2.5)
    figure.savefig(path, dpi=150)


def main(options: Options) -> np.ndarray:
    """Collect, learn, compare, draw; return |cos| (d,)."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    found = exact_eigensystem(transition_matrix(), offset_weights(options.discount, 200))
    values, exact = (part[..., : options.num_dims] for part in found)
    network, buffer = Network(options.num_dims), collect(options.num_envs, 10, 200, options.seed)
    duals = learn(network, buffer, options)
    with torch.inference_mode():
        learned = network(torch.from_numpy(placed(1).observe().copy())).double().numpy()
    cosines = np.abs((learned * exact).mean(0)) / (learned**2).mean(0) ** 0.5
    options.save.mkdir(parents=True, exist_ok=True)
    draw(values, exact, learned, options.save / "laplacian.png")
    print("eigenvalues, learned ones:", values, -0.5 * duals.diagonal().numpy(), sep="\n")
    print(f"|cosines|: {cosines.round(4)}, lowest {cosines.min():.4f}; see {options.save}")
    return cosines


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
