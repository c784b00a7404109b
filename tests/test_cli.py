"""The command `vecenv`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
from forked_runners import forked  # noqa: F401 - a fixture
from PIL import Image
from test_mistakes import WIDE  # returns observations outside its space

from vecenv.command.cli import main
from vecenv.core.compiling import is_jit_off

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    gym.register("Broken-v0", WIDE, disable_env_checker=True)
    yield
    gym.registry.pop("Broken-v0")


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module beside the user, with a policy and a red agent."""
    (tmp_path / "my_cage2.py").write_text(
        "from cage.challenge2.free_run import own_red as lazy\n"  # compiled for other tests, too
        "def restore(obs):\n    return [144] * len(obs)\n"
        "def boom(obs):\n    raise ValueError('boom')\n"
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


def test_an_error_in_a_users_own_policy_is_told_with_its_place(capsys, own_module, tmp_path):
    assert main(["evaluate", "--policy", "my_cage2:boom", "--episodes", "2"]) == 2
    place = f'File "{tmp_path / "my_cage2.py"}", line 5, in boom'
    assert capsys.readouterr().err.splitlines()[-2:] == ["vecenv: ValueError: boom", f"  {place}"]


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


def test_watch_writes_every_step_where_there_is_no_terminal(capsys):
    assert main(["watch", "--policy", "sleep", "--steps", "3", "--rules", "debugged"]) == 0
    out = capsys.readouterr().out
    assert "debugged rules" in out and "Privileged" in out
    assert [f"step {step}/3" in out for step in range(4)] == [True] * 4


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
        (["evaluate", "--policy", "nobody"], "policy is 'nobody', no built-in policy, no file"),
        (["evaluate", "--policy", "sleep", "--episodes", "1"], "episodes is 1"),
        (["evaluate", "--policy", "nowhere:act"], "there is no module 'nowhere'"),
        (["evaluate", "--policy", "sleep", "--red-agents", "x"], "red_agents has 'x'"),
        (["watch", "--policy", "sleep", "--red-agent", "x"], "red_agent is 'x', expected one of"),
        (["watch", "--policy", "sleep", "--fps", "0"], "fps is 0"),
        (["check", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["check", "agents:agents.parallel_tug"], "agents has no such module"),
        (["check", "agents:agents.games:runner"], "has no 'runner'; it has"),
        (["train", "agents:no_module:Game"], "there is no module 'no_module'"),
        (["compare", "CartPole-v2"], "there is no env 'CartPole-v2'; did you mean CartPole-v1"),
        (
            ["evaluate", "--policy", "sleep", "--json", "/nowhere/at/all.json"],
            "/nowhere/at/all.json",
        ),
        (
            ["watch", "--policy", "sleep", "--gif", "film.mp4"],
            "'film.mp4', expected an ending of .gif",
        ),
        (["compare", "CartPole-v1", "--backends", "quick"], "'quick', expected some of loop, sync"),
        (["compare", "CartPole-v1", "--num-envs", "many"], "num_envs is 'many', expected integers"),
        (["compare", "CartPole-v1", "--env-kwargs", "3"], "'3', expected NAME=VALUE"),
        (["compare", "CartPole-v1", "--plot", "picture.abc"], "expected an ending of"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(args, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # What is wrong is found before anything is run.
    monkeypatch.setattr("vecenv.compare.serving.subprocess.Popen", None)
    assert main(args) == 2
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.lstrip().startswith("vecenv: ")
    assert "Traceback" not in captured.err
    assert 'File "' not in captured.err


@pytest.mark.slow
def test_compare_prints_tables_and_writes_files(capsys, tmp_path):
    files = {name: tmp_path / f"compare.{name}" for name in ("json", "png")}
    args = ["compare", "vecenv:Synthetic-v0", "--num-envs", "2", "--backends", "loop,sync,jit"]
    args += ["--env-kwargs", "cpu_ms=0.05", "obs_shape=(2,)", "--rounds", "2", "--round-s", "0.02"]
    args += ["--json", str(files["json"]), "--plot", str(files["png"])]

    assert main(args) == 0

    out = capsys.readouterr().out
    assert "vecenv:Synthetic-v0: env steps per second" in out
    assert "Synthetic-v0 is not compiled" in out
    numbers = json.loads(files["json"].read_text())
    assert numbers["settings"]["env_kwargs"] == {"cpu_ms": 0.05, "obs_shape": [2]}
    assert [case["status"] for case in numbers["cases"]] == ["ok", "ok", "unavailable"]
    assert numbers["cases"][1]["report"]["shares"]["policy"] > 0
    with Image.open(files["png"]) as picture:
        assert picture.format == "PNG"


@pytest.mark.usefixtures("forked")
def test_compare_ends_with_an_error_if_nothing_ran(capsys):
    args = ["compare", "Synthetic-v0", "--num-envs", "1", "--backends", "jit"]
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
    try:
        assert main(["check", "my_own_env:make", "--num-envs", "2", "--num-steps", "20"]) == 0
        with pytest.raises(SystemExit):
            main(["train", "my_own_env:make", "--help"])
        told = re.sub(r"[\s│]", "", capsys.readouterr().out)  # which is in columns
        assert "default:my_own_env:make)" in told
    finally:
        sys.modules.pop("my_own_env", None)


@pytest.mark.parametrize("args", [["play"], ["watch", "--policy", "sleep", "--x"], ["compare"]])
def test_wrong_options_end_the_command(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


def test_without_arguments_the_commands_are_described(capsys):
    assert main([]) == 2
    assert "train" in (out := capsys.readouterr().out)
    assert "envs" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian", "CartPole-v1"], "no command 'trian'; did you mean train?"),
        (["xyzzy"], "expected one of demo, train, play, envs"),
        (["train", "cartpole-V1"], "did you mean CartPole-v1?"),
        (["train", "CartPole-v7"], "did you mean CartPole-v1 or JitCartPole-v1"),
        (["train", "CartPole-v1", "--total-steps", "-5"], "total_steps is -5"),
        (["watch", "CartPole-v1"], "CartPole-v1 does not render as text"),
        (["evaluate"], "expected either --policy with one policy, or --paired"),
        (["watch", "JitCartPole-v1", "--steps", "1"], "by --gif FILE or --html FILE"),
    ],
)
def test_what_was_meant_is_said(args, words, capsys):
    assert main(args) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_policy_is_said(capsys, tmp_path):
    args = ["--total-steps", "0", "--eval-episodes", "1", "--save"]
    assert main(["train", "CartPole-v1", *args, str(tmp_path / "a")]) == 0
    (tmp_path / "a" / "checkpoint" / "last.pt").unlink()  # as before the first one is saved
    assert main(["play", "CartPole-v1", "--policy", str(tmp_path / "a"), "--episodes", "1"]) == 2
    told = f"has no policy yet: its training has not saved {tmp_path}/a/checkpoint/last.pt"
    assert told in capsys.readouterr().err
    (tmp_path / "a" / "policy.pt").unlink()  # as before the envs were made
    assert main(["play", "CartPole-v1", "--policy", str(tmp_path / "a"), "--episodes", "1"]) == 2
    assert "has no policy yet: its training has saved nothing" in capsys.readouterr().err


def test_kwargs_of_an_env_are_given_in_two_forms(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = ["--total-steps", "0", "--eval-episodes", "1", "--overwrite"]
    args += ["--save", "a", "--env-kwargs"]
    for form in (["max_episode_steps=5"], ["max_episode_steps", "5"]):
        assert main(["train", "Pendulum-v1", "--algo", "ppo", *args, *form]) == 0
        kept = json.loads(Path("a/options.json").read_text())
        assert kept["env_kwargs"] == {"max_episode_steps": 5}
    play = ["play", "Pendulum-v1", "--policy", "a", "--episodes", "1", "--env-kwargs"]
    for form in (["max_episode_steps=1"], ["max_episode_steps", "1"]):
        assert main([*play, *form]) == 0


def test_the_compiled_twin_is_named_where_pygame_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert main(["watch", "CartPole-v1", "--gif", str(tmp_path / "a.gif"), "--steps", "1"]) == 2
    assert "JitCartPole-v1 is the same env and draws itself" in capsys.readouterr().err


def test_help_needs_no_compiler():
    script = (
        "import sys\nfrom vecenv.command.cli import main\n"
        "try: main(['evaluate', '--help'])\nexcept SystemExit: pass\n"
        "print({'numba', 'torch', 'PIL', 'matplotlib'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--episodes" in run.stdout
    assert run.stdout.strip().endswith("set()")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vecenv 0.")


KERNELS = """
import numpy as np
from gymnasium.spaces import Box, Discrete
from vecenv.jit import EnvKernels

def reset(state, rng):
    state.row = 0

def step(state, action, rng):
    state.row += 1
    return 0.0, state.row > 3, False

def observe(state, out):
    out[state.row] = 1.0

def adds_text(state, action, rng):
    state.row += "1"
    return 0.0, False, False

SPACES = {"observation_space": Box(0, 1, (2,)), "action_space": Discrete(2)}
OPTIONS = {"state_dtype": [("row", np.int32)], **SPACES, "reset": reset, "observe": observe}
BEYOND = EnvKernels(name="Beyond", step=step, **OPTIONS)
TEXT = EnvKernels(name="Text", step=adds_text, **OPTIONS)
"""


@pytest.mark.skipif(is_jit_off(), reason="nothing is compiled")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BEYOND", "in observe\n    out[state.row] = 1.0\nBeyond: index 2 is out of bounds"),
        ("TEXT", 'in adds_text\n    state.row += "1"\n'),
    ],
)
def test_a_mistake_in_a_kernel_is_told_by_its_line_alone(
    name, words, tmp_path, monkeypatch, capsys
):
    module = tmp_path / f"kernels_{name.lower()}.py"
    module.write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", f"{module.stem}:{name}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vecenv: {module}:") and words in told and "Traceback" not in told


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vecenv.cage.challenge2.playing.evaluate", interrupted)
    assert main(["evaluate", "--policy", "sleep"]) == 130
    assert capsys.readouterr().err == "vecenv: stopped by Ctrl-C\n"


# -- train, play, envs, bench, demo ----------------------------------------------------------------

FAST = ["--total-steps", "600", "--num-envs", "4", "--num-steps", "32", "--eval-episodes", "2"]


@pytest.fixture(scope="module")
def cartpole_run(tmp_path_factory):
    """A run folder of a few steps of PPO."""
    folder = tmp_path_factory.mktemp("runs") / "cartpole"
    assert main(["train", "CartPole-v1", *FAST, "--backend", "sync", "--save", str(folder)]) == 0
    return folder


@pytest.mark.usefixtures("one_torch_thread")
def test_train_leaves_a_run_folder_that_play_plays_and_train_resumes(
    cartpole_run, capsys, tmp_path, monkeypatch
):
    from vecenv.learn import load_checkpoint

    options = json.loads((cartpole_run / "options.json").read_text())
    assert (options["env_id"], options["total_steps"]) == ("CartPole-v1", 600)
    for policy in (cartpole_run, cartpole_run / "options.json"):
        assert main(["play", "CartPole-v1", "--policy", str(policy), "--episodes", "3"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"CartPole-v1, ppo of .*: return [0-9.]+ ± .* over 3 episodes", out)
    config = tmp_path / "options.json"  # of the first run; the command line goes first
    config.write_text((cartpole_run / "options.json").read_text())
    monkeypatch.chdir(tmp_path)
    args = ["train", "CartPole-v1", "--config", str(config), "--total-steps", "300"]
    assert main(args) == 0
    assert "ppo: actions are Discrete(2)" in capsys.readouterr().out
    again = tmp_path / "runs" / "CartPole-v1-ppo"
    found = json.loads((again / "options.json").read_text())
    assert found == {**options, "total_steps": 300, "save": "runs/CartPole-v1-ppo"}
    before = load_checkpoint(again / "checkpoint" / "last.pt")["state"]["steps"]
    assert main([*args[:-1], "600", "--resume"]) == 0
    after = load_checkpoint(again / "checkpoint" / "last.pt")["state"]["steps"]
    assert 0 < before < after
    capsys.readouterr()
    assert main([*args[:-1], "600", "--resume"]) == 0
    assert f"steps is left at step {after}: more --total-steps" in capsys.readouterr().out
    assert main(args) == 2
    assert "has a run already: go on with it by" in capsys.readouterr().err


def test_the_last_checkpoint_is_the_policy_and_another_one_is_not(cartpole_run, capsys):
    for name in ("policy.pt", "checkpoint/last.pt"):
        file = str(cartpole_run / name)
        assert main(["play", "CartPole-v1", "--policy", file, "--episodes", "1"]) == 0
    best = cartpole_run / "checkpoint" / "best.pt"
    best.touch()
    assert main(["play", "CartPole-v1", "--policy", str(best)]) == 2
    best.unlink()
    told = f"is not the last checkpoint, which is what {cartpole_run} plays"
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_resume_takes_the_options_of_the_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["--backend", "sync", "--gamma", "0.9", "--hidden", "16", "8", "--save", "own"]
    assert main(["train", "CartPole-v1", *FAST, *args]) == 0
    options = json.loads(Path("own/options.json").read_text())
    again = ["train", "CartPole-v1", "--resume", "--total-steps"]
    assert main([*again, "700", "--save", "own"]) == 0
    assert json.loads(Path("own/options.json").read_text()) == {**options, "total_steps": 700}
    assert main([*again, "800", "--config", "own/options.json"]) == 0  # no new run elsewhere
    assert json.loads(Path("own/options.json").read_text()) == {**options, "total_steps": 800}
    assert not Path("runs").exists()
    capsys.readouterr()
    assert main([*again, "900", "--save", "own", "--gamma", "0.8"]) in (1, 2)
    assert "gamma = 0.9, this one has 0.8" in capsys.readouterr().err
    assert main([*again, "900", "--save", "own", "--algo", "dqn"]) == 2
    assert (
        "is not of dqn: give the trainer that began the run, by --algo" in capsys.readouterr().err
    )
    other = Path("runs/CartPole-v1-dqn/checkpoint")
    other.mkdir(parents=True)
    (other / "last.pt").touch()
    assert main(["train", "CartPole-v1", "--resume"]) == 2
    assert "no run to resume, but there is runs/CartPole-v1-dqn: give" in capsys.readouterr().err


@pytest.mark.usefixtures("one_torch_thread")
def test_a_trainer_that_was_copied_out_and_changed_trains_and_plays(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--algo", "ppo", "CartPole-v1", "--eject", "my"]) == 0
    assert [path.name for path in Path("my").iterdir()] == ["ppo.py"]
    assert main(["train", "CartPole-v1", "--eject", "my"]) == 2
    assert "there already" in capsys.readouterr().err
    small = ["--total-steps", "128", "--num-steps", "16", "--num-envs", "4"]
    Path("my/ppo.py").rename("my/plain_ppo.py")
    assert main(["train", "Acrobot-v1", "--algo", "my/plain_ppo.py", *small]) == 0
    assert "Acrobot-v1: return" in capsys.readouterr().out
    assert Path("runs/Acrobot-v1-plain_ppo/agent.pt").exists()
    text = (ROOT / "examples" / "resume.py").read_text().replace("nn.SiLU", "nn.ReLU")
    own = Path("my/own_ppo.py")
    own.write_text(text.replace("    width: int", "    my_width: int = 32\n    width: int"))
    args = ["--backend", "sync", "--my-width", "16", "--save", "run"]
    assert main(["train", "CartPole-v1", "--algo", str(own), *FAST, *args]) == 0
    play = ["play", "CartPole-v1", "--policy", "run", "--episodes", "1"]
    assert main(play) == 2
    assert "own_ppo.py, which only runs if you name it: --algo" in capsys.readouterr().err
    assert main([*play, "--algo", str(own)]) == 0
    assert "own_ppo of run" in capsys.readouterr().out
    sys.modules.pop("own_ppo")
    sys.modules.pop("plain_ppo")


@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        ("CartPole-v1", "ppo"),
        ("Pendulum-v1", "sac"),
        ("vecenv:Synthetic-v0", "ppo"),
        ("Cage2-v0", "cage2_defender"),
        ("vecenv:Cage4-v0", "cage4_defender"),
        ("agents:Spread-v0", "ppo_agents"),
        ("test_cli_envs:Pictures", "dqn"),
    ],
)
def test_algorithms_are_chosen_by_spaces(env, algorithm, own_envs):
    from vecenv.command.trainers import choose

    assert choose(env).algorithm == algorithm


@pytest.fixture
def own_envs(tmp_path, monkeypatch):
    """A module of envs beside the user."""
    (tmp_path / "test_cli_envs.py").write_text(
        "import gymnasium as gym, numpy as np\nfrom gymnasium.spaces import *\n"
        "class Own(gym.Env):\n"
        "    observation_space, action_space = Box(0, 1, (3,)), Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n        return self.observation_space.sample(), {}\n"
        "    def step(self, action):\n"
        "        return self.observation_space.sample(), 1.0, True, False, {}\n"
        "class Pictures(Own):\n"
        "    observation_space = Box(0, 255, (40, 40, 3), np.uint8)\n"
        "class Strange(Own):\n"
        "    action_space = Tuple((Discrete(2), Box(0, 1, (2,))))\n"
        "class Words(Own):\n    observation_space = Text(8)\n"
        "class Bare(Own):\n    def __init__(self, render_mode):\n        pass\n"
        "class Gray(Bare):\n    metadata = {'render_modes': ['rgb_array']}\n"
        "    render_mode = 'rgb_array'\n"
        "    def render(self):\n        return np.zeros((8, 8), np.uint8)\n"
        "class Sized(Own):\n"
        "    def __init__(self, size):\n        self.observation_space = Box(0, 1, (size,))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("test_cli_envs", None)


@pytest.mark.usefixtures("one_torch_thread", "own_envs")
@pytest.mark.parametrize("shown", [["--gif", "a.gif"], ["--html", "a.html"], ["--text"]])
def test_an_env_that_does_not_draw_is_refused_before_its_episodes(shown, capsys):
    args = ["--total-steps", "0", "--eval-episodes", "1"]
    assert main(["train", "test_cli_envs:Own", "--backend", "sync", *args]) == 0
    capsys.readouterr()
    assert main(["play", "test_cli_envs:Own", "--policy", "runs/Own-ppo", *shown]) == 2
    said = capsys.readouterr()
    assert "test_cli_envs:Own does not render" in said.err
    assert "its metadata['render_modes'] is []" in said.err
    assert "return" not in said.out and len(said.err.splitlines()) == 1


@pytest.mark.usefixtures("one_torch_thread", "own_envs")
def test_the_algorithm_is_chosen_by_the_env_that_a_config_makes(capsys):
    Path("sized.toml").write_text("total_steps = 0\neval_episodes = 2\nenv_kwargs = {size = 5}\n")
    args = ["train", "test_cli_envs:Sized", "--config", "sized.toml", "--backend", "sync"]
    assert main(args) == 0
    assert "return 1.0 ± 0.0" in capsys.readouterr().out


@pytest.mark.usefixtures("own_envs")
def test_a_script_of_the_users_own_may_count_for_itself_and_track(capsys):
    Path("cleanrl_like.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Options:\n    env_id: str = ''\n    batch_size: int = 0\n"
        "    track: bool = False\n"
        "def main(options):\n    print(options.batch_size, options.track)\n"
    )
    train = ["train", "CartPole-v1", "--algo", "cleanrl_like.py"]
    assert main([*train, "--track"]) == 0
    assert main(train) == 0
    assert capsys.readouterr().out.splitlines()[1::2] == ["0 True", "0 False"]
    assert main([*train, "--batch-size", "-1"]) == 2
    assert "batch_size is -1, expected at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("own_envs")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--seed", "1", "CartPole-v1"], "come after it, as in: vecenv train CartPole-v1"),
        (["train", "CartPole-v1", "--algo", "pp0"], "algo is 'pp0', expected one of ppo, sac"),
        (["train", "CartPole-v1", "--algo", "my.py"], "'my.py', but there is no such file"),
        (["train", "CartPole-v1", "--algo", "none_here.py"], "is no trainer: it has no Options;"),
        (["train", "CartPole-v1", "--num-epochs", "0"], "num_epochs is 0, expected at least 1"),
        (["train", "CartPole-v1", "--hidden", "64", "0"], "hidden is (64, 0), expected at least 1"),
        (["train", "Pendulum-v1", "--alpha", "0"], "--alpha 0.0: expected a number above 0"),
        (["train", "CartPole-v1", "--algo", "sac"], "expected a bounded Box of floats"),
        (["train", "Pendulum-v1", "--algo", "dqn"], "expected Discrete; use a wrapper"),
        (["train", "test_cli_envs:Strange"], "actions are Tuple(Discrete(2)"),
        (["train", "test_cli_envs:Words"], "the observation 'obs' is Text"),
        (["train", "CartPole-v1", "--save", "/proc/nowhere"], "/proc/nowhere"),
        (["train", "CartPole-v1", "--config", "none.toml"], "config is 'none.toml', which can't"),
        (["train", "CartPole-v1", "--config", "odd.toml"], "did you mean gamma?"),
        (
            ["train", "CartPole-v1", "--config", "bad.json"],
            "bad.json', which can't be read (Expecting",
        ),
        (["train", "CartPole-v1", "--device", "cuda:77"], "torch finds no such device"),
        (["watch", "test_cli_envs:Bare"], "Bare does not render as text (render_mode='ansi')"),
        (["watch", "test_cli_envs:Bare", "--gif", "a.gif"], "Bare does not render pictures"),
        (["watch", "test_cli_envs:Gray", "--gif", "a.gif"], "drew uint8 (8, 8), expected a pict"),
        (["play", "CartPole-v1", "--policy", "none"], "there is no such file or folder"),
        (["play", "CartPole-v1", "--policy", "odd.toml"], "odd.toml is no policy"),
        (["play", "CartPole-v1", "--policy", ".", "--episodes", "0"], "episodes is 0"),
        (["play", "CartPole-v1", "--policy", ".", "--gif", "no/a.gif"], "there is no folder"),
        (["watch", "CartPole-v1", "--policy", "."], "vecenv play CartPole-v1 --policy . --html"),
        (["watch", "--policy", "."], "policy is '.', a folder without a policy.npz; expected"),
        (["envs", "no-such"], "no env has no-such in its name; --all lists"),
        (["demo", "--save", "/proc/nowhere"], "choose another folder with --save"),
    ],
)
def test_what_can_not_be_trained_or_played_is_said_in_one_line(args, words, capsys):
    Path("odd.toml").write_text("gama = 0.9\n")
    Path("bad.json").write_text("{")
    Path("none_here.py").write_text("")
    assert main(args) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("vecenv: ")
    assert "Traceback" not in err
    assert "Errno" not in err
    assert not list(Path().glob("runs/*/checkpoint/*"))  # nothing was trained


@pytest.mark.parametrize(
    "args", [["train"], ["train", "CartPole-v1", "--no-such-option", "3"], ["demo", "--x", "3"]]
)
def test_wrong_options_of_a_trainer_end_the_command(args, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_a_trainer_without_load_policy_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("own_trainer.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Options:\n    speed: int = 1\n"
        "def main(options): ...\n"
    )
    Path("run").mkdir()
    Path("run/options.json").write_text('{"speed": 1}')
    play = ["play", "CartPole-v1", "--policy", "run", "--algo", "own_trainer.py"]
    assert main(play) == 2
    assert "is of own_trainer, which vecenv play can't play" in capsys.readouterr().err


@pytest.mark.usefixtures("one_torch_thread")
def test_a_policy_of_another_env_is_refused(cartpole_run, capsys):
    assert main(["play", "Acrobot-v1", "--policy", str(cartpole_run)]) == 2
    told = capsys.readouterr().err
    assert "was trained with observations Box(" in told
    assert "Acrobot-v1 has Box(" in told
    assert "size mismatch" not in told
    last = cartpole_run / "checkpoint" / "last.pt"
    weights = last.read_bytes()
    last.write_bytes(weights[:1000])
    try:  # equal spaces: the damage is what is said
        assert main(["play", "CartPole-v1", "--policy", str(cartpole_run)]) == 2
    finally:
        last.write_bytes(weights)
    told = capsys.readouterr().err
    assert "damaged" in told
    assert "trained with" not in told


@pytest.mark.usefixtures("one_torch_thread")
def test_kernels_are_trained_in(capsys, tmp_path):
    kernels, folder = "vecenv.jit.cartpole:CARTPOLE", str(tmp_path / "run")
    assert main(["train", kernels, *FAST, "--save", folder]) == 0
    assert main(["play", kernels, "--policy", folder, "--episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


def test_envs_lists_spaces(capsys):
    assert main(["envs", "synth"]) == 0
    assert "Synthetic-v0" in (out := capsys.readouterr().out)
    assert "Discrete(2)" in out
    assert main(["envs", "--all", "cartpole-v"]) == 0
    out = capsys.readouterr().out
    assert "CartPole-v1" in out
    assert "CartPole-v0" not in out.replace("JitCartPole", "")


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"loop": 100, "sync": 96, "async": 104}, "backend='sync', 0.96 times a loop"),
        ({"loop": 100, "sync": 96, "async": 107}, "backend='async', 1.1 times"),
        ({"loop": 9, "async": 95, "async-first-ready": 100}, "backend='async', 11 times"),
        ({"loop": 9, "async": 90, "async-first-ready": 100}, "first-ready (send/recv), 11"),
        ({"loop": 9, "sync": 9, "jit": 900, "gymnasium-sync": 2000}, "kernels (backend='jit'), 1e"),
    ],
)
def test_bench_advises_the_simplest_of_those_that_are_about_as_fast(rates, expected):
    from vecenv.command.bench import Bench

    cases = [SimpleNamespace(backend=name, steps_per_second=rate) for name, rate in rates.items()]
    found = Bench({"CartPole": SimpleNamespace(measured=cases)})
    assert expected in found.advice()[0]


def test_trackers_that_are_not_installed_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vecenv.command.trainers.find_spec", lambda name: None)
    assert main(["train", "CartPole-v1", "--track", "wandb"]) == 2
    assert "which is not installed: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_policies_play_the_same_episodes(capsys, cartpole_run, tmp_path):
    found = tmp_path / "paired.json"
    words = ["evaluate", "--paired", "defender", "sleep", "--episodes", "5", "--json", str(found)]
    assert main([*words, "--env-kwargs", "episode_length=12"]) == 0
    told, numbers = capsys.readouterr().out, json.loads(found.read_text())
    assert "5 episodes under equal luck" in told and numbers["unpaired_ci95"] >= 0
    assert "Cage2-v0 red_agent=b_line episode_length=12" in told and "defender - sleep" in told
    (first, mean, _), (second, other, _), (_, gain, _) = (x.values() for x in numbers["scores"])
    assert (first, second) == ("defender", "sleep") and mean > other
    assert gain == pytest.approx(mean - other)
    same = ["evaluate", "--paired", str(cartpole_run), str(cartpole_run), "--env", "CartPole-v1"]
    assert main([*same, "--episodes", "3"]) == 0
    assert "CartPole-v1" in (told := capsys.readouterr().out) and "0.0 ± 0.0" in told
    for wrong, message in (
        (["--paired", "sleep", "random", "--policy", "sleep"], "either --policy with one"),
        ([], "either --policy with one policy, or --paired with two"),
        (["--policy", "sleep", "--env", "CartPole-v1"], "`vecenv play ENV --policy RUN` scores"),
        (["--paired", "sleep", "random", "--episodes", "1"], "episodes is 1, expected at least 2"),
        (["--paired", "sleep", "random", "--red-agents", "sleep"], "--env-kwargs rules=debugged"),
        (["--paired", "sleep", "random", "--rules", "debugged"], "with --paired write them"),
    ):
        assert main(["evaluate", *wrong]) == 2
        assert message in capsys.readouterr().err
