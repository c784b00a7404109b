"""vecenv.train.r2d2."""

import pytest
import torch
from example_files import last_state, load_example

from vecenv import make_vec
from vecenv.train import r2d2

load_example("memory")  # registers the env


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"env_id": "Pendulum-v1"}, "Pendulum-v1: the spaces are .*, expected Box with an axis"),
        ({"exploration": (0.4, 0.0)}, r"exploration \(0\.4, 0\.0\): expected numbers above 0"),
        ({"burn_in": 30}, "--burn-in 30: expected 0 or more and less than --sequence-length 24"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(changed, words, tmp_path):
    options = {"env_id": "CartPole-v1", "backend": "sync", **changed}
    with pytest.raises(SystemExit, match=words):
        r2d2.main(r2d2.Options(save=tmp_path, **options))


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_errors_are_those_of_n_steps(recurrent):
    torch.manual_seed(0)
    task = {"env_id": "memory:TMaze-v0", "env_kwargs": {"length": 4}, "recurrent": recurrent}
    options = r2d2.Options(**task, n_step=3, hidden=8, learning_starts=10**6, prioritized=False)
    envs = make_vec(options.env_id, 4, autoreset_mode="SameStep", length=4)
    trainer = r2d2.R2D2(options, envs)
    trainer.start()
    for _ in range(60):
        trainer.collect()
    batch = trainer.buffer.sample_sequences(8, 6, pad=True, initial_states="state")
    errors, states = r2d2.td_errors(trainer.agent, batch, options)
    assert states.shape == (8, 6, 8)
    for b in range(8):
        count = int(batch.mask[b].sum())
        obs = torch.cat([batch.obs[b, :count], batch.next_obs[b, count - 1 : count]])[None]
        state = batch.initial_states["state"][b : b + 1]
        with torch.no_grad():
            values, later = trainer.agent.network(obs, state)
        picks = values[0].argmax(1)
        for t in range(count):
            goal, factor = 0.0, 1.0
            end = min(t + 3, count)
            for k in range(t, end):
                goal += factor * float(batch.rewards[b, k])
                factor *= options.gamma * float(~batch.terminations[b, k])
            goal += factor * float(values[0, end, picks[end]])
            taken = float(values[0, t, batch.actions[b, t]])
            assert float(errors[b, t].detach()) == pytest.approx(taken - goal, abs=1e-4)
            if t:
                torch.testing.assert_close(states[b, t], later[0, t - 1])
    envs.close()


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_a_memory_task_is_learned(tmp_path):
    options = r2d2.Options(
        env_id="memory:TMaze-v0", env_kwargs={"length": 6}, total_steps=30_000, save=tmp_path
    )
    assert r2d2.main(options).mean >= 0.9


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_went_on(tmp_path):
    given = {"env_id": "memory:TMaze-v0", "env_kwargs": {"length": 5}, "learning_starts": 320}
    given |= {"hidden": 8, "batch_size": 4, "eval_episodes": 2}
    r2d2.main(r2d2.Options(**given, total_steps=960, save=tmp_path / "whole"))
    r2d2.main(r2d2.Options(**given, total_steps=640, save=tmp_path / "half"))
    r2d2.main(r2d2.Options(**given, total_steps=960, save=tmp_path / "half", resume=True))
    whole, half = (last_state(tmp_path / name) for name in ("whole", "half"))
    assert [name for name in whole if whole[name] != half[name]] == []
