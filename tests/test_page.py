"""Pages: an episode in one file."""

import base64
import io
import json
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from vecenv import SyncVectorEnv
from vecenv.command.cli import main
from vecenv.page import MAX_BYTES, EpisodePage, Frames, action_names, record

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"&"


class Dots(gym.Env):
    """Counts to five; draws noise that depends on the seed and the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}
    observation_space = gym.spaces.Box(-1, 9, (1,), np.float32)

    def __init__(
        self, render_mode=None, size=(20, 30), action_space=None, meanings=(), length=5, fails=False
    ):
        self.render_mode, self.size, self.meanings, self.length = (
            render_mode,
            size,
            meanings,
            length,
        )
        self.action_space = gym.spaces.Discrete(3) if action_space is None else action_space
        self.fails = fails

    def get_action_meanings(self):
        return self.meanings

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {"hostile": HOSTILE}

    def step(self, action):
        if self.fails:
            raise ArithmeticError("no dots")
        self.count += 1
        is_over = self.count >= self.length
        return np.full(1, min(self.count, 9), np.float32), -0.5, is_over, False, {"n": self.count}

    def render(self):
        rng = np.random.default_rng(self.count)
        return rng.integers(0, 256, (*self.size, 3), dtype=np.uint8)


def blank(render_mode=None):
    """Make an env that draws nothing."""
    env = Dots(render_mode)
    env.render = lambda: None
    return env


def envs_of(mode="NextStep", **options):
    return SyncVectorEnv([lambda: Dots("rgb_array", **options)], autoreset_mode=mode)


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def pixels_of(data, index):
    """The slow twin of the page's `draw`."""
    file = next(file for file in data["frames"][index::-1] if file)
    assert file.startswith("data:image/webp;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(file.partition(",")[2])))
    return np.asarray(image.convert("RGB"))


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_an_episode_is_shown_with_all_that_the_policy_reports():
    envs = envs_of(meanings=["left", HOSTILE, "right"])
    drawn = []

    def act(obs, is_first, report):
        assert is_first == (obs[0, 0] == 0)
        report.update(probabilities=np.array([[0.2, 0.7, 0.1]]), values=np.array([-2.5]))
        return np.array([1])

    def picture():
        drawn.append(envs.render()[0])
        return drawn[-1]

    page = EpisodePage(HOSTILE, {HOSTILE: HOSTILE}, fps=2)
    record(page, envs, act, action_names(envs, "Dots"), picture, seed=1, num_steps=500)
    envs.close()

    data = data_of(page.to_html())
    assert [step.get("reward") for step in data["steps"]] == [None, *[-0.5] * 5]
    first, *_, last = data["steps"]
    assert (first["action"], first["value"], first["facts"]) == (
        HOSTILE,
        -2.5,
        [["hostile", HOSTILE]],
    )
    choices = [[HOSTILE, 0.7, 1], ["left", 0.2, 0], ["right", 0.1, 0]]
    assert first["parts"] == [["", "probability", choices, 3]]
    assert "action" not in last
    for index, frame in enumerate(drawn):
        np.testing.assert_array_equal(pixels_of(data, index), frame)


def test_the_page_needs_nothing_else_and_texts_of_envs_stay_texts():
    page = EpisodePage(HOSTILE + " DATA HEAD", {HOSTILE: HOSTILE}, fps=2)
    page.show(np.zeros((5, 4, 3), np.uint8), facts={HOSTILE: HOSTILE})
    page.choose(HOSTILE, [(HOSTILE, "probability", [(HOSTILE, float("nan"), True)])], float("inf"))
    page.show(np.zeros((5, 4, 3), np.uint8), reward=float("-inf"))
    text = page.to_html()

    assert "http:" not in text
    assert "https:" not in text
    assert "//" not in re.sub(r"^\s*//.*$|<!doctype.*", "", text, flags=re.MULTILINE)
    elements = Elements()
    elements.feed(text)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert "link" not in tags
    assert not any(name in attrs for _, attrs in elements.found for name in ("src", "onerror"))
    policy = next(a["content"] for t, a in elements.found if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data: blob:;")
    assert "script-src 'sha256-" in policy
    assert data_of(text)["steps"][0]["parts"][0][2] == [[HOSTILE, "nan", 1]]


def test_pictures_that_do_not_fit_lose_detail_and_then_every_second_one():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for max_bytes, is_exact in ((450_000, True), (150_000, False), (50_000, False)):
        page = EpisodePage("noise", {}, fps=2, max_bytes=max_bytes)
        for number in range(40):
            page.show(np.roll(noise, number, axis=1), reward=1.0)
            page.choose("x" * 20)
        text = page.to_html()
        assert len(text) <= max_bytes
        data = data_of(text)
        assert len(data["steps"]) == len(data["frames"]) == 40
        assert (data["notes"] == []) == is_exact
        if not is_exact:
            kept = [k for k, patch in enumerate(data["frames"]) if patch]
            assert kept == sorted({*range(0, 40, data["stride"]), 39})
            assert (data["stride"] > 1) == ("Only every" in data["notes"][0])
    assert data["stride"] > 1


def test_frames_are_exact_and_of_one_size():
    frames, frame, data = Frames(), np.zeros((30, 40, 3), np.uint8), {}
    shown = []
    for number in range(6):
        frame[number // 2, 5] = 200
        frames.add(frame)
        shown.append(frame.copy())
    frames.add(np.dstack([frame, np.full(frame.shape[:2], 9, np.uint8)]))  # its opacity is left out
    data["frames"] = frames.to_list(10**9)
    assert [bool(file) for file in data["frames"]] == [True, False] * 3 + [False]
    for index, pixels in enumerate(shown):
        np.testing.assert_array_equal(pixels_of(data, index), pixels)
    with pytest.raises(ValueError, match="a picture of 4 x 3 after ones of 40 x 30"):
        frames.add(np.zeros((3, 4, 3), np.uint8))
    with pytest.raises(ValueError, match="expected a picture uint8"):
        Frames().add(np.zeros((3, 4), np.uint8))


def test_what_a_policy_that_is_watched_is_given_is_its_own_to_keep(monkeypatch, tmp_path, capsys):
    kept = []

    def act(obs):
        kept.append((obs, obs.copy()))
        return np.full(1, len(kept) % 3)

    module = types.ModuleType("hoarder")
    module.act, module.Env = act, Dots
    monkeypatch.setitem(sys.modules, "hoarder", module)
    args = ["watch", "hoarder:Env", "--policy", "hoarder:act", "--steps", "5"]
    for name in ("a:bug:.gif", "a:bug:.html"):  # no emoji
        kept.clear()
        assert main([*args, f"--{Path(name).suffix[1:]}", str(tmp_path / name)]) == 0
        assert len(kept) == 5
        for given, as_it_was in kept:
            np.testing.assert_array_equal(given, as_it_was)
        assert len({as_it_was.tobytes() for _, as_it_was in kept}) > 1
    out = capsys.readouterr().out
    assert f"animation: {tmp_path / 'a:bug:.gif'}\npage: {tmp_path / 'a:bug:.html'} (5 steps" in out


@pytest.mark.slow
def test_watch_writes_pages_of_cage_with_probabilities(capsys, tmp_path):
    path = tmp_path / "a.html"
    args = ["watch", "--policy", "defender", "--steps", "4", "--html", str(path)]
    assert main(args) == 0
    assert "4 steps" in capsys.readouterr().out
    data = data_of(path.read_text(encoding="utf-8"))
    assert len(data["steps"]) == 5
    for step in data["steps"][:-1]:
        ((title, kind, choices, count),) = step["parts"]
        assert (title, kind, count) == ("", "probability", 44)
        assert sum(chosen for *_, chosen in choices) == 1
        assert 0 < sum(share for _, share, _ in choices) <= 1.001
    assert path.stat().st_size < MAX_BYTES * 4 / 500 + 400_000  # a whole picture and the script


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["watch", "CartPole-v1", "--html", "a.txt"], "expected a name that ends in .html"),
        (["watch", "CartPole-v1", "--html", "no/a.html"], "no/a.html"),
        (["watch", "test_page:blank", "--html", "a.html"], "does not render pictures"),
        (["play", "CartPole-v1"], "policy is missing"),
    ],
)
def test_what_can_not_be_shown_is_told_in_a_sentence(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_names_of_actions():
    for given, expected in ((["a", "b", "c"], "b"), (["a"], "1"), (None, "1"), ("abc", "1")):
        envs = envs_of(meanings=given)
        assert action_names(envs, "Dots").describe(np.int64(1)) == expected
        envs.close()
    envs = gym.make_vec("CartPole-v1")
    assert action_names(envs, "CartPole-v1").describe(0) == "left"
    envs.close()


@pytest.mark.parametrize(
    ("space", "meanings", "expected"),
    [
        (gym.spaces.MultiDiscrete([2, 4]), None, "(1, 0)"),
        (gym.spaces.MultiBinary(2), None, "(1, 0)"),
        (gym.spaces.MultiDiscrete([2, 4]), {"legs": ["rest", "run"], "arms": None}, None),
    ],
)
def test_actions_of_several_parts_read_as_one_where_nothing_is_named(space, meanings, expected):
    envs = envs_of(action_space=space, meanings=meanings)
    names = action_names(envs, "Dots")
    assert names.describe(np.array([1, 0])) == (expected or "legs: run; arms: 0")
    titles = [part.title for part in names.parts]
    assert titles == (["part 0", "part 1"] if expected else ["legs", "arms"])  # of their bars
    envs.close()
