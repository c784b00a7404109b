"""The files of examples/, as modules, the checkpoints that they leave, and what they refuse."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name):
    """Import an example once for all tests: some register envs, which can't be done twice."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and registered ids look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def last_state(folder):
    """What the last checkpoint of a run has, as by `flat`."""
    from vecenv.learn import load_checkpoint

    return flat(load_checkpoint(folder / "checkpoint" / "last.pt")["state"])


def flat(state, where=""):
    """The leaves of a nest by their places, arrays as bytes, without what pads records."""
    if isinstance(state, np.ndarray) and state.dtype.names:
        state = {name: np.ascontiguousarray(state[name]) for name in state.dtype.names}
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, item in items for k, v in flat(item, f"{where}/{key}").items()}
    if hasattr(state, "detach") or isinstance(state, np.ndarray):
        state = np.asarray(state).tobytes()
    return {where: state}


def assert_another_network_is_refused(trainer, main, monkeypatch):
    """Train by `main(**options)`; an agent with a weight more can't go on from there."""
    import torch

    main()

    class Other(trainer.make_agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.more = torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(trainer, "make_agent", Other)
    with pytest.raises(SystemExit, match=r"does not fit agent: .*more.*make agent as it was"):
        main(resume=True)
    with pytest.raises(SystemExit, match="has a run already"):
        main()
