"""Learning with several agents: vecenv.train.ppo_agents beside SuperSuit and stable-baselines3.

    pip install 'pettingzoo[sisl]' mpe2 supersuit stable-baselines3
    python benchmarks/agents_learning.py --envs spread pursuit --results learned.jsonl
    python benchmarks/agents_learning.py --table --results learned.jsonl

Each case trains one policy for all agents for as many steps of agents: "ippo" and "sb3", the PPO of
stable-baselines3 over SuperSuit's vector env of agents. All get the settings of `SETTINGS`: games,
steps between updates, epochs, minibatches, learning rate falling linearly to 0, discounts,
clipping, entropy, orthogonal 64-64 tanh networks for actor and critic each, Adam with eps 1e-5.
"... compiled" is the same on the compiled env of the same rules, which SuperSuit gets as a
`GameView`, one for each game.

Then the policy plays each of some games once, from the same seeds for all; actions are the
likeliest ones, or drawn. The return is an agent's, its mean over agents and games.

Seconds are of processor time, of this one process with one torch thread, envs and learning; so that
they can be compared on a machine that does other things as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, markdown_table

from vecenv import make_vec_agents
from vecenv.adapters.pettingzoo import GameView
from vecenv.train import ppo_agents as ppo

MODULES = {"spread": "mpe2.simple_spread_v3", "pursuit": "pettingzoo.sisl.pursuit_v5"}
COMPILED = {"pursuit": "Pursuit-v0", "spread": "Spread-v0"}
SETTINGS: dict[str, dict[str, Any]] = {
    "spread": {"total_steps": 150_000},
    "pursuit": {"total_steps": 300_000, "num_steps": 32, "num_epochs": 4},
}
GAMES = {"spread": 100, "pursuit": 20}  # of the evaluation
LEARNERS = ("ippo", "sb3", "ippo, compiled", "sb3, compiled")
Act = Callable[[np.ndarray, bool], np.ndarray]  # observations (B, ...) -> actions (B,)


def options_of(env: str, learner: str, seed: int) -> Any:
    """Return the example's options."""
    backend, name = "sync", MODULES[env]
    if learner.endswith("compiled"):
        backend, name = "jit", COMPILED[env]
    return ppo.Options(env=name, seed=seed, backend=backend, compile="off", **SETTINGS[env])


def train_example(options: Any) -> Act:
    """Train the example; return its policy."""
    envs = ppo.AgentsPPO.make_envs(options, options.num_games, on_device=True)
    trainer = ppo.AgentsPPO(options, envs)
    while trainer.steps + trainer.rollout_steps <= options.total_steps:
        trainer.update()
    envs.close()

    @torch.inference_mode()
    def act(obs: np.ndarray, draws: bool) -> np.ndarray:
        quantiles = torch.rand(len(obs), len(trainer.agent.sizes)) if draws else None
        actions, _ = trainer.agent.act(torch.from_numpy(obs), quantiles)
        return actions.squeeze(1).numpy()

    return act


def train_sb3(options: Any) -> Act:
    """Train stable-baselines3's PPO with the same options; return its policy."""
    model_class: Any = import_module("stable_baselines3").PPO
    games = rows_for_sb3(options)
    size = games.num_envs * options.num_steps
    hidden = list(options.hidden or (64, 64))
    model = model_class(
        "MlpPolicy",
        games,
        learning_rate=lambda remaining: remaining * options.learning_rate,
        n_steps=options.num_steps,
        batch_size=size // options.num_minibatches,
        n_epochs=options.num_epochs,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
        clip_range=options.clip,
        ent_coef=options.entropy_weight,
        vf_coef=options.value_weight / 2,  # of the squared error, not of half of it
        max_grad_norm=options.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}},  # tanh and eps 1e-5 by default
        device="cpu",
    )
    model.learn(options.total_steps // size * size)
    return lambda obs, draws: model.predict(obs, deterministic=not draws)[0]


def rows_for_sb3(options: Any) -> Any:
    """Return agents' rows as SuperSuit's vector env for stable-baselines3, seeded."""
    supersuit: Any = import_module("supersuit")
    if options.backend == "jit":
        vector: Any = import_module("supersuit.vector")
        wrapper: Any = import_module("supersuit.vector.sb3_vector_wrapper")
        made = [
            make_vec_agents(options.env, 1, autoreset_mode="Disabled")
            for _ in range(options.num_games)
        ]
        views = [vector.MarkovVectorEnv(GameView(envs)) for envs in made]
        spaces = views[0].observation_space, views[0].action_space
        games = vector.ConcatVecEnv([lambda view=view: view for view in views], *spaces)
        games = wrapper.SB3VecEnvWrapper(games)
    else:
        env = import_module(options.env).parallel_env(**options.env_kwargs)
        rows = supersuit.pettingzoo_env_to_vec_env_v1(env)
        games = supersuit.concat_vec_envs_v1(
            rows, options.num_games, num_cpus=0, base_class="stable_baselines3"
        )
    # Copies of one env draw alike, until they are reset with seeds of their own.
    for number, game in enumerate(games.venv.vec_envs):
        game.par_env.reset(seed=options.seed + number)
    return games


def play(options: Any, act: Act, draws: bool, num_games: int) -> float:
    """Play each of some games once; return the mean return of an agent."""
    torch.manual_seed(options.seed)
    envs = ppo.AgentsPPO.make_envs(options, num_games)
    ((name, group),) = envs.groups.items()
    obs, _ = envs.reset(seed=1_000_000)
    total, goes_on = 0.0, np.ones(num_games, np.bool_)
    while goes_on.any():
        obs, rewards, *_ = envs.step({name: act(obs[name], draws)})
        total += rewards[name].reshape(num_games, -1)[goes_on].sum()
        goes_on &= group.alive.reshape(num_games, -1).any(1)
    envs.close()
    return float(total / group.num_envs)


def measure(env: str, learner: str, seed: int) -> dict[str, Any]:
    """Train one case and play its policy."""
    torch.manual_seed(seed)
    options = options_of(env, learner, seed)
    if options.backend == "jit":  # compile, or load what was
        envs = ppo.AgentsPPO.make_envs(options, 1)
        envs.reset(seed=0)
        envs.step({name: group.action_space.sample() for name, group in envs.groups.items()})
        envs.close()
    begin = time.process_time()
    act = train_sb3(options) if learner.startswith("sb3") else train_example(options)
    seconds = time.process_time() - begin
    kinds = ("drawn", "likeliest")
    returns = {kind: play(options, act, kind == "drawn", GAMES[env]) for kind in kinds}
    found = {"env": env, "learner": learner, "seed": seed, "steps": options.total_steps}
    return {**found, "seconds": seconds, **returns}


def table(results: Iterable[dict[str, Any]]) -> str:
    """Return all results, a row for each env and learner."""
    cases: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    for found in results:
        case = found["env"], found["learner"], found["steps"]
        cases.setdefault(case, {})[found["seed"]] = found
    rows = []
    for (env, learner, steps), by_seed in sorted(cases.items()):
        several = [by_seed[seed] for seed in sorted(by_seed)]
        cells = [f"{env}, {steps:_}".replace("_", " "), learner]
        for kind in ("drawn", "likeliest"):
            values = [found[kind] for found in several]
            cells += [" ".join(f"{x:.1f}" for x in values), f"{statistics.mean(values):.1f}"]
        rows.append([*cells, f"{statistics.median(found['seconds'] for found in several):.0f}"])
    head = ["env, steps", "learner", "drawn, by seed", "mean", "likeliest, by seed", "mean"]
    return markdown_table([*head, "processor-seconds"], rows)


def main() -> None:
    """Read the command line; train and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--learners", nargs="+", default=list(LEARNERS[:3]), choices=LEARNERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=Path("agents_learning.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what is in --results, only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        for env in arguments.envs:
            for seed in arguments.seeds:
                for learner in arguments.learners:
                    found = measure(env, learner, seed)
                    print(found, flush=True)
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")
    lines = arguments.results.read_text(encoding="utf-8").splitlines()
    print(machine("torch", "pettingzoo", "mpe2", "supersuit", "stable-baselines3"))
    print(table(json.loads(line) for line in lines))


if __name__ == "__main__":
    main()
