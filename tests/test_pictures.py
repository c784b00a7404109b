"""Pictures of rates: what their marks stand for."""

import matplotlib.figure
from matplotlib.container import BarContainer

from vecenv.compare.result import Case, Comparison
from vecenv.compare.serving import Round

RATES = {"loop": 457.0, "sync": 455.0, "async": 2214.0}


def comparison():
    cases = [
        Case(name, 1, rounds=[Round(int(rate), seconds, 1) for seconds in (0.9, 1.1)])
        for name, rate in RATES.items()
    ]
    return Comparison("Env-v0", {}, "a machine", cases)


def test_bars_begin_at_zero_and_log_axes_have_points(tmp_path, monkeypatch):
    """A logarithmic axis has no zero: bars on it are as long as its end happens to make them."""
    figures, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda figure, *args, **options: (figures.append(figure), save(figure, *args, **options)),
    )
    comparison().plot(tmp_path / "picture.png")
    (figure,) = figures
    on_log = [axes for axes in figure.axes if "log" in (axes.get_xscale(), axes.get_yscale())]
    assert len(on_log) == 1
    for axes in figure.axes:
        bars = [one for one in axes.containers if isinstance(one, BarContainer)]
        if axes in on_log:
            assert bars == []
            shown = [x for line in axes.lines for x in line.get_xdata()]
            shown += [x for one in axes.collections for x, _ in one.get_offsets()]
            assert set(map(round, RATES.values())) <= {round(x) for x in shown}
        elif bars:
            assert min(bar.get_x() for bar in bars[0]) == 0
