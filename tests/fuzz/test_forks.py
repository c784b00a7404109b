"""A few programs that are forked at random instants; `make fuzz` takes a minute of new ones."""

import os

import pytest
from fuzz import forks

from vecenv import AsyncVectorEnv


@pytest.mark.slow
def test_a_few_forks():
    """Of programs with workers and without, the same ones every time."""
    assert sum(map(forks.run_case, (0, 1))) >= 10


@pytest.mark.slow
def test_a_call_that_a_fork_is_not_refused_is_found(monkeypatch, capfd):
    monkeypatch.setattr(AsyncVectorEnv, "set_attr", lambda *_: None)
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            forks.run_here(0, "async")
        except AssertionError:
            code = 5
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert "a fork has done call 5" in capfd.readouterr().err
