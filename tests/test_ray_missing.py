"""Without Ray the rest works, and asking for it names the extra to install."""

import sys

import gymnasium as gym
import pytest

from vecenv import RayVectorEnv, make_vec


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'vecenv\[ray\]'"):
        RayVectorEnv([lambda: gym.make("CartPole-v1")])
    with pytest.raises(ImportError, match=r"pip install 'vecenv\[ray\]'"):
        make_vec("CartPole-v1", 2, backend="ray")
