"""A whole comparison, in processes of its own: what it reports, and what it survives."""

import json
import re
import time
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from forked_runners import forked, forking  # noqa: F401 - a fixture
from PIL import Image
from rich.console import Console

from vecenv.backends import COMPARED, TIMED
from vecenv.compare import Options, run_comparison
from vecenv.compare.result import Case, Comparison
from vecenv.compare.serving import Round, Runner, RunnerProcess, Setting

QUICK = {"rounds": 2, "round_s": 0.01, "warm_up_s": 0.02, "timed_s": 0.02, "timeout": 30.0}
TOYS = "compare.toy_envs"
SOME = ("loop", "sync", "async-first-ready", "jit")


def as_text(result, width=120):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(result)
    return captured.get()


def compared(backends, env="CartPole-v1", num_envs=(3,), **options):
    given = {**QUICK, "num_envs": num_envs, "backends": backends, **options}
    return run_comparison(Options(env, **given), on_progress=lambda what, share: None)


@pytest.fixture(scope="module")
def cartpole():
    with forking():
        return compared(SOME)


@pytest.mark.slow
def test_every_backend_is_measured():
    result = compared(COMPARED)
    assert [case.backend for case in result.cases] == list(COMPARED)
    for case in result.cases:
        assert case.is_measured, case.reason
        assert len(case.rates) == len(case.beside) == 2
        assert all(one.steps > 0 < one.seconds for one in case.rounds)
        assert case.start_s > 0
        assert case.memory_bytes > 2**20
        assert (case.report is not None) == (case.backend in TIMED)
    assert result.cases[0].speed_up == 1.0
    assert result.others_busy is None or result.others_busy >= 0
    assert set(COMPARED) <= set(as_text(result).split())


@pytest.mark.usefixtures("forked")
def test_the_number_of_workers_can_be_given():
    one = compared(["async"], num_workers=1)
    assert [case.num_workers for case in one.cases] == [1]
    assert json.loads(one.to_json())["cases"][0]["num_workers"] == 1


def test_the_tables_name_everything(cartpole):
    text = as_text(cartpole)
    for words in (*SOME, "x loop", "hand-", "strag", "MiB"):
        assert words in text
    assert (verdict := cartpole.verdict) and verdict in " ".join(text.split())


def rows_of_tables(text):
    return [line for line in text.splitlines() if line.startswith(("│", "┃"))]


def test_the_tables_fit_80_columns_without_a_wrapped_cell(cartpole):
    """With the largest numbers that are likely, and a name that would be markup."""
    result = deepcopy(cartpole)
    result.env = "shop:[red]:bug:[/red]"
    large = {"num_envs": 16_384, "rounds": rounds(123_456_789.0) * 2}
    large |= {"start_s": 12.34, "memory_bytes": 2**33}
    result.cases = [replace(case, **large) for case in result.cases]
    result.cases += [
        Case("jit", count, "unavailable", "not [b]compiled[/b] " * 99) for count in (1, 8, 64)
    ]
    text, wide = as_text(result, 80), as_text(result, 200)
    assert max(map(len, text.splitlines())) <= 80
    assert len(rows_of_tables(text)) == len(rows_of_tables(wide))
    assert "shop:[red]:bug:[/red]: env steps per second" in text
    assert "(1) not [b]compiled[/b] not" in text
    assert len([line for line in text.splitlines() if "not [b]" in line]) <= 2  # a short footnote


def test_json_and_picture_hold_the_numbers(cartpole, tmp_path):
    result = cartpole
    result.to_json(tmp_path / "compare.json")
    numbers = json.loads((tmp_path / "compare.json").read_text())
    assert numbers["verdict"] == result.verdict
    assert numbers["cases"][1]["steps_per_second"] == result.cases[1].steps_per_second
    assert numbers["cases"][1]["rounds"][0]["steps"] == result.cases[1].rounds[0].steps
    assert numbers["cases"][1]["report"]["shares"].keys() >= {"env compute", "hand-over"}
    result.plot(tmp_path / "compare.png")
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.width > 800


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_env_that_raises_is_reported_and_the_others_finish():
    result = compared(("sync", "async"), f"{TOYS}:OnlyInMainProcess", num_envs=(2,))
    assert [case.status for case in result.cases] == ["ok", "failed"]
    assert result.cases[1].reason.startswith("RuntimeError: not in a worker; Raised by env ")
    text = as_text(result)
    assert re.search(r"async +│ +2 │ failed \(1\)", text)
    assert "(1) RuntimeError: not in a worker" in text


@pytest.mark.usefixtures("forked")
def test_a_process_that_is_killed_is_reported():
    result = compared(["sync"], f"{TOYS}:Breaking", env_kwargs={"how": "kill", "after": 5})
    assert result.cases[0].reason == "its process was killed by signal SIGKILL (last words)"
    assert result.verdict.startswith("nothing could be run: its process was killed")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_process_that_hangs_is_reported():
    options = {"env_kwargs": {"how": "hang", "after": 5}}
    options["timeout"] = 5.0  # on a busy machine an env takes a second to be made
    begin = time.monotonic()
    result = compared(["sync"], f"{TOYS}:Breaking", **options)
    assert "no answer within 5 s while warming up" in result.cases[0].reason
    assert time.monotonic() - begin < 60


@pytest.mark.usefixtures("forked")
def test_envs_without_single_envs_run_compiled_only():
    result = compared(("loop", "jit"), "vecenv.jit.cartpole:CARTPOLE", num_envs=(4,))
    assert [case.status for case in result.cases] == ["unavailable", "ok"]
    assert result.cases[1].speed_up is None
    assert "x one env in a loop" not in result.verdict
    as_text(result)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backends": ("sync", "quick")}, "backends has 'quick', expected some of loop, sync"),
        ({"backends": ()}, "backends is empty"),
        ({"num_envs": ()}, r"num_envs is \[\]"),
        ({"num_envs": (4, 0)}, r"num_envs is \[4, 0\]"),
        ({"rounds": 0}, "rounds is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"round_s": 0.0}, "round_s is 0.0"),
        ({"timeout": np.inf}, "timeout is inf"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Options("CartPole-v1", **options)


def test_unknown_envs_are_refused_before_anything_is_started():
    with pytest.raises(ValueError, match="there is no env"):
        run_comparison(Options("NoSuchEnv-v0"))


@pytest.mark.usefixtures("forked")
def test_an_interrupted_comparison_leaves_no_process(monkeypatch):
    started = []
    begin = RunnerProcess.__init__

    def note(self):
        begin(self)
        started.append(self._process)

    monkeypatch.setattr(RunnerProcess, "__init__", note)

    def interrupt(what, share):
        if "round" in what:
            raise KeyboardInterrupt

    options = Options("CartPole-v1", num_envs=(2,), backends=("loop", "async"), **QUICK)
    with pytest.raises(KeyboardInterrupt):
        run_comparison(options, on_progress=interrupt)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_runner_steps_in_this_process_too():
    runner = Runner()
    setting = Setting(f"{TOYS}:Counter", {"length": 4}, "sync", 2, 0)
    assert min(runner.open(setting)[:2]) > 0
    assert runner.warm_up(0.01) > 2**20
    found = runner.measure(0.01)
    assert found.rate == found.steps / found.seconds > 0
    assert found.episodes > 2
    assert runner.take_time(0.01).num_envs == 2
    runner.close()
    runner.open(setting._replace(backend="loop"))
    runner.warm_up(0.001)
    assert runner.take_time(0.01) is None
    runner.close()


def rounds(*rates):
    """A second of each rate."""
    return [Round(rate, 1.0, 9) for rate in rates]


def test_the_verdict_names_the_fastest_and_who_else_was_at_work():
    loop = rounds(100.0, 110.0, 90.0)
    cases = [
        Case("loop", 1, rounds=loop, beside=loop),
        Case("sync", 8, rounds=rounds(95.0, 94.0, 93.0), beside=loop),
        Case("gymnasium-async", 8, rounds=rounds(300.0, 120.0, 180.0), beside=loop),
    ]
    result = Comparison("Env-v0", {}, "", cases)
    assert result.verdict == (
        "Fastest: gymnasium-async, 8 envs, 200 steps/s, 2 x one env in a loop."
    )
    assert cases[2].spread == 0.9
    result.others_busy = 1.04
    assert "Other programs kept 1.0 cores busy meanwhile" in result.verdict


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((100, 110, 105), (104, 112, 101), "A tie: sync, 8; async, 8 (105 to 106 steps/s)."),
        ((100, 100, 100), (109, 109, 109), "A tie: sync, 8; async, 8 (100 to 109 steps/s)."),
        ((100, 100, 100), (130, 131, 132), "Fastest: async, 8 envs, 131 steps/s."),
        ((100, 131, 100), (130, 131, 132), "A tie: sync, 8; async, 8 (110 to 131 steps/s)."),
        ((100, 131, 100), (130, 931, 132), "Too noisy to say what is fastest: the rounds of "),
    ],
)
def test_rounds_that_overlap_are_a_tie(first, second, words):
    for order in ((first, second), (second, first)):
        cases = [
            Case("sync", 8, rounds=rounds(*order[0])),
            Case("async", 8, rounds=rounds(*order[1])),
        ]
        verdict = Comparison("Env-v0", {}, "", cases).verdict
        assert words in (
            verdict if order[0] is first else verdict.replace("Fastest: sync", "Fastest: async")
        )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_slow_resets_are_in_the_rates():
    """An episode is 10 steps of 1 ms and a reset of 20: 333 steps/s, however it is stepped here."""
    result = compared(("loop", "sync"), f"{TOYS}:SlowResets", num_envs=(4,), round_s=0.02)
    for case in result.measured:
        assert min(one.episodes for one in case.rounds) >= 2
        per_episode = case.rounds[0].steps / case.rounds[0].episodes / case.num_envs
        assert per_episode == pytest.approx(10, rel=0.25)  # a look at the clock every 5 ms
        assert case.steps_per_second < 500  # 1000 without the resets; on busy cores less
