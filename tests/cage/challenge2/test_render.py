"""Texts, pictures and animations of a network."""

import builtins
from dataclasses import replace

import numpy as np
import pytest
from cage.challenge2.harbour import HARBOUR
from envs import begun
from PIL import Image

from vecenv.cage import Cage2Env, Cage2VectorEnv, action_index, cage2_scenario, save_episode_gif
from vecenv.cage import canvas as canvas_module
from vecenv.cage.canvas import Canvas, save_gif
from vecenv.cage.challenge2.replay import RecordedStep, Replay
from vecenv.cage.challenge2.snapshot import draw_snapshot, take_snapshot, to_text

CRIMSON = (0xD6, 0x45, 0x45)
BLUE, RED = (0x1F, 0x6F, 0xEB), (0xB3, 0x12, 0x2B)
DECOY = (0xE3, 0xF4, 0xEA)


def count(picture, color):
    return int((picture == np.array(color, np.uint8)).all(axis=-1).sum())


def stepped(num_steps=15, seed=1, **options):
    envs = begun(Cage2VectorEnv(1, **options), seed=seed)
    for action in np.random.default_rng(seed).integers(0, 132, num_steps):
        envs.step([action])
    return envs


def test_pictures_show_what_happens():
    envs = begun(Cage2VectorEnv(1, render_mode="rgb_array"), seed=1)
    (first,) = envs.render()
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[2] == 3
    assert all(length % 2 == 0 for length in first.shape[:2]), "video formats want even sizes"
    assert len(np.unique(first @ [1, 256, 256**2])) > 50, "not blank"
    assert count(first, BLUE) > 0 < count(first, RED), "the legend"
    envs.step([action_index(envs.scenario, "DecoyApache", "Enterprise0")])
    (second,) = envs.render()
    assert count(second, DECOY) > count(first, DECOY)
    assert count(second, BLUE) > count(first, BLUE), "blue's deed is framed"
    assert count(second, RED) > count(first, RED), "red's deed is framed"
    for _ in range(15):
        envs.step([0])
    (last,) = envs.render()
    assert count(last, CRIMSON) > 1.5 * count(first, CRIMSON), "red holds more hosts"
    assert first.shape == second.shape == last.shape


def test_pictures_show_truth_and_belief_apart():
    """The same truth, another belief: only the host's second pill changes colour."""
    scenario = cage2_scenario()
    state = stepped(0).true_state[0].copy()
    pictures = []
    for belief in (0b0000, 0b1100):
        state["obs_bits"] = belief << 4
        pictures.append(draw_snapshot(take_snapshot(state, scenario, 100, 0.0)).to_array())
    changed = (pictures[0] != pictures[1]).any(axis=-1)
    rows, columns = np.nonzero(changed)
    assert np.ptp(rows) < 30
    assert np.ptp(columns) < 90
    assert count(pictures[1], CRIMSON) > count(pictures[0], CRIMSON)


def test_texts_show_what_happens():
    envs = stepped(render_mode="ansi")
    (text,) = envs.render()
    assert text == envs.render_env(0) == envs.render_env(0, "ansi")
    for words in ("faithful rules", "b_line", "step 15/100", "Op_Server0", "Blue: ", "Red: "):
        assert words in text
    assert "\x1b[" in text
    assert envs.render_env(0, "rgb_array").ndim == 3


@pytest.mark.parametrize("make", [Cage2Env, Cage2VectorEnv])
def test_rendering_without_a_mode_warns(make):
    env = begun(make())
    with pytest.warns(UserWarning, match="render_mode is None"):
        assert env.render() is None


def test_unknown_modes_and_envs_are_refused():
    envs = stepped(1)
    with pytest.raises(ValueError, match="mode is 'human'"):
        envs.render_env(0, "human")
    with pytest.raises(IndexError, match="env_id is 1"):
        envs.render_env(1)


def test_other_networks_are_drawn():
    spare = [replace(HARBOUR.hosts[-1], name=name, subnet=name) for name in ("Attic", "Cellar")]
    larger = replace(
        HARBOUR, subnets=(*HARBOUR.subnets, "Attic", "Cellar"), hosts=(*HARBOUR.hosts, *spare)
    )
    sizes = []
    for scenario in (HARBOUR, larger):
        replay = Replay(1, scenario)
        replay.step(RecordedStep(blue_action=1, red_type=1, red_target=0))
        snapshot = take_snapshot(replay.states[0], scenario, 100, 0.0)
        words = to_text(snapshot)
        assert all(name in words for name in (*scenario.subnets, "plc0", "DiscoverRemoteSystems"))
        sizes.append(draw_snapshot(snapshot).to_array().shape)
    assert sizes[1][0] > sizes[0][0], "a second row of panels"
    assert sizes[1][1] == sizes[0][1]


def test_green_is_shown():
    envs = begun(Cage2VectorEnv(1, green=True, red_agent="sleep", step_infos="green_target"))
    seen = 0
    for _ in range(20):
        *_, infos = envs.step([0])
        words = envs.render_env(0)
        assert ("Green: scanned" in words) == (infos["green_target"][0] >= 0)
        if "Green: scanned" in words:
            seen += 1
            if seen == 1:
                envs.render_env(0, "rgb_array")
    assert 0 < seen < 20


@pytest.mark.slow
def test_animation_of_an_episode(tmp_path):
    path = tmp_path / "episode.gif"
    save_episode_gif("obs-restore", path, seed=3, episode_length=7, red_agent="meander", fps=4)
    with Image.open(path) as gif:
        assert gif.format == "GIF"
        assert gif.is_animated
        assert gif.info["loop"] == 0
        milliseconds, shades = 0, []
        for frame in range(gif.n_frames):
            gif.seek(frame)
            milliseconds += gif.info["duration"]
            shades.append(len(gif.convert("RGB").getcolors(1 << 20)))
        assert 2 < gif.n_frames <= 8
    assert milliseconds == 8 * 250 + 2000
    assert min(shades) > 20, "no frame is blank"


def test_animation_needs_pictures_and_a_speed(tmp_path):
    with pytest.raises(ValueError, match="frames is empty"):
        save_gif([], tmp_path / "a.gif")
    with pytest.raises(ValueError, match="fps is 0"):
        save_gif([np.zeros((4, 4, 3), np.uint8)], tmp_path / "a.gif", fps=0)
    assert not list(tmp_path.iterdir())


def test_missing_pillow_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def no_pillow(name, *args, **kwargs):
        if name == "PIL":
            raise ImportError("no PIL here")
        return real_import(name, *args, **kwargs)

    canvas_module.pillow.cache_clear()
    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(ImportError, match=r"vecenv\[plots\]"):
        Canvas(10, 10, "#ffffff")
    monkeypatch.undo()
    Canvas(10, 10, "#ffffff")
