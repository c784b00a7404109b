"""Cases of a fuzzer in processes of their own, whose end is looked at.

A case that dies by a signal or hangs is told from one that passes, with what it said last. `warm`
ones find compiled code, as `module.warm_up()` has been called before the fork; in the others every
case makes the first calls of its process.
"""

import json
import signal
import subprocess

import programs

LIMIT_S = 40.0  # of a case; they take about a second
_CASE = """
import json, os, sys, {module}
value = {module}.run_here(*json.loads(sys.argv[1]))
print(json.dumps(value), flush=True)
os._exit(0)  # at once: it may have left threads
"""


def run_apart(module, number, *arguments, warm=True, limit_s=LIMIT_S):
    """Return what `module.run_here(number, *arguments)` returns in a process of its own.

    Raises:
        AssertionError: It raised, died by a signal, or did not end in time.
    """
    kind = f"{module}, {'warm' if warm else 'cold'}"
    warm_up = f"; {module}.warm_up()" if warm else ""
    programs.KINDS.setdefault(kind, (f"import {module}{warm_up}", {}))
    case = f"case {number} {arguments}"
    given = json.dumps([number, *arguments])
    try:
        done = programs.run(_CASE.format(module=module), given, kind=kind, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{case} hangs\n{error.__notes__[0][-14000:]}") from None
    ended = "fails"
    if done.returncode < 0:
        ended = f"died by {signal.Signals(-done.returncode).name}"
    assert done.returncode == 0, f"{case} {ended}\n{done.stderr[-14000:]}"
    return json.loads(done.stdout.splitlines()[-1])
