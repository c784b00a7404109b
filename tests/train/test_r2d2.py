"""vecenv.train.r2d2."""

import pytest
import torch
from example_files import load_example

from vecenv import make_vec
from vecenv.train import r2d2

load_example("memory")  # registers the env


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
