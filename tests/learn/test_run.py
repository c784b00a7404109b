"""Run: what is in its folder, what it refuses, and that nothing that was there gets lost."""

import json
import math
import os
import shlex
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs import counters
from equality import assert_same

from vecenv import SyncVectorEnv
from vecenv.learn import CheckpointError, Moments, Run, RunError, load_checkpoint, load_options
from vecenv.learn.run import FORMAT, save_checkpoint

draw_curve = Run.draw_curve  # which a fixture replaces
MARK = "\0what"  # of what is no plain value


@dataclass
class Options:
    folder: Path
    learning_rate: float = 1e-3
    total_steps: int = 100
    resume: bool = False


@pytest.fixture
def options(tmp_path):
    return Options(tmp_path / "run")


def begin(options, **kwargs):
    return Run(options.folder, options, **kwargs)


def resume(options, **kwargs):
    return begin(options, resume=True, **kwargs)


def lines(options):
    text = (options.folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# -- metrics ---------------------------------------------------------------------------------------


def test_scalars_are_lines_of_json(options):
    with begin(options) as run:
        run.log(8, {"loss": torch.ones((), requires_grad=True), "kl": np.float32(0.5)})
        run.log(16, {"loss": float("nan"), "kl": 2})
        run.write_json("evaluation", {"mean": 1.5, "ci95": math.nan, "all": (math.inf, 2)})
        text = (run.folder / "evaluation.json").read_text()
    assert json.loads(text) == {"mean": 1.5, "ci95": None, "all": [None, 2]}
    first, second = lines(options)
    assert (first["steps"], first["loss"], first["kl"]) == (8, 1, 0.5)
    assert (second["steps"], second["loss"], second["kl"]) == (16, None, 2)
    assert 0 <= first["seconds"] <= second["seconds"]


def test_lines_and_episodes_after_the_checkpoint_are_cut(options):
    with begin(options) as run:
        for steps in (10, 20, 30):
            run.log(steps, {"x": steps})
            run.add_episodes(steps, torch.tensor([1.0, steps]))
            if steps == 20:
                run.save({"steps": steps})
    with (options.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"steps": 40')
    with resume(options) as run:
        assert run.restore({}) == {"steps": 20}
        assert run.curve_steps == [10, 10, 20, 20]
        assert run.curve_returns == [1, 10, 1, 20]
        assert run.recent_return(2) == 10.5
        run.log(30, {"x": 31})
        assert run.seconds > lines(options)[1]["seconds"]
    assert [line["x"] for line in lines(options)] == [10, 20, 31]


def test_scalars_go_to_tensorboard_too_or_a_sentence_says_that_it_is_missing(options, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with begin(options, tensorboard=True) as run:
        run.log(10, {"losses/x": 0.5})
        run.save({"steps": 10})
        run.log(20, {"losses/x": 0.25})
    with resume(options, tensorboard=True) as run:
        run.log(20, {"losses/x": 0.125})
    with monkeypatch.context() as patched:
        patched.setattr("vecenv.learn.run.find_spec", lambda name: None)
        with pytest.raises(RunError, match="tensorboard is missing: pip install"):
            resume(options, tensorboard=True)
    events = EventAccumulator(str(options.folder)).Reload().Scalars("losses/x")
    assert [(event.step, event.value) for event in events] == [(10, 0.5), (20, 0.125)]


def test_the_curve_is_drawn_from_all_episodes(options, monkeypatch):
    monkeypatch.setattr(Run, "draw_curve", draw_curve)
    pytest.importorskip("matplotlib")
    with begin(options) as run:
        run.draw_curve()
        assert not (options.folder / "curve.png").exists()  # there is nothing to draw
        run.add_episodes(1000, -np.geomspace(1, 1000, 30))
        run.add_episodes(2000, [-2.0])
        run.draw_curve("a title", {"random": -900.0})
        assert (options.folder / "curve.png").read_bytes()[1:4] == b"PNG"
        (options.folder / "curve.png").unlink()
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        run.draw_curve()
    assert not (options.folder / "curve.png").exists()


# -- checkpoints -----------------------------------------------------------------------------------


def make_parts(width=4):
    module = torch.nn.Sequential(Moments(3), torch.nn.Linear(3, width))
    return {
        "module": module,
        "optimizer": torch.optim.Adam(module.parameters(), 1e-2),
        "envs": SyncVectorEnv(counters([3, 5])),
        "draws": torch.Generator().manual_seed(1),
        "noise": np.random.default_rng(1),
    }


def use(parts):
    """Change everything there is; return what can be seen of it."""
    x = torch.randn(5, 3, generator=parts["draws"]) + torch.rand(1)
    parts["module"][0].update(x)
    parts["optimizer"].zero_grad()
    parts["module"](x).square().mean().backward()
    parts["optimizer"].step()
    drawn = parts["noise"].random(), np.random.rand()  # noqa: NPY002  # the global one
    weights = [tensor.clone() for tensor in parts["module"].state_dict().values()]
    return [tensor.numpy() for tensor in weights], drawn, parts["envs"].step([0, 0])[0]


def test_parts_go_on_from_where_they_were_with_all_random_streams(options):
    parts = make_parts()
    parts["envs"].reset(seed=1)
    with begin(options) as run:
        assert run.restore(parts) is None
        use(parts)
        run.save({**parts, "steps": 7, "more": [1.5, None], "obs": np.ones(2)})
        expected = [use(parts) for _ in range(4)]
    parts = make_parts()
    with resume(options) as run:
        rest = run.restore(parts)
        assert_same(rest, {"steps": 7, "more": [1.5, None], "obs": np.ones(2)})
        assert run.not_restored == {}
        assert_same([use(parts) for _ in range(4)], expected)


def test_envs_that_cannot_be_saved_are_to_be_reset_and_the_log_says_so(options, caplog):
    envs = SyncVectorEnv(counters([3]))
    envs.envs[0].unwrapped.engine = threading.Lock()  # which can't be pickled
    envs.reset(seed=1)
    others = gym.vector.SyncVectorEnv(counters([3]))
    with begin(options) as run:
        for steps in (1, 2):
            run.save({"envs": envs, "others": others, "steps": steps})
    assert caplog.text.count("a resumed run resets what can't be saved: {'envs':") == 1
    with resume(options) as run:
        assert run.restore({"envs": envs, "others": others}) == {"steps": 2}
    assert "pickling it failed with TypeError" in run.not_restored["envs"]
    assert run.not_restored["others"] == "SyncVectorEnv has no state_dict"
    assert "envs: not as they were, they were reset: the state of env 0" in caplog.text


def test_pickles_of_another_user_are_not_loaded(options, tmp_path, monkeypatch):
    envs = SyncVectorEnv(counters([9]))
    envs.reset()
    envs.step([0])
    with begin(options) as run:
        run.save({"envs": envs, "steps": 1})
    own = os.environ["XDG_DATA_HOME"]
    for home, found in ((str(tmp_path / "theirs"), 4), (own, 2)):
        monkeypatch.setenv("XDG_DATA_HOME", home)
        envs.step([0])
        envs.step([0])
        with resume(options) as run:
            run.restore({"envs": envs})
            assert ("envs" in run.not_restored) == (home != own)
        assert envs.step([0])[0][0, 2] == found


def test_checkpoints_are_due_at_step_counts_and_the_best_is_kept(options):
    best, last = (options.folder / f"checkpoint/{name}.pt" for name in ("best", "last"))
    with begin(options, save_every=100) as run:
        assert [run.is_due(steps) for steps in (99, 100, 101)] == [False, True, True]
        run.save({"steps": 130}, score=float("nan"))
        assert not best.exists()
        assert [run.is_due(steps) for steps in (199, 200)] == [False, True]
        run.save({"steps": 200}, score=-5.0)
        run.save({"steps": 300}, score=-6.0)
        assert load_checkpoint(best)["state"]["steps"] == 200
    with resume(options, save_every=100) as run:
        assert run.best_score == -5
        assert not run.is_due(399)
        run.save({"steps": 400}, score=-5.5)
        run.save({"steps": 500})
        assert load_checkpoint(best)["state"]["steps"] == 200
        run.save({"steps": 600}, score=-4.0)
        assert load_checkpoint(best)["state"]["steps"] == 600
    assert sorted(path.name for path in last.parent.iterdir()) == ["best.pt", "last.pt"]


def test_a_state_without_steps_is_refused_in_a_sentence(options):
    with begin(options) as run:
        with pytest.raises(ValueError, match=r'^state lacks "steps": give .* run\.save\(\{'):
            run.save({"x": 1})
        assert not (options.folder / "checkpoint/last.pt").exists()


def test_a_module_with_nan_is_not_saved(options):
    module = torch.nn.Linear(2, 1)
    with begin(options) as run:
        run.save({"module": module, "steps": 1})
        torch.nn.init.constant_(module.bias, float("nan"))
        with pytest.raises(CheckpointError, match="module has NaN or infinity in bias, so no"):
            run.save({"module": module, "steps": 2})
    assert load_checkpoint(options.folder / "checkpoint/last.pt")["state"]["steps"] == 1


# -- the folder ------------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_neither_overwritten_nor_mixed_up(options):
    with begin(options) as run:
        run.log(1, {"x": 1})
        run.save({"steps": 1}, score=1.0)
    with pytest.raises(RunError, match=r"has a run already: go on with it by .*--resume"):
        begin(options)
    options.learning_rate = 0.5
    message = r"options.json is of a run with learning_rate = 0.001, this one has 0.5: give"
    with pytest.raises(RunError, match=message):
        resume(options)
    with resume(options, may_change=["learning_rate"]) as run:
        assert run.restore({}) == {"steps": 1}
    moved = options.folder.rename(options.folder.with_name("moved"))
    with resume(Options(moved, 0.5), may_change=["folder"]) as run:
        assert run.restore({}) == {"steps": 1}
    with begin(Options(moved), overwrite=True) as run:
        assert run.restore({}) is None
        assert sorted(path.name for path in moved.rglob("*.pt")) == []
    assert load_options(moved, Options).learning_rate == 1e-3


def test_a_run_killed_before_its_first_checkpoint_begins_anew(options, caplog):
    with begin(options) as run:
        run.log(1, {"x": 1})
    with resume(options) as run:
        assert run.restore({}) is None
    assert "has no checkpoint yet: --resume begins a new run" in caplog.text
    assert lines(options) == []


# -- signals ---------------------------------------------------------------------------------------


def test_the_first_signal_asks_for_the_end_and_the_second_acts_as_before(options):
    before = signal.getsignal(signal.SIGTERM)
    with begin(options) as run:
        signal.raise_signal(signal.SIGTERM)
        assert run.should_stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        run.save({"steps": 1})
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_command_to_go_on_with_is_that_of_this_process(options, monkeypatch, tmp_path):
    program = tmp_path / "vecenv"
    program.touch(mode=0o755)
    with begin(options) as run:
        for words in (["python", "a.py", "--folder", "a b"], ["python", "a.py", "--resume"]):
            monkeypatch.setattr(sys, "orig_argv", words)
            monkeypatch.setattr(sys, "argv", words[1:])
            expected = "a.py" + (" --folder 'a b'" if len(words) == 4 else "")
            assert run.resume_command == f"{shlex.quote(sys.executable)} {expected} --resume"
        monkeypatch.setattr(sys, "argv", [str(program), "train", "--resume"])  # not on the path
        assert run.resume_command == f"{program} train --resume"


# -- options ---------------------------------------------------------------------------------------


@dataclass
class ManyOptions:
    path: Path = Path("a/b")
    maybe: Path | None = None
    some: tuple[int, ...] | None = None
    pairs: list[tuple[int, int]] | None = None
    pair: tuple[int, str] = (1, "x")
    rate: float = 3.5
    anything: Any = None


@dataclass
class Fewer:
    path: Path = Path()


def test_options_come_back_as_they_were_and_those_of_another_program_are_refused(tmp_path):
    given = ManyOptions(path=Path("c"), pair=(2, "y"), anything={"a": [1, 2]})
    Run(tmp_path, given).close()
    assert load_options(tmp_path, ManyOptions) == given
    assert json.loads((tmp_path / "options.json").read_text())["path"] == "c"
    several = ManyOptions(maybe=Path("d"), some=(1, 2), pairs=[])
    Run(tmp_path / "several", several).close()
    assert load_options(tmp_path / "several", ManyOptions) == several
    for kind, message in {Fewer: "options of Fewer", int: "options of int"}.items():
        with pytest.raises(ValueError, match=message):
            load_options(tmp_path, kind)
    for wrong_options in (ManyOptions(anything=object()), 3):
        with pytest.raises(TypeError):
            Run(tmp_path / "x", wrong_options)
    assert not (tmp_path / "x").exists()
    (tmp_path / "options.json").write_text("[1")
    with pytest.raises(ValueError, match="has no options in JSON"):
        load_options(tmp_path, ManyOptions)
    with pytest.raises(RunError, match="has no options in JSON"):
        Run(tmp_path, given, resume=True)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no checkpoint, or damaged"),
        (b"PK\3\4" + bytes(100), "is no checkpoint, or damaged"),
        ({"format": "vecenv checkpoint 9"}, "has the format 'vecenv checkpoint 9', expected"),
        ({"format": FORMAT, "content": 3}, "is no checkpoint, or damaged"),
        ({"format": FORMAT, "content": {"a": torch.zeros(1).expand(9)}}, "without so much memory"),
        ({"format": FORMAT, "content": {"a": torch.float32}}, "it has a dtype"),
        ({"format": FORMAT, "content": {"a": Path("a")}}, "is no checkpoint, or damaged"),
        ({"format": FORMAT, "content": {MARK: ("eval", "1")}}, "damaged"),
    ],
)
def test_files_that_are_no_checkpoints_are_refused(content, message, tmp_path):
    path = tmp_path / "last.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("make_changes", "message"),
    [
        (lambda: {"module": torch.nn.Linear(3, 4)}, "fit module: .* Missing key.* .weight"),
        (
            lambda: {"module": make_parts(5)["module"]},
            r"fit module: .* size mismatch for 1.weight: .*\[4, 3\].*\[5, 3\]",
        ),
        (lambda: {"noise": np.random.Generator(np.random.MT19937())}, "noise: state must be for a"),
        (lambda: {"optimizer": torch.optim.Adam([torch.zeros(1)])}, "fit optimizer: loaded state"),
        (
            lambda: {"optimizer": torch.optim.Adam(make_parts(5)["module"].parameters())},
            r"optimizer: exp_avg is torch.float32 \(4, 3\), expected \(5, 3\)",
        ),
        (lambda: {"draws": 3}, "draws: 'int' object has no attribute 'load_state_dict'"),
        (lambda: {"critic": torch.nn.Linear(1, 1)}, "does not fit critic: it has no 'critic'"),
    ],
)
def test_a_checkpoint_of_other_parts_is_refused_in_a_sentence_that_names_the_file(
    make_changes, message, options
):
    parts, changes = make_parts(), make_changes()
    parts["envs"].reset(seed=1)
    use(parts)
    with begin(options) as run:
        run.save({**parts, "steps": 1})
    with resume(options) as run, pytest.raises(CheckpointError, match=message) as caught:
        run.restore(make_parts() | changes)
    assert str(options.folder / "checkpoint/last.pt") in str(caught.value)
    assert "\n" not in str(caught.value).split(":")[0]


# -- what is told ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_a_sentence(options, tmp_path):
    (tmp_path / "file").touch()
    options.folder = tmp_path / "file" / "run"
    with pytest.raises(RunError, match=r"file.*Not a directory; choose another folder with --save"):
        begin(options)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([None]), print, torch.eye(2).to_sparse()]
)
def test_what_cannot_be_saved_is_named(value, tmp_path):
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\]\['b'\] is "):
        save_checkpoint(tmp_path / "x", {"a": [{"b": value}]})
    assert not (tmp_path / "x").exists()


def test_a_full_disk_keeps_the_checkpoint_and_whole_lines(options):
    resource = pytest.importorskip("resource")
    with begin(options) as run:
        run.log(1, {"x": 1})
        run.save({"steps": 1})
        size = (options.folder / "metrics.jsonl").stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))  # no file may be longer
        try:
            with pytest.raises(CheckpointError, match=r"of step 2 can't be written.*--resume"):
                run.save({"steps": 2, "x": torch.zeros(100_000)})
            with pytest.raises(OSError, match=r"metrics.jsonl"):
                run.log(2, {"x": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.log(3, {"x": 3})
    assert [line["x"] for line in lines(options)] == [1, 3]
    assert [path.name for path in (options.folder / "checkpoint").iterdir()] == ["last.pt"]
    with resume(options) as run:
        assert run.restore({}) == {"steps": 1}


def test_damaged_random_streams_are_refused_in_a_sentence(options):
    with begin(options) as run:
        path = run.save({"steps": 1})
    found = load_checkpoint(path)
    found["random"]["numpy"]["state"]["pos"] = -1  # from where NumPy would read
    save_checkpoint(path, found)
    with resume(options) as run, pytest.raises(CheckpointError, match="fit the random streams"):
        run.restore({})
    found["state"]["steps"] = math.inf
    save_checkpoint(path, found)
    with pytest.raises(CheckpointError, match="is no checkpoint of Run"):
        resume(options)


def test_without_a_terminal_progress_is_a_line_now_and_then(options, capsys, monkeypatch):
    monkeypatch.setattr("vecenv.learn.run._LINE_S", 0.0)
    with Run(options.folder, options) as run, run.progress("Env", 0, 4000) as show:
        show(1000, "return 7")
        show(2000)
    assert "Env: return 7, 1,000 of 4,000 steps\n" in capsys.readouterr().out
