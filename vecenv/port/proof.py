"""Prove that kernels behave like a Python env, or show where they first differ.

    find_hidden   the Python env alone, played three times: does it depend on anything else?
        |
    Lockstep      Tape --words--> PythonSide --Seen--+
        |                                            +--> compare --> Difference, or go on
        |         the same seed --> KernelSide ------+
        |                                                     |
    free_runs     no difference: means of returns      locate: the run once more, kernels as plain
        |         with random numbers of their own     Python under a trace: lines and draws
      Proof <------------------------------------------------+

The kernels are one env of a vector env, compiled as in normal use. They run as plain Python only
to locate a difference.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.jit.env import JitVectorEnv
from vecenv.jit.kernels import EnvKernels
from vecenv.port.deadline import StuckError, time_limit
from vecenv.port.hidden import Hidden, find_hidden
from vecenv.port.locate import locate
from vecenv.port.lockstep import Difference, Lockstep, pick, width_of
from vecenv.port.returns import Equivalence, free_runs, speeds
from vecenv.port.sides import RESET, KernelSide, PythonSide, check_spaces, read_kernels

__all__ = ["Proof", "prove"]

_SHOWN = 8  # most entries of a list in words; all are in the JSON
_LONGEST = 1_000  # longest episode in free runs, if nothing else ends it


@dataclass
class Proof:
    """What was compared, and the outcome.

    Attributes:
        python, kernels: Names of the two sides.
        difference: The first difference, or None.
        hidden: What the Python env depends on besides seed and actions.
        counts: Numbers of equal steps, resets, draws and values.
        styles: Steps by kind of actions.
        fields: State fields that were compared.
        not_compared: The other state fields.
        masks: Whether action masks were compared, and why not.
        lines_not_run: Lines of the kernels that never ran, by file: of these nothing is known.
        outcomes_not_seen: Comparisons in the kernels that were always, or never, true.
        largest_errors: Largest errors of floats by name, relative to the larger of 1 and their
            size.
        means: Comparisons of means, from free runs and policies.
        speeds: Steps per second of the Python env and of the kernels; None if not measured.
        seconds: Duration of the proof.
        is_interrupted: Whether Ctrl-C has cut it short; the rest is what was found before.
    """

    python: str
    kernels: str
    difference: Difference | None = None
    hidden: list[Hidden] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    styles: dict[str, int] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    masks: str = "none"
    lines_not_run: dict[str, list[int]] = field(default_factory=dict)
    outcomes_not_seen: list[str] = field(default_factory=list)
    largest_errors: dict[str, float] = field(default_factory=dict)
    means: list[Equivalence] = field(default_factory=list)
    speeds: tuple[float, float] | None = None
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether there is no difference, nothing fatal is hidden, and all means agree."""
        apart = any(one.verdict == "different" for one in self.means)
        is_fatal = self.is_interrupted or any(one.is_fatal for one in self.hidden)
        return self.difference is None and not apart and not is_fatal

    def __str__(self) -> str:
        lines = [f"{self.python} and {self.kernels}, {self.seconds:.0f} s"]
        lines += [f"hidden: {one}" for one in self.hidden]
        lines.append(f"equal: {_listed(self.counts)}")
        lines.append(f"steps by kind of actions: {_listed(self.styles)}")
        other = f"; not compared: {', '.join(self.not_compared)}" if self.not_compared else ""
        lines.append(f"fields of the state: {', '.join(self.fields) or 'none'}{other}")
        lines.append(f"action masks: {self.masks}")
        if errors := {k: f"{v:.0e}" for k, v in self.largest_errors.items() if v > 0.0}:
            lines.append("floats apart by " + ", ".join(f"{v} ({k})" for k, v in errors.items()))
        if any(self.counts.values()):
            lines += _not_seen("lines of the kernels that never ran", _ranges(self.lines_not_run))
            lines += _not_seen("comparisons with one outcome", self.outcomes_not_seen)
        lines += map(str, self.means)
        if self.speeds is not None:
            own, kernels = self.speeds
            told = f"Python {own:,.0f}, kernels {kernels:,.0f}: {kernels / own:,.0f} times as many"
            lines.append(f"steps per second: {told}")
        if self.difference is not None:
            lines.append(f"DIFFERENT: {self.difference}")
        if self.is_interrupted:
            lines.append("interrupted: no difference was found so far")
        else:
            lines.append("no difference was found" if self.is_proven else "NOT PROVEN")
        return "\n".join(lines)

    def to_json(self, path: Path) -> None:
        """Write everything as JSON."""
        told = asdict(self) | {"is_proven": self.is_proven}
        told |= {name: [x._asdict() for x in getattr(self, name)] for name in ("hidden", "means")}
        text = json.dumps(told, indent=1, default=lambda array: array.tolist()) + "\n"
        try:
            path.write_text(text)
        except OSError as error:  # that of a full disk has no name
            raise OSError(error.errno, error.strerror, str(path)) from error


_NO_MASKS = "NOT COMPARED, only {} has them"
_MASKS = {  # by whether the Python env and the kernels have masks
    (False, False): "none",
    (True, True): "compared",
    (True, False): f"{_NO_MASKS.format('the Python env')}: give the kernels an `action_mask`",
    (False, True): _NO_MASKS.format("the kernels"),
}


def _report(steps: Lockstep, proof: Proof, have_masks: tuple[bool, bool]) -> None:
    """Write what was compared into the proof."""
    proof.masks = _MASKS[have_masks]
    proof.counts, proof.styles = dict(steps.counts), dict(steps.styles)
    proof.largest_errors = steps.errors
    proof.lines_not_run = steps.coverage.lines_not_run()
    proof.outcomes_not_seen = steps.coverage.outcomes_not_seen()


def _twin(make_envs: Any, kernels: Any, limit: int | None, has_observations: bool) -> KernelSide:
    """Return the kernels as plain Python, without observations if that is possible."""
    if isinstance(kernels, EnvKernels) and not has_observations:
        blind = replace(kernels, observe=lambda *_: None)
        make_envs = partial(JitVectorEnv, blind, dry_run=False)
    return KernelSide(make_envs, limit, debug=True)


def _try_plain(make_envs: Any, limit: int | None) -> None:
    """Reset and step kernels once as plain Python, so that one that never returns is told soon.

    Other errors are told better where the compiled kernels are made.
    """
    try:
        side = KernelSide(make_envs, limit, debug=True)
        side(RESET, 0)
        space = side.envs.single_action_space
        side(pick(space, np.zeros((1, width_of(space))))[0])
    except StuckError:
        raise
    except Exception:
        return


def _ranges(lines: Mapping[str, Sequence[int]]) -> list[str]:
    """Return "file: 3, 7-9" for each file."""
    found = []
    for file, numbers in lines.items():
        groups = [list(x) for _, x in itertools.groupby(enumerate(numbers), lambda x: x[1] - x[0])]
        told = [f"{x[0][1]}-{x[-1][1]}" if len(x) > 1 else f"{x[0][1]}" for x in groups]
        found.append(f"{file}: {', '.join(told)}")
    return found


def _not_seen(what: str, found: Sequence[str]) -> list[str]:
    """Return lines that tell what was not seen, the first few of many."""
    if not found:
        return [f"{what}: none"]
    more = [f"  ... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{what}:", *(f"  {one}" for one in found[:_SHOWN]), *more]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "nothing"


def prove(
    make_python: Callable[[], Any],
    kernels: Any,
    *,
    minutes: float = 2.0,
    fields: Mapping[str, Any] | None = None,
    policies: Sequence[Callable[[Any], Any]] = (),
    tolerance: float = 1e-6,
    margin: float = 0.2,
    max_episode_steps: int | None = None,
    seed: int = 0,
    debug: bool = False,
    timeout: float = 30.0,
    has_free_runs: bool = True,
    names: tuple[str, str] = ("the Python env", "its kernels"),
    say: Callable[[str], Any] = lambda text: None,
) -> Proof:
    """Compare a Python env with its kernels, draw by draw.

    Ctrl-C ends it with what was found so far.

    Args:
        make_python: Makes the Python env: a `gymnasium.Env` (Tuple spaces mean a game), or a
            PettingZoo parallel env.
        kernels: EnvKernels, or a maker of a JitVectorEnv of them.
        minutes: Time to look for differences.
        fields: Places of the state's fields in the Python env, by name: a path such as
            "agent_pos[0]", a function of the unwrapped env, or None to leave a field out. Other
            fields are compared with attributes of the same names.
        policies: Functions from an observation to an action, to be played, too.
        tolerance: Allowed distance of floats, relative to the larger of 1 and their size.
        margin: Allowed distance between means of free runs, in standard deviations.
        max_episode_steps: Limit of the kernels' episodes; None for that of the env's registration.
        seed: Seed of all draws.
        debug: Whether kernels run as plain Python: nothing is compiled.
        timeout: Seconds for one reset or step of either side. One that does not return is a
            difference; compiled kernels that loop forever are ended by the command only.
        has_free_runs: Whether to also compare returns of free runs and policies, and speeds.
        names: Names of the two sides for the report.
        say: Called with a text about the current work.

    Raises:
        ValueError: The env can't be seeded, spaces differ, a field can't be read, or the env draws
            from a distribution that the kit lacks.
        TypeError: `kernels` are not kernels, or `make_python` makes no env.
        StuckError: Making an env, or a reset, does not return.
    """
    if not minutes > 0.0:
        raise ValueError(f"minutes is {minutes}, expected a number above 0")
    began = time.perf_counter()
    proof = Proof(*names)
    make_envs = read_kernels(kernels)
    with contextlib.ExitStack() as stack:
        stack.enter_context(time_limit(timeout))
        python = PythonSide(make_python)
        stack.callback(python.env.close)
        limit = max_episode_steps or getattr(
            getattr(python.env, "spec", None), "max_episode_steps", None
        )
        if not debug:
            _try_plain(make_envs, limit)
        side = KernelSide(make_envs, limit, debug=debug)
        stack.callback(side.envs.close)
        check_spaces(python, side)
        python.read_fields(side.envs.kernels.state_dtype, fields)
        proof.fields = list(python.paths)
        proof.not_compared = [name for name in side.field_names if name not in python.paths]
        say("looking for hidden randomness, clocks and I/O")
        proof.hidden = find_hidden(make_python, side.envs.single_action_space, python.paths)
        if any(one.is_fatal for one in proof.hidden):
            proof.seconds = time.perf_counter() - began
            return proof
        make_twin = None if debug else partial(_twin, make_envs, kernels, limit)
        steps = Lockstep(
            python, side, tolerance=tolerance, seed=seed, policies=policies, make_twin=make_twin
        )
        with contextlib.suppress(KeyboardInterrupt):
            proof.is_interrupted = True
            say("playing both in lockstep")
            found = proof.difference = steps.play(60.0 * minutes * (0.6 if has_free_runs else 1.0))
            if found is not None and found.what != "deadline":
                say("looking for the lines of the difference")
                replay = KernelSide(make_envs, limit, debug=True)
                locate(found, PythonSide(make_python, python.paths), replay, tolerance)
            elif found is None and has_free_runs:
                say("comparing free runs")
                proof.means = free_runs(
                    make_python,
                    make_envs,
                    limit=limit or _LONGEST,
                    debug=debug,
                    seconds=60.0 * minutes * 0.4,
                    margin=margin,
                    seed=seed,
                    policies=policies,
                )
                proof.speeds = None if debug else speeds(make_python, make_envs)
            proof.is_interrupted = False
        _report(steps, proof, (python.has_masks, side.envs.has_action_masks))
    proof.seconds = time.perf_counter() - began
    return proof
