"""What the first version of ppo.py saved with torch is converted once, and then plays."""

import collections

import numpy as np
import pytest
import torch

from examples import convert_policy
from vecenv.files import load_arrays


def convert(path):
    return load_arrays(convert_policy.main(convert_policy.Options(path)))


def test_every_kind_of_tensor_is_converted_as_it_was(tmp_path):
    base = torch.arange(24.0).view(2, 3, 4)
    tensors = [base, base.transpose(0, 2), base[1, 1:, ::2], torch.tensor(5), torch.zeros(0, 3)]
    tensors += [torch.nn.Parameter(base[0]).detach(), torch.ones(2, dtype=torch.bool)]
    plain = {"a": [1, 2.5, "x", None, (True, {"b": 1})], "c": collections.OrderedDict(d=1)}
    torch.save({"kind": "k", "tensors": tensors, **plain}, tmp_path / "policy.pt")
    found = convert(tmp_path / "policy.pt")
    assert (found["a"], found["c"]) == ([1, 2.5, "x", None, [True, {"b": 1}]], {"d": 1})
    for array, tensor in zip(found["tensors"], tensors, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_files_that_hold_code_are_refused(tmp_path):
    torch.save({"kind": "", "tensors": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(SystemExit, match=r"evil\.pt can't be read by torch"):
        convert(tmp_path / "evil.pt")
    torch.save([1], tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="is no policy that ppo"):
        convert(tmp_path / "other.pt")
