"""`vecenv demo`: train a defender for CAGE Challenge 2, compare it with simple ones, film it."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vecenv.cage import Evaluation, evaluate, save_episode_gif
from vecenv.files import require_writable
from vecenv.timing.report import new_table

__all__ = ["compare", "run_demo"]

RIVALS = ("sleep", "random", "react-restore")


def _interval(mean: float, half_width: float) -> str:
    """Return a confidence interval as text, with tenths only where they matter."""
    digits = int(abs(mean) < 100)
    return f"{mean:.{digits}f} ± {half_width:.{digits}f}"


def compare(scores: list[Evaluation]) -> Table:
    """Return a table with a row per cell of the challenge and a column per policy."""
    title = f"mean return ± half of its 95 % interval, {scores[0].cells[0].episodes} episodes each"
    names = [score.policy for score in scores]
    table = new_table(title, ["red agent", "steps", *names], box=SIMPLE_HEAD)
    for cells in zip(*(score.cells for score in scores), strict=True):
        shown = (_interval(cell.mean, cell.ci95) for cell in cells)
        agent, length = cells[0].red_agent, cells[0].episode_length
        table.add_row(agent, str(length), *shown, end_section=length == 100)
    totals = (_interval(score.total, score.total_ci95) for score in scores)
    table.add_row("total", "", *totals, style="bold")
    return table


def run_demo(total_steps: int, num_envs: int, seed: int, episodes: int, save: Path) -> None:
    """Train, compare, film, and say where everything is; see `vecenv.command.cli.demo`."""
    console = Console()
    if find_spec("PIL") is None or find_spec("matplotlib") is None:
        raise SystemExit("the demo draws and films: pip install 'vecenv[train]'")
    try:
        save.mkdir(parents=True, exist_ok=True)
        require_writable(save / "policy.npz")
    except OSError as error:
        told = f"{error.filename}: {error.strerror}; choose another folder with --save"
        raise SystemExit(told) from None
    from vecenv.train.cage2_defender import Cage2Defender  # torch

    settings = Cage2Defender.Options(
        total_steps=total_steps,
        num_envs=num_envs,
        num_epochs=3,
        learning_rate=2e-3,
        entropy_weight=0.03,  # with less, only some seeds find a better way to play
        compile="on",  # takes up to half a minute the first time; later runs load the code
        seed=seed,
        save=save,
        overwrite=True,
    )
    given: Any = {"episodes": episodes, "seed": seed}
    # Meanwhile, a separate process plays the others; this also caches their compiled rules for the
    # evaluation at the end. It ignores Ctrl-C, which is for the training.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ignore) as pool:
        rivals = [pool.submit(evaluate, name, **given) for name in RIVALS]
        console.print("compiling the simulator; the first time ever this takes 20 s or more")
        Cage2Defender.make_envs(settings, 1).close()
        console.print(f"training {total_steps} steps against B_line and Meander (Ctrl-C ends it)")
        Cage2Defender.run(settings)
        with console.status("waiting for the policies it is compared with"):
            scores = [rival.result(timeout=600) for rival in rivals]
    trained = str(save / "policy.npz")
    with console.status("evaluating the policy") as status:
        scores.insert(0, evaluate(trained, **given, name="trained"))
        status.update("filming an episode")
        film = save / "episode.gif"
        save_episode_gif(trained, film, red_agent="b_line", episode_length=30, seed=seed)
    console.print(compare(scores))
    scores[0].to_json(save / "scores.json")
    for name in ("policy.npz", "curve.png", "scores.json", "episode.gif"):
        console.print(f"{save / name}", soft_wrap=True)
