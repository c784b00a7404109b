"""Kernels that draw random numbers from elsewhere than their env's stream are refused."""

import dataclasses
import random
import types

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from jit.toy_env import PARAMS, TOY
from numba import njit
from numpy import random as numpy_random

from vecenv import make_vec, make_vec_agents
from vecenv.jit import AgentsOf, EnvKernels, JitVectorEnv, KernelCompileError
from vecenv.jit import random as own_random

GENERATOR = np.random.default_rng(0)
HELD = types.SimpleNamespace(rng=GENERATOR, deep=types.SimpleNamespace(draw=random.random))
TABLE = {"rng": GENERATOR}
PAIR = (1, random.Random(3))


@njit
def compiled_helper():
    return np.random.randint(0, 4)  # noqa: NPY002


def plain_helper():
    return compiled_helper()


def closing_over(draw):
    def inside():
        return draw()

    return inside


closed = closing_over(numpy_random.standard_normal)
nested = njit(closing_over(compiled_helper))
# What a line draws, the name in the message, and what to write instead.
LINES = {
    "np.random.rand()": ("numpy.random", "random.uniform(rng)"),
    "random.random()": ("random", "random.uniform(rng)"),
    "gauss(0, 1)": ("random", "random.normal(rng)"),
    "poisson(3.0)": ("numpy.random", "random.poisson(rng, rate)"),
    "default_rng(1).random()": ("numpy.random", "random.uniform(rng)"),
    "GENERATOR.permutation(4)[0]": ("numpy.random", "random.permutation(rng, out)"),
    "HELD.deep.draw()": ("random", "random.uniform(rng)"),
    "TABLE['rng'].random()": ("numpy.random", "random.uniform(rng)"),
    "PAIR[1].random()": ("random", "random.uniform(rng)"),
    "max(k for k in (np.random.rand(), 0.0))": ("numpy.random", "random.uniform(rng)"),
}
HELPERS = {
    "compiled_helper()": ("compiled_helper", "random.integers(rng, n)"),
    "plain_helper()": ("compiled_helper", "random.integers(rng, n)"),
    "nested()": ("compiled_helper", "random.integers(rng, n)"),
    "closed()": ("inside", "random.normal(rng)"),
}
IMPORTED = {
    "python_random": random,
    "gauss": random.gauss,
    "poisson": numpy_random.poisson,
    "default_rng": numpy_random.default_rng,
}
SPACES = Box(0, 1, (1,), np.float32), Discrete(2)


def drawing(line, name="step"):
    """Kernels of which one draws as `line` says."""
    scope = {**globals(), **IMPORTED}
    made = {
        "reset": "def reset(state, rng):\n    state.x = 0.0\n",
        "step": "def step(state, action, rng):\n    state.x = 0.0\n",
        "observe": "def observe(state, out):\n    out[0] = state.x\n",
    }
    made[name] += f"    state.x = {line}\n"
    made["step"] += "    return 0.0, False, False\n"
    for text in made.values():
        exec(compile(text, "drawing.py", "exec"), scope)
    functions = {name: scope[name] for name in made}
    return EnvKernels([("x", np.float64)], *SPACES, **functions, name="drawing")


@pytest.mark.parametrize("line", LINES)
def test_draws_from_elsewhere_are_refused_with_what_to_write(line):
    home, instead = LINES[line]
    with pytest.raises(KernelCompileError) as caught:
        JitVectorEnv(drawing(line))
    text = str(caught.value)
    assert text.startswith("drawing.py:3, in ") and caught.value.lineno == 3
    assert f"drawing: kernel step draws random numbers from {home}, of which" in text
    assert f"import random, then {instead}" in text


@pytest.mark.parametrize(("name", "line"), [*zip(["reset", "observe"] * 2, HELPERS, strict=True)])
def test_so_are_draws_of_functions_that_a_kernel_calls(name, line):
    function, instead = HELPERS[line]
    with pytest.raises(KernelCompileError, match=f"kernel {name} draws random") as caught:
        JitVectorEnv(drawing(line, name), debug=True)
    assert f"{__file__}:{caught.value.lineno}, in {function}" in str(caught.value)
    assert f"then {instead}" in str(caught.value)


def test_so_are_draws_in_any_form_of_kernels():
    """Made by make_vec, of games with groups, of a policy inside a bundled env, and as defaults."""
    with pytest.raises(KernelCompileError, match="draws random numbers from numpy"):
        make_vec(drawing("np.random.rand()"), 3)
    space = SPACES[0]

    def observe(state, agent, out):
        out[0] = numpy_random.standard_normal()  # noqa: NPY002

    game = EnvKernels(
        [("x", np.float64)],
        groups={"one": AgentsOf(2, space, Discrete(2))},
        reset=lambda state, rng: None,
        step=lambda state, actions, rng: (0.0, False, False),
        observe=observe,
        name="game",
    )
    with pytest.raises(KernelCompileError, match="game: kernel observe draws random numbers"):
        make_vec_agents(game, 2, vector_kwargs={"debug": True})

    def red(state, rng, tables):
        return np.random.randint(2), 0  # noqa: NPY002

    with pytest.raises(KernelCompileError, match="in red"):
        make_vec("Cage2-v0", 2, backend="jit", red_agent=red)

    def step(state, action, rng, params, source=GENERATOR):
        return 0.0, source.random() < 0.5, False

    with pytest.raises(KernelCompileError, match="toy: kernel step draws random numbers"):
        JitVectorEnv(dataclasses.replace(TOY, step=step), params=PARAMS, debug=True)


def test_draws_of_the_stream_are_taken_whatever_they_are_called():
    scope = {"random": own_random, "integers": own_random.integers}
    text = "def step(state, action, rng):\n    state.x = random.uniform(rng)\n"
    exec(f"{text}    return integers(rng, 2) * 1.0, False, False\n", scope)
    kernels = dataclasses.replace(drawing("0.0"), step=scope["step"])
    envs = JitVectorEnv(kernels, 2, debug=True)
    envs.reset(seed=0)
    assert envs.step([0, 0])[1].shape == (2,)
