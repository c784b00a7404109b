"""Learn the slow modes of a random walk through four rooms: eigenvectors of the graph Laplacian.

    python examples/laplacian.py

A compiled env is walked at random, an EpisodicReplayBuffer draws pairs of positions a geometric
number of steps apart, and a network of the coordinates learns from them the first d eigenvectors,
which are compared with the exact ones.

The objective is the augmented Lagrangian one of Gomez, Bowling and Machado, "Proper Laplacian
Representation Learning", ICLR 2024 (arXiv 2310.10833). Over dual variables B, lower triangular,

    max_B min_u  sum_i <u_i, L u_i> + sum_{k<=j} B_jk e_jk + b sum_{k<=j} e_jk^2,

    e_jk = <u_j, [u_k]> - 1{j=k}

where [.] stops the gradient, so that u_j gives way to those before it and not they to it.
"""

import math
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from buffers import EpisodicReplayBuffer, TransitionWriter
from vecenv.jit import EnvKernels, JitVectorEnv, pack_record
from vecenv.jit.random import integers

# Rooms of different sizes, so that no two of the first 13 eigenvalues are close.
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


@dataclass
class Options:
    num_dims: int = 10  # eigenvectors to learn, the constant one included
    discount: float = 0.9  # pairs are k steps apart with probability ~ discount^k; 0: always one
    num_envs: int = 500  # envs stepped side by side
    num_episodes: int = 5000  # to collect; each begins anywhere with equal probability
    episode_steps: int = 200  # steps of an episode
    num_updates: int = 25_000  # gradient steps
    batch_size: int = 256  # pairs in one of them
    learning_rate: float = 2e-3  # of Adam at the start; it falls linearly to 0
    dual_rate: float = 0.02  # of the gradient ascent on B
    penalty: float = 2.0  # b, of what is not orthonormal
    num_waves: int = 6  # cosines of each coordinate that the network sees, of 1/2, 1, ... periods
    hidden: tuple[int, ...] = (64, 64)  # units of the ReLU layers
    seed: int = 1  # the same seed gives the same eigenvectors
    torch_threads: int = 1  # more do not pay for batches so small
    save: Path = Path("runs/laplacian")  # folder for the eigenvectors and their picture


def reset(state, rng, params):
    """Begin anywhere."""
    cell = integers(rng, params.cells.shape[0])
    state.row, state.column = params.cells[cell, 0], params.cells[cell, 1]


def step(state, action, rng, params):
    """Walk right, left, down or up; whoever would walk into a wall stays."""
    row = state.row + (action == 2) - (action == 3)
    column = state.column + (action == 0) - (action == 1)
    if not params.is_wall[row, column]:
        state.row, state.column = row, column
    return 0.0, False, False


def observe(state, out, params):
    """Write row and column, each scaled to -1..1."""
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


class Rooms:
    """A map: `#` is a wall, `.` a cell. The border must be wall."""

    def __init__(self, drawing: str = ROOMS) -> None:
        self.is_wall = np.array([[char == "#" for char in line] for line in drawing.split()])
        self.cells = np.argwhere(~self.is_wall).astype(np.int32)  # (S, 2), rows and columns
        self.params = pack_record(is_wall=self.is_wall.astype(np.int8), cells=self.cells)

    def make_envs(self, num_envs: int, **kwargs: Any) -> JitVectorEnv:
        """Make envs in these rooms."""
        return JitVectorEnv(KERNELS, num_envs, params=self.params, **kwargs)

    def transition_matrix(self) -> np.ndarray:
        """Return P (S, S) of the uniformly random policy, by every action in every cell."""
        num_cells = len(self.cells)
        envs = self.make_envs(4 * num_cells)
        envs.reset(seed=0)
        envs.states["row"], envs.states["column"] = np.repeat(self.cells, 4, axis=0).T
        envs.step(np.tile(np.arange(4), num_cells))
        numbers = np.full(self.is_wall.shape, -1)
        numbers[tuple(self.cells.T)] = np.arange(num_cells)
        matrix = np.zeros((num_cells, num_cells))
        reached = numbers[envs.states["row"], envs.states["column"]]
        np.add.at(matrix, (np.repeat(np.arange(num_cells), 4), reached), 0.25)
        envs.close()
        return matrix

    def observations(self) -> Tensor:
        """Return what is observed in each cell (S, 2)."""
        envs = self.make_envs(len(self.cells))
        envs.reset(seed=0)
        envs.states["row"], envs.states["column"] = self.cells.T
        obs = torch.from_numpy(envs.observe().copy())
        envs.close()
        return obs


class Eigensystem(NamedTuple):
    """Of the Laplacian L = 1 - W, in the order of its eigenvalues."""

    values: np.ndarray  # (S,), ascending, the first is 0
    vectors: np.ndarray  # (S, S), columns of mean square 1


def offset_weights(discount: float, episode_steps: int) -> np.ndarray:
    """Return the probability (T - 1,) of a pair 1, 2, ... T - 1 steps apart.

    The sampler draws a step with T - 1, T - 2, ... or 1 later ones with equal probability, then one
    of those, k steps later with probability ~ discount^k.
    """
    powers = float(discount) ** np.arange(episode_steps - 1)
    return powers * np.cumsum(1 / np.cumsum(powers)[::-1])[::-1] / (episode_steps - 1)


def exact_eigensystem(matrix: np.ndarray, weights: np.ndarray) -> Eigensystem:
    """Return that of L = 1 - sum_k weights[k-1] P^k, given P (S, S), symmetric.

    Powers of P have its eigenvectors, so those of L are P's as well; the discount sets the
    eigenvalues, and through them the order.
    """
    found, vectors = np.linalg.eigh(matrix)
    values = 1 - np.polynomial.polynomial.polyval(found, np.concatenate([[0.0], weights]))
    order = np.argsort(values, kind="stable")
    return Eigensystem(values[order], vectors[:, order] * math.sqrt(len(matrix)))


def cosines(learned: np.ndarray, exact: Eigensystem) -> np.ndarray:
    """Return |cos| (d,) between each learned vector, columns of (S, d), and the exact one.

    Of equal eigenvalues any rotation of the eigenvectors is as good: the cosine is then the one
    with the space that they span.
    """
    unit = learned / np.linalg.norm(learned, axis=0)
    parts = exact.vectors.T @ unit / math.sqrt(len(unit))
    is_same = np.isclose(exact.values[:, None], exact.values[: unit.shape[1]], rtol=0, atol=1e-9)
    return np.sqrt((parts**2 * is_same).sum(0))


def collect(rooms: Rooms, options: Options) -> EpisodicReplayBuffer:
    """Walk at random; return a buffer with the episodes."""
    length = options.episode_steps
    envs = rooms.make_envs(
        options.num_envs, max_episode_steps=length, autoreset_mode="SameStep", num_threads=1
    )
    num_rounds = math.ceil(options.num_episodes / options.num_envs)
    num_steps = num_rounds * options.num_envs * length
    spaces = envs.single_observation_space, envs.single_action_space
    buffer = EpisodicReplayBuffer(num_steps, *spaces, num_envs=options.num_envs, seed=options.seed)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=options.seed)[0])
    actions = np.random.default_rng(options.seed)
    for _ in range(num_rounds * length):
        chosen = actions.integers(4, size=options.num_envs)
        writer.step(chosen, *envs.step(chosen))
    envs.close()
    return buffer


class Learner:
    """A network of the observations (B, 2), whose outputs (B, d) become eigenvectors."""

    def __init__(self, buffer: EpisodicReplayBuffer, options: Options) -> None:
        self.buffer, self.options, self.updates = buffer, options, 0
        widths = (2 * options.num_waves, *options.hidden)
        self.waves = 0.5 * math.pi * torch.arange(1, options.num_waves + 1)
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        last = nn.Linear(widths[-1], options.num_dims)
        self.network = nn.Sequential(*(part for layer in layers for part in layer), last)
        self.optimizer = torch.optim.Adam(self.network.parameters(), fused=True)
        self.duals = torch.zeros(options.num_dims, options.num_dims)  # B
        self.batch = buffer.sample(2 * (options.batch_size // 2), options.discount)

    def outputs(self, obs: Tensor) -> Tensor:
        """Return u (B, d) for obs (B, 2). As cosines, coordinates let a small net draw walls."""
        return self.network(torch.cos((obs[..., None] + 1) * self.waves).flatten(1))

    def update(self) -> float:
        """Make a gradient step down for the network and one up for B; return the graph loss."""
        options, batch = self.options, self.batch
        progress = self.updates / options.num_updates
        self.optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - progress)
        self.buffer.sample(len(batch.offsets), options.discount, out=batch)
        here, later = self.outputs(torch.cat([batch.obs, batch.future_obs])).chunk(2)
        # Half of the mean squared difference over pairs estimates the sum of <u_i, L u_i>.
        graph_loss = 0.5 * (here - later).square().sum(1).mean()
        # The two halves of the pairs are independent, so e * e has the mean that e^2 should have.
        first, second = zip(here.chunk(2), later.chunk(2), strict=True)
        errors = [self.errors(torch.cat(half)) for half in (first, second)]
        mean = 0.5 * (errors[0] + errors[1])
        loss = graph_loss + (self.duals * mean).sum()
        loss = loss + options.penalty * (errors[0] * errors[1]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.duals.add_(mean.detach(), alpha=options.dual_rate)
        self.updates += 1
        return float(graph_loss.detach())

    def errors(self, outputs: Tensor) -> Tensor:
        """Return e (d, d), lower triangular, as estimated from outputs (B, d)."""
        products = outputs.T @ outputs.detach() / len(outputs)
        return (products - torch.eye(len(products))).tril()

    def eigenvalues(self) -> np.ndarray:
        """Return those of L (d,), to which the dual variables of the norms tend times -2."""
        return -0.5 * self.duals.diagonal().numpy()

    @torch.inference_mode()
    def vectors(self, obs: Tensor) -> np.ndarray:
        """Return what was learned about obs (S, 2), columns of (S, d)."""
        return self.outputs(obs).double().numpy()


def train(learner: Learner) -> None:
    """Update as often as the options say, or until Ctrl-C."""
    count = learner.options.num_updates
    with Progress(refresh_per_second=4) as progress:
        task = progress.add_task("learning", total=count)
        try:
            while learner.updates < count:
                loss = learner.update()
                if learner.updates % 100 == 0:
                    text = f"learning: graph loss {loss:.3f}"
                    progress.update(task, completed=learner.updates, description=text)
        except KeyboardInterrupt:
            progress.print(f"stopped by Ctrl-C after {learner.updates} updates")


def draw(rooms: Rooms, learned: np.ndarray, exact: Eigensystem, path: Path) -> None:
    """Draw the exact eigenvectors over the rooms, and below each the learned one."""
    try:
        matplotlib: Any = import_module("matplotlib.figure")
    except ImportError:
        print("matplotlib is missing: pip install 'vecenv[plots]'")
        return
    count = learned.shape[1]
    wanted = exact.vectors[:, :count]
    signs = np.where((learned * wanted).sum(0) < 0, -1, 1)  # an eigenvector has none of its own
    figure = matplotlib.Figure(figsize=(1.5 * count, 2.6), layout="constrained")
    axes = figure.subplots(2, count, squeeze=False)
    similar = cosines(learned, exact)
    for j in range(count):
        axes[0, j].set_title(f"{j + 1}: λ = {exact.values[j]:.3f}", fontsize=9)
        axes[1, j].set_title(f"|cos| {similar[j]:.4f}", fontsize=9)
        for axis, vectors in zip(axes[:, j], (wanted, signs * learned), strict=True):
            grid = np.full(rooms.is_wall.shape, np.nan)
            grid[tuple(rooms.cells.T)] = vectors[:, j]
            axis.set(xticks=[], yticks=[], facecolor="0.3")
            axis.imshow(grid, cmap="RdBu", vmin=-2.5, vmax=2.5)
    axes[0, 0].set_ylabel("exact")
    axes[1, 0].set_ylabel("learned")
    figure.savefig(path, dpi=150)


def report(learner: Learner, similar: np.ndarray, exact: Eigensystem) -> None:
    """Print eigenvalues and cosines."""
    table = Table("eigenvector", "eigenvalue", "learned", "|cosine|")
    for j, value in enumerate(learner.eigenvalues()):
        table.add_row(f"{j + 1}", f"{exact.values[j]:.3f}", f"{value:.3f}", f"{similar[j]:.4f}")
    Console().print(table)


def check(options: Options, num_cells: int) -> None:
    """Refuse what can't work."""
    limits = {
        "num_dims": (1, num_cells, f"{num_cells} cells have {num_cells} eigenvectors"),
        "episode_steps": (3, math.inf, "a pair is of two steps, neither of them the last"),
        "batch_size": (4, math.inf, "the batch is halved"),
        "discount": (0, 1, "it is a ratio of probabilities"),
    }
    for name, (low, high, reason) in limits.items():
        value, option = getattr(options, name), "--" + name.replace("_", "-")
        if not low <= value <= high:
            raise SystemExit(f"{option} is {value}, expected {low} to {high}: {reason}")


def main(options: Options) -> np.ndarray:
    """Collect, learn, compare, draw; return |cos| (d,)."""
    torch.set_num_threads(options.torch_threads)
    torch.manual_seed(options.seed)
    rooms = Rooms()
    check(options, len(rooms.cells))
    file = options.save / "eigenvectors.npz"
    try:
        options.save.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise SystemExit(f"{error}: choose another folder with --save") from None
    weights = offset_weights(options.discount, options.episode_steps)
    exact = exact_eigensystem(rooms.transition_matrix(), weights)
    learner = Learner(collect(rooms, options), options)
    train(learner)
    learned = learner.vectors(rooms.observations())
    similar = cosines(learned, exact)
    np.savez(file, cells=rooms.cells, learned=learned, exact=exact.vectors, cosines=similar)
    draw(rooms, learned, exact, options.save / "laplacian.png")
    report(learner, similar, exact)
    worst = f"lowest |cosine| of {len(similar)}: {similar.min():.4f}"
    print(f"{worst}; seed {options.seed}, {learner.updates} updates, see {options.save}")
    return similar


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
