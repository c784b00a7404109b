"""Envs that nobody here wrote, beside Gymnasium's own vector envs; `make test-real`."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

_PROGRAM = Path(__file__).with_name("lockstep.py")
_DEADLINE_S = 400  # MuJoCo's pixels take a minute without a GPU, more beside other work
_PACKAGES = {
    "mujoco_state": ["mujoco"],
    "mujoco_pixels": ["mujoco"],
    "ale": ["ale_py"],
    "minigrid": ["minigrid"],
    "miniworld": ["miniworld"],
    "pybullet": ["pybullet_envs_gymnasium"],
    "stable_retro": ["stable_retro"],
    "highway": ["highway_env"],
    "dm_control": ["shimmy", "dm_control"],
}
_PIXELS = ("mujoco_pixels", "ale", "miniworld", "stable_retro")
_BACKENDS = ("sync", "fork", "forkserver", "spawn", "auto", "fork+4")
_ONE_PER_PROCESS = ("stable_retro",)


def _try_out(name: str, backend: str, file: Path, environ: dict[str, str]) -> dict[str, Any]:
    """Run the program in a process of its own and return what it wrote."""
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), name, backend, str(file)],
        cwd=file.parent,  # where MuJoCo writes its log
        env=environ,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{name} on {backend}: {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(file.read_text())


@functools.cache
def _offscreen() -> str | None:
    """Return the value of MUJOCO_GL with which this machine renders; None without any."""
    code = "import mujoco; mujoco.GLContext(8, 8).make_current()"
    for library in ("egl", "osmesa"):
        environ = {**os.environ, "MUJOCO_GL": library}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, check=False
        )
        if done.returncode == 0:
            return library
    return None


def _environ(name: str) -> dict[str, str]:
    """Return the environment for an env, or skip the test where the env can't be had."""
    for package in _PACKAGES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test-real` installs it")
    environ = dict(os.environ)
    if name in ("mujoco_pixels", "miniworld"):
        library = _offscreen()
        if library is None or (name == "miniworld" and library != "egl"):
            pytest.skip("nothing to render with: install EGL (Debian: libegl1, libglu1-mesa)")
        environ["MUJOCO_GL"] = library
    return environ


@functools.cache
def _control(name: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what Gymnasium's class gives, and which part of it is the same a second time."""
    kind = "gymnasium-async" if name in _ONE_PER_PROCESS else "gymnasium"
    first, second = (
        _try_out(name, kind, folder / f"{name}-{number}.json", _environ(name)) for number in (1, 2)
    )
    return first, [part for part in ("observations", "outcomes") if first[part] == second[part]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("name", _PACKAGES)
def test_every_row_is_gymnasiums(name: str, backend: str, folder: Path) -> None:
    environ = _environ(name)
    if name in _ONE_PER_PROCESS and backend == "sync":
        pytest.skip("this env allows one instance per process, as in Gymnasium's SyncVectorEnv")
    expected, repeatable = _control(name, folder)

    found = _try_out(name, backend, folder / f"{name}-{backend}.json", environ)

    if name in _PIXELS:
        assert found["darkest"] > min(1.0, expected["darkest"] / 2), "the pictures are black"
    # What differs from itself (pictures of a renderer with threads) can only be stepped.
    for part in repeatable:
        for step, (ours, theirs) in enumerate(zip(found[part], expected[part], strict=True)):
            assert ours == theirs, f"{name} on {backend} ({found['kind']}): {part} of step {step}"


@pytest.mark.parametrize("name", _PACKAGES)
def test_opening_and_closing_leaves_nothing(name: str, folder: Path) -> None:
    after = _try_out(name, "leaks", folder / f"{name}-leaks.json", _environ(name))["after"]

    assert after[-1]["children"] == after[4]["children"]
    assert after[-1]["files"] <= after[4]["files"]
    assert after[-1]["maps"] <= after[4]["maps"] + 5
    assert after[-1]["kib"] <= after[4]["kib"] + 20_000
