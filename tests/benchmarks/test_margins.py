"""benchmarks/margins.py: what it concludes from figures, and that its list is complete."""

import importlib
import json
import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

# What the library has to keep: the pattern of the rows, how many there are, and their bar.
LIST = [
    ("sync, 64 null envs", 1, 2.5),
    ("async, 64 null envs, 2 workers", 1, 25),
    ("async, 64 null envs, caller and worker", 1, 40),
    ("make_vec: CartPole 64", 2, 0.97),
    ("make_vec: Atari", 2, 0.97),
    ("make_vec: MuJoCo", 2, 0.97),
    ("make_vec: MiniGrid", 2, 0.97),
    ("64 envs that sleep, batches of 16", 1, 0.9),
    ("start of 64 envs", 1, 0.5),
    ("memory of 200 envs that compute", 1, 0.2),
    ("worker killed", 1, 300),
    ("replay: add 2048", 1, 1.5),
    ("replay: sample 256", 1, 2.5),
    ("replay: sample 4096", 1, 2),
    ("replay: prioritized, sample and update", 1, 2.5),
    ("replay: 3 steps", 1, 2),
    ("episodic: sample 256 pairs", 1, 4),
    ("writer and add, 1 env", 1, 12 / 6),
    ("writer and add, 64 envs", 1, 25 / 6),
    ("frames stored once, sample", 2, 0.7),
    ("frames stored once, a million", 1, 7.6),
    ("gae 128 x 2048", 1, 4),
    ("CAGE 2 2048", 2, 0.95),
    ("jit CartPole", 2, 0.95),
    ("CAGE 4", 1, 0.95),
    ("loop: PPO on CAGE 2", 1, 0.9),
    ("loop: PPO on CartPole", 1, 0.9),
    ("SAC updates on HalfCheetah", 1, 2.3),
]
AT_MOST = {"start", "memory", "worker", "writer"}


@pytest.fixture(scope="module")
def margins():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("margins")


def test_every_margin_of_the_list_is_a_row_with_its_bar(margins):
    found = []
    for begin, count, bar in LIST:
        rows = [margin for margin in margins.MARGINS if margin.name.startswith(begin)]
        assert len(rows) == count, begin
        assert all(math.isclose(margin.bar, bar) for margin in rows), begin
        found += rows
    assert found and set(found) == set(margins.MARGINS)
    for margin in margins.MARGINS:
        is_most = margin.name.split()[0] in AT_MOST or margin.of == "GB"
        assert margin.is_most == is_most, margin.name
        assert (margin.measure is None) == (margin.row in importlib.import_module("against").ROWS)


@pytest.mark.parametrize(
    ("is_most", "figures", "control", "verdict"),
    [
        (False, [2.0, 0.5, 0.95], None, "pass"),
        (False, [0.9, 0.94, 0.99], None, "FAIL"),
        (False, [0.9, 0.94, 0.99], 0.05, "FAIL"),
        (False, [0.9, 0.94, 0.99], 0.07, "unclear"),
        (True, [0.9, 0.95, 0.99], None, "pass"),
        (True, [0.9, 0.96, 0.99], None, "FAIL"),
    ],
)
def test_the_median_must_keep_the_bar(
    margins, monkeypatch, capsys, is_most, figures, control, verdict
):
    margin = margins.Margin("anything", 0.95, "× a peer", lambda _: figures, is_most=is_most)
    outcome = margins.Outcome(margin, figures, control)
    monkeypatch.setattr(margins, "MARGINS", [margin])
    monkeypatch.setattr(margins, "measure_own", lambda *_: outcome)
    assert margins.main(["--wait-idle", "0"]) == (verdict == "FAIL")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "anything" in line]
    assert row.split(" | ")[-1] == f"{verdict} |"


def test_an_error_of_this_tree_fails_and_what_is_missing_does_not(margins):
    margin = margins.Margin("anything", 0.95, "× 1419e63", row="gae 128 x 8")
    broken = margins.Outcome(margin, [1.0], why="B: ValueError: no such option", has_failed=True)
    assert broken.verdict == "FAIL"
    assert "FAIL (B: ValueError: no such option)" in margins.table([broken])
    assert margins.Outcome(margin, why="A: ValueError: no such option").verdict == "skipped"


def test_what_a_row_lacks_is_in_the_table_and_no_failure(margins, monkeypatch, tmp_path, capsys):
    def broken(repetitions):
        raise AssertionError  # measured in a process of its own, or not at all

    rows = [
        margins.Margin("peer", 2.0, "× a peer", broken, needs=("no_such_module",)),
        margins.Margin("past", 0.9, "× no-such-revision", row="gae 128 x 8"),
    ]
    monkeypatch.setattr(margins, "MARGINS", rows)
    path = tmp_path / "found.json"
    options = ["--base", "no-such-revision", "--wait-idle", "0", "--output", str(path)]
    assert margins.main(options) == 0
    shown = capsys.readouterr().out
    assert "skipped (needs no_such_module: pip install -r benchmarks/requirements-" in shown
    assert "2 skipped" in shown
    found = json.loads(path.read_text())["rows"]
    assert [row["verdict"] for row in found] == ["skipped", "skipped"]
    assert "no-such-revision" in found[1]["why"]


def test_a_figure_is_measured_in_a_process_of_its_own(margins):
    (margin,) = [one for one in margins.MARGINS if one.name.startswith("worker killed")]
    outcome = margins.measure_own(margin, 1)
    assert not outcome.why
    assert len(outcome.figures) == 1
    wrong = margins.measure_own(margins.Margin("nothing", 1, "ms", margin.measure), 1)
    assert wrong.verdict == "FAIL"
    assert "no row matches 'nothing'" in wrong.why
