"""The command `vecenv`."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from PIL import Image

from vecenv.cli import main

ROOT = Path(__file__).parents[1]


class BrokenEnv(gym.Env):
    """Returns observations outside its space."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 7, {}

    def step(self, action):
        return 7, 0.0, False, False, {}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    gym.register("Broken-v0", BrokenEnv, disable_env_checker=True)
    yield
    gym.registry.pop("Broken-v0")


def test_evaluate_prints_the_table_and_writes_json(capsys, tmp_path):
    path = tmp_path / "scores.json"

    status = main(
        ["evaluate", "--policy", "react-restore", "--episodes", "20", "--json", str(path)]
    )

    assert status == 0
    out = capsys.readouterr().out
    assert "react-restore: faithful rules, 20 episodes per cell" in out
    assert "total" in out
    scores = json.loads(path.read_text())
    assert (scores["policy"], len(scores["cells"])) == ("react-restore", 9)


def test_rules_and_seed_are_passed_on(capsys, tmp_path):
    totals = []
    for options in (["--rules", "debugged"], ["--seed", "3"], []):
        path = tmp_path / "scores.json"
        args = ["evaluate", "--policy", "sleep", "--episodes", "20", "--json", str(path)]
        assert main([*args, *options]) == 0
        totals.append(json.loads(path.read_text())["total"])
    assert len(set(totals)) == 3
    assert "debugged rules" in capsys.readouterr().out


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module beside the user, with a policy and a red agent."""
    (tmp_path / "my_cage2.py").write_text(
        "from cage.challenge2.free_run import own_red as lazy\n"  # compiled for other tests, too
        "def restore(obs):\n    return [144] * len(obs)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    sys.modules.pop("my_cage2", None)


def test_policies_and_red_agents_of_ones_own_are_played(capsys, own_module):
    args = ["evaluate", "--policy", "my_cage2:restore", "--episodes", "2", "--json", "out.json"]
    assert main([*args, "--red-agents", "my_cage2:lazy", "meander"]) == 0
    scores = json.loads(Path("out.json").read_text())
    assert [cell["red_agent"] for cell in scores["cells"]] == ["lazy"] * 3 + ["meander"] * 3
    assert [cell["mean"] for cell in scores["cells"][:3]] == [-30, -50, -100]
    out = capsys.readouterr().out
    assert "lazy" in out
    assert max(map(len, out.splitlines())) <= 80

    args = ["watch", "--policy", "my_cage2:restore", "--steps", "3"]
    assert main([*args, "--red-agent", "my_cage2:lazy"]) == 0
    assert "red agent custom, step 3/3" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_a_policy_trained_under_other_rules_is_told_in_one_line(capsys):
    args = ["--policy", "defender", "--rules", "debugged"]
    words = "vecenv: defender.npz was made for 'CAGE Challenge 2' with 'faithful'"
    assert main(["evaluate", *args, "--episodes", "2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(words)
    assert main(["watch", *args, "--steps", "2"]) == 0
    assert capsys.readouterr().err.startswith(words)


def test_watch_writes_an_animation(capsys, tmp_path):
    path = tmp_path / "episode.gif"
    args = ["watch", "--policy", "random", "--red-agent", "meander", "--steps", "6"]

    assert main([*args, "--gif", str(path)]) == 0

    assert str(path) in capsys.readouterr().out
    with Image.open(path) as gif:
        assert gif.is_animated


def test_watch_shows_the_last_step_where_there_is_no_terminal(capsys):
    assert main(["watch", "--policy", "sleep", "--steps", "15", "--rules", "debugged"]) == 0
    out = capsys.readouterr().out
    assert "debugged rules" in out
    assert "step 15/15" in out
    assert "Privileged" in out


def test_check_reports_what_it_tried(capsys):
    arguments = ["check", "CartPole-v1", "--num-envs", "2", "--num-steps", "50"]
    assert main(arguments) == 0
    short = capsys.readouterr().out
    assert "rules passed" in short
    assert len(short.splitlines()) < 20
    assert main([*arguments, "--full"]) == 0
    assert "passed: the same seed gives the same run" in capsys.readouterr().out


def test_check_fails_for_an_env_that_breaks_the_rules(capsys):
    assert main(["check", "Broken-v0", "--num-steps", "5"]) == 1
    assert "observation_space" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["evaluate", "--policy", "nobody"], "policy is 'nobody', but there is no such file"),
        (["evaluate", "--policy", "sleep", "--episodes", "1"], "episodes is 1"),
        (["evaluate", "--policy", "nowhere:act"], "there is no module 'nowhere'"),
        (["evaluate", "--policy", "sleep", "--red-agents", "x"], "red_agents has 'x'"),
        (["watch", "--policy", "sleep", "--red-agent", "x"], "red_agent is 'x', expected one of"),
        (["watch", "--policy", "sleep", "--steps", "0"], "episode_length is 0"),
        (["watch", "--policy", "sleep", "--fps", "0"], "fps is 0"),
        (["watch", "--policy", "sleep", "--gif", "/nowhere/at/all.gif"], "/nowhere/at/all.gif"),
        (["check", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["check", "agents:agents.parallel_tug"], "agents has no such module"),
        (["check", "CartPole-v1", "--num-envs", "0"], "num_envs is 0"),
        (["compare", "CartPole-v2"], "there is no env 'CartPole-v2'; did you mean CartPole-v1"),
        (
            ["evaluate", "--policy", "sleep", "--json", "/nowhere/at/all.json"],
            "/nowhere/at/all.json",
        ),
        (
            ["watch", "--policy", "sleep", "--gif", "film.mp4"],
            "'film.mp4', expected a name",
        ),
        (["compare", "no_module:make"], "No module named 'no_module'"),
        (["compare", "CartPole-v1", "--backends", "quick"], "'quick', expected some of loop, sync"),
        (["compare", "CartPole-v1", "--num-envs", "many"], "num_envs is 'many', expected integers"),
        (["compare", "CartPole-v1", "--num-envs", "4,0"], "num_envs is [4, 0]"),
        (["compare", "CartPole-v1", "--env-kwargs", "3"], "'3', expected NAME=VALUE"),
        (["compare", "CartPole-v1", "--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["compare", "CartPole-v1", "--plot", "/nowhere/at/all.png"], "/nowhere/at/all.png"),
        (["compare", "CartPole-v1", "--trace", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["compare", "CartPole-v1", "--plot", "picture.abc"], "expected an ending of"),
        (["trace", "NoSuchEnv-v0", "--out", "trace.json"], "gymnasium.registry has all ids"),
        (["trace", "CartPole-v1", "--out", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (
            ["trace", "CartPole-v1", "--out", "trace.json", "--backend", "loop"],
            "one of sync, async",
        ),
        (["trace", "CartPole-v1", "--out", "trace.json", "--steps", "0"], "steps is 0"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(args, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # What is wrong is found before anything is run.
    monkeypatch.setattr("vecenv.compare.processes.subprocess.Popen", None)
    assert main(args) == 2
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.lstrip().startswith("vecenv: ")
    assert "Traceback" not in captured.err


def test_compare_prints_tables_and_writes_files(capsys, tmp_path):
    files = {name: tmp_path / f"compare.{name}" for name in ("json", "png", "trace")}
    args = ["compare", "vecenv:Synthetic-v0", "--num-envs", "2", "--backends", "loop,sync,jit"]
    args += ["--env-kwargs", "cpu_ms=0.05", "obs_shape=(2,)", "--rounds", "2", "--round-s", "0.02"]
    args += ["--policy-ms", "0.02", "--json", str(files["json"]), "--plot", str(files["png"])]

    assert main([*args, "--trace", str(files["trace"])]) == 0

    out = capsys.readouterr().out
    assert "vecenv:Synthetic-v0: env steps per second" in out
    assert "Synthetic-v0 is not compiled" in out
    numbers = json.loads(files["json"].read_text())
    assert numbers["settings"]["env_kwargs"] == {"cpu_ms": 0.05, "obs_shape": [2]}
    assert [case["status"] for case in numbers["cases"]] == ["ok", "ok", "unavailable"]
    assert numbers["cases"][1]["report"]["shares"]["policy"] > 0
    with Image.open(files["png"]) as picture:
        assert picture.format == "PNG"
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_compare_ends_with_an_error_if_nothing_ran(capsys):
    args = ["compare", "Synthetic-v0", "--num-envs", "1", "--backends", "jit", "--no-diversity"]
    assert main(args) == 2
    captured = capsys.readouterr()
    assert "skipped (1)" in captured.out
    assert captured.err.lstrip().startswith(
        "vecenv: nothing could be run: Synthetic-v0 is not compiled"
    )


def test_envs_of_the_working_directory_are_found(capsys, monkeypatch, tmp_path):
    (tmp_path / "my_own_env.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    args = ["trace", "my_own_env:make", "--num-envs", "2", "--backend", "sync", "--steps", "7"]
    try:
        assert main([*args, "--out", "trace.json"]) == 0
    finally:
        sys.modules.pop("my_own_env", None)
    out = capsys.readouterr().out
    assert "SyncVectorEnv, 2 envs" in out
    assert "timeline: trace.json" in out
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "step" and event["ph"] == "X" for event in events) == 7


def test_trace_says_why_a_backend_can_not_run(capsys, tmp_path):
    args = ["trace", "Acrobot-v1", "--backend", "jit", "--out", str(tmp_path / "trace.json")]
    assert main(args) == 2
    assert "jit: Acrobot-v1 is not compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [[], ["dance"], ["evaluate"], ["watch", "--policy", "sleep", "--x"], ["compare"]]
)
def test_wrong_options_end_the_command(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


def test_help_needs_no_compiler():
    script = (
        "import sys\nfrom vecenv.cli import main\n"
        "try: main(['evaluate', '--help'])\nexcept SystemExit: pass\n"
        "print({'numba', 'torch', 'PIL', 'matplotlib'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--episodes" in run.stdout
    assert run.stdout.strip().endswith("set()")


def test_runs_as_a_module():
    command = [sys.executable, "-m", "vecenv.cli", "evaluate", "--policy", "nobody"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "policy is 'nobody'" in run.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vecenv 0.")


def test_check_takes_factories(capsys):
    assert main(["check", "compare.toy_envs:Counter", "--num-steps", "20"]) == 0
    assert "passed" in capsys.readouterr().out


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vecenv.cage.challenge2.play.playing.evaluate", interrupted)
    assert main(["evaluate", "--policy", "sleep"]) == 130
    assert capsys.readouterr().err == "vecenv: stopped by Ctrl-C\n"
