"""The zoo: train the envs of examples/zoo, each with some seeds, and write docs/zoo.md's tables.

    python benchmarks/zoo.py                      # all of them, seeds 1, 2 and 3
    python benchmarks/zoo.py JitCartPole-v1 JitTaxi-v4 --seeds 1 2
    python benchmarks/zoo.py --report             # trains nothing: table, picture and policies

A run is a process of its own, `vecenv train ENV --config zoo --seed S`, and evaluates itself, with
100 episodes. What is finished is not trained again, unless its settings have changed; a run that
was stopped, by Ctrl-C or by --limit, goes on. The report is of all that is finished: between two
comments of docs/zoo.md, in docs/zoo.png, and policies of the first seed in examples/zoo/ENV, if
they are small; every env needs a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from measure import machine, markdown_table

from vecenv.command import trainers
from vecenv.files import whole_file, write_text
from vecenv.learn import load_checkpoint
from vecenv.learn.run import save_checkpoint
from vecenv.timing.report import new_figure

ROOT = Path(__file__).parents[1]
ZOO, RUNS, PAGE = ROOT / "examples" / "zoo", ROOT / "runs" / "zoo", ROOT / "docs" / "zoo.md"
TRAIN = [sys.executable, "-m", "vecenv", "train"]
MAX_POLICY_BYTES = 100_000

# Of benchmark.md of RL Baselines3 Zoo, at its commit 0088472: algorithm, env steps, mean return.
# One run each; LunarLander was of version 2.
PUBLISHED = {
    "JitCartPole-v1": ("PPO", 100_000, 500.0),
    "JitAcrobot-v1": ("PPO", 1_000_000, -73.506),
    "JitMountainCar-v0": ("PPO", 1_000_000, -110.423),
    "JitMountainCarContinuous-v0": ("SAC", 50_000, 94.679),
    "JitPendulum-v1": ("SAC", 20_000, -156.995),
    "LunarLander-v3": ("PPO", 1_000_000, 242.119),
}


class Result(NamedTuple):
    """A run that is finished; seconds are of the whole process."""

    seed: int
    mean: float
    ci95: float
    wall_s: float
    processor_s: float
    machine: str
    curve: list[tuple[int, float]]  # env steps, mean return of the last episodes


def entries() -> dict[str, Path]:
    """Return the files of settings, by the envs' ids."""
    return {file.stem: file for file in sorted(ZOO.glob("*.toml"))}


def settings_of(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def fingerprint(file: Path) -> str:
    """Identify settings, whatever the comments say."""
    plain = json.dumps(settings_of(file), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def train(name: str, seed: int, limit_s: float) -> str:
    """Train until the end or the limit; return how it ended."""
    folder, note = RUNS / name / str(seed), RUNS / name / f"{seed}.json"
    known, is_of = read(note), fingerprint(entries()[name])
    if known.get("settings") != is_of:
        known = {"settings": is_of, "wall_s": 0.0, "processor_s": 0.0, "is_finished": False}
        shutil.rmtree(folder, ignore_errors=True)
    if known["is_finished"]:
        return "finished already"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").unlink(missing_ok=True)  # of a run that was stopped
    write_text(note, json.dumps(known))
    command = [*TRAIN, name, "--config", "zoo", "--seed", str(seed)]
    command += ["--save", str(folder.relative_to(ROOT)), "--resume"]  # begins, if there is none
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    is_over_limit = False
    with (RUNS / name / f"{seed}.log").open("ab") as log:
        # In a session of its own: Ctrl-C reaches it as one signal, from here, and it saves.
        output: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        child = subprocess.Popen(command, cwd=ROOT, **output)
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_over_limit = True
        finally:
            stop(child)
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            known["wall_s"] += time.perf_counter() - begin
            known["processor_s"] += usage.ru_utime - before.ru_utime
            known["processor_s"] += usage.ru_stime - before.ru_stime
            write_text(note, json.dumps(known))
    if is_over_limit:
        return f"stopped after {limit_s:.0f} s; the same command goes on"
    if child.returncode or not (folder / "evaluation.json").is_file():
        return f"FAILED with status {child.returncode}, see {RUNS / name / f'{seed}.log'}"
    known |= {"is_finished": True, "machine": machine("torch", "gymnasium", "numpy", "numba")}
    known |= read(folder / "evaluation.json")
    write_text(note, json.dumps(known))
    return f"return {known['mean']:.1f} ± {known['ci95']:.1f}, {known['wall_s']:.0f} s"


def stop(child: subprocess.Popen[Any]) -> None:
    """Let a training save and end, if it has not ended."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(120)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def results(name: str) -> list[Result]:
    """Return the finished runs of an env with its present settings, by seed."""
    found = list[Result]()
    for note in sorted((RUNS / name).glob("*.json"), key=lambda path: int(path.stem)):
        known = read(note)
        if known["is_finished"] and known["settings"] == fingerprint(entries()[name]):
            fields = {key: known[key] for key in Result._fields if key in known}
            curve = curve_of(note.with_suffix(""))
            found.append(Result(seed=int(note.stem), curve=curve, **fields))
    return found


def curve_of(folder: Path) -> list[tuple[int, float]]:
    found = list[tuple[int, float]]()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        value = row.get("charts/episodic_return", row.get("return"))
        if value is not None and math.isfinite(value):
            found.append((row["steps"], value))
    return found


def interval(run: Result) -> str:
    """Write the mean and half of the interval with as many digits as the mean's size asks for."""
    digits = 0 if abs(run.mean) >= 1000 else 1 if abs(run.mean) >= 10 else 2
    mean, half = (f"{value:,.{digits}f}".replace(",", " ") for value in (run.mean, run.ci95))
    return f"{mean} ± {half}"


def grouped(count: int) -> str:
    """Write thousands apart."""
    return f"{count:,}".replace(",", " ")


def num_steps(settings: dict[str, Any]) -> int:
    return settings.get("total_steps", trainers.load(settings["algo"]).Options().total_steps)


def table(found: dict[str, list[Result]]) -> str:
    """Return the page's part that is measured."""
    rows = list[list[str]]()
    seeds = sorted({run.seed for runs in found.values() for run in runs})
    for name, runs in found.items():
        settings = settings_of(entries()[name])
        returns = {run.seed: interval(run) for run in runs}
        others = PUBLISHED.get(name)
        told = f"{others[0]} {others[2]:.1f}, {grouped(others[1])}" if others else ""
        seconds = [max(getattr(run, kind) for run in runs) for kind in ("wall_s", "processor_s")]
        policy = "yes" if (ZOO / name).is_dir() else ""
        cells = [name, settings["algo"].upper(), grouped(num_steps(settings))]
        returns = [returns.get(seed, "") for seed in seeds]
        rows.append([*cells, *returns, *(f"{s:.0f}" for s in seconds), policy, told])
    header = ["env", "algorithm", "env steps", *(f"seed {seed}" for seed in seeds)]
    header += ["wall, s", "processor, s"]
    header += ["policy", "RL Baselines3 Zoo: return, env steps"]
    machines = sorted({run.machine for runs in found.values() for run in runs})
    return markdown_table(header, rows) + "\n\nMachine: " + "; ".join(machines) + "."


def draw(found: dict[str, list[Result]], path: Path) -> None:
    """Draw the curves of each env side by side."""
    columns = 4
    rows = math.ceil(len(found) / columns)
    figure = new_figure(3.1 * columns, 2.3 * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (name, runs) in zip(grid, found.items(), strict=False):
        for run in runs:
            steps, returns = zip(*run.curve, strict=True) if run.curve else ((), ())
            axes.plot([s / 1000 for s in steps], returns, linewidth=1, label=f"seed {run.seed}")
        if name in PUBLISHED:
            axes.axhline(PUBLISHED[name][2], color="gray", linestyle="--", linewidth=0.8)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.set_xlabel("env steps (thousands)", fontsize=7)
    for axes in grid[len(found) :]:
        axes.axis("off")
    figure.axes[0].legend(fontsize=7)
    figure.axes[0].set_ylabel("return while it trains", fontsize=7)
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=110)


def keep_policy(name: str, seed: int) -> None:
    """Copy the policy of a run, without what only a training needs, if that is small."""
    run, target = RUNS / name / str(seed), ZOO / name
    shutil.rmtree(target, ignore_errors=True)
    best = run / "checkpoint" / "best.pt"
    is_best = best.is_file() and settings_of(entries()[name])["algo"] == "dqn"  # as DQN plays
    saved = load_checkpoint(best if is_best else best.with_name("last.pt"))
    kept = {"state": {"agent": saved["state"]["agent"]}}
    (target / "checkpoint").mkdir(parents=True)
    file = target / "checkpoint" / "last.pt"
    save_checkpoint(file, kept)
    if file.stat().st_size > MAX_POLICY_BYTES:
        shutil.rmtree(target)
        return
    for name in ("options.json", "policy.pt"):
        shutil.copyfile(run / name, target / name)


def report() -> None:
    """Write table, picture and policies of all that is finished."""
    found = {name: results(name) for name in entries()}
    if missing := [name for name, runs in found.items() if not runs]:
        raise SystemExit(f"no finished run of {', '.join(missing)}; train these first")
    for name, runs in found.items():
        keep_policy(name, runs[0].seed)
    begin, end = "<!-- benchmarks/zoo.py writes from here -->", "<!-- to here -->"
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(begin)[0], page.partition(end)[2]
    write_text(PAGE, f"{before}{begin}\n\n{table(found)}\n\n{end}{after}")
    draw(found, PAGE.with_suffix(".png"))
    print(f"{len(found)} envs: {PAGE.relative_to(ROOT)}, {PAGE.with_suffix('.png').name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ENV", help=", ".join(entries()))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit", type=float, default=2700.0, help="seconds of a run, at most")
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in entries()]:
        parser.error(f"{', '.join(unknown)}: not in {ZOO}; it has {', '.join(entries())}")
    for number in (signal.SIGINT, signal.SIGTERM):  # the run saves before this ends
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    runs = [(name, seed) for name in given.names or entries() for seed in given.seeds]
    for count, (name, seed) in enumerate(() if given.report else runs, 1):
        print(f"{count}/{len(runs)} {name}, seed {seed}: ", end="", flush=True)
        print(train(name, seed, given.limit), flush=True)
    if given.report:
        report()


if __name__ == "__main__":
    main()
