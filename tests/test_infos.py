"""Batched infos are those of Gymnasium's `_add_info`, and rows can be taken out of them."""

import numpy as np
import pytest
from equality import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vecenv.core.infos import add_info
from vecenv.jit.cartpole import CartPoleVectorEnv
from vecenv.ray.actor import infos_by_env

NUM_ENVS = 4

# One strategy per key, as in life: a key has values of one type, and in arrays of one shape.
NUMBERS = {
    "int": st.integers(-(2**40), 2**40),
    "float": st.floats(allow_nan=True, width=32),
    "bool": st.booleans(),
    "numpy float": st.floats(width=32).map(np.float32),
    "numpy int": st.integers(-100, 100).map(np.int8),
    "numpy bool": st.booleans().map(np.bool_),
    "array": hnp.arrays(np.float32, (2, 3), elements=st.floats(-9, 9, width=32)),
    "number array": hnp.arrays(np.int64, (), elements=st.integers(-9, 9)),
    "bool array": hnp.arrays(np.bool_, (2,)),
}
OBJECTS = {
    "text": st.text(max_size=3),
    "list": st.lists(st.integers(0, 9), max_size=3),
    "tuple": st.tuples(st.integers(0, 9), st.text(max_size=1)),
    "none": st.none(),
    "mixed": st.one_of(st.none(), st.text(max_size=2), st.lists(st.none(), max_size=2)),
    "final_obs": st.one_of(
        st.integers(0, 9),
        hnp.arrays(np.float32, (2,), elements=st.floats(-9, 9, width=32)),
        st.fixed_dictionaries({"near": st.integers(0, 9)}),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
    ),
    "_hidden": st.integers(0, 9),
}
LEAVES = NUMBERS | OBJECTS
INFO = st.fixed_dictionaries(
    {},
    optional=LEAVES
    | {
        "nested": st.fixed_dictionaries({}, optional=LEAVES),
        "final_info": st.fixed_dictionaries(
            {}, optional=NUMBERS | {"deeper": st.fixed_dictionaries({}, optional=LEAVES)}
        ),
    },
)


@pytest.fixture(scope="module")
def envs():
    return CartPoleVectorEnv(NUM_ENVS)


@settings(max_examples=15)
@given(per_env=st.lists(INFO, min_size=NUM_ENVS, max_size=NUM_ENVS))
def test_batched_infos_that_an_actor_takes_apart_are_the_same_when_batched_again(envs, per_env):
    infos, again = {}, {}
    for index, info in enumerate(per_env):
        add_info(infos, info, index, NUM_ENVS)
    apart = infos_by_env(envs, infos, np.arange(10, 10 + NUM_ENVS))
    rows = np.arange(-10, NUM_ENVS)  # row k of the batch is that of env 10 + k
    apart.enter(again, rows, NUM_ENVS, rows)
    assert_same(again, infos)
