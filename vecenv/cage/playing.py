"""What both challenges share: finding policies and letting them play, custom red agents, scores."""

from __future__ import annotations

import functools
import inspect
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import njit
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from vecenv.core.arguments import import_object
from vecenv.core.moments import mean_of
from vecenv.files import write_json


def found_policy(
    policy: Any,
    expected: str,
    *,
    ready: Mapping[str, Callable[[], Any]],
    files: tuple[str, ...],
    others: Collection[str],
    load: Callable[[Path], Any],
    make: Callable[[type], Any],
    convert: Callable[[Any], Any],
    reset_takes: tuple[str, ...] = (),
) -> Any:
    """Return the policy for a name, file, "module:object", class, object or function.

    Args:
        policy: See above; hyphens in names count as underscores.
        expected: Description of the accepted values, in words.
        ready: Makers of the built-in policies, by name with underscores.
        files: Paths at which a run folder may hold a policy.
        others: Names of policies, and files of run folders, of the other challenge.
        load: Reads a policy from a file.
        make: Makes a policy from a class.
        convert: Makes a policy from any other object; returns None if it can't.
        reset_takes: Names of the arguments of `reset`.

    Raises:
        ValueError: No policy or file has this name, or the file holds no policy.
        TypeError: The object can't be used as a policy.
        ImportError: The module does not exist, or a library that the file needs is missing.
        OSError: The file can't be read.
    """
    found = policy
    if isinstance(policy, str | Path):
        text = str(policy)
        if maker := ready.get(text.replace("-", "_")):
            return maker()
        for path in (Path(text), *(Path(text) / name for name in files)):
            if path.is_file():
                return load(path)
        if ":" not in text:
            is_folder = Path(text).is_dir()
            what = f"a folder without a {files[0]}" if is_folder else "no built-in policy, no file"
            held = [name for name in others if (Path(text) / name).is_file()]
            if held or text.replace("-", "_") in others:
                what += " (it belongs to the other challenge, see --challenge)"
            names = ", ".join(sorted(name.replace("_", "-") for name in ready))
            raise ValueError(
                f"policy is {text!r}, {what}; expected a file with a saved policy, or its run "
                f"folder, 'module:object', or one of {names}"
            )
        policy = found = import_object("policy", text)
    found = make(found) if isinstance(found, type) else found
    if not (hasattr(found, "act") and hasattr(found, "reset")):
        found = convert(found)
    if found is None:
        lacks = "; it has act, but no reset" if hasattr(policy, "act") else ""
        raise TypeError(f"policy is {policy!r:.200}, expected {expected}{lacks}")
    try:
        inspect.signature(found.reset).bind(*reset_takes)
    except ValueError:
        pass  # functions written in C may have no signature
    except TypeError:
        raise TypeError(
            f"policy is {policy!r:.200}; this challenge calls reset({', '.join(reset_takes)}), but "
            f"it has reset{inspect.signature(found.reset)}: is it for the other challenge?"
        ) from None
    return found


def called(kind: type, **given: Any) -> Any:
    """Call a class with the given arguments that it has parameters for."""
    wanted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in given.items() if name in wanted})


def name_of(policy: Any) -> str:
    """Return the name of a policy or red agent for tables."""
    if isinstance(policy, str | Path):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)


class Seat(AbstractContextManager["Seat"]):
    """A policy and the vector envs that it plays; all episodes begin and end together.

    Each challenge has a subclass that queries the policy. As a context manager it closes the envs.

    Args:
        policy: See the challenge's `find_policy`.
        envs: Vector envs without autoreset.

    Attributes:
        policy, envs: As given.
    """

    def __init__(self, policy: Any, envs: Any) -> None:
        self.policy, self.envs = policy, envs
        try:
            self._reports = "report" in inspect.signature(policy.act).parameters
        except (TypeError, ValueError):  # functions written in C may have no signature
            self._reports = False

    def begin(self) -> None:
        """Tell the policy that all envs have been reset."""
        self.policy.reset()

    def ask(self, obs: np.ndarray, more: dict[str, Any]) -> np.ndarray:
        """Return the policy's actions; `more` may hold the argument `report` of its `act`."""
        raise NotImplementedError

    def tell(self) -> Mapping[str, str]:
        """Return the actions of both sides in the first env's latest step, by name."""
        return {}

    def act(
        self, obs: np.ndarray, is_first: bool = False, report: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return actions for the envs' latest observations.

        Args:
            obs: (N, ...); the policy may keep this array, so the caller must not change it.
            is_first: Whether these are the first observations of episodes.
            report: A dict that some policies fill, see docs/watch.md.
        """
        if is_first:
            self.begin()
        return self.ask(obs, {} if report is None or not self._reports else {"report": report})

    def play(self, seed: int | None) -> Iterator[Any]:
        """Play one episode in every env; yield None after reset, then each step's rewards (N,)."""
        obs, _ = self.envs.reset(seed=seed)
        yield None
        is_first, is_over = True, False
        while not is_over:
            # Without `out`, every step returns a new array, which the policy may keep.
            obs, rewards, ends, cuts, _ = self.envs.step(self.act(obs, is_first))
            is_first, is_over = False, bool((ends | cuts).all())
            yield rewards

    def __exit__(self, *_: Any) -> None:
        self.envs.close()


@functools.cache
def compiled_red(option: str, policy: Any, parameters: tuple[str, ...]) -> Any:
    """Return a policy as compiled code; equal calls return the same object.

    Args:
        option: Name of the argument, for messages.
        policy: A compiled function, or a plain one, which is compiled.
        parameters: Names of the parameters that it must take.

    Raises:
        TypeError: The policy is not a function, or takes other parameters.
    """
    function = getattr(policy, "py_func", policy)
    wanted = f"a function of ({', '.join(parameters)}) for one env"
    if not inspect.isfunction(function):
        raise TypeError(f"{option} is {policy!r}, expected {wanted}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        came = f"{function.__name__}{inspect.signature(function)}"
        raise TypeError(f"{option} is {came}, expected {wanted}") from error
    return njit(function, error_model="numpy") if function is policy else policy


def choice_problem(
    policy: str, choice: Any, length: int, expected: str, unknown: Callable[..., str | None]
) -> str | None:
    """Return a description of what is wrong with a red policy's choice, or None.

    Args:
        policy: Name of the policy.
        choice: Its return value.
        length: Expected number of integers.
        expected: Meaning of the integers, in words.
        unknown: Function of the integers; returns which of them is invalid, such as "no host 9,
            expected 0..8", or None.
    """
    if not isinstance(choice, tuple) or len(choice) != length:
        came = "None (this branch ends without `return`)" if choice is None else repr(choice)
        return f"red agent {policy} returns {came}, expected {expected}"
    told = f"red agent {policy} returns ({', '.join(map(str, choice))})"
    if not all(isinstance(one, int | np.integer) for one in choice):
        return f"{told}, expected {expected}"
    problem = unknown(*choice)
    return None if problem is None else f"{told}: there is {problem}"


def outside(what: str, number: int, count: int) -> str | None:
    """Return a message that no `what` has this number, or None if it is below `count`."""
    return None if 0 <= number < count else f"no {what} {number}, expected 0..{count - 1}"


_CHALLENGE = "CAGE Challenge 2"  # the title of a table leaves out this name
_AGENT_TITLES = {"b_line": "B_line", "meander": "Meander", "sleep": "Sleep", "mixed": "mixed"}


def as_text(shown: RenderableType, colors: Literal["standard"] | None = None) -> str:
    """Return a table as text of 100 columns, with colour codes if `colors` is "standard"."""
    console = Console(
        file=io.StringIO(),
        width=100,
        force_terminal=colors is not None,
        color_system=colors,
        legacy_windows=False,
    )
    with console.capture() as capture:  # a notebook would show what is printed
        console.print(shown)
    return capture.get()


def new_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table of results; all columns but the first are of numbers."""
    # No markup, as names are the user's.
    table = Table(title=Text(title), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True, overflow="ellipsis")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class Tabular:
    """Base of results that print as a table."""

    __slots__ = ()

    def table(self) -> Table:
        """Return the table, for `rich` to print."""
        raise NotImplementedError

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return as_text(self.table()).rstrip()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over episodes.

    Attributes:
        mean: Mean of the episodes.
        sd: Their standard deviation (ddof 1).
        ci95: Half of the width of the 95 % confidence interval of the mean (Student's t).
    """

    mean: float
    sd: float
    ci95: float


def estimate(totals: np.ndarray) -> Estimate:
    """Return the estimate of a mean from one number per episode, at least two."""
    return Estimate(*mean_of(totals))


@dataclass(frozen=True, slots=True)
class Cell:
    """Total rewards of the episodes of one length against one red agent.

    Attributes:
        red_agent: Name of the red agent.
        episode_length: Steps per episode.
        episodes: Number of episodes.
        mean, sd, ci95: See `Estimate`.
        impossible_turns: Turns in which a custom red agent returned an action that does not exist;
            Sleep was played instead.
    """

    red_agent: str
    episode_length: int
    episodes: int
    mean: float
    sd: float
    ci95: float
    impossible_turns: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation(Tabular):
    """The result of `evaluate`; prints as a table.

    Attributes:
        policy: Name of the policy.
        scenario: Name of the scenario.
        rules: Name of the rules: scores under different rules are not comparable.
        rules_version: `RULES_VERSION`; scores of different versions are not comparable.
        tables: Hash of the scenario's tables; it distinguishes networks of the same name.
        observation: Kind of observation that the policy received.
        green: Whether the green agent took part.
        seed: Seed of the evaluation.
        cells: See `Cell`.
        total: Sum of the means of all cells: the score of the challenge.
        total_ci95: Half of the width of its 95 % confidence interval; cells are independent.
    """

    policy: str
    scenario: str
    rules: str
    rules_version: int
    tables: str
    observation: str
    green: bool
    seed: int
    cells: tuple[Cell, ...]
    total: float
    total_ci95: float

    def cell(self, red_agent: str, episode_length: int) -> Cell:
        """Return one cell.

        Raises:
            KeyError: The evaluation has no such cell.
        """
        for cell in self.cells:
            if (cell.red_agent, cell.episode_length) == (red_agent, episode_length):
                return cell
        raise KeyError(f"no cell for {red_agent!r} and {episode_length} steps")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the evaluation as JSON, and write it to a file if a path is given."""
        return write_json(asdict(self), path)

    def table(self) -> Table:
        """Return a table for `rich` to print: mean ± half of the 95 % confidence interval.

        The table fits 80 columns for scores of up to four digits.
        """
        lengths = sorted({cell.episode_length for cell in self.cells})
        agents = list(dict.fromkeys(cell.red_agent for cell in self.cells))
        where = "" if self.scenario == _CHALLENGE else f" in {self.scenario}"
        title = (
            f"{self.policy}{where}: {self.rules} rules, {self.cells[0].episodes} episodes per cell"
        )
        title += ", green agent" if self.green else ""
        table = new_table(title, "red agent", *(f"{n} steps" for n in lengths), "sum")
        table.columns[-1].style = "bold"
        for agent in agents:
            row = [self.cell(agent, length) for length in lengths]
            shown = [interval(cell.mean, cell.ci95) for cell in row]
            name = Text(_AGENT_TITLES.get(agent, agent))
            table.add_row(name, *shown, interval(*sum_of(row)))
        table.add_section()
        blank = [""] * len(lengths)
        table.add_row("total", *blank, interval(self.total, self.total_ci95), style="bold")
        lines = [PLUS_MINUS]
        for agent in agents:
            cells = [cell for cell in self.cells if cell.red_agent == agent]
            turns = sum(cell.episodes * cell.episode_length for cell in cells)
            impossible = sum(cell.impossible_turns for cell in cells)
            rest = f"of {turns:_} turns; these were played as Sleep"
            lines.append(impossible_text(agent, impossible, rest))
        table.caption = Text("\n".join(filter(None, lines)), justify="left")
        return table


PLUS_MINUS = "±: half of the 95 % confidence interval of the mean"


def impossible_text(agent: str, number: int, rest: str) -> str:
    """Return a line about a red agent that returned actions that do not exist; "" if none."""
    told = f"{number:_} {rest}".replace("_", " ")
    return f"red agent {agent} returned an action that does not exist in {told}" if number else ""


def sum_of(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the sum of independent cells' means, and half of its confidence interval."""
    return sum(cell.mean for cell in cells), math.hypot(*(cell.ci95 for cell in cells))


def interval(mean: float, ci95: float) -> str:
    """Return the text of a mean and half of its confidence interval, as in tables."""
    digits = 2 if abs(mean) < 100 else 1
    return f"{mean:.{digits}f} ± {ci95:.{digits}f}"
