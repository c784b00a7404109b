"""Options of trainers: what `--help` says of each is whole, and each survives its file."""

import dataclasses
import importlib
import itertools
import re
import typing
from pathlib import Path

import pytest
import tyro

import vecenv.train
from vecenv.command.trainers import ALGORITHMS
from vecenv.learn import Run, load_options

FILES = sorted(Path(vecenv.train.__file__).parent.glob("*.py"))


def test_comments_of_options_are_one_line_as_help_shows_only_that():
    cut = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, after in itertools.pairwise(lines):
            if re.match(r"    \w+: .* = .*  # ", line) and after.startswith("    # "):
                cut.append(f"{path.name}: {line.strip()}")
    assert cut == []


def other_words(hint):
    """Words of the command line for an option of this type: none is a default."""
    if typing.get_origin(hint) is typing.Literal:
        return [str(typing.get_args(hint)[-1])]
    if typing.get_origin(hint) is dict:
        return ["speed", "3"]
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        return [word for kind in kinds if kind is not ... for word in other_words(kind)]
    if args := typing.get_args(hint):  # or None
        return other_words(args[0])
    return {int: ["7"], float: ["0.375"], str: ["word"], Path: ["a/b"]}[hint]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_has_every_option_as_it_was_given_on_the_command_line(algorithm, tmp_path):
    kind = importlib.import_module(f"vecenv.train.{algorithm}").Options
    words = []
    for name, hint in typing.get_type_hints(kind).items():
        flag = name.replace("_", "-")
        if hint is bool:
            words.append(f"--no-{flag}" if getattr(kind(), name) else f"--{flag}")
        else:
            words += [f"--{flag}", *other_words(hint)]
    given = tyro.cli(kind, args=words)
    defaults = kind()
    same = [
        f.name for f in dataclasses.fields(kind) if vars(given)[f.name] == vars(defaults)[f.name]
    ]
    assert same == []
    Run(tmp_path, given).close()
    begun = dataclasses.replace(load_options(tmp_path, kind), resume=True)
    assert begun == given
    resumed = tyro.cli(kind, args=["--resume"], default=dataclasses.replace(begun, resume=False))
    assert resumed == given
