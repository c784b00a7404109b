"""Action masks of envs in actors; those of single envs are in tests/test_backends.py."""

import functools

import numpy as np
import pytest
from masked_envs import Minefield, mask_of
from on_ray.toy_policies import Masked

from vecenv import RayVectorEnv, StepSlot, make_vec
from vecenv.cage import Cage2VectorEnv

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_masks_of_compiled_envs():
    """Asked for when they are wanted, or with the results."""
    here = Cage2VectorEnv(5, episode_length=6)
    here.reset(seed=3)
    for mask_infos in (False, True):
        spread = make_vec(
            "Cage2-v0",
            5,
            backend="ray",
            mask_infos=mask_infos,
            vector_kwargs={"num_workers": 2},
            episode_length=6,
        )
        _, infos = spread.reset(seed=3)
        here.reset(seed=3)
        assert spread.has_action_masks
        for _ in range(9):
            masks = here.action_masks()
            np.testing.assert_array_equal(spread.action_masks(), masks)
            assert ("action_mask" in infos) == mask_infos
            if mask_infos:
                np.testing.assert_array_equal(infos["action_mask"], masks)
            actions = here.action_space.sample()
            here.step(actions)
            infos = spread.step(actions)[4]
        spread.close()
    here.close()


@pytest.mark.parametrize("form", ["info", "action_masks"])
def test_policies_in_actors_see_the_masks_of_their_envs(form):
    """And when they have acted, the caller does."""
    fns = [functools.partial(Minefield, form)] * 3
    envs = RayVectorEnv(fns, num_workers=2)
    envs.set_policy(Masked)
    obs = envs.reset(seed=1)[0].copy()
    num_steps, slots = 20, []
    for _ in range(num_steps):
        flags = [np.zeros(3, bool) for _ in range(2)]
        slots.append(StepSlot(np.zeros((3, 2), np.float32), np.zeros(3), *flags))
    seen = np.zeros((num_steps, 3, 5), np.int8)
    for _ in range(2):
        envs.collect(slots, fields={"masks": seen})
        keys = np.array([obs, *(slot.obs for slot in slots)])[:, :, 0]
        np.testing.assert_array_equal(seen, mask_of(np.where(keys == 0, 31, keys))[:-1])
        assert not any(slot.terminations.any() for slot in slots)
        expected = mask_of(np.where(keys[-1] == 0, 31, keys[-1]))
        np.testing.assert_array_equal(envs.action_masks(), expected)
        obs = slots[-1].obs.copy()
    envs.close()
