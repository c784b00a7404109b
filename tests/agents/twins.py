"""Comparison of a vector env of agents with bare games, by steps, `out=` and sends."""

import numpy as np
from agents.bare import BareGames
from gymnasium.vector import AutoresetMode

from vecenv.agents import AgentSlot, make_vec_agents

FIELDS = ("rewards", "terminations", "truncations", "valid")


def as_agents(envs):
    """The env whose results are dicts by group."""
    return getattr(envs, "agents", envs)


def put(batch, values, row):
    """Compare a row, nested or not, with what an agent got; None stands for zeros."""
    if isinstance(batch, dict):
        for key, part in batch.items():
            put(part, None if values is None else values[key], row)
    else:
        np.testing.assert_array_equal(batch[row], 0 if values is None else values)


def assert_alike(group, name, got, expected, rows=None, path=""):
    """Compare results of some rows (all for None) with the expected ones."""
    rows = list(range(group.num_envs)) if rows is None else list(rows)
    obs, *arrays = got
    for field, array in zip(FIELDS, arrays, strict=True):
        wanted = getattr(expected, field)[name][rows]
        np.testing.assert_array_equal(array, wanted, err_msg=f"{path} {name} {field}")
    for place, row in enumerate(rows):
        put(obs, expected.obs[name][row], place)


def assert_infos(infos, expected, group, name, rows=None):
    """Compare infos of agents, which are there if and only if they were given."""
    rows = list(range(group.num_envs)) if rows is None else list(rows)
    wanted = expected.infos[name]
    own = infos.get(name, {})
    for key in ("drawn", "place"):
        if key not in own:
            assert not any(key in wanted.get(row, {}) for row in rows)
            continue
        for place, row in enumerate(rows):
            assert own[f"_{key}"][place] == (key in wanted.get(row, {})), (name, row)
            if own[f"_{key}"][place]:
                np.testing.assert_array_equal(own[key][place], wanted[row][key])
                assert own["more"]["name"][place] == wanted[row]["more"]["name"]
    if expected.states:
        games = np.array(rows[:: group.num_agents]) // group.num_agents
        has_final = [game in expected.final_states for game in games]
        np.testing.assert_array_equal(infos.get("_final_state", np.zeros(len(games))), has_final)
        for place in np.flatnonzero(has_final):
            final = infos["final_state"][place]
            np.testing.assert_array_equal(final, expected.final_states[games[place]])
    final = own.get("final_obs", np.full(len(rows), None))
    for place, row in enumerate(rows):
        if row in expected.final_obs[name]:
            assert own["_final_obs"][place]
            put({"": final[place]}, {"": expected.final_obs[name][row]}, slice(None))
        else:
            assert final[place] is None


def random_actions(groups, rng):
    """Actions for all rows; nonsense for agents that are not alive, as they are ignored."""
    actions = {}
    for name, group in groups.items():
        space = group.single_action_space
        if space.dtype.kind == "f":
            drawn = rng.uniform(-1, 1, (group.num_envs, *space.shape)).astype(space.dtype)
            drawn[~group.alive] = np.nan
        else:
            sizes = getattr(space, "nvec", None)
            high = space.n if sizes is None else sizes
            drawn = rng.integers(0, high, (group.num_envs, *space.shape))
            if group.has_action_masks:
                keys = rng.random((group.num_envs, space.n)) + group.action_masks()
                drawn = keys.argmax(1)
            drawn[~group.alive] = 77
        actions[name] = drawn
    return actions


def slots_for(envs):
    """Memory for each group, as a rollout buffer has it."""
    slots = {}
    for name, group in envs.groups.items():
        space, count = group.single_observation_space, group.num_envs
        flags = [group.allocate((count,), np.bool_) for _ in range(3)]
        slots[name] = AgentSlot(
            group.allocate((count, *space.shape), space.dtype),
            group.allocate((count,), np.float32),
            *flags,
        )
    return slots


def play(factory, num_games=3, num_steps=40, *, by="step", seed=5, bare=None, **options):
    """Play a vector env and bare games with equal calls, and compare all that comes.

    Args:
        factory: What `make_vec_agents` takes.
        num_games: How many.
        num_steps: How many.
        by: "step", "out" or "send".
        seed: Of games and actions.
        bare: Makes a bare game, where `factory` does not.
        options: Of `make_vec_agents`.

    Returns:
        How many games ended, and how many agents ended before their game did.
    """
    made = make_vec_agents(factory, num_games, **options)
    envs = as_agents(made)
    mode = envs.autoreset_mode
    has_state = options.get("central_state", False)
    games = [(bare or factory)() for _ in range(num_games)]
    bare = BareGames(games, envs.groups, mode, with_states=has_state)
    rng = np.random.default_rng(seed)
    slots = slots_for(envs) if by == "out" else None
    num_ends = num_early = 0
    try:
        obs, infos = envs.reset(seed=seed)
        expected = bare.reset([seed + g for g in range(num_games)])
        check_reset(envs, obs, infos, expected)
        states = expected.states
        for step in range(num_steps):
            actions = random_actions(envs.groups, rng)
            expected = bare.step(actions)
            if by == "send":
                step_by_sends(envs, actions, rng, expected, f"step {step}")
            else:
                *results, infos = envs.step(actions, out=slots)
                assert_step(envs, results, infos, expected, slots, f"step {step}")
            for name, group in envs.groups.items():
                np.testing.assert_array_equal(group.alive, expected.alive[name])
            num_ends += sum(bare.over) + sum(bool(f) for f in expected.final_obs.values())
            num_early += sum(int((~a).sum()) for a in expected.alive.values())
            if mode is AutoresetMode.DISABLED and any(bare.over):
                states |= expected.states
                expected = restart(envs, bare, expected)
            states |= expected.states
            if has_state:
                np.testing.assert_array_equal(envs.state(), [states[g] for g in range(num_games)])
    finally:
        made.close()
        made.close()
    return num_ends, num_early


def restart(envs, bare, before):
    """Reset the games that are over; the rows of the others stay as they were `before`.

    Returns:
        What the bare games gave.
    """
    mask = np.array(bare.over)
    obs, _ = envs.reset(options={"reset_mask": mask})
    expected = bare.reset([None] * len(mask), mask)
    for name, group in envs.groups.items():
        rows = group.rows(np.flatnonzero(mask))
        for row in range(group.num_envs):
            source = expected if row in rows else before
            put(obs[name], source.obs[name][row], row)
            assert group.alive[row] == source.alive[name][row]
            assert group.valid[row] == (row not in rows and source.valid[name][row])
    return expected


def assert_step(envs, results, infos, expected, slots, path):
    """Compare what `step` returned with what is expected, and with the slots if there are some."""
    for name, group in envs.groups.items():
        arrays = [part[name] for part in results]
        if slots is not None:
            assert all(a is b for a, b in zip(arrays, slots[name][:4], strict=True))
            np.testing.assert_array_equal(slots[name].valid, group.valid)
            expected.rewards[name][:] = expected.rewards[name].astype(np.float32)
        assert_alike(group, name, (*arrays, group.valid), expected, path=path)
        assert_infos(infos, expected, group, name)


def check_reset(envs, obs, infos, expected):
    for name, group in envs.groups.items():
        for row in range(group.num_envs):
            put(obs[name], expected.obs[name][row], row)
        np.testing.assert_array_equal(group.alive, expected.alive[name])
        assert not group.valid.any()
        assert_infos(infos, expected, group, name)


def step_by_sends(envs, actions, rng, expected, path):
    """Step all games by several sends in random order, received in several parts."""
    order = rng.permutation(envs.num_games)
    for games in np.array_split(order, 2):
        if len(games):
            part = {name: actions[name][group.rows(games)] for name, group in envs.groups.items()}
            envs.send(part, games)
    left = envs.num_games
    while left:
        batch = envs.recv(min_games=1, max_games=2)
        left -= len(batch.game_ids)
        for name, group in envs.groups.items():
            rows = group.rows(batch.game_ids)
            np.testing.assert_array_equal(batch.env_ids[name], rows)
            got = [getattr(batch, field)[name] for field in ("obs", *FIELDS)]
            assert_alike(group, name, got, expected, rows, path)
            assert_infos(batch.infos, expected, group, name, rows)
