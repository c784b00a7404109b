"""Change the ported kernels of tests/port/ports, and see whether `vecenv.port` finds each change.

    python benchmarks/port_mutants.py --output results.json

*Mutants* have one other operator, comparison or constant in a kernel (`benchmarks/mutants.py` makes
them); each is compared with its Python env until a difference is found, for two minutes at most.
Those that are not found have no effect, or are listed as missed: which of the two, a reader must
say. *Variants* are correct: the same kernels with names, forms and orders of statements changed
(`VARIANTS`, and pairs of these); none may be found different. Kernels run as plain Python for
`FIRST_S` seconds, and are compiled for the rest. Seconds of comparing are those of one processor,
so other programs do not matter. A mutant that does not return is found after `STUCK_S` seconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import multiprocessing
import random
import sys
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import mutants as changes  # noqa: E402  # from this folder

from vecenv.port import lockstep, prove  # noqa: E402

STUCK_S, FIRST_S = 20.0, 8.0
lockstep.time = types.SimpleNamespace(perf_counter=time.process_time)  # of this process alone

PORTS = ("taxi", "pendulum", "breakout", "lava_gap", "foraging")
# What does the same in another form, by port: text and its replacement.
VARIANTS = {
    "taxi": [
        ("luck >= 0.8 + 0.1", "luck >= 1.0 - 0.1"),
        ("(row * 5 + col) * 5 + passenger", "row * 25 + col * 5 + passenger"),
        ("integers(rng, 3)", "int(uniform(rng) * 3)"),
        ("target = other + (other >= target)", "target = other if other < target else other + 1"),
        ("s % 4, s // 4 % 5, s // 20 % 5, s // 100", "s & 3, (s >> 2) % 5, s // 20 % 5, s // 100"),
        ("return row < 4", "return row != 4"),
        ("reward, is_over = -1.0, False", "is_over, reward = False, -1.0"),
        ("row != was_row or col != was_col", "abs(row - was_row) + abs(col - was_col) > 0"),
    ],
    "pendulum": [
        ("min(max(speed, -8.0), 8.0)", "max(min(speed, 8.0), -8.0)"),
        ("wrapped**2", "wrapped * wrapped"),
        ("-1.0 + 2.0 * uniform(rng)", "2.0 * uniform(rng) - 1.0"),
        ("15.0 * math.sin", "3 * 10.0 / 2.0 * math.sin"),
        ("state.speed * 0.05", "0.05 * state.speed"),
        ("return -cost, False, False", "return 0.0 - cost, False, False"),
        ("math.cos(state.angle)", "math.sin(state.angle + math.pi / 2)"),
    ],
    "breakout": [
        ("9 * side, 2 + side", "9 if side else 0, 3 if side else 2"),
        ("1 <= row < 4", "row in (1, 2, 3)"),
        ("max(0, state.pos - 1)", "state.pos - (state.pos > 0)"),
        ("min(9, state.pos + 1)", "state.pos + (state.pos < 9)"),
        ("if x < 0 or x > 9", "if not 0 <= x <= 9"),
        ("row == 9 and column == state.pos", "10 * row + column == 90 + state.pos"),
        ("num_bricks == 0", "num_bricks < 1"),
        ("key = KEYS[action]", "key = action + (action == 2)"),
    ],
    "lava_gap": [
        ("(state.direction + 3) % 4", "(state.direction - 1) % 4"),
        ("(state.direction + 1) % 4", "(state.direction + 1) & 3"),
        ("state.gap_x = 2 + integers(rng, SIZE - 4)", "state.gap_x = SIZE - 5 + integers(rng, 3)"),
        ("1 - 0.9 * (state.steps / LIMIT)", "1.0 - (state.steps / LIMIT) * 0.9"),
        ("x <= 0 or y <= 0 or", "min(x, y) <= 0 or"),
        ("kind == GOAL else 0", "kind == 8 else 0"),
        ("ahead == 0 and right == 0", "ahead == right == 0"),
    ],
    "foraging": [
        ("1 + integers(rng, 2)", "integers(rng, 2) + 1"),
        ("row * SIZE + col - 1", "row * SIZE + (col - 1)"),
        ("is_alone &= other == k or", "is_alone = is_alone and other == k or is_alone and"),
        ("left == 0 or state.steps >= LIMIT", "state.steps >= LIMIT or left < 1"),
        ("abs(y - row) <= 1 and abs(x - col) <= 1", "max(abs(y - row), abs(x - col)) < 2"),
        ("-1, -1, 0\n    at", "-1, -1, -0\n    at"),
        ("for place in range(PLAYERS):\n", "for place in range(0, PLAYERS, 1):\n"),
    ],
}


def load(name: str, source: str) -> types.ModuleType:
    """Return a module of changed source, whose lines can be shown."""
    import linecache

    module = types.ModuleType(f"port.ports.{name}")
    module.__file__ = str(ROOT / f"tests/port/ports/{name}.py")
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


def try_one(name: str, source: str, seconds: float, has_policies: bool, answer: Connection):
    """Compare changed kernels with the env; send what was found, "" for nothing."""
    begin = time.process_time()
    try:
        module = load(name, source)
        for debug, share in ((True, FIRST_S), (False, seconds - FIRST_S)):
            proof = prove(
                module.make,
                module.KERNELS,
                fields=module.FIELDS,
                policies=getattr(module, "POLICIES", ()) if has_policies else (),
                minutes=share / 60.0,
                debug=debug,
                timeout=STUCK_S,
                has_free_runs=False,
            )
            if proof.difference is not None or seconds <= FIRST_S:
                break
        found = "" if proof.difference is None else proof.difference.what
        lines = "" if proof.difference is None else proof.difference.kernel_line
    except Exception as error:  # refused when they are made, by the kit's dry run for one
        found, lines = f"{type(error).__name__}", ""
    answer.send((found, lines, time.process_time() - begin))


def run(name: str, source: str, options: argparse.Namespace) -> tuple[str, str, float]:
    """Try changed kernels in a process of their own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=try_one, args=(name, source, options.seconds, options.policies, sender)
    )
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def is_in_kernel(source: str, line: int) -> bool:
    """Whether a line is in a function of the kernels, not in `make` or in a table."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name not in ("make", "follow")  # a policy
        and node.lineno < line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
    )


def try_mutants(options: argparse.Namespace, rng: random.Random) -> list[dict]:
    """Try a sample of the mutants of each port; return what was found."""
    results, chosen = [], []
    for name in PORTS:
        file = f"tests/port/ports/{name}.py"
        source = (ROOT / file).read_text()
        possible = [x for x in changes.find_mutants(file) if is_in_kernel(source, x.line)]
        some = rng.sample(possible, min(len(possible), options.count // len(PORTS)))
        chosen += [(name, source, x) for x in some][options.skip :]
    for name, source, mutant in chosen:
        if name not in options.ports or (options.lines and mutant.line not in options.lines):
            continue
        importlib.import_module(f"port.ports.{name}").make().close()  # so that children have it
        found, line, took = run(name, changes.apply(source, mutant), options)
        told = {"port": name, "change": mutant.key, "line": mutant.line, "found": found}
        results.append(told | {"at": line, "seconds": took})
        mark = "found" if found else "NOT FOUND"
        print(f"{mark} {took:5.1f} s {mutant.line} {mutant.key} | {found} | {line}", flush=True)
    return results


def try_variants(options: argparse.Namespace, rng: random.Random) -> list[dict]:
    """Try correct variants of each port, in turn; return what was found."""
    rows, results = [], []
    for name in options.ports:
        pairs = list(itertools.combinations(VARIANTS[name], 2))
        rows.append([(name, [one]) for one in VARIANTS[name]])
        rows[-1] += [(name, pair) for pair in rng.sample(pairs, min(len(pairs), 6))]
    in_turn = filter(None, itertools.chain(*itertools.zip_longest(*rows)))
    for name, some in itertools.islice(in_turn, options.variants):
        source = (ROOT / f"tests/port/ports/{name}.py").read_text()
        for before, after in some:
            assert before in source, (name, before)
            source = source.replace(before, after)
        found, line, took = run(name, source, options)
        results.append({"port": name, "variant": some, "found": found, "seconds": took})
        mark = "FALSE ALARM" if found else "equal"
        print(f"variant {mark} {took:5.1f} s {name} {some} {found} {line}", flush=True)
    return results


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="mutants of all ports (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=110.0, help="of comparing (110)")
    parser.add_argument("--policies", action="store_true", help="play POLICIES of the ports, too")
    parser.add_argument("--variants", type=int, default=50, help="correct ones (50)")
    parser.add_argument("--skip", type=int, default=0, help="mutants of each port to leave out")
    parser.add_argument("--lines", nargs="*", type=int, help="only mutants of these lines")
    parser.add_argument("--ports", nargs="*", default=PORTS)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    mutants, variants = try_mutants(options, rng), try_variants(options, rng)
    for name in options.ports:
        own = [one for one in mutants if one["port"] == name]
        times = sorted(one["seconds"] for one in own if one["found"]) or [0.0]
        print(f"{name}: {len(times)} of {len(own)} found, median {times[len(times) // 2]:.1f} s, "
              f"longest {times[-1]:.1f} s")  # fmt: skip
    alarms = sum(bool(one["found"]) for one in variants)
    print(f"{alarms} false alarms in {len(variants)} variants")
    if options.output:
        options.output.write_text(json.dumps(mutants + variants, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
