"""Blue policies, and playing them: an episode to look at, or the nine cells for a score.

A policy plays a batch of environments at once. It chooses actions from the observations and the
*alerts*: the hosts on which the monitor saw a reverse shell in the latest step, which the
observation shows only in part.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vecenv.cage.challenge2.env import (
    OBSERVATIONS,
    RED_AGENTS,
    Cage2VectorEnv,
    RedAgent,
    observation_space,
    read_episode_lengths,
    read_red_agents,
    read_scenario,
)
from vecenv.cage.challenge2.remembering import BlueMemory
from vecenv.cage.challenge2.rules.codes import BITS_PER_HOST, EPISODE_LENGTHS
from vecenv.cage.challenge2.scenario import (
    Scenario,
    action_index,
    blue_actions,
    blue_choices,
    cage2_scenario,
    warn_of_other,
)
from vecenv.cage.challenge2.snapshot import Snapshot
from vecenv.cage.challenge2.tables import impossible_turns
from vecenv.cage.playing import (
    Cell,
    Evaluation,
    Seat,
    called,
    found_policy,
    name_of,
    sum_of,
)
from vecenv.cage.saved import is_sb3_file
from vecenv.core.arguments import read_count
from vecenv.core.moments import mean_of
from vecenv.files import load_arrays, save_arrays


@runtime_checkable
class BatchedPolicy(Protocol):
    """Chooses blue's actions for a batch of envs; `BluePolicy` is one.

    The policy may keep and change its input arrays. The returned array is read at once.

    Two attributes are optional: `observation`, "bits" or "memory", and `uses_masks`. If the latter
    is True, `act` gets a third argument, `Cage2VectorEnv.action_masks()`, int8. If `act` has a
    parameter `report`, callers may pass a dict to fill, see docs/watch.md.
    """

    def act(self, obs: np.ndarray, alerts: np.ndarray, /) -> Any:
        """Return actions, integers (N,), for obs (N, ...) and alerts bool (N, hosts)."""
        ...

    def reset(self) -> None:
        """Forget everything: all envs are about to begin an episode."""
        ...


Policy = str | Path | BatchedPolicy | Callable[..., Any]


class BluePolicy:
    """Base class of blue policies.

    Args:
        scenario: Scenario to play; CAGE 2 by default.
    """

    def __init__(self, scenario: Scenario | None = None) -> None:
        self.scenario = cage2_scenario() if scenario is None else scenario

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose actions.

        Args:
            obs: (N, at least 4 * hosts), the observations.
            alerts: bool (N, hosts), see `Cage2VectorEnv.shell_alerts`.

        Returns:
            int64 (N,); fresh memory.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget the episodes: all envs are about to begin new ones."""


class ObservationPolicy(BluePolicy):
    """Cleans the first host whose activity in the last observation is Exploit; else sleeps.

    Red's foothold is never cleaned.

    Args:
        action: "Remove" or "Restore".
        scenario: See `BluePolicy`.
    """

    otherwise = "Sleep"

    def __init__(self, action: str, scenario: Scenario | None = None) -> None:
        super().__init__(scenario)
        hosts = [host.name for host in self.scenario.hosts]
        self._first = action_index(self.scenario, action, hosts[0])
        self._otherwise = action_index(self.scenario, self.otherwise)
        self._may_clean = np.array([name != self.scenario.foothold for name in hosts])

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose by the observation alone."""
        num_values = BITS_PER_HOST * len(self.scenario.hosts)
        return self._clean((obs[:, 0:num_values:4] == 1) & (obs[:, 1:num_values:4] == 1))

    def _clean(self, is_suspect: np.ndarray) -> np.ndarray:
        """Act on the first host of each row of is_suspect bool (N, hosts), if there is one."""
        suspects = is_suspect & self._may_clean
        return np.where(
            suspects.any(axis=1), self._first + suspects.argmax(axis=1), self._otherwise
        )


class ReactivePolicy(ObservationPolicy):
    """Monitors; cleans the host on which it saw a reverse shell while monitoring.

    The challenge's own reactive agents keep a queue of such hosts. Red acts on one host per step,
    alerts count only in Monitor steps, and the agents monitor only when the queue is empty. So it
    never holds more than one host, which is cleaned at once.
    """

    otherwise = "Monitor"
    _has_monitored: Any = False

    def act(self, obs: np.ndarray, alerts: np.ndarray) -> np.ndarray:
        """Choose by the alerts and the action chosen before."""
        actions = self._clean(alerts & self._has_monitored)
        self._has_monitored = (actions == self._otherwise)[:, None]
        return actions

    def reset(self) -> None:
        """Forget the previous actions."""
        self._has_monitored = False


class _FunctionPolicy:
    """A function of the observations."""

    def __init__(self, function: Callable[..., Any], observation: str = "bits") -> None:
        self._function, self.uses_masks = function, getattr(function, "wants_masks", False)
        self.observation = getattr(function, "observation", observation)
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def act(self, obs: np.ndarray, alerts: np.ndarray, *masks: np.ndarray) -> Any:
        """Call the function."""
        return self._function(obs, *masks)

    def reset(self) -> None:
        """Reset the function, if it has a `reset`."""
        getattr(self._function, "reset", lambda: None)()


def _uniform(scenario: Scenario, seed: int | None) -> _FunctionPolicy:
    """Return a policy that draws uniformly among all actions."""
    generator, num_actions = np.random.default_rng(seed), len(blue_actions(scenario))
    return _FunctionPolicy(lambda obs: generator.integers(num_actions, size=len(obs)))


_MAKERS: dict[str, Callable[[Scenario, int | None], BatchedPolicy]] = {
    "sleep": lambda *_: _FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64)),
    "uniform": _uniform,
    "react_remove": lambda scenario, seed: ReactivePolicy("Remove", scenario),
    "react_restore": lambda scenario, seed: ReactivePolicy("Restore", scenario),
    "obs_remove": lambda scenario, seed: ObservationPolicy("Remove", scenario),
    "obs_restore": lambda scenario, seed: ObservationPolicy("Restore", scenario),
}
POLICY_NAMES = tuple(_MAKERS)


TRAINED_DEFENDER = Path(__file__).with_name("defender.npz")  # what `make cage2` has trained
_IMPOSSIBLE = -1e9
Layers = Sequence[tuple[np.ndarray, np.ndarray]]


class DefenderPolicy:
    """Plays the most likely choices of a network with tanh layers; see `BlueMemory`.

    The policy sees the 52 bits and remembers its actions; `reset` begins episodes. All envs that it
    plays at the same time must begin together.

    Args:
        layers: Weights float32 (a, b) and biases (b,) of each layer, kept.
        scenario: Scenario to play; CAGE 2 by default.

    Raises:
        ValueError: The layers do not fit each other or the scenario.

    Attributes:
        layers: As given.
    """

    observation = "bits"

    def __init__(self, layers: Layers, scenario: Scenario | None = None) -> None:
        self._scenario = cage2_scenario() if scenario is None else scenario
        self.layers = list(layers)
        self._memory: BlueMemory | None = None
        shapes = [(weight.shape, bias.shape) for weight, bias in self.layers]
        widths = [weight[0] for weight, _ in shapes] + [bias[0] for _, bias in shapes[-1:]]
        if not shapes or shapes != [((a, b), (b,)) for a, b in pairwise(widths)]:
            raise ValueError(f"layers of shapes {shapes!s:.999} do not fit each other")
        probe = BlueMemory(1, self._scenario)
        expected = probe.num_features, len(probe.choices)
        if (widths[0], widths[-1]) != expected:
            raise ValueError(
                f"layers with {widths[0]} inputs and {widths[-1]} outputs, expected {expected[0]} "
                f"inputs and {expected[1]} outputs: they were trained for another scenario"
            )

    def reset(self) -> None:
        """Begin new episodes in all envs."""
        self._memory = None

    def act(
        self, obs: np.ndarray, alerts: Any = None, /, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return actions int64 (N,) for obs (N, 4 * hosts), the result of the last actions.

        A dict passed as `report` receives the probabilities (N, choices), the labels of the choices
        and the choices taken.
        """
        obs = np.asarray(obs)
        if self._memory is None:
            self._memory = BlueMemory(len(obs), self._scenario)
        else:
            self._memory.note(obs)
        x = self._memory.features(obs)
        for number, (weight, bias) in enumerate(self.layers):
            x = (np.tanh(x) if number else x) @ weight + bias
        x[self._memory.useless()] = _IMPOSSIBLE
        choices = x.argmax(axis=1)
        if report is not None:
            shares = np.exp(x - x.max(axis=1, keepdims=True))
            report["probabilities"] = shares / shares.sum(axis=1, keepdims=True)
            report["labels"] = [str(choice) for choice in self._memory.choices]
            report["chosen"] = choices
        return self._memory.act(choices)


def save_defender(
    path: str | Path, layers: Layers, scenario: Scenario | None = None, **facts: Any
) -> None:
    """Write a defender's network, as float16, with `vecenv.files.save_arrays`.

    Args:
        path: File to write; no suffix is added.
        layers: Weights (a, b) and biases (b,) of each layer.
        scenario: Scenario it was trained in, CAGE 2 by default; `load_defender` compares the saved
            names and version of the rules.
        **facts: Further values to save, such as the number of training steps.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    arrays = {}
    for number, layer in enumerate(layers):
        for name, part in zip(("weight", "bias"), layer, strict=True):
            arrays[f"{name}{number}"] = np.asarray(part, np.float16)
    save_arrays(path, arrays, {**facts, "made_for": scenario.identity()})


def load_defender(path: str | Path, scenario: Scenario | None = None) -> DefenderPolicy:
    """Load a defender that `save_defender` wrote.

    Warn if it was trained in another scenario or under other rules but can play here too.

    Args:
        path: The file.
        scenario: Scenario to play; CAGE 2 by default.

    Raises:
        ValueError: The file holds no defender, or one for another scenario.
        OSError: The file can't be read.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    try:
        arrays, facts = load_arrays(path)
        pairs = [(arrays[f"weight{k}"], arrays[f"bias{k}"]) for k in range(len(arrays) // 2)]
        layers = [(_numbers(weight, 2), _numbers(bias, 1)) for weight, bias in pairs]
        made_for = facts["made_for"]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no saved policy: {error!s:.999}") from error
    try:
        policy = DefenderPolicy(layers, scenario)
    except ValueError as error:
        raise ValueError(f"{path} is no defender that can play here: {error}") from error
    warn_of_other(Path(path).name, made_for, scenario.identity())
    return policy


def _numbers(array: Any, ndim: int) -> np.ndarray:
    """Return an array of floats as float32; raise ValueError if it is no finite float array."""
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind != "f":
        raise ValueError("its arrays are others than those of a network")
    if not (np.abs(array) <= np.finfo(np.float32).max).all():
        raise ValueError("its numbers are not finite")
    return array.astype(np.float32)


def find_policy(
    policy: Policy, scenario: Scenario | None = None, *, seed: int | None = None
) -> BatchedPolicy:
    """Find a policy by name, file or object.

    | ready-made | in each step |
    |---|---|
    | sleep | does nothing |
    | random, uniform | draws any of the actions |
    | obs-remove, obs-restore | treats the first host that the observation shows exploited |
    | react-remove, react-restore | treats the host where a shell was seen at Monitor, or monitors |
    | defender | the likeliest choice of the trained network, see `DefenderPolicy` |

    Args:
        policy: Name of a ready-made policy ("react_restore" or "react-restore"; "random" is
            "uniform"; "defender" is the bundled trained one); name of a file with a saved
            policy, of `save_defender` or of stable-baselines3; a `vecenv.load_policy`; an object
            with `act` and `reset`; a function from observations (N, ...) to actions (N,); a class
            of either, which is called, with `scenario` and `seed` if it has parameters of these
            names; or "module:object" for one of these, searched in the working directory too.
        scenario: Scenario to play; CAGE 2 by default.
        seed: Seed for policies that draw.

    Raises:
        ValueError: There is no such policy or file, or the file is for another env.
        TypeError: The argument is none of these.
        ImportError: There is no such module, or a library that a file needs is missing.
    """
    scenario = cage2_scenario() if scenario is None else scenario
    ready: Any = {name: functools.partial(f, scenario, seed) for name, f in _MAKERS.items()}
    ready["random"] = ready["uniform"]
    ready["defender"] = functools.partial(load_defender, TRAINED_DEFENDER, scenario)
    return found_policy(
        policy,
        "a name, a file, an object with `act` and `reset`, or a function from observations to "
        "actions",
        ready=ready,
        files=("policy.npz", "checkpoint/last.pt"),
        others=("rules", "decoy_restore", "defender.npz"),
        load=functools.partial(_policy_of_file, scenario=scenario),
        make=functools.partial(called, scenario=scenario, seed=seed),
        convert=lambda found: _FunctionPolicy(found) if callable(found) else None,
    )


def _policy_of_file(path: Path, scenario: Scenario) -> BatchedPolicy:
    """Return the policy of a file: a defender's, or one that `vecenv.load_policy` reads.

    Raises:
        ValueError: The policy is for another env.
    """
    if path.suffix != ".pt" and not is_sb3_file(path):
        return load_defender(path, scenario)
    from vecenv import load_policy

    found = load_policy(path)
    counts = {"bits": len(blue_actions(scenario)), "memory": len(blue_choices(scenario))}
    known = {observation_space(scenario, name).shape: name for name in OBSERVATIONS}
    shape, num_actions = found.observation_space.shape, getattr(found.action_space, "n", None)
    if shape not in known or num_actions != counts[known[shape]]:
        expected = [f"{wanted[0]} and {counts[name]}" for wanted, name in known.items()]
        inputs = shape[0] if shape is not None and len(shape) == 1 else shape
        raise ValueError(
            f"{path} is a policy for {inputs} inputs and {num_actions} actions, expected "
            f"{', '.join(expected)}: it was trained in another env"
        )
    return _FunctionPolicy(found, known[shape])


EVALUATED_AGENTS = ("b_line", "meander", "sleep")


class _Seat(Seat):
    """A policy that plays envs of CAGE 2."""

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> Any:
        """Return the policy's actions for obs (N, ...)."""
        uses_masks = getattr(self.policy, "uses_masks", False)
        masks = (self.envs.action_masks(),) if uses_masks else ()
        return self.policy.act(obs, self.envs.shell_alerts(), *masks, **more)

    def tell(self) -> Mapping[str, str]:
        """Return what blue and red did in the latest step of the first env, and its outcome."""
        snapshot = self.envs.in_words()
        deeds = {"blue": snapshot.blue, "red": snapshot.red}
        return {side: deed.with_outcome() for side, deed in deeds.items() if deed is not None}


def seated(
    policy: Policy,
    num_envs: int = 1,
    *,
    seed: int | None = None,
    observation: str | None = None,
    **options: Any,
) -> Seat:
    """Return a policy together with envs for it; the envs do not reset automatically.

    Args:
        policy: See `find_policy`.
        num_envs: Number of envs.
        seed: Seed for policies that draw.
        observation: Kind of observation; None for the kind that the policy asks for, or "bits".
        **options: As for `Cage2VectorEnv`.
    """
    scenario = read_scenario(options.pop("scenario", None), options.pop("rules", None))
    player = find_policy(policy, scenario, seed=seed)
    options["observation"] = observation or getattr(player, "observation", "bits")
    options |= {"scenario": scenario, "autoreset_mode": "Disabled"}
    return _Seat(player, Cage2VectorEnv(num_envs, **options))


def play_episode(policy: Policy, *, seed: int | None = None, **options: Any) -> Iterator[Snapshot]:
    """Play one episode and yield a `Snapshot` after its reset and after each step.

    Its `blue` and `red` describe the actions: action, target, success, and red's exploit.

    Args:
        policy: See `find_policy`.
        seed: Seed of the episode.
        **options: `observation`: its kind; None for the kind the policy asks for, or "bits".
            `red_agent`, `episode_length`, `rules`, `scenario`, `green` as for `Cage2VectorEnv`.
    """
    with seated(policy, seed=seed, **options) as seat:
        for _ in seat.play(seed):
            yield seat.envs.in_words()


def save_episode_gif(
    policy: Policy, path: str | Path, *, fps: float = 2.0, seed: int | None = None, **options: Any
) -> None:
    """Play one episode and write it as an animated GIF.

    Args:
        policy: See `find_policy`.
        path: File to write; an existing file is replaced.
        fps: Steps per second.
        seed: Seed of the episode.
        **options: As for `play_episode`.

    Raises:
        ValueError: The file name does not end in .gif.
        OSError: The file can't be written.
        ImportError: Pictures need the extra `plots`.
    """
    from vecenv.cage.canvas import require_gif, save_gif

    require_gif(path)
    with seated(policy, seed=seed, render_mode="rgb_array", **options) as seat:
        save_gif((seat.envs.render()[0] for _ in seat.play(seed)), path, fps=fps)


def evaluate(
    policy: Policy,
    *,
    episodes: int = 1000,
    seed: int = 0,
    rules: str | None = None,
    scenario: Scenario | None = None,
    observation: str | None = None,
    green: bool = False,
    red_agents: RedAgent = EVALUATED_AGENTS,
    episode_lengths: Sequence[int] = EPISODE_LENGTHS,
    num_threads: int | None = None,
    name: str | None = None,
    on_cell: Callable[[Cell], Any] | None = None,
) -> Evaluation:
    """Evaluate a policy on the challenge's nine cells: three red agents, three episode lengths.

    All episodes of a cell are played side by side, in one batch. Every cell has its own
    random numbers, which depend only on the seed, the red agent and the length.

    Args:
        policy: See `vecenv.cage.find_policy`: a name, a file, an object with `act` and
            `reset`, or a function from observations (N, ...) to actions (N,).
        episodes: Number of episodes per cell.
        seed: Equal seeds give equal results, unless the policy itself draws.
        rules: "faithful" (the default) or "debugged".
        scenario: Tables to use instead of CAGE 2's.
        observation: Kind of observation; None for the kind that the policy asks for, or "bits".
        green: Whether the green agent is present.
        red_agents: Rows of the table: names, or custom red agents (see `Cage2VectorEnv`), also
            as "module:function"; such a row has the name of its function.
        episode_lengths: Columns of the table.
        num_threads: Maximum number of threads.
        name: Name of the policy in the result.
        on_cell: Called after each cell, to show progress.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
        ActionError: The policy returned something that is not one action per env.

    Example:
        >>> print(evaluate("sleep", episodes=20, red_agents=["sleep"]).total)
        0.0
    """
    episodes, seed = read_count("episodes", episodes, 2), read_count("seed", seed, 0)
    agents, lengths = _read_table(red_agents, episode_lengths)
    scenario = read_scenario(scenario, rules)
    player = find_policy(policy, scenario, seed=seed)
    wanted = observation or getattr(player, "observation", "bits")
    options: Any = {"scenario": scenario, "observation": wanted, "green": green}
    options["num_threads"] = num_threads
    cells = []
    for (agent, red_agent), length in product(agents.items(), lengths):
        options |= {"red_agent": red_agent, "episode_length": length}
        totals, impossible = play_cell(player, episodes, cell_seed(seed, agent, length), **options)
        cells.append(Cell(agent, length, episodes, *mean_of(totals), impossible))
        if on_cell is not None:
            on_cell(cells[-1])
    total, total_ci95 = sum_of(cells)
    return Evaluation(
        policy=name or name_of(policy),
        **scenario.identity(),
        observation=wanted,
        green=green,
        seed=seed,
        cells=tuple(cells),
        total=total,
        total_ci95=total_ci95,
    )


def _read_table(red_agents: Any, episode_lengths: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the red agents by name, and the lengths."""
    if isinstance(red_agents, str) or callable(red_agents):
        red_agents = [red_agents]
    agents: dict[str, Any] = {}
    for agent in red_agents:
        if not isinstance(agent, str) and not callable(agent):
            raise TypeError(f"red_agents has {agent!r}, expected names and compiled policies")
        try:
            read_red_agents(agent)
        except (TypeError, ValueError) as error:
            raise type(error)(f"red_agents has {agent!r}: {error}") from error
        name = name_of(agent).rpartition(":")[2]
        if agents.setdefault(name, agent) != agent:
            raise ValueError(f"red_agents has two that are called {name!r}; rename one")
    if not agents:
        raise ValueError("red_agents is empty, expected at least one")
    return agents, tuple(sorted(set(read_episode_lengths(episode_lengths))))


def cell_seed(seed: int, red_agent: str, episode_length: int) -> int:
    """Return the seed of env 0 of a cell; seeds of other cells are far from it.

    Args:
        seed: Seed of the evaluation.
        red_agent: Name of the row.
        episode_length: Episode length of the column.
    """
    names = list(RED_AGENTS)
    is_known, own = red_agent in names, zlib.crc32(red_agent.encode()) + len(names)
    entropy = [seed, names.index(red_agent) if is_known else own, episode_length]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 2


def play_cell(policy: Policy, episodes: int, seed: int, **options: Any) -> tuple[np.ndarray, int]:
    """Play the episodes of one cell; episode i has seed `seed + i`.

    Args:
        policy: See `find_policy`.
        episodes: Number of episodes.
        seed: Seed of the first episode.
        **options: See `seated`.

    Returns:
        Total rewards, float64 (episodes,), and the number of impossible turns of red.
    """
    totals, impossible = np.zeros(episodes), 0
    with seated(policy, episodes, seed=seed, **options) as seat:
        for rewards in islice(seat.play(seed), 1, None):
            totals += rewards
            impossible += int(impossible_turns(seat.envs.true_state).sum())
    return totals.round(1), impossible  # sums of tenths
