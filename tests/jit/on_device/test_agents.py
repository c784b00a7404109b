"""Games of several agents on a device against the same on the CPU: without a device."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from agents.toy_games import CHASE, NUM_CATS, WALK, PythonGame, mask
from choices import fast_are, product
from envs import begun
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Box
from jit.on_device.bundled import check_states
from jit.on_device.host_device import all_same, same

import vecenv
from vecenv import ActionError, ObservationError, make_vec_agents
from vecenv.agents import AgentRowsVecEnv, AgentSlot
from vecenv.core.errors import NoActionMaskError, SlotError
from vecenv.core.masks import sample_actions

pytestmark = pytest.mark.usefixtures("host_device")

MODES = ("NextStep", "SameStep", "Disabled")
GAMES = 3


def mask_of_dead_and_alive(state, agent, out):
    mask(state, agent, out)
    if not state.alive[agent]:
        out[0] = False  # which nobody is to see


MASKED = dataclasses.replace(CHASE, action_mask=mask_of_dead_and_alive)
KINDS = {"two groups": MASKED, "one group": WALK}


def pair(kernels, **changes):
    """The same games on the CPU and on the "device", both as plain Python."""
    options = {"max_episode_steps": 9, "debug": True, **changes}
    return [make_vec_agents(kernels, GAMES, device=device, **options) for device in ("cpu", "cuda")]


def by_group(envs, parts):
    """Results by group, of either kind of vector env."""
    if not isinstance(envs, AgentRowsVecEnv):
        return parts
    (name,) = envs.groups
    return tuple({name: part} for part in parts)


def call(envs, method, actions, *rest, **options):
    if isinstance(envs, AgentRowsVecEnv):
        (name,) = envs.groups
        options = {key: value[name] for key, value in options.items()}
        found = getattr(envs, method)(actions[name], *rest, **options)
    else:
        found = getattr(envs, method)(actions, *rest, **options)
    return None if found is None else by_group(envs, found)


def draw(envs, rng, rows=None) -> dict[str, Any]:
    """Actions by group, impossible ones for agents that are not alive."""
    found = {}
    for name, group in envs.groups.items():
        ids = np.arange(group.num_envs) if rows is None else rows[name]
        if group.has_action_masks:
            masks = np.asarray(group.action_masks(ids))
            actions = sample_actions(group.single_action_space, masks, rng)
        else:
            shape = (len(ids), *group.single_action_space.shape)
            actions = rng.uniform(-1, 1, shape).astype(group.single_action_space.dtype)
        actions[~np.asarray(group.alive)[ids]] = 77
        found[name] = actions
    return found


def assert_same(device, cpu, found, expected, mode, rows=None):
    for part, other in zip(found[:4], expected[:4], strict=True):
        assert part.keys() == other.keys()
        for name in part:
            same(part[name], other[name], name)
    infos, expected_infos = found[4], expected[4]
    for name, group in cpu.groups.items():
        same(device.groups[name].alive, group.alive, name)
        same(device.groups[name].valid, group.valid, name)
        if group.has_action_masks:
            ids = None if rows is None else rows[name]
            same(device.groups[name].action_masks(ids), group.action_masks(ids))
        if mode != "SameStep":
            assert "final_obs" not in infos.get(name, {})
            continue
        count = group.num_envs if rows is None else len(rows[name])
        is_final = expected_infos.get(name, {}).get("_final_obs", np.zeros(count, bool))
        same(infos[name]["_final_obs"], is_final)
        for row in np.flatnonzero(is_final):
            same(infos[name]["final_obs"][row], expected_infos[name]["final_obs"][row])


def slots_of(envs):
    return {
        name: AgentSlot(
            *(
                envs.allocate((group.num_envs, *shape), dtype)
                for shape, dtype in (
                    (group.single_observation_space.shape, group.single_observation_space.dtype),
                    ((), np.float64 if group.num_agents == NUM_CATS else np.float32),
                    *[((), np.bool_)] * 3,
                )
            )
        )
        for name, group in envs.groups.items()
    }


def assert_same_state(device, cpu):
    found, expected = device.state_dict(), cpu.state_dict()
    check_states(found["games"], expected["games"])
    for name in expected["groups"]:
        all_same(found["groups"][name][:2], expected["groups"][name][:2])


# Each mode with one kind of game; the other pairs are slow.
PAIRS = [
    pytest.param(kind, mode, marks=[] if (number + k) % 2 else pytest.mark.slow)
    for number, kind in enumerate(KINDS)
    for k, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_steps_rows_and_the_living_are_those_of_the_cpu(kind, mode):
    cpu, device = pair(KINDS[kind], autoreset_mode=mode)
    rng = np.random.default_rng(0)
    assert_all = by_group(cpu, cpu.reset(seed=5))[0]
    found = by_group(device, device.reset(seed=5))[0]
    for name in assert_all:
        same(found[name], assert_all[name])
    slots, num_ends, held = slots_of(device), 0, []
    for step in range(40):
        actions = draw(cpu, rng)
        given = {"out": slots} if step % 3 == 1 else {}
        if step % 2:
            actions = {name: torch.from_numpy(part) for name, part in actions.items()}
        found = call(device, "step", actions, **given)
        expected = call(cpu, "step", {name: np.asarray(part) for name, part in actions.items()})
        assert_same(device, cpu, found, expected, mode)
        finals = [(n, x["final_obs"]) for n, x in found[4].items() if "final_obs" in x]
        held += [(step, name, final, np.asarray(final).copy()) for name, final in finals]
        for name, slot in slots.items():
            if given:
                assert found[0][name] is slot.obs
                assert found[1][name] is slot.rewards
                same(slot.valid, cpu.groups[name].valid)
            else:
                assert found[1][name].dtype == torch.float32
        ends = [part.reshape(GAMES, -1).any(axis=1) for part in expected[3].values()]
        num_ends += int(np.sum(ends))
        over = ~np.any([g.alive.reshape(GAMES, -1).any(1) for g in cpu.groups.values()], axis=0)
        if mode == "Disabled" and over.any():
            expected = by_group(cpu, cpu.reset(options={"reset_mask": over}))
            there = torch.from_numpy(over) if step % 2 else over  # one never leaves the device
            found = by_group(device, device.reset(options={"reset_mask": there}))
            for name in cpu.groups:
                same(found[0][name], expected[0][name])
                same(device.groups[name].alive, cpu.groups[name].alive)
                same(device.groups[name].valid, cpu.groups[name].valid)
    assert num_ends > 5
    assert bool(held) == (mode == "SameStep")
    for step, name, final, before in held:
        same(final, before, f"{name}, step {step}: they are the caller's")
    assert_same_state(device, cpu)
    device.check()


@pytest.mark.parametrize(
    ("kind", "mode"),
    fast_are(
        [*zip(KINDS, ("NextStep", "SameStep"), strict=True)],
        product(KINDS, ["NextStep", "SameStep"]),
    ),
)
def test_games_sent_and_received_are_those_of_the_cpu(kind, mode):
    cpu, device = (begun(one, seed=1) for one in pair(KINDS[kind], autoreset_mode=mode))
    rng, num_final = np.random.default_rng(1), 0
    for _ in range(16):
        order = rng.permutation(GAMES)
        rows = {name: group.rows(order) for name, group in cpu.groups.items()}
        actions = draw(cpu, rng, rows)
        for envs in (cpu, device):
            call(envs, "send", actions, order)
        for most in (1, GAMES - 1):
            name = "max_envs" if isinstance(cpu, AgentRowsVecEnv) else "max_games"
            expected, found = (by_group(e, e.recv(**{name: most})) for e in (cpu, device))
            assert_same(device, cpu, found, expected, mode, expected[5])
            for k in (5, 6):
                for name in cpu.groups:
                    same(found[k][name], expected[k][name])
            if mode == "SameStep":
                num_final += sum(int(found[4][name]["_final_obs"].sum()) for name in cpu.groups)
    assert (num_final > 5) == (mode == "SameStep")
    assert_same_state(device, cpu)


def central_state(state, out):
    for k in range(3):
        out[k] = state.place[k, 0] + state.place[k, 1]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_central_states_are_those_of_the_cpu(mode):
    space = Box(-np.inf, np.inf, (3,), np.float32)
    kernels = dataclasses.replace(WALK, central_state=central_state, state_space=space)
    cpu, device = (
        begun(one, seed=2) for one in pair(kernels, autoreset_mode=mode, central_state=True)
    )
    rng = np.random.default_rng(2)
    for _ in range(20):
        expected, found = cpu.state(), device.state()
        same(found, expected)
        assert isinstance(found, torch.Tensor)
        actions = rng.uniform(-1, 1, (3 * GAMES, 2)).astype(np.float32)
        *_, ends, cuts, _ = cpu.step(actions)
        device.step(actions)
        over = (ends | cuts).reshape(GAMES, -1).all(1)
        if mode == "Disabled" and over.any():
            for envs in (cpu, device):
                envs.reset(options={"reset_mask": over})
    same(device.state(), cpu.state())
    device.load_state_dict(cpu.state_dict())
    cpu.load_state_dict(device.state_dict())
    same(device.state(), cpu.state())
    with pytest.raises(ValueError, match="in autoreset mode SameStep, in which the one that"):
        make_vec_agents(
            kernels, GAMES, device="cuda", central_state=True, autoreset_mode="SameStep"
        )


def test_saved_games_go_on_from_one_side_to_the_other():
    cpu, device = pair(MASKED)
    cpu.reset(seed=2)
    rng = np.random.default_rng(2)
    for _ in range(6):
        cpu.step(draw(cpu, rng))
    device.load_state_dict(cpu.state_dict())
    for _ in range(12):
        actions = draw(cpu, rng)
        assert_same(device, cpu, device.step(actions), cpu.step(actions), "NextStep")
    saved = device.state_dict()
    cpu.load_state_dict(saved)
    actions = draw(cpu, rng)
    assert_same(device, cpu, device.step(actions), cpu.step(actions), "NextStep")
    with pytest.raises(vecenv.EnvStateError, match="has the groups"):
        device.load_state_dict({**saved, "groups": {}})


def test_an_action_out_of_bounds_steps_no_agent_of_its_game_and_is_told_later():
    cpu, device = (begun(one, seed=4) for one in pair(MASKED))
    rng = np.random.default_rng(0)
    actions = draw(cpu, rng)
    cpu.step(actions)
    device.step(actions)
    actions = draw(cpu, rng)
    expected = cpu.step(actions)
    actions["cat"][NUM_CATS] = 7  # of game 1
    found = device.step(actions)
    others = {name: ~np.isin(np.arange(g.num_envs), g.rows([1])) for name, g in cpu.groups.items()}
    for name, rows in others.items():
        for k in range(4):
            same(found[k][name][rows], expected[k][name][rows])
        assert not found[1][name][~rows].any()
        assert not device.groups[name].valid[~rows].any()
    with pytest.raises(ActionError, match="env 1 was given an action out of bounds"):
        device.check()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"obs": np.zeros((9, 2, 2), np.float32)}, "out.obs is ndarray"),
        ({"obs": torch.zeros(9, 4)}, r"out.obs .* expected .*\(9, 2, 2\)"),
    ],
)
def test_slots_that_cannot_be_written_are_refused(change, told):
    _, device = pair(WALK)
    device.reset(seed=0)
    (slot,) = slots_of(device).values()
    with pytest.raises(SlotError, match=told):
        device.step(torch.zeros(9, 2), out=slot._replace(**change))
    with pytest.raises(SlotError, match="share memory"):
        device.step(torch.zeros(9, 2), out=slot._replace(valid=slot.terminations))
    device.step(torch.zeros(9, 2), out=slot)


def test_what_a_device_cannot_refuse_at_once_is_told_by_check():
    _, device = pair(WALK, autoreset_mode="Disabled", max_episode_steps=1)
    device.reset(seed=0)
    device.step(torch.zeros(9, 2))
    found = device.step(torch.zeros(9, 2))
    assert not found[1].any()
    assert not device.valid.any()
    with pytest.raises(ResetNeeded, match="had ended when it was stepped"):
        device.check()

    def leave_all(state, rng):
        for k in range(len(state.alive)):
            state.alive[k] = 0

    _, device = pair(dataclasses.replace(WALK, reset=leave_all), autoreset_mode="NextStep")
    device.reset(seed=0)
    with pytest.raises(ObservationError, match="game 0 of Walk has no agents after reset"):
        device.check()


def test_masks_are_asked_for_by_rows_that_are_there():
    """On a real device a row out of range would end it for the whole process."""
    cpu, device = pair(MASKED)
    for envs in (cpu, device):
        envs.reset(seed=0)
        group = envs.groups["cat"]
        alive = np.asarray(group.alive)
        every = np.asarray(group.action_masks())
        for rows in ([4, 0, 4], np.flatnonzero(alive)):
            same(group.action_masks(rows), every[np.asarray(rows, int)])
        for row in (-1, GAMES * NUM_CATS):
            with pytest.raises(ValueError, match=f"rows has {row}, expected rows from 0 to"):
                group.action_masks([0, row])
        with pytest.raises(ValueError, match=r"got shape \(1, 1\)"):
            group.action_masks([[0]])
        with pytest.raises(TypeError, match="got dtype bool; of a mask take"):
            group.action_masks(alive.astype(bool))
        with pytest.raises(TypeError, match="got dtype float64"):
            group.action_masks([0.0])


def test_what_is_not_there_is_said():
    _, device = pair(WALK)
    device.reset(seed=3)
    zeros = np.zeros((9, 2), np.float32)
    with pytest.raises(NoActionMaskError, match="Walk has no action_mask kernel"):
        device.action_masks()
    with pytest.raises(ValueError, match="Walk has no central state: give its EnvKernels"):
        make_vec_agents(WALK, GAMES, device="cuda", central_state=True)
    with pytest.raises(ValueError, match="no central state: make the env with"):
        device.state()
    with pytest.raises(ValueError, match="one by one on the CPU; compiled games"):
        make_vec_agents(WALK, GAMES, device="cuda", backend="async")
    given = []

    def in_python(device):  # an argument of its own
        given.append(device)
        return PythonGame(WALK)

    make_vec_agents(in_python, 1, backend="sync", device="cuda").close()
    assert set(given) == {"cuda"}
    device.close()
    with pytest.raises(ClosedEnvironmentError):
        device.step(zeros)
