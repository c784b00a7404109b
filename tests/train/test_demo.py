"""vecenv demo, and PPO on CAGE Challenge 2."""

import json
import signal

import pytest
import torch

from vecenv.cage import evaluate
from vecenv.command import demo as module
from vecenv.learn import draw_curve
from vecenv.train import ppo


@pytest.fixture
def demo():
    before = torch.get_num_threads()
    yield module
    torch.set_num_threads(before)


def small(demo, folder, **options):
    settings = {"total_steps": 15_000, "num_envs": 32, "episodes": 20, "save": folder}
    return demo.Options(**{**settings, **options})


@pytest.mark.slow
def test_demo_leaves_policy_curve_scores_and_film(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vecenv.learn.run.draw_curve", draw_curve)
    demo.main(small(demo, tmp_path / "run"))

    out = capsys.readouterr().out
    for policy in ("trained", "sleep", "random", "react-restore"):
        assert policy in out
    for name in ("policy.npz", "curve.png", "scores.json", "episode.gif"):
        assert str(tmp_path / "run" / name) in out
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "episode.gif").read_bytes().startswith(b"GIF89a")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    again = evaluate(str(tmp_path / "run" / "policy.npz"), episodes=20, seed=1)
    assert scores["total"] == again.total
    assert len(scores["cells"]) == 9


@pytest.mark.slow
def test_demo_stopped_by_ctrl_c_goes_on_with_what_it_has(demo, tmp_path, monkeypatch, capsys):
    update = ppo.PPO.update

    def interrupted(self):
        if self.steps:
            signal.raise_signal(signal.SIGINT)
        return update(self)

    monkeypatch.setattr(ppo.PPO, "update", interrupted)
    monkeypatch.setattr(demo, "save_episode_gif", lambda *_, **__: None)
    demo.main(small(demo, tmp_path))

    assert "stopped after" in capsys.readouterr().out
    assert (tmp_path / "policy.npz").stat().st_size > 0
    assert json.loads((tmp_path / "scores.json").read_text())["total"] < 0


@pytest.mark.slow
def test_table_fits_a_terminal(demo, capsys):
    scores = [evaluate(name, episodes=2) for name in ("sleep", *demo.RIVALS)]
    demo.Console(width=80).print(demo.compare(scores))
    lines = capsys.readouterr().out.splitlines()
    (header,) = (line for line in lines if "react-restore" in line)
    assert len(header) <= 80
    assert sum("±" in line for line in lines) == 11  # title, nine cells and the total


def test_env_options_reach_the_envs(demo, tmp_path):
    options = ppo.Options(
        env_id="vecenv:Cage2-v0",
        env_kwargs={"red_agent": "sleep"},
        total_steps=0,
        eval_episodes=5,
        save=tmp_path,
    )
    assert (ppo.main(options)).mean == 0
