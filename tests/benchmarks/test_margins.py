"""benchmarks/margins.py: what it concludes from figures, and that its list is complete."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def margins():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("margins")


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
