"""The command `vecenv`: train, play and watch policies; check and compare vector envs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import io
import itertools
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from gymnasium.error import Error as GymnasiumError
from rich.console import Console

from vecenv.backends import COMPARED
from vecenv.command import progress
from vecenv.files import require_writable
from vecenv.source import GAMES, did_you_mean, read_env_kwargs, read_source

__all__ = ["main"]

_CHALLENGES = {"vecenv.cage:Cage2Env": 2, "vecenv.cage:Cage4Env": 4}  # by entry point
Rules = Literal["faithful", "debugged"]
Observation = Literal["bits", "memory"]
EnvName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]

_DESCRIPTION = """Train, play and watch policies; check and compare Gymnasium's vector envs.

`vecenv COMMAND --help` says more about a command."""

# Errors by wrong arguments, files and ids, and bugs in users' own files, whose place is printed.
# Any other error keeps its traceback, except our own errors, like those about a kernel's index.
_USER_ERRORS = (
    *(ValueError, TypeError, OSError, ImportError, RuntimeError, GymnasiumError),
    FloatingPointError,  # of a loss
)
_is_program: ContextVar[bool] = ContextVar("is_program", default=False)  # the process runs `main`
# Options of trainers that must be at least 1.
_COUNTS = "num_envs", "num_games", "num_steps", "num_epochs", "num_minibatches", "num_workers"
_COUNTS += "batch_size", "hidden", "hold", "torch_threads", "eval_episodes"


def demo(
    *,
    total_steps: int = 3_000_000,
    num_envs: int = 64,
    seed: int = 1,
    episodes: int = 1000,
    save: Path = Path("runs/cage2"),
) -> int:
    """Train a defender for CAGE 2 for a minute, compare it with simple ones, film it.

    It learns as `vecenv train Cage2-v0` does. Ctrl-C ends the training early and keeps the policy.

    Args:
        total_steps: Env steps to train for.
        num_envs: Envs stepped side by side.
        seed: Seed of training, evaluation and the film.
        episodes: Per cell of the table; the challenge plays 1000.
        save: Folder for the policy, its learning curve and the film.
    """
    from vecenv.command.demo import run_demo

    print("loading torch ...", flush=True)
    run_demo(total_steps, num_envs, seed, episodes, save)
    return 0


@dataclass
class Train:
    """Train a policy into a run folder, by PPO, SAC or DQN as the env's spaces require.

    Options of the algorithm, such as --total-steps, --save and --resume, go here, too:
    `vecenv train ENV --help` lists them.
    """

    env: EnvName
    """Registered id, also "module:id", or "module:name" of a factory or of EnvKernels;
    "agents:NAME" is a game with several agents."""
    algo: str | None = None
    """ppo, sac, dqn, r2d2, ppo_agents, cage2_defender, cage4_defender; or a file of your own, such
    as --eject writes. By default chosen by the env's spaces."""
    config: Path | None = None
    """File of options, .toml, or .json such as options.json of a run folder; "zoo" for the
    bundled settings of this env, if it has some. Those given here go first."""
    track: Literal["tensorboard", "wandb"] | None = None
    """Where to send the scalars, too."""
    eject: Path | None = None
    """Copy an example of the trainer into this folder, to be changed, and train nothing."""


def _train(words: Sequence[str]) -> int:
    """Read the options in `Train`, then those of the trainer, and run it."""
    helps = {"-h", "--help"} & set(words)
    while len(words) > 2 and words[0] in ("--algo", "--config", "--track", "--eject"):
        words = [*words[2:], *words[:2]]  # words before ENV must not become a trainer's options
    if not words or words[0].startswith("-"):
        if words and not helps:
            raise ValueError(
                f"{words[0]} came before ENV; options of trainers come after it, as in: "
                f"vecenv train CartPole-v1 {words[0]} ..."
            )
        tyro.cli(Train, prog="vecenv train", args=words[:1] if helps else [])
    own = [word for word in words if word not in helps]
    # `--track` without a value is an option of the user's own trainer, as in CleanRL's scripts.
    flags = [k for k, word in enumerate(own) if word == "--track" and _is_flag(own[k + 1 : k + 2])]
    own, flags = [w for k, w in enumerate(own) if k not in flags], [own[k] for k in flags]
    given, rest = tyro.cli(Train, prog="vecenv train", args=own, return_unknown_args=True)
    rest = list(_in_pairs([*rest, *flags]))
    from vecenv.command import trainers

    config, values = given.config, dict[str, Any]()
    if config is not None:
        if config == Path("zoo") and not config.is_file():
            config = trainers.zoo_config(given.env)
        values = trainers.read_config(config)
    env_kwargs = _env_kwargs_in(rest) or values.get("env_kwargs", {})
    chosen = trainers.choose(given.env, given.algo or values.get("algo"), env_kwargs)
    if given.algo is None and "algo" in values:
        chosen = chosen._replace(reason=f"as --config {given.config} says")
    if given.eject is not None:
        copy = trainers.eject(chosen.algorithm, given.eject)
        print(f"{copy}\nchange it, and train with: vecenv train {given.env} --algo {copy}")
        return 0
    if not helps:
        print(f"{chosen.algorithm}: {chosen.reason} (--algo takes another)", flush=True)
    module = trainers.load(chosen.algorithm)
    if config is not None:
        rest = [*trainers.arguments_of(values, module.Options, config), *rest]
    if given.track is not None:
        trainers.require_tracker(given.track, chosen.algorithm, module.Options)
        rest.append("--tensorboard")
    options = _options_of_training(given, chosen, module, config, ["--help"] if helps else rest)
    _check_counts(options)
    with trainers.sent_to(given.track, options):
        module.main(options)
    return 0


def _is_flag(following: Sequence[str]) -> bool:
    """Whether no value follows an option."""
    return not following or following[0].startswith("-")


def _in_pairs(words: Sequence[str]) -> Iterator[str]:
    """Yield words; after `--env-kwargs` or `--vector-kwargs`, NAME=VALUE becomes two words."""
    option = ""
    for word in words:
        option = word if word.startswith("--") else option
        name, equals, value = word.partition("=")
        is_pair = option in {"--env-kwargs", "--vector-kwargs"} and equals and name.isidentifier()
        yield from (name, value) if is_pair else (word,)


def _env_kwargs_in(words: Sequence[str]) -> dict[str, Any]:
    """Return the values after --env-kwargs."""
    found = words[words.index("--env-kwargs") + 1 :] if "--env-kwargs" in words else []
    return read_env_kwargs(list(itertools.takewhile(lambda word: not word.startswith("--"), found)))


def _options_of_training(
    given: Train, chosen: Any, module: Any, config: Path | None, words: Sequence[str]
) -> Any:
    """Read options of a trainer; missing ones are its defaults, or those of the resumed run.

    Args:
        given: The options of `vecenv train`.
        chosen: The trainer's name and env.
        module: The trainer.
        config: The file of options; `words` contain them already.
        words: The command line.
    """
    from vecenv.command import trainers

    read = functools.partial(
        tyro.cli,
        module.Options,
        prog=f"vecenv train {given.env}",
        description=f"{chosen.algorithm}: {chosen.reason}. {inspect.getdoc(Train)}",
        args=words,
    )
    fields = {field.name for field in dataclasses.fields(module.Options)}
    own: dict[str, Any] = {name: chosen.env for name in ("env_id", "env") if name in fields}
    if not own and chosen.algorithm not in trainers.OF_ENVS.values():
        raise ValueError(
            f"{chosen.algorithm} trains in an env of its own: its Options have neither env_id nor "
            "env; run it by python"
        )
    folder = trainers.run_folder(given.env, chosen.algorithm)
    own_run = config.parent if config is not None and "--resume" in words else folder
    folder = own_run if (own_run / "checkpoint" / "last.pt").is_file() else folder
    defaults = own | ({"save": folder} if "save" in fields else {})
    options = read(default=dataclasses.replace(module.Options(), **defaults))
    if not getattr(options, "resume", False):
        return options
    from vecenv.learn import load_options

    if not (options.save / trainers.OPTIONS_FILE).is_file():
        if options.save == folder and (others := trainers.runs_of(given.env)):
            there = ", ".join(map(str, others))
            raise ValueError(
                f"{folder} has no run to resume, but there is {there}: give its --algo, or --save"
            )
        return options
    try:
        begun = load_options(options.save, module.Options)
    except ValueError as error:
        raise ValueError(
            f"{options.save} is not of {chosen.algorithm}: give the trainer that began the run, by "
            f"--algo, or another folder, by --save ({error.__cause__ or error!s:.99})"
        ) from None
    return read(default=dataclasses.replace(begun, save=options.save, **own))


def _check_counts(options: Any) -> None:
    """Raise for options that would end a training with an error later."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in (*_COUNTS, "total_steps"):
        given, least = getattr(options, name, None), int(name in _COUNTS)
        counts = given if isinstance(given, tuple) else (given,)
        # A default of a file of the user's own may be 0: to be computed by its `main`.
        if given != defaults.get(name) and any(x is not None and x < least for x in counts):
            raise ValueError(f"{name} is {given}, expected at least {least}")


def play(
    env: EnvName,
    /,
    *,
    policy: Path | None = None,
    episodes: int = 20,
    seed: int = 1_000_000,
    env_kwargs: tuple[str, ...] = (),
    algo: str | None = None,
    vecnormalize: Path | None = None,
    gif: Path | None = None,
    text: bool = False,
    html: Path | None = None,
    frames: int = 500,
    fps: float | None = None,
    sample: bool = False,
) -> int:
    """Play episodes with a trained policy, print the mean return, film one episode.

    Args:
        env: As for `train`.
        policy: Run folder of `train`, or a file in it; "zoo" for the bundled one of this env, if
            it has one; or a .zip that stable-baselines3 has written, which can run code when it is
            read.
        episodes: How many; for several agents, games: a return is that of all agents of a group.
        seed: Of the episodes.
        env_kwargs: For the env, such as size=5; those of the training also apply.
        algo: The trainer that made it, if it is a file of your own.
        vecnormalize: Statistics of a model of stable-baselines3 that was trained under
            VecNormalize, which can run code, too; by default vecnormalize.pkl beside it.
        gif: File to write an animation of one more episode to.
        text: Show one more episode in the terminal.
        html: File to write a page to, with one more episode to scrub through in a browser.
        frames: Number of frames of that episode, at most.
        fps: Pictures per second; by default those of the env, 2 of CAGE's networks, on a page at
            most 10.
        sample: Draw actions from the policy, as in the training, instead of the likeliest ones. By
            default, both returns are printed.
    """
    from vecenv.command.trainers import runs_of

    if policy is None:
        there = f" ({', '.join(map(str, runs_of(env)))})" if runs_of(env) else ""
        raise ValueError(f"policy is missing: give --policy FOLDER, a run of vecenv train{there}")
    from vecenv.command.playing import Trained, play, show_run
    from vecenv.command.watching import Shown

    _check_shown(gif, html, fps)
    trained = Trained(env, policy, read_env_kwargs(env_kwargs), algo, vecnormalize, sample)
    _tell_statistics(policy, vecnormalize)
    modes = ["ansi"] * text + ["rgb_array"] * (gif is not None or html is not None)
    results, name = play(trained, episodes, seed, modes)
    for group, (result, drawn) in results.items():
        told = f"{result} (drawn as in the training: {drawn})" if drawn else f"{result}"
        print(f"{env}, {name} of {policy}{group and f', {group}'}: {told}")
    if text:
        show_run(trained, Shown(str(policy), frames, fps=fps), seed)
    if gif is not None or html is not None:
        show_run(trained, Shown(f"{name} of {policy}", frames, gif, html, fps), seed)
    return 0


def _tell_statistics(policy: str | Path | None, given: Path | None = None) -> None:
    """Say which statistics normalise observations for a model of stable-baselines3, if any."""
    from vecenv.cage.saved import WITHOUT_STATISTICS, find_vecnormalize, is_sb3_file

    if policy is None or not is_sb3_file(policy) or (given is not None and not given.is_file()):
        return  # reading says that there is no such file
    found = given or find_vecnormalize(policy)
    told = f"observations go through the VecNormalize of {found}"
    print(told if found else WITHOUT_STATISTICS % policy, flush=True)


def envs(words: tyro.conf.Positional[tuple[str, ...]] = (), /, *, all: bool = False) -> int:
    """List envs: their spaces, and whether they are compiled.

    Args:
        words: Only envs with one of these words in the name.
        all: Also envs of Gymnasium and other packages.
    """
    if "numba" not in sys.modules:  # spaces can be seen without compiling the envs
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    from vecenv.command.listing import list_envs

    Console().print(list_envs(words, has_all=all))
    return 0


def bench() -> int:
    """Measure this machine for a minute: which backend suits which env, and why."""
    from vecenv.command.bench import run_bench

    with progress("starting", 1.0) as update:
        found = run_bench(lambda what, done: update(description=what, completed=done))
    Console().print(found)
    return 0


def evaluate(
    *,
    policy: str | None = None,
    paired: tuple[str, str] | None = None,
    env: str | None = None,
    env_kwargs: tuple[str, ...] = (),
    challenge: Literal[2, 4] = 2,
    episodes: int = 1000,
    seed: int = 0,
    rules: Rules = "faithful",
    scenario: str | None = None,
    red_agents: tuple[str, ...] | None = None,
    observation: Observation | None = None,
    green: bool = False,
    json: Path | None = None,
) -> int:
    """Let a policy play CAGE Challenge 2 or 4 by the challenge's protocol; print its scores.

    With --paired, two policies play the same episodes, of any env, and the first minus the second
    is printed.
    (`vecenv play` scores one policy in any other env.)

    Args:
        paired: Two policies to compare, instead of one.
        env: With --paired, an env of `vecenv play`; policies of other envs than CAGE's are run
            folders or files of stable-baselines3. The default is Cage2-v0 or Cage4-v0, by
            --challenge.
        env_kwargs: For that env, such as red_agent=meander.
        policy: sleep, random, defender (the bundled trained one); for Challenge 2 react-remove,
            react-restore, obs-remove, obs-restore; for Challenge 4 react-restore, react-remove,
            decoy-restore, rules; a file with a policy that PPO, the trainers of CAGE defenders or
            stable-baselines3 have saved; module:object, a policy of your own; or a run folder of
            these.
        challenge: Which.
        episodes: How many; for Challenge 2 per cell.
        seed: Seed of the episodes.
        rules: For Challenge 2. Scores under different rules are not comparable.
        scenario: A network of your own for Challenge 2, which has its own rules: "module:id" of a
            registered one, or "module:name" of a Scenario.
        red_agents: For Challenge 2, rows of the table: b_line, meander, sleep, mixed, or
            module:function, a red agent of your own. For Challenge 4 one of fsm, discovery, sleep,
            module:function.
        observation: For Challenge 2, what the policy sees; by default as in its training.
        green: For Challenge 2, with the green agent, which the challenge does not have.
        json: File to write the numbers to.
    """
    from vecenv.command.playing import compare_policies

    if json is not None:
        require_writable(json)
    if policy is not None and env in ("Cage2-v0", "Cage4-v0"):
        challenge, env = (2 if env == "Cage2-v0" else 4), None
    if (paired is None) == (policy is None):
        raise ValueError("expected either --policy with one policy, or --paired with two")
    _tell_statistics(policy)
    options: dict[str, Any] = {"seed": seed, "env_kwargs": read_env_kwargs(env_kwargs)}
    if paired is not None:
        if (rules, scenario, red_agents, observation, green) != ("faithful", *[None] * 3, False):
            raise ValueError(
                "rules, scenario, red_agents, observation and green are of --policy; with --paired "
                "write them for the env, such as --env-kwargs rules=debugged red_agent=meander"
            )
        options["env"] = env or f"Cage{challenge}-v0"
        result: Any = compare_policies(paired, episodes, **options)
    elif env is not None or env_kwargs:
        raise ValueError(
            "env and env_kwargs are of --paired; `vecenv play ENV --policy RUN` scores one policy"
        )
    else:
        options = {"rules": rules, "observation": observation, "green": green, "scenario": scenario}
        result = _evaluate_cage(str(policy), challenge, episodes, seed, red_agents, options)
    Console().print(result.table())
    if json is not None:
        result.to_json(json)
        print(f"numbers: {json}")
    return 0


def _evaluate_cage(
    policy: str, challenge: int, episodes: int, seed: int,
    red_agents: tuple[str, ...] | None, options: dict[str, Any],
) -> Any:  # fmt: skip
    """Play by the protocol of a challenge; `options` are those of Challenge 2."""
    first = f"{policy} (the first time ever the simulator is compiled, 15 to 30 s)"
    with progress(first) as update, _warnings_in_one_line():
        given: dict[str, Any] = {"episodes": episodes, "seed": seed}
        if challenge == 4:
            from vecenv.cage import evaluate_cage4

            defaults = {"rules": "faithful", "observation": None, "green": False, "scenario": None}
            if options != defaults:
                told = "rules, scenario, observation and green are of Challenge 2; leave them out"
                raise ValueError(told)
            red = red_agents or ("fsm",)
            if len(red) != 1:
                raise ValueError(f"red_agents has {len(red)} names, expected one in Challenge 4")
            update(total=499 * episodes)
            given["on_step"] = lambda count: update(advance=count, description=policy)
            return evaluate_cage4(policy, red=red[0], **given)
        from vecenv.cage.challenge2 import playing

        agents = red_agents or ("b_line", "meander", "sleep")
        if options["scenario"] is None:
            del options["scenario"]
        else:
            options["scenario"] = _find_scenario(options["scenario"])
            options["rules"] = None if options["rules"] == "faithful" else options["rules"]
        update(total=len(playing.EPISODE_LENGTHS) * len(agents))
        given["on_cell"] = lambda cell: update(advance=1, description=policy)
        return playing.evaluate(policy, red_agents=agents, **given, **options)


def _find_scenario(name: str) -> Any:
    """Return the scenario that "module:name" or a registered id names."""
    from vecenv.cage import Scenario
    from vecenv.core.arguments import import_module

    module, _, attribute = name.rpartition(":")
    found = getattr(import_module(module), attribute, None) if module else None
    if not isinstance(found, Scenario):
        found = read_source(name).kwargs.get("scenario")
    if not isinstance(found, Scenario):
        told = "expected 'module:name' of a Scenario, or 'module:id' of an id registered with one"
        raise ValueError(f"scenario is {name!r}, which has none; {told}")
    return found


def watch(
    env: tyro.conf.Positional[str] = "vecenv:Cage2-v0",
    /,
    *,
    policy: str | None = None,
    env_kwargs: tuple[str, ...] = (),
    red_agent: str | None = None,
    steps: int = 50,
    seed: int = 0,
    rules: Rules = "faithful",
    scenario: str | None = None,
    gif: Path | None = None,
    html: Path | None = None,
    fps: float | None = None,
) -> int:
    """Show an env, CAGE 2, CAGE 4 or another, in the terminal, as an animation or as a page.

    Args:
        env: Registered id, also "module:id", or "module:name" of a factory or of EnvKernels.
        policy: For CAGE 2 and 4, and ids registered with a network of your own, as for `evaluate`;
            for other envs "random" (the default) or "module:function", a function from observations
            (1, ...) to actions (1, ...).
        env_kwargs: For the env, such as size=5.
        red_agent: The attacker in CAGE 2: b_line (the default), meander, sleep, mixed, or
            module:function.
        steps: Number of steps, or the length of the episode in CAGE 2; in CAGE 4 at most 499.
        seed: Seed of the episode.
        rules: For CAGE 2, as for `evaluate`.
        scenario: A network of your own for CAGE 2, as for `evaluate`.
        gif: File to write an animation to, instead of showing the episode here.
        html: File to write a page to, with the episode to scrub through in a browser.
        fps: Steps per second; by default the env's own, 2 for CAGE's networks, at most 10 on a
            page.
    """
    _check_shown(gif, html, fps)
    from vecenv.command import watching

    shown = watching.Shown(policy or "random", steps, gif, html, fps)
    source = read_source("Cage2-v0" if env == "Cage2" else env, read_env_kwargs(env_kwargs))
    challenge = _CHALLENGES.get(str(getattr(source.spec, "entry_point", "")))
    if challenge is None:
        watching.watch(source, shown, seed)
        return 0
    options = dict(source.kwargs)
    if scenario is not None:
        options["scenario"] = _find_scenario(scenario)
    if policy is None and "scenario" not in options:
        raise ValueError("policy is missing, such as --policy defender; see vecenv evaluate --help")
    _tell_statistics(shown.policy)
    if challenge == 2:
        options |= {"red_agent": red_agent} if red_agent else {}
        options |= {"rules": rules} if rules != "faithful" else {}
        if "scenario" not in source.kwargs:
            options.setdefault("episode_length", steps)
    with _warnings_in_one_line():
        watching.watch_cage(challenge, source.name, options, shown, seed)
    return 0


def _check_shown(gif: Path | None, html: Path | None, fps: float | None) -> None:
    """Raise for files that can't be written, or a wrong speed, before anything is played."""
    if fps is not None and not 0 < fps < float("inf"):
        raise ValueError(f"fps is {fps!r}, expected a positive number")
    if html is not None:
        if html.suffix.lower() not in (".html", ".htm"):
            told = f"the page's file is {str(html)!r}, expected a name that ends in .html"
            raise ValueError(told)
        require_writable(html)
    if gif is not None:
        from vecenv.cage.canvas import require_gif

        require_gif(gif)


def replay(
    files: tyro.conf.Positional[tuple[Path, ...]],
    /,
    *,
    max_differences: int = 20,
) -> int:
    """Play recorded episodes of CAGE Challenge 4; print every field that differs.

    The exit status is 1 if any field differs, 2 if a file is damaged.

    Args:
        files: Traces of the documented format, .npz.
        max_differences: Leave an episode after this many differences.
    """
    from vecenv.cage import replay_traces

    if not files:
        raise ValueError("files is empty, expected at least one trace")
    result = replay_traces(files, max_differences=max_differences)
    for difference in result.differences:
        print(difference)
    print(
        f"{result.num_episodes} episodes, {result.num_steps} steps, {result.num_compared} fields "
        f"compared, {len(result.differences)} differ"
    )
    return 1 if result.differences else 0


def check(
    env: EnvName,
    /,
    *,
    num_envs: int = 3,
    num_steps: int = 200,
    seed: int = 0,
    full: bool = False,
) -> int:
    """Check that a vector env keeps the rules of Gymnasium's interface.

    Args:
        env: Registered id, also "module:id", or "module:factory"; or "agents:NAME", a game with
            several agents.
        num_envs: How many envs, or games, the vector env has.
        num_steps: Length of a run.
        seed: Of the resets and the actions.
        full: Name the rules that passed, too.
    """
    from vecenv.check import VectorEnvCheckError, check_vector_env

    if env.startswith(GAMES):
        from vecenv.agents import make_vec_agents

        envs: Any = make_vec_agents(env.removeprefix(GAMES), num_envs)
    else:
        envs = read_source(env).make(num_envs)
    try:
        report = check_vector_env(envs, num_steps=num_steps, seed=seed)
    except VectorEnvCheckError as error:
        print(f"{error}\n\n{error.report.full()}" if full else error)
        return 1
    print(report.full() if full else f"{report}\n(--full names the rules)")
    return 0


def compare(
    env: EnvName,
    /,
    *,
    num_envs: str = "1,8,64",
    backends: str = ",".join(COMPARED),
    num_workers: int | None = None,
    env_kwargs: tuple[str, ...] = (),
    seed: int = 0,
    rounds: int = 5,
    round_s: float = 0.15,
    timeout: float = 60.0,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Run backends in turn on one env; print speed, where the time goes, memory.

    Args:
        env: Registered id, also "module:id", or "module:factory". Synthetic-v0 has the proportions
            that its arguments set. "agents:NAME" is a game with several agents, NAME a module with
            parallel_env or an id of PettingZoo's.
        num_envs: Numbers of envs.
        backends: Which.
        num_workers: For the async backends; by default one per core, or one per env that waits.
        env_kwargs: For the env, such as cpu_ms=0.2 obs_shape=(84,84,4).
        seed: Seed of envs and actions.
        rounds: How often each backend runs.
        round_s: Seconds per backend and round.
        timeout: Longest wait for a backend, in seconds.
        json: File to write the numbers to.
        plot: File to draw a picture into.
    """
    from vecenv.compare import Options, run_comparison
    from vecenv.compare.result import check_picture

    try:
        counts = [int(part) for part in num_envs.split(",") if part.strip()]
    except ValueError as error:
        told = f"num_envs is {num_envs!r}, expected integers such as 1,8,64"
        raise ValueError(told) from error
    options = Options(
        env,
        env_kwargs=read_env_kwargs(env_kwargs),
        num_envs=counts,
        backends=[part.strip() for part in backends.split(",") if part.strip()],
        seed=seed,
        rounds=rounds,
        round_s=round_s,
        timeout=timeout,
        num_workers=num_workers,
    )
    for path in filter(None, (json, plot)):
        require_writable(path)
    if plot is not None:
        check_picture(plot)
    with progress("starting", 1.0) as update:
        result = run_comparison(
            options, on_progress=lambda what, done: update(description=what, completed=done)
        )
    Console().print(result)
    if json is not None:
        result.to_json(json)
    if plot is not None and result.measured:
        result.plot(plot)
    if not result.measured:
        raise RuntimeError(result.verdict)
    return 0


def port(
    env: EnvName,
    kernels: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="KERNELS")] = "",
    /,
    *,
    new: bool = False,
    folder: Path = Path(),
    minutes: float = 2.0,
    fields: str | None = None,
    policy: tuple[str, ...] = (),
    env_kwargs: tuple[str, ...] = (),
    tolerance: float = 1e-6,
    margin: float = 0.2,
    max_episode_steps: int | None = None,
    seed: int = 0,
    debug: bool = False,
    timeout: float = 30.0,
    json: Path | None = None,
) -> int:
    """Prove that kernels do what a Python env does, draw by draw, or show the first difference.

    Args:
        env: The Python env: registered id, also "module:id", or "module:factory".
        kernels: "module:name" of EnvKernels, or the id of compiled envs.
        new: Write a skeleton of kernels for ENV, and a test, instead.
        folder: Where --new writes.
        minutes: Time to look for differences.
        fields: "module:name" of a dict from fields of the state to paths in the Python env; by
            default FIELDS beside the kernels.
        policy: Also played: "module:function" from an observation to an action, or a run folder of
            `vecenv train`.
        env_kwargs: For the Python env, such as is_slippery=True.
        tolerance: Allowed distance of floats, relative to the larger of 1 and their size.
        margin: Allowed distance between mean returns of free runs, in standard deviations.
        max_episode_steps: Limit of the kernels' episodes; by default that of ENV's registration.
        seed: Seed of runs and actions.
        debug: Run the kernels as plain Python: nothing is compiled.
        timeout: Seconds for one reset or step; one that does not return is a difference.
        json: File to write the report to.
    """
    kwargs = read_env_kwargs(env_kwargs)
    if new:
        from vecenv.port.skeleton import write_skeleton

        written, test = write_skeleton(read_source(env, kwargs).env_fn(), env, folder)
        told = f"fill the kernels in, and run: vecenv port {env} {written.stem}:KERNELS"
        print(written, test, told, sep="\n")
        return 0
    if not kernels:
        raise ValueError("KERNELS is missing: give module:name, or --new to write a skeleton")
    for name, value in {"minutes": minutes, "timeout": timeout}.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}, expected a number above 0")
    if json is not None:
        require_writable(json)
    from vecenv.command.porting import run_port

    return run_port(
        env,
        kernels,
        fields=fields,
        policies=policy,
        env_kwargs=kwargs,
        report=json,
        is_guarded=_is_program.get(),
        say=functools.partial(print, flush=True),
        minutes=minutes,
        tolerance=tolerance,
        margin=margin,
        max_episode_steps=max_episode_steps,
        seed=seed,
        debug=debug,
        timeout=timeout,
    )


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print warnings like errors, without the line of code that caused them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"vecenv: {message}", file=sys.stderr)
        yield


def _words_of_process() -> list[str]:
    """Return the command line; from now on, print "?" for letters that the terminal lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it is None if the stream is closed
            stream.reconfigure(errors="replace")
    return sys.argv[1:]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    It is 1 if a check failed, 2 for wrong arguments, 130 after Ctrl-C, 141 if nobody reads on.

    Args:
        args: Arguments; None for those of the process.
    """
    functions = play, envs, bench, evaluate, watch, replay, check, compare, port
    commands: dict[str, Any] = {"demo": demo, "train": Train}
    commands |= {function.__name__: function for function in functions}
    words = _words_of_process() if args is None else list(args)
    _is_program.set(args is None)
    _tell_sdl_of_no_display()
    if words == ["--version"]:
        print(f"vecenv {importlib.metadata.version('vecenv')}")
        return 0

    try:
        if words and not words[0].startswith("-") and words[0] not in commands:
            told = did_you_mean(words[0], commands)
            told = told or f"expected one of {', '.join(commands)}"
            raise ValueError(f"there is no command {words[0]!r}; {told} (--help describes them)")
        if words[:1] == ["train"]:  # it takes the options of a trainer, too
            return _train(words[1:])
        return tyro.extras.subcommand_cli_from_dict(
            commands, prog="vecenv", description=_DESCRIPTION, args=words or ["--help"]
        )
    except SystemExit as error:
        if not words:
            return 2
        if not isinstance(error.code, str):
            raise
        print(f"vecenv: {error.code}", file=sys.stderr)  # raised by an example
        return 2
    except KeyboardInterrupt:
        print("vecenv: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on, as in `vecenv --help | head`: drop the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        return _tell(error)


def _tell(error: Exception) -> int:
    """Print the current error if a user can mend it; otherwise raise it again."""
    if not isinstance(error, _USER_ERRORS) and not type(error).__module__.startswith("vecenv."):
        raise error
    message, place = str(error) or type(error).__name__, _place_of(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}; give another file or folder"
    if place is not None:  # possibly a bug of the user's
        message = f"{type(error).__name__}: {error}\n  {place}"
    print(f"vecenv: {message}", file=sys.stderr)
    return 2


def _tell_sdl_of_no_display() -> None:
    """Keep pygame from looking for a display where none exists: it would print an error.

    Two names, because envs that find "dummy" alone (highway-env) draw black pictures.
    """
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy,offscreen")


def _place_of(error: BaseException) -> str | None:
    """Return the innermost line of a user's own files that an error passed; None if none did.

    A wrong argument needs no place, but a bug does.
    """
    package = Path(__file__).parents[1]
    ours = [package, package.parent / "buffers", package.parent / "examples"]
    ours += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)  # some are not files, "<string>" for example
        is_installed = {"site-packages", "dist-packages"} & set(path.parts) or not path.is_file()
        if not is_installed and not any(path.resolve().is_relative_to(p.resolve()) for p in ours):
            return f'File "{path}", line {frame.lineno}, in {frame.name}'
    return None


if __name__ == "__main__":
    sys.exit(main())
