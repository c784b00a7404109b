"""`CudaVectorEnv` does what `JitVectorEnv` does, and says what it can't: without a device."""

import numpy as np
import pytest
import torch
from envs import begun
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, MultiDiscrete
from jit.on_device.bundled import check_infos
from jit.on_device.host_device import all_same, same
from jit.on_device.recorded import count_differences, load_trace
from jit.toy_env import PARAMS, TOY
from jit.toy_rolls import assert_same_states

import vecenv
from vecenv import StepSlot
from vecenv.core import cuda as cuda_code
from vecenv.core.errors import ActionError, ActionTypeError, NoActionMaskError, SlotError
from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.cuda.env import CudaVectorEnv, open_device

pytestmark = pytest.mark.usefixtures("host_device")

MODES = ("NextStep", "SameStep", "Disabled")
N = 5


def pair(**options):
    """The same envs on the CPU and on the "device", both as plain Python."""
    options = {"params": PARAMS, "max_episode_steps": 9, "debug": True, **options}
    return JitVectorEnv(TOY, N, **options), CudaVectorEnv(TOY, N, **options)


@pytest.mark.parametrize("mode", MODES)
def test_steps_episodes_and_statistics_are_those_of_the_cpu(mode):
    cpu, device = pair(autoreset_mode=mode, episode_infos=True, mask_infos=True)
    expected, infos = cpu.reset(seed=3)
    found, infos_there = device.reset(seed=3)
    all_same([found, infos_there["action_mask"]], [expected, infos["action_mask"]])
    rng = np.random.default_rng(0)
    num_ended = 0
    for _ in range(24):
        actions = rng.integers(-1, 2, N)
        expected, found = cpu.step(actions), device.step(torch.from_numpy(actions))
        all_same(found[:4], expected[:4])
        assert found[1].dtype == torch.float32
        over = expected[2] | expected[3]
        same(found[4]["action_mask"], expected[4]["action_mask"])
        same(found[4]["_episode"], over)
        if over.any():
            num_ended += 1
            for name in "rl":
                same(found[4]["episode"][name], expected[4]["episode"][name])
        if mode == "SameStep":
            same(found[4]["_final_obs"], over)
            for row in np.flatnonzero(over):
                same(found[4]["final_obs"][row], expected[4]["final_obs"][row])
        if mode == "Disabled" and over.any():
            # One mask from the host, one that never leaves the device.
            mask = over if num_ended % 2 else torch.from_numpy(over)
            found = device.reset(options={"reset_mask": mask})
            same(found[0], cpu.reset(options={"reset_mask": over})[0])
    assert num_ended > 3
    assert_same_states(device.state_dict(), cpu.state_dict())
    names = ("last_returns", "last_lengths", "num_episodes", "episode_lengths", "episode_over")
    all_same([getattr(device, name) for name in names], [getattr(cpu, name) for name in names])
    all_same([device.state_field("trail"), device.observe()], [cpu.states.trail, cpu.observe()])
    assert device.np_random_seed == cpu.np_random_seed


def test_sends_and_receives_are_those_of_the_cpu():
    cpu, device = (begun(one, seed=1) for one in pair(episode_infos=True))
    rng, num_ended = np.random.default_rng(1), 0
    for _ in range(12):
        order = rng.permutation(N)
        cut = int(rng.integers(1, N + 1))
        for ids in (order[:cut], order[cut:]):
            if len(ids):
                actions = rng.integers(-1, 2, len(ids))
                cpu.send(actions, ids)
                device.send(actions, ids)
        while cpu._calls.num_in_flight:
            most = int(rng.integers(1, N + 1))
            expected, found = cpu.recv(max_envs=most), device.recv(max_envs=most)
            all_same([*found[:4], found.env_ids], [*expected[:4], expected.env_ids])
            check_infos(found.infos, expected.infos)
            num_ended += len(expected.infos)
    assert num_ended
    assert_same_states(device.state_dict(), cpu.state_dict())


def test_recorded_episodes_replay_and_a_wrong_step_is_noticed(monkeypatch):
    assert count_differences("shared", slice(0, 400, 200), 30) == (0, 2 * 30 * 217)
    changed = dict(load_trace("shared"))
    actions = changed["blue_action"].copy()
    actions[0, 20] = 144 if actions[0, 20] != 144 else 0
    changed["blue_action"] = actions
    monkeypatch.setattr("jit.on_device.recorded.load_trace", lambda name: changed)
    assert count_differences("shared", slice(0, 400, 200), 30)[0] > 0


def slot(rewards=torch.float32):
    return StepSlot(
        torch.zeros(N, 3), torch.zeros(N, dtype=rewards), torch.zeros(N, dtype=torch.bool),
        torch.zeros(N, dtype=torch.bool),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"obs": torch.zeros(N, 4)}, r"out.obs is torch.float32 \(5, 4\).*expected.*\(5, 3\)"),
        ({"obs": torch.zeros(3, N).T}, "not contiguous"),
        ({"obs": torch.zeros(N, 3, device="meta")}, "on meta; expected .* on cpu"),
    ],
)
def test_slots_that_cannot_be_written_are_refused(change, told):
    _, device = pair()
    device.reset(seed=2)
    with pytest.raises(SlotError, match=told):
        device.step([0] * N, out=slot()._replace(**change))
    assert device.episode_lengths.tolist() == [0] * N


@pytest.mark.parametrize(
    ("actions", "error", "told"),
    [
        (torch.zeros(N, dtype=torch.int64, device="meta"), ActionError, "on meta, expected .* cpu"),
        (torch.zeros(N - 1, dtype=torch.int64), ActionError, r"shape \(4,\), expected \(5,\)"),
        (torch.zeros(N), ActionTypeError, "dtype torch.float32"),
    ],
)
def test_actions_that_the_host_can_refuse_are_refused_at_once(actions, error, told):
    _, device = pair()
    device.reset(seed=2)
    with pytest.raises(error, match=told):
        device.step(actions)
    device.step([0] * N)


def test_an_action_out_of_bounds_steps_the_others_and_is_told_by_a_later_call():
    cpu, device = pair()
    cpu.reset(seed=4)
    before, _ = device.reset(seed=4)
    found = device.step([0, 1, 7, -1, 0])
    expected = cpu.step([0, 1, 0, -1, 0])
    others = [0, 1, 3, 4]
    all_same([part[others] for part in found[:4]], [part[others] for part in expected[:4]])
    all_same([found[0][2], found[1][2]], [before[2], np.float32(0)])
    assert device.episode_lengths.tolist() == [1, 1, 0, 1, 1]
    with pytest.raises(ActionError, match="env 2 was given an action out of bounds"):
        device.step([0] * N)
    device.step([0] * N)  # told once
    device.step([0, 0, 0, 0, -2])
    with pytest.raises(ActionError, match="env 4"):
        device.check()


def noop(state, rng):
    pass


def zeros(state, out):
    out[:] = 0


def never(state, action, rng):
    return 0.0, False, False


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (MultiDiscrete([2, 3]), [1, 2], [1, 3]),
        (Box(-1, 1, (2,), np.float32), [5.0, 0.0], [0.0, np.nan]),
        (Box(0, 9, (2,), np.int32), [0, 9], [-1, 3]),
    ],
)
def test_every_element_of_an_action_is_checked(space, good, bad):
    kernels = EnvKernels([("x", np.int64)], Box(-1, 1, (1,)), space, noop, never, zeros)
    envs = begun(CudaVectorEnv(kernels, 3, debug=True))
    envs.step([good] * 3)
    envs.check()
    envs.step([good, bad, good])
    with pytest.raises(ActionError, match="env 1"):
        envs.check()


def test_stepping_an_episode_that_is_over_is_told_if_autoreset_is_disabled():
    _, device = pair(autoreset_mode="Disabled", max_episode_steps=1)
    device.reset(seed=4)
    device.step([0] * N)
    device.step([0] * N)
    with pytest.raises(ResetNeeded, match="had ended when it was stepped"):
        device.check()
    assert device.episode_lengths.tolist() == [1] * N


def test_states_go_from_the_cpu_to_the_device_and_back():
    cpu, device = pair()
    cpu.reset(seed=6)
    for _ in range(5):
        cpu.step([1] * N)
    device.load_state_dict(cpu.state_dict())
    same(device.observe(), cpu.observe())
    for _ in range(15):
        all_same(device.step([1] * N)[:4], cpu.step([1] * N)[:4])
    saved = device.state_dict()
    device.step([0] * N)
    cpu.load_state_dict(saved)
    device.load_state_dict(saved)
    all_same(device.step([1] * N)[:4], cpu.step([1] * N)[:4])
    with pytest.raises(KeyError, match="no entry 'runs'"):
        device.load_state_dict({"states": saved["states"]})
    with pytest.raises(ValueError, match="5 envs of the same kind"):
        device.load_state_dict({**saved, "states": saved["states"][:2]})


def test_make_vec_makes_compiled_envs_on_a_device_and_leaves_the_argument_to_others():
    envs = vecenv.make_vec(TOY, 3, device="cuda", params=PARAMS, autoreset_mode="SameStep")
    assert isinstance(envs, CudaVectorEnv)
    assert envs.autoreset_mode.value == "SameStep"
    envs = vecenv.make_vec("JitCartPole-v1", 3, device="cuda", mask_infos=False)
    assert isinstance(envs, CudaVectorEnv)
    assert envs.max_episode_steps == 500
    assert isinstance(
        vecenv.make_vec(TOY, 3, device="cpu", params=PARAMS, debug=True), JitVectorEnv
    )
    with pytest.raises(Exception, match="device"):
        vecenv.make_vec("CartPole-v1", device="cuda")  # of which the constructor knows nothing


def test_envs_made_under_modes_of_torch_are_those_made_without():
    """A default device must not be that of memory of the host, nor may tensors be frozen."""
    on_cpu, _ = pair()
    with torch.inference_mode(), torch.device("meta"):
        _, on_device = pair()
        same(on_device.reset(seed=2)[0], on_cpu.reset(seed=2)[0])
    on_device.last_lengths.add_(0)
    with torch.device("meta"):
        on_device.reset(seed=3)
    on_cpu.reset(seed=3)
    actions = np.stack([on_cpu.single_action_space.sample() for _ in range(N)])
    with torch.device("meta"):
        found = on_device.step(actions)[:4]
    all_same(found, on_cpu.step(actions)[:4])
    assert_same_states(on_device.state_dict(), on_cpu.state_dict())


def test_without_numba_cuda_it_is_said_how_to_install_it(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_code, "require", cuda_code.require.__wrapped__)
    monkeypatch.setattr(cuda_code, "_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r'need numba-cuda: pip install "vecenv\[cuda\]"'):
        open_device("cuda")


def test_masks_are_those_of_the_cpu():
    cpu, device = (begun(one, seed=8) for one in pair())
    ids = np.array([3, 1])
    all_same(
        [device.action_masks(), device.action_masks(ids)],
        [cpu.action_masks(), cpu.action_masks(ids)],
    )
    out = torch.zeros(N, 3, dtype=torch.bool)
    assert device.action_masks(out=out) is out
    same(out, cpu.action_masks())
    kernels = EnvKernels(
        [("x", np.int64)], Box(-1, 1, (1,)), MultiDiscrete([2]), noop, never, zeros
    )
    envs = begun(CudaVectorEnv(kernels, 3, debug=True))
    with pytest.raises(NoActionMaskError, match="no action_mask kernel"):
        envs.action_masks()


def test_other_arrays_of_the_device_are_taken_through_dlpack():
    class Foreign:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    cpu, device = (begun(one, seed=1) for one in pair())
    found = device.step(Foreign(torch.ones(N, dtype=torch.int64)))
    all_same(found[:4], cpu.step([1] * N)[:4])
