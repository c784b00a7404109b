"""`vecenv.port`: equal kernels are proven, others' first difference is told with its lines."""

import cProfile
import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from port import toys

from vecenv import load_policy
from vecenv.command.cli import main
from vecenv.command.trainers import load
from vecenv.jit import JitVectorEnv
from vecenv.port import StuckError, lockstep, prove
from vecenv.port.returns import compare_means, speeds

BRIEF: Any = {"minutes": 0.004, "debug": True, "has_free_runs": False}


@pytest.fixture(autouse=True)
def own_time(monkeypatch):
    """Count the time of a comparison in this process alone, whatever else runs."""
    monkeypatch.setattr(lockstep, "time", types.SimpleNamespace(perf_counter=time.process_time))


def line_of(text):
    """Return "toys.py:N" of the line of the toys that begins with a text."""
    lines = Path(toys.__file__).read_text().splitlines()
    return f"toys.py:{1 + next(k for k, line in enumerate(lines) if line.strip().startswith(text))}"


def difference(env, kernels, minutes=0.1, **options):
    """What a proof finds, which there must be."""
    proof = prove(env, kernels, **BRIEF | {"minutes": minutes, **options})
    assert proof.difference is not None and not proof.is_proven, str(proof)
    return proof.difference


def test_every_distribution_replays():
    proof = prove(toys.Luck, toys.LUCK_KERNELS, **BRIEF)
    assert proof.is_proven, str(proof)
    assert proof.counts["draws"] > 13 * 50 and proof.fields == ["steps", "luck"]
    assert proof.not_compared == ["order"]
    assert max(proof.largest_errors.values()) == 0.0


def test_fields_that_are_not_named_are_compared_by_their_own_names():
    given = {"luck": lambda env: env.luck}
    assert prove(toys.Luck, toys.LUCK_KERNELS, fields=given, **BRIEF).fields == ["steps", "luck"]
    proof = prove(toys.Luck, toys.LUCK_KERNELS, fields={"steps": None}, **BRIEF)
    assert (proof.fields, proof.not_compared) == (["luck"], ["steps", "order"])


def test_masks_and_fields_are_compared():
    proof = prove(toys.Walk, toys.WALK, **BRIEF)
    assert proof.is_proven, str(proof)
    assert proof.counts["steps"] >= 50 and set(proof.styles) >= {"random", "rare", "rare states"}


@pytest.mark.parametrize(
    ("changed", "what", "python_line", "kernel_line"),
    [
        ({"step": toys.step_rarely_wrong}, "reward", "reward = 1.0 if self", "reward = 0.5"),
        ({"observe": toys.observe_wrong}, "observation[1]", "", "out[1] = 5"),
        ({"action_mask": toys.mask_wrong}, "mask[0]", "", "def mask_wrong"),
        ({"step": toys.step_other_field}, "field wind", "self.wind = int(", "state.wind = -2"),
    ],
)
def test_a_difference_is_told_with_its_lines(changed, what, python_line, kernel_line):
    kernels = dataclasses.replace(toys.WALK, **changed)
    found = difference(toys.Walk, kernels)
    assert found.what == what
    if python_line:
        assert line_of(python_line) in found.python_line
    assert line_of(kernel_line) in found.kernel_line
    assert str(found).count("\n") >= 3 and found.actions[0] is None


def test_a_difference_is_told_where_actions_are_arrays():
    proof = prove(toys.Slide, toys.SLIDE, **BRIEF | {"minutes": 0.1})
    found = proof.difference
    assert found is not None and found.what == "reward" and len(found.actions) > 1
    assert "reward differs in step " in str(proof) and "return 0.5 if" in found.kernel_line


def test_a_part_of_an_observation_that_is_rarely_written_is_a_difference():
    def observe(state, out):
        out[1] = state.wind
        if state.place != 8:
            out[0] = state.place

    kernels = dataclasses.replace(toys.WALK, observe=observe)
    found = difference(toys.Walk, kernels)
    assert found.what == "observation[0]" and found.python == "8"


def test_a_draw_too_many_is_named_with_its_line():
    kernels = dataclasses.replace(toys.WALK, step=toys.step_one_more_draw)
    found = difference(toys.Walk, kernels, **BRIEF)
    assert found.what == "draws"
    assert line_of("integers(rng, 5)") in found.kernel_line
    assert "draw 3: nothing | integers(5)" in found.notes[-1]


def test_a_draw_too_few_is_named_with_its_line():
    def still(state, action, rng):
        state.wind = 0
        state.place = min(max(state.place + action - 1, 0), 9)
        return 1.0 if state.place == 9 else -0.1, state.place == 9, False

    found = difference(toys.Walk, dataclasses.replace(toys.WALK, step=still), **BRIEF)
    assert found.what == "draws"
    assert line_of("if self.np_random.random() < 0.3") in found.python_line
    assert "uniform() toys.py" in found.notes[0] and "nothing" in found.notes[0]


def test_a_game_is_compared_agent_by_agent():
    proof = prove(toys.Tag, toys.TAG, **BRIEF)
    assert proof.is_proven, str(proof)
    assert proof.fields == ["places", "steps"]

    def lazy(state, actions, rng):
        result = toys.tag_step(state, actions, rng)
        if state.steps > 6:
            state.rewards[:] = 0.0
        return result

    found = difference(toys.Tag, dataclasses.replace(toys.TAG, step=lazy))
    assert found.what.startswith("reward of "), found
    assert "state.rewards[:] = 0.0" in found.kernel_line


@pytest.mark.parametrize(
    ("env", "kind", "text", "is_fatal"),
    [
        (toys.GlobalLuck, "global randomness", "self.noise = np.random.rand()", True),
        (toys.PythonLuck, "global randomness", "if random.random() < 0.5", True),
        (toys.Clock, "wall-clock time", "self.now = time.time()", False),
        (toys.Reader, "I/O", "with open(Path(__file__))", False),
        (toys.Counting, "earlier episodes", "", False),
        (toys.Ordered, "unknown", "", True),
        (toys.SecondLuck, "seed", "", False),
    ],
)
def test_hidden_dependencies_are_named(env, kind, text, is_fatal):
    proof = prove(env, toys.WALK, **BRIEF)
    hidden = [one for one in proof.hidden if one.kind == kind]
    assert hidden, str(proof)
    assert hidden[0].is_fatal == is_fatal and (not is_fatal or not proof.is_proven)
    if text:
        assert line_of(text) in hidden[0].line
    assert str(hidden[0]) in str(proof)


@pytest.mark.parametrize(
    ("env", "kernels", "options", "message"),
    [
        (toys.Unseeded, toys.WALK, {}, "Unseeded can't be seeded: its reset takes no `seed`"),
        (toys.Luck, toys.WALK, {}, "observation_space: the Python env has Box"),
        (
            toys.Walk,
            dataclasses.replace(toys.WALK, action_space=Discrete(4), action_mask=None),
            {},
            r"action_space: the Python env has Discrete\(3\), the kernels have Discrete\(4\)",
        ),
        (toys.Walk, toys.WALK, {"fields": {"plce": "place"}}, "'plce', but the state has place"),
        (toys.Walk, toys.WALK, {"fields": {"place": "plce"}}, "AttributeError"),
        (toys.Walk, toys.WALK, {"fields": {"place": "seen()"}}, r"shape \(2,\); the state has"),
        (toys.Dirichlet, toys.WALK, {}, "draws by `dirichlet`, which has no counterpart"),
        (toys.Tag, toys.WALK, {}, "the Python env has agents"),
    ],
)
def test_what_can_not_be_compared_is_refused(env, kernels, options, message):
    with pytest.raises(ValueError, match=message):
        prove(env, kernels, **BRIEF, **options)


def test_kernels_must_be_some():
    with pytest.raises(TypeError, match="expected EnvKernels or what makes a JitVectorEnv"):
        prove(toys.Walk, "walk", **BRIEF)
    with pytest.raises(TypeError, match="expected a Gymnasium env or a parallel env with reset"):
        prove(dict, toys.WALK, **BRIEF)
    with pytest.raises(ValueError, match=r"minutes is 0\.0, expected a number above 0"):
        prove(toys.Walk, toys.WALK, minutes=0.0)


def test_a_state_that_luck_does_not_reach_is_compared():
    found = difference(toys.Lock, toys.LOCK, minutes=1.0)
    assert found.what == "reward", found
    assert line_of("return 2.0, True, False") in found.kernel_line
    assert len(found.actions) >= 10  # from the seed, not from a copy


def test_what_was_not_seen_is_told():
    def step(state, action, rng):
        if state.place < -5:
            state.wind = 7
        return toys.step(state, action, rng)

    proof = prove(toys.Walk, dataclasses.replace(toys.WALK, step=step), **BRIEF)
    (lines,) = proof.lines_not_run.values()
    assert proof.is_proven and len(lines) == 1 and "was never true" in str(proof)
    assert f"test_port.py: {lines[0]}" in str(proof)
    assert "state.place < -5 was never true" in proof.outcomes_not_seen[0]
    assert Path(__file__).read_text().splitlines()[lines[0] - 1].strip() == "state.wind = 7"


@pytest.mark.parametrize("env", [toys.Uncopied, toys.Locked])
def test_an_env_whose_copies_fail_gives_no_false_alarm(env):
    proof = prove(env, toys.WALK, **BRIEF | {"minutes": 0.02})
    assert proof.is_proven and proof.styles["rare states"] > 0, str(proof)


def test_a_call_that_does_not_return_is_a_difference():
    options: Any = BRIEF | {"minutes": 0.2, "timeout": 0.5}
    endless = dataclasses.replace(toys.WALK, step=toys.step_endless)
    found = difference(toys.Walk, endless, **options)
    assert found.what == "deadline" and found.actions
    assert "step of the kernels did not return within 0.5 s: `step_endless`" in found.kernels
    assert "toys.py:" in found.kernels
    try:
        text = str(prove(toys.Endless, toys.WALK, **options))
    except StuckError as error:  # while it is played alone
        text = str(error)
    assert "step of the Python env did not return within 0.5 s: `step` at" in text


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can't be stopped here")
def test_time_in_which_the_process_is_stopped_does_not_count():
    code = (
        "import os, signal\nfrom vecenv.port.deadline import time_limit, within\n"
        "with time_limit(1.5), within('a call'):\n    os.kill(os.getpid(), signal.SIGSTOP)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.waitpid(child.pid, os.WUNTRACED)  # it has stopped
        time.sleep(2.0)
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert child.wait(60) == 0


def test_ctrl_c_ends_a_proof_with_what_was_found():
    calls = []

    def interrupt(obs):
        calls.append(obs)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return 1

    proof = prove(toys.Walk, toys.WALK, policies=[interrupt], **BRIEF | {"minutes": 0.1})
    assert proof.is_interrupted and not proof.is_proven and proof.counts["steps"] > 20
    assert "interrupted: no difference was found so far" in str(proof)


@pytest.mark.slow
def test_the_command_ends_compiled_kernels_that_loop(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom port import toys\n"
        "ENDLESS = dataclasses.replace(toys.WALK, step=toys.step_endless)\n"
    )
    command = [sys.executable, "-m", "vecenv", "port", "port.toys:Walk", "mine:ENDLESS"]
    done = subprocess.run(
        [*command, "--timeout", "1", "--json", "report.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "step of the kernels did not return in time" in done.stdout
    assert "`step_endless` at" in done.stdout
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["difference"]["what"] == "deadline"


def test_an_exception_of_the_env_is_a_difference():
    found = difference(toys.Raising, toys.WALK)
    assert found.what == "exception" and "no way back" in found.python
    assert line_of('raise RuntimeError("no way back")') in found.python_line


def test_policies_of_the_user_are_played():
    asked = []

    def right(obs):
        asked.append(obs)
        return 2

    options = {"minutes": 0.05, "debug": True, "max_episode_steps": 20}
    proof = prove(toys.brief, toys.WALK, policies=[right], **options)
    assert proof.is_proven and proof.styles["policy"] > 5, str(proof)
    assert proof.means[2].what == "return, policy 1 of the user" and proof.means[2].kernels > 0.0
    assert asked and asked[0].shape == (2,)


class MethodWalk(toys.Walk):
    """Gives its masks by the method alone."""

    def reset(self, **options):
        return super().reset(**options)[0], {}

    def step(self, action):
        return *super().step(action)[:4], {}

    def action_masks(self):
        return self.mask()


def test_masks_of_a_method_are_compared_and_missing_ones_told():
    options = {"minutes": 0.02, "debug": True, "max_episode_steps": 20, "has_free_runs": False}

    def make():
        return gym.wrappers.TimeLimit(MethodWalk(), 20)

    found = {}
    for name, mask in {"right": toys.action_mask, "wrong": toys.mask_wrong, "none": None}.items():
        found[name] = prove(make, dataclasses.replace(toys.WALK, action_mask=mask), **options)
    assert found["wrong"].difference.what == "mask[0]"
    assert found["right"].is_proven and "action masks: compared" in str(found["right"])
    assert "action masks: NOT COMPARED, only the Python env has them" in str(found["none"])


def test_policies_of_run_folders_see_the_masks_of_all_envs_at_once(tmp_path, caplog):
    ppo = load("ppo")
    small = {"num_envs": 2, "total_steps": 0, "eval_episodes": 1}
    ppo.main(ppo.Options(env_id="port.toys:brief", save=tmp_path, **small))
    policy, asked = load_policy(tmp_path), []
    assert policy.wants_masks

    def seen(obs, masks=None, starts=None):
        asked.append((np.shape(obs), np.shape(masks), bool(np.all(starts))))
        return policy(obs, masks, starts)

    seen.has_action_masks = True
    options = {"minutes": 0.05, "debug": True, "max_episode_steps": 20}
    proof = prove(toys.brief, toys.WALK, policies=[seen], **options)
    assert proof.is_proven and proof.styles["policy"] > 5, str(proof)
    assert "trained with masks" not in caplog.text and "nan" not in str(proof)
    found = proof.means[2]
    assert found.what == "return, policy 1 of the user" and found.episodes[1] == 32
    sizes = {shape[0] for shape, _, _ in asked if len(shape) == 2}
    assert sizes == {1, 32} and {masks[-1] for _, masks, _ in asked} == {3}
    assert {is_new for shape, _, is_new in asked if shape == (32, 2)} == {True, False}


def test_free_runs_and_policies_carried_over_have_equal_means():
    options = {"minutes": 0.03, "debug": True, "max_episode_steps": 20}
    proof = prove(toys.brief, toys.WALK, **options)
    assert len(proof.means) == 6 and proof.is_proven, str(proof)
    assert all(one.episodes[0] > 1 for one in proof.means)

    def still(state, action, rng):
        result = toys.step(state, action, rng)
        return result[0] - 2.0, result[1], result[2]

    def make(num_envs, **options):  # another env where many are made
        kernels = toys.WALK if num_envs == 1 else dataclasses.replace(toys.WALK, step=still)
        return JitVectorEnv(kernels, num_envs, **options)

    proof = prove(toys.brief, make, **options)
    assert proof.difference is None and not proof.is_proven
    assert "different" in {one.verdict for one in proof.means}, str(proof)


def test_speeds_are_those_of_the_env_alone(monkeypatch):
    monkeypatch.setattr("vecenv.port.returns._NUM_ENVS", 16)

    class Large(toys.Walk):  # whose observations take a millisecond to copy
        seen = np.zeros(2_000_000).view  # type: ignore[assignment]

    own, kernels = speeds(Large, functools.partial(JitVectorEnv, toys.WALK, debug=True))
    assert own > 10_000 and kernels > 1_000


def test_two_one_sided_tests():
    rng = np.random.default_rng(0)
    many, more = rng.normal(size=4000), rng.normal(size=4000)
    assert compare_means("x", many, more, 0.2).verdict == "same"
    assert compare_means("x", many[:8], more[:8], 0.2).verdict == "not shown"
    assert compare_means("x", many, more + 0.5, 0.2).verdict == "different"
    late = compare_means("x", many, more[:0], 0.2)
    assert late.verdict == "not shown" and late.kernels is None
    assert "in 4000 episodes; the kernels' did not end in time" in str(late)
    rare = np.repeat([20.0, 3.0], [224, 30])  # of which the few have none
    assert compare_means("x", rare, np.full(32, 20.0), 0.2).verdict == "not shown"
    assert compare_means("x", np.full(30, 3.0), np.full(30, 3.0), 0.2).verdict == "same"
    assert compare_means("x", np.full(30, 3.0), np.full(30, 3.1), 0.2).verdict == "different"


@pytest.mark.parametrize("name", ["taxi", "pendulum", "breakout", "lava_gap", "foraging"])
def test_envs_of_others_equal_their_ports(name):
    packages = {"breakout": "minatar", "lava_gap": "minigrid", "foraging": "lbforaging"}
    pytest.importorskip(packages.get(name, "gymnasium"))
    port = importlib.import_module(f"port.ports.{name}")
    proof = prove(port.make, port.KERNELS, fields=port.FIELDS, **BRIEF)
    assert proof.is_proven and proof.fields == list(port.FIELDS), str(proof)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["taxi", "pendulum"])
def test_compiled_ports_equal_too(name):
    port = importlib.import_module(f"port.ports.{name}")
    proof = prove(port.make, port.KERNELS, fields=port.FIELDS, minutes=0.2)
    assert proof.is_proven and proof.speeds is not None, str(proof)


def test_the_command_reports_in_words_and_json(tmp_path, capsys):
    args = ["port", "port.toys:brief", "port.toys:WALK", "--debug", "--minutes", "0.02"]
    args += ["--max-episode-steps", "20"]
    assert main([*args, "--json", str(tmp_path / "report.json")]) == 0
    assert "no difference was found" in capsys.readouterr().out
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["is_proven"] and told["fields"] == ["place", "wind"] and len(told["means"]) == 6
    assert main(["port", "port.toys:GlobalLuck", *args[2:]]) == 1
    assert "global randomness" in capsys.readouterr().out
    if Path("/dev/full").exists():
        assert main([*args, "--minutes", "0.002", "--json", "/dev/full"]) == 2
        assert "/dev/full: No space left on device" in capsys.readouterr().err
    assert main(["port", "port.toys:Walk", "port.toys:WAKL"]) == 2
    assert "EnvKernels in port.toys: LUCK_KERNELS, WALK" in capsys.readouterr().err
    assert main(["port", "port.toys:Walk"]) == 2
    assert "KERNELS is missing" in capsys.readouterr().err


def test_bundled_envs_are_kernels_by_their_id(capsys):
    ids = ["FrozenLake-v1", "JitFrozenLake-v1"]
    assert main(["port", *ids, "--debug", "--minutes", "0.01"]) == 0, capsys.readouterr().out


def test_a_skeleton_names_what_was_not_guessed(tmp_path):
    main(["port", "port.toys:Depot", "--new", "--folder", str(tmp_path)])
    text = (tmp_path / "depot_kernels.py").read_text()
    assert "    # not guessed: trucks (list), event (str), loads (list)\n" in text
    assert "'place': 'place'" in text and "TODO: by" not in text


@pytest.mark.parametrize("env", ["port.toys:Walk", "port.toys:Tag", "Pendulum-v1"])
def test_a_skeleton_runs(env, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["port", env, "--new", "--folder", str(tmp_path)]) == 0
    module, test = sorted((path.stem for path in tmp_path.iterdir()), key=len)
    assert test == f"test_{module}"
    if env != "port.toys:Walk":  # one is compiled
        monkeypatch.setattr("vecenv.port.prove", functools.partial(prove, debug=True))
    module = importlib.import_module(module)
    with pytest.raises(AssertionError, match="DIFFERENT: draws"):  # so far, but it runs
        importlib.import_module(test).test_the_port_is_the_env()
    envs = JitVectorEnv(module.KERNELS, 2, debug=True)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    if env == "port.toys:Walk":
        assert module.FIELDS == {"place": "place", "wind": "wind"}
    capsys.readouterr()
    assert main(["port", env, f"{module.__name__}:KERNELS", "--debug", "--minutes", "0.01"]) == 1
    assert "DIFFERENT: draws" in capsys.readouterr().out
    assert main(["port", env, "--new", "--folder", str(tmp_path)]) == 2
    assert "there is such a file already" in capsys.readouterr().err


def test_a_proof_runs_under_the_users_profiler():
    profiler = cProfile.Profile()
    assert profiler.runcall(prove, toys.Luck, toys.LUCK_KERNELS, **BRIEF).is_proven
    assert any(
        called.code.co_name == "prove"
        for called in profiler.getstats()
        if hasattr(called.code, "co_name")
    )
