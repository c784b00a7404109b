"""Options of trainers: what `--help` says of each is whole."""

import itertools
import re
from pathlib import Path

import vecenv.train

FILES = sorted(Path(vecenv.train.__file__).parent.glob("*.py"))


def test_comments_of_options_are_one_line_as_help_shows_only_that():
    cut = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, after in itertools.pairwise(lines):
            if re.match(r"    \w+: .* = .*  # ", line) and after.startswith("    # "):
                cut.append(f"{path.name}: {line.strip()}")
    assert cut == []
