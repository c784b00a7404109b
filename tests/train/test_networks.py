"""Networks for any space: pictures by one rule, hidden layers behind all parts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import nn

from vecenv.train import OptionsError, ppo, sac
from vecenv.train.networks import Encoders, Pictures, mlp

PICTURE = Box(0, 255, (35, 40, 3), np.uint8)


def agent_of(space, **options):
    envs = SimpleNamespace(single_observation_space=space, single_action_space=Discrete(3))
    return ppo.Agent(envs, ppo.Options(**options))


def test_pictures_of_each_size_leave_a_map_of_one_to_nine_cells():
    for side in range(5, 97):
        encoder = Pictures(Box(0, 255, (side, side + 3, 1), np.uint8))
        maps = encoder.layers[:-1](torch.zeros(1, 1, side, side + 3))
        assert 1 <= maps.shape[2] <= 9, side
        assert encoder(torch.zeros(2, side, side + 3, 1)).shape == (2, encoder.num_features)
        assert encoder.num_features <= 5000


def test_smaller_pictures_are_refused():
    with pytest.raises(OptionsError, match=r"pictures are \(4, 9, 3\), expected 5 cells a side"):
        Pictures(Box(0, 255, (4, 9, 3), np.uint8))
    envs = SimpleNamespace(single_observation_space=PICTURE, single_action_space=Box(-1, 1, (2,)))
    with pytest.raises(OptionsError, match="observations have pictures, which SAC has no layers"):
        sac.Agent(envs, sac.Options())
    envs.single_action_space = Box(-3e38, 3e38, (2,), np.float32)  # bounds that stand for none
    with pytest.raises(OptionsError, match=r"actions are .*, expected a bounded Box"):
        sac.Agent(envs, sac.Options())


def test_pictures_have_their_channels_first_or_last():
    last, first = (Pictures(Box(0, 255, shape, np.uint8)) for shape in ((10, 9, 4), (4, 10, 9)))
    first.load_state_dict(last.state_dict())
    pictures = torch.randint(0, 255, (6, 10, 9, 4))
    torch.testing.assert_close(first(pictures.movedim(3, 1)), last(pictures))


def test_hidden_layers_are_as_asked_for_behind_pictures_too():
    agent = agent_of(PICTURE, hidden=(48, 24))
    linear = [layer for layer in agent.trunk if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [48, 24]
    assert [agent.actor[0].in_features, agent.critic[0].in_features] == [24, 24]
    for side, width in ((5, 128), (7, 256), (10, 512), (35, 512), (36, 128), (84, 512)):
        layer = agent_of(Box(0, 255, (side, side, 3), np.uint8)).trunk[0]
        assert layer.out_features == width and width <= 2 * layer.in_features
    plain = agent_of(Box(-1, 1, (3,)))
    assert len(plain.trunk) == 0 and [plain.actor[0].out_features] == [64]


def test_the_numbers_of_a_dict_meet_the_hidden_layers_beside_its_picture():
    """Their effect on an action depends on the picture, which it cannot without a layer."""
    torch.manual_seed(0)
    agent = agent_of(Dict(picture=PICTURE, x=Box(-1, 1, (2,))))
    assert agent.trunk[0].in_features == agent.encoders.num_features
    pictures = torch.randint(0, 255, (2, *PICTURE.shape))
    x = torch.tensor([[0.0, 0.0], [3.0, -3.0]])

    def output(k, j):
        return agent.actor(agent.features({"picture": pictures[k : k + 1], "x": x[j : j + 1]}))

    changes = [output(k, 1) - output(k, 0) for k in range(2)]
    assert not torch.allclose(*changes, rtol=1e-3, atol=1e-6)


def test_choices_below_the_first_one_are_taken_for_it():
    """As dead agents' rows of zeros."""
    encoders = Encoders(Dict(a=Discrete(3, start=2), b=MultiDiscrete([2, 2])))
    found = encoders({"a": torch.tensor([0, 4]), "b": torch.tensor([[0, 1], [1, 0]])})
    assert found.tolist() == [[1, 0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 1, 1, 0]]


def test_a_policy_that_is_exported_or_in_bfloat16_is_torchs():
    net, x = mlp(3, 8, 2, gain=1.0), torch.randn(5, 3)
    with torch.no_grad():
        exported = torch.export.export(net, (torch.zeros(5, 3),)).module()
        expected = net(x)
        torch.testing.assert_close(exported(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(net(x), expected)
        assert net.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
