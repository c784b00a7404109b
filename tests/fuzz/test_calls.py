"""A few random calls with hostile arguments; `make fuzz` takes a minute of new ones."""

import numpy as np
import pytest
from fuzz import calls


@pytest.mark.parametrize("kind", [pytest.param("replay", marks=pytest.mark.slow), "sync"])
def test_a_few_hostile_calls(kind, tmp_path, monkeypatch):
    """The same ones every time, so that a failure is one of the change that was made."""
    monkeypatch.setitem(calls.sys.modules, "ray", calls.fake_ray())
    numbers = np.random.default_rng(len(kind)).integers(1 << 40, size=1).tolist()
    assert sum(calls.run_here(n, str(tmp_path), calls.RUNS[kind]) for n in numbers) > 5
    for key in [key for key in calls._pairs if key[0] == kind]:
        twins = calls._pairs.pop(key)
        twins.hostile.close()
        twins.reference.close()


def test_a_call_that_does_something_else_is_found(monkeypatch, tmp_path):
    """A buffer that takes swapped bytes as they lie is told from one that does not."""
    from buffers import SharedReplayBuffer

    add = SharedReplayBuffer.add

    def misread(self, *, obs=None, **columns):
        if isinstance(obs, np.ndarray) and not obs.dtype.isnative:
            obs = obs.view(obs.dtype.newbyteorder("="))
        add(self, obs=obs, **columns)

    monkeypatch.setattr(SharedReplayBuffer, "add", misread)
    case = calls.Case(3, str(tmp_path))
    case.space, case.has_extras = calls._OBS_SPACES["flat"], False
    buffers = [SharedReplayBuffer(9, case.space, case.actions) for _ in range(2)]
    twins = calls.Twins(*buffers, "case 3")
    columns = calls.good_columns(case, 4)
    twins.call("add", **{**columns, "obs": columns["obs"].astype(">f4")})
    with pytest.raises(calls.Finding, match="case 3: state"):
        calls.compare_states(twins)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("os.kill(os.getpid(), 11)", "case 5 has ended the process with signal SIGSEGV"),
        pytest.param("time.sleep(60)", "case 5 does not end", marks=pytest.mark.slow),
        pytest.param("1 / 0", "(?s)case 5: .*ZeroDivisionError", marks=pytest.mark.slow),
    ],
)
def test_a_case_that_ends_or_stops_its_process_is_named(does, told, monkeypatch):
    monkeypatch.setattr(calls, "_PATIENCE_S", 20 if "sleep" not in does else 1)
    prelude = f"import os, time\nfrom fuzz import calls\ncalls.run_here = lambda *_: {does}"
    child = calls.Child(prelude)
    with pytest.raises(AssertionError, match=told):
        child.run(5)
    child.end()
