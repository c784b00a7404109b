"""The code of docs/adapters.md and docs/migrating.md that needs other libraries; older scripts.

The rest is run by tests/test_docs.py.
"""

import importlib
import re
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import vecenv

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migrating.md").read_text()
BLOCK = re.compile(r"^```python title=\"before: (\w+)\"\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_code_before_runs(library, code):
    pytest.importorskip(library)
    importlib.import_module(library)
    exec(compile(code, "migrating.md", "exec"), {"__name__": "page"})


def test_what_an_older_script_must_change_means_the_same_in_both():
    returns = 'infos["final_info"]["episode"]["r"][infos["_final_info"]]'
    last = 'infos["final_obs"][i]'
    assert f"`for r in {returns}:`" in PAGE
    assert f"`{last}`" in PAGE
    found = []
    for vector in (gym.vector, vecenv):
        makers = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * 3
        mode = vector.AutoresetMode.SAME_STEP
        with closing(vector.SyncVectorEnv(makers, autoreset_mode=mode)) as envs:
            envs.reset(seed=1)
            seen = []
            for step in range(60):
                actions = np.full(3, step // 2 % 2)
                infos = envs.step(actions)[4]
                if "final_info" in infos:
                    ended = np.flatnonzero(infos["_final_info"])
                    seen += [(step, r) for r in eval(returns, {"infos": infos})]
                    seen += [(i, eval(last, {"infos": infos, "i": i}).tolist()) for i in ended]
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) >= 2


# -- docs/adapters.md ------------------------------------------------------------------------------

ADAPTERS = DOCS / "adapters.md"
LIBRARIES = {
    "stable-baselines3": "stable_baselines3",
    "TorchRL": "torchrl",
    "Tianshou": "tianshou",
    "RLlib": "gymnasium",
}
# A title names what a block needs; tests/test_docs.py runs those without.
PAGE_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def has_rllib():
    try:
        importlib.import_module("ray.rllib")
    except ImportError:
        return False
    return True


def sections():
    parts = re.split(r"^## (.*)\n", ADAPTERS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_section_with_code_is_run():
    assert {name for name, text in sections().items() if PAGE_BLOCK.search(text)} == set(LIBRARIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_code_of_the_page_runs(name):
    pytest.importorskip(LIBRARIES[name])
    scope = {"__name__": "page"}
    for title, block in PAGE_BLOCK.findall(sections()[name]):
        if "ray" in title and not has_rllib():  # `ray` alone lacks what it needs
            continue
        exec(compile(block, str(ADAPTERS), "exec"), scope)
    if name == "RLlib":
        assert scope["make_env"]({"num_envs": 3}).num_envs == 3
        assert not hasattr(scope["make_env"]({}), "num_envs")
