"""Random cases that nothing may fail on, for a bounded time: what `make fuzz` runs.

    make fuzz                                                # a minute of each fuzzer
    make fuzz FUZZ_ARGS="envs files --seconds 600"           # ten minutes of two of them
    make fuzz FUZZ_ARGS="envs --case 123456"                 # a case that was found, again

Each fuzzer is a module here with `run_case(number)`, which draws everything from that number and
raises on what must not be; it returns how much it tried, counted in `UNIT`, and may
count it by kind in `BY_KIND`. What a fuzzer finds becomes a test beside the code that was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

import numpy as np

FUZZERS = ("envs", "files", "replays", "interrupts", "cage4")


def run_for(name, seconds, seed):
    """Run cases of one fuzzer until the time is up; return how much was tried."""
    fuzzer = importlib.import_module(f"fuzz.{name}")
    end, total, count = time.monotonic() + seconds, 0, 0
    numbers = np.random.default_rng(seed)
    while time.monotonic() < end:
        number = int(numbers.integers(1 << 40))
        try:
            total += fuzzer.run_case(number)
        except BaseException:
            say(f'case {number} of {name} fails: make fuzz FUZZ_ARGS="{name} --case {number}"')
            raise
        count += 1
    say(f"{name}: {total} {fuzzer.UNIT} in {count} cases, nothing found (seed {seed})")
    for kind, number in sorted(getattr(fuzzer, "BY_KIND", {}).items()):
        say(f"  {kind}: {number}")
    return total


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.splitlines()[0])
    fresh = int(np.random.SeedSequence().generate_state(1)[0])
    parser.add_argument("fuzzers", nargs="*", metavar="FUZZER", help=f"of {', '.join(FUZZERS)}")
    parser.add_argument("--seed", type=int, default=fresh)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each")
    parser.add_argument("--case", type=int, help="run only this one")
    args = parser.parse_args()
    names = args.fuzzers or list(FUZZERS)
    for name in names:
        if name not in FUZZERS:
            parser.error(f"there is no fuzzer {name!r}, only {', '.join(FUZZERS)}")
    for name in names:
        if args.case is None:
            run_for(name, args.seconds, args.seed)
        else:
            fuzzer = importlib.import_module(f"fuzz.{name}")
            say(f"{name}: {fuzzer.run_case(args.case)} {fuzzer.UNIT}, nothing found")


if __name__ == "__main__":
    main()
