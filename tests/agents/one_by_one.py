"""Compiled games played one by one by a backend are those that are played all at once."""

import numpy as np

from vecenv import make_vec_agents
from vecenv.agents import AgentRowsVecEnv


def assert_same_games(env, backend, mode, *, num_steps=40, num_games=3, **options):
    """Play with random actions that masks allow; save the games on the way, and go on from there.

    Returns:
        In how many steps games have ended.
    """
    own, other = (
        make_vec_agents(env, num_games, backend=name, autoreset_mode=mode, **options)
        for name in ("jit", backend)
    )
    rng = np.random.default_rng(0)
    assert_equal(other.reset(seed=5)[0], own.reset(seed=5)[0])
    if options.get("central_state"):
        assert_equal(other.state(), own.state())
    saves = backend != "ray"  # which saves no states
    state, num_ended = None, 0
    for step in range(num_steps):
        if step == num_steps // 2 and saves:
            state = own.state_dict(), other.state_dict(), rng.bit_generator.state
        num_ended += step_both(own, other, rng, options.get("central_state", False))
    if state is not None and mode != "Disabled":  # play the second half again
        last = {name: (g.alive.copy(), g.valid.copy()) for name, g in own.groups.items()}
        states, rng.bit_generator.state = state[:2], state[2]
        other.close()
        other = make_vec_agents(env, num_games, backend=backend, autoreset_mode=mode, **options)
        other.reset(seed=99)
        own.load_state_dict(states[0])
        other.load_state_dict(states[1])
        for _ in range(num_steps // 2, num_steps):
            step_both(own, other, rng)
        for name, notes in last.items():
            assert_equal(notes, (own.groups[name].alive, own.groups[name].valid))
    own.close()
    other.close()
    return num_ended


def step_both(own, other, rng, has_state=False):
    """Step both with the same actions; return whether games have ended."""
    actions = {name: draw(group, other.groups[name], rng) for name, group in own.groups.items()}
    if isinstance(own, AgentRowsVecEnv):
        (actions,) = actions.values()
    results, expected = other.step(actions), own.step(actions)
    assert_equal(results[:4], expected[:4])
    for name, group in own.groups.items():
        assert_equal(other.groups[name].alive, group.alive)
        assert_equal(other.groups[name].valid, group.valid)
    if has_state:
        assert_equal(other.state(), own.state())
    finals = [infos_of(one, infos) for one, infos in ((own, expected[4]), (other, results[4]))]
    assert_equal(*finals)
    num_games = own.num_games
    is_over = ~np.logical_or.reduce(
        [group.alive.reshape(num_games, -1).any(axis=1) for group in own.groups.values()]
    )
    if is_over.any() and own.autoreset_mode.value == "Disabled":
        options = {"reset_mask": is_over}
        assert_equal(other.reset(options=options)[0], own.reset(options=options)[0])
    return is_over.any() or bool(finals[0])


def draw(group, twin, rng):
    """Draw actions over the masks, which both must have, if there are some."""
    if not group.has_action_masks:
        return np.array([group.single_action_space.sample() for _ in range(group.num_envs)])
    masks = group.action_masks()
    np.testing.assert_array_equal(twin.action_masks(), masks)
    sizes = np.atleast_1d(getattr(group.single_action_space, "nvec", masks.shape[-1]))
    stops = np.cumsum(sizes)[:-1]
    chosen = [[rng.choice(np.flatnonzero(m)) for m in np.split(row, stops)] for row in masks]
    return np.array(chosen)[:, 0] if len(sizes) == 1 else np.array(chosen)


def infos_of(envs, infos):
    """Final observations and states."""
    by_group = dict.fromkeys(envs.groups, infos)
    if not isinstance(envs, AgentRowsVecEnv):
        by_group = {name: infos.get(name, {}) for name in envs.groups}
    found = [
        np.stack(list(own["final_obs"][own["_final_obs"]]))
        for own in by_group.values()
        if "final_obs" in own
    ]
    if "final_state" in infos:
        mask = infos["_final_state"]
        found += [mask, np.stack(list(infos["final_state"][mask]))]
    return found


def assert_equal(one, other):
    """Compare nested arrays."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_equal(one[key], value)
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for part, value in zip(one, other, strict=True):
            assert_equal(part, value)
    else:
        np.testing.assert_array_equal(one, other)
