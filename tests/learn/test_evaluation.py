"""evaluate: the first episodes of each env, on any backend, and the interval of their mean."""

import functools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import games
from envs import CounterEnv, counters
from gymnasium import spaces
from masked_envs import ForbiddingPair

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec, make_vec_agents
from vecenv.learn import EvaluationResult, evaluate, evaluating


def zeros(obs):
    return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_env_plays_its_first_episodes_whether_short_or_long(mode):
    """An episode of n steps of a counter has the return 1 + 2 + ... + n."""
    envs = SyncVectorEnv(counters([1, 9, 3]), autoreset_mode=mode)
    result = evaluate(zeros, envs, 7)
    assert result.returns == (1, 1, 1, 45, 45, 6, 6)
    assert result.lengths == (1, 1, 1, 9, 9, 3, 3)
    assert result.mean == pytest.approx(105 / 7)


def bare_returns(num_games, count):
    """Play Tag's first games bare, each agent doing nothing; returns by group, and lengths."""
    found = []
    for g in range(num_games):
        game = games.Tag(forgets=True)
        for again in range(count // num_games + (g < count % num_games)):
            game.reset(**({} if again else {"seed": 7 + g}))
            totals, length = {"runner": 0.0, "catcher": 0.0}, 0
            while game.agents:
                acted = list(game.agents)
                still = {a: 0 if a in game.runners else np.zeros(2, np.float32) for a in acted}
                rewards = game.step(still)[1]
                length += 1
                for agent in acted:
                    totals[agent.partition("_")[0]] += rewards[agent]
            found.append((totals, length))
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_games_of_several_agents_are_played_as_bare_ones(mode):
    envs = make_vec_agents(
        functools.partial(games.Tag, forgets=True), 3, backend="sync", autoreset_mode=mode
    )
    begun = []

    def act(obs, starts):
        begun.append(starts.numpy().copy())
        assert obs["runner"].shape == (9, 3)
        return {"runner": torch.zeros(9, dtype=torch.int64), "catcher": np.zeros((3, 2), "f4")}

    found = evaluate(act, envs, 7, seed=7)
    expected = bare_returns(3, 7)
    assert list(found) == ["runner", "catcher"]
    for name, result in found.items():
        assert result.returns == pytest.approx([totals[name] for totals, _ in expected])
        assert result.lengths == tuple(length for _, length in expected)
        assert result.mean == pytest.approx(np.mean(result.returns))
    assert begun[0].all() and 6 <= np.sum(begun) <= 20


def test_games_of_one_group_are_played_by_masks():
    envs = make_vec_agents(functools.partial(ForbiddingPair, "obs"), 2, backend="sync")

    def act(obs, action_masks):
        alive = torch.from_numpy(envs.alive)  # the others may do anything
        assert torch.equal(action_masks["player"][alive], obs["player"]["action_mask"][alive])
        return {"player": action_masks["player"].to(torch.int64).argmax(1)}

    assert len(evaluate(act, envs, 3)["player"].returns) == 3


def test_results_are_the_same_on_every_backend():
    def act(obs):
        return (obs[:, 2] > 0).long()

    made = [
        make_vec("CartPole-v1", 3, backend="sync", autoreset_mode="SameStep"),
        AsyncVectorEnv([functools.partial(gym.make, "CartPole-v1")] * 3, copy=False),
        gym.vector.SyncVectorEnv([functools.partial(gym.make, "CartPole-v1")] * 3),
    ]
    results = [evaluate(act, envs, 8, seed=5).lengths for envs in made]
    assert results[0] == results[1] == results[2]
    again = evaluate(act, "CartPole-v1", 8, seed=5, num_envs=3, backend="sync")
    assert again.lengths == results[0]
    assert not made[0].closed
    for envs in made:
        envs.close()


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (11, 2.22814)]
)
def test_the_interval_is_students(count, quantile):
    envs = SyncVectorEnv(counters(range(1, count + 1)))
    result = evaluate(zeros, envs, count)
    std = np.std(result.returns, ddof=1)
    assert result.std == pytest.approx(std)
    assert result.ci95 == pytest.approx(quantile * std / math.sqrt(count), rel=2e-3)


def test_a_single_episode_has_no_interval():
    result = evaluate(zeros, lambda: CounterEnv(length=2), 1, backend="sync")
    assert math.isnan(result.std) and math.isnan(result.ci95)
    assert str(result) == "return 3.0 of 1 episode"


class Masked(CounterEnv):
    """Observes a Dict; action `step_number` alone is allowed."""

    observation_space = spaces.Dict(
        step=spaces.Discrete(99), pair=spaces.Tuple([spaces.Discrete(9)])
    )

    def _observe(self):
        return {"step": self.step_number, "pair": (1,)}

    def step(self, action):
        assert action == self.step_number
        return super().step(action)


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv, gym.vector.SyncVectorEnv])
def test_what_a_policy_is_given_is_its_own_to_keep(make):
    """Also of envs that hand out views, which the next step overwrites."""
    kept = []

    def act(obs):
        kept.append((obs, obs.clone()))
        return zeros(obs)

    envs = make(counters([5, 5]), copy=False)
    evaluate(act, envs, 2)
    envs.close()
    assert len(kept) == 5 and not torch.equal(kept[0][0], kept[-1][0])
    assert all(torch.equal(given, as_it_was) for given, as_it_was in kept)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_policies_with_a_memory_are_told_where_episodes_start(mode):
    counts = torch.zeros(2, dtype=torch.int64)

    def act(obs, starts):
        counts[starts] = 0
        assert (obs["step"] == counts).logical_or(obs["step"] == 3).all()  # 3 at the end
        assert torch.is_tensor(obs["pair"][0])
        counts.add_(1)
        return counts - 1

    make = functools.partial(Masked, length=3)
    result = evaluate(act, SyncVectorEnv([make, make], autoreset_mode=mode), 4)
    assert result.lengths == (3, 3, 3, 3)


def test_policies_that_ask_for_action_masks_get_those_of_the_envs():
    class Envs(SyncVectorEnv):
        def action_masks(self):
            return np.array([[0, 1, 0]] * self.num_envs, np.int8)

    def act(obs, action_masks):
        assert action_masks.tolist() == [[0, 1, 0]]
        return action_masks.argmax(-1)

    evaluate(act, Envs(counters([2])), 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"episodes": 0}, "episodes is 0"), ({"num_envs": 3}, "for envs that are made here")],
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        evaluate(zeros, SyncVectorEnv(counters([1])), **kwargs)


@pytest.mark.parametrize(
    ("mean", "ci95", "told"),
    [
        (0.00421, 0.00253, "return 0.0042 ± 0.0025"),
        (-0.0312, 0.5149, "return -0.031 ± 0.51"),
        (1234.5678, 0.0, "return 1234.6 ± 0.0"),
        (math.nan, math.inf, "return nan ± inf"),
    ],
)
def test_small_returns_keep_their_digits(mean, ci95, told):
    result = EvaluationResult(mean, 1.0, ci95, (0.0, 0.0), (1, 1))
    assert str(result) == f"{told} (95 %) over 2 episodes"


def test_policies_draw_where_they_are_asked_to():
    def act(obs, *, sample=False):
        return np.full(len(obs), int(sample))

    def by_chance(obs, *, sample=False):
        return torch.randint(2, (len(obs),))

    envs = {"envs": "CartPole-v1", "episodes": 3, "seed": 5}
    always = evaluate(lambda obs: np.ones(len(obs), int), **envs)
    never = evaluate(lambda obs: np.zeros(len(obs), int), **envs)
    assert evaluate(act, **envs) == never != always == evaluate(act, **envs, sample=True)
    before = torch.get_rng_state()
    drawn = [evaluate(by_chance, **envs, sample=True) for _ in range(2)]
    assert drawn[0] == drawn[1] and torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="no probabilities to draw from: leave sample out"):
        evaluate(lambda obs: np.ones(len(obs), int), **envs, sample=True)


def test_ctrl_c_leaves_an_evaluation_out_with_a_sentence():
    told = []
    with pytest.raises(SystemExit) as ended, evaluating("9 games", told.append):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert told == ["evaluating 9 games; Ctrl-C leaves that out", "the evaluation is left out"]
    with pytest.raises(ZeroDivisionError), evaluating("9 games", told.append):
        raise ZeroDivisionError
