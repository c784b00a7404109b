"""What processes load that are not forked from the tests': it imports little."""

import itertools
import os
import subprocess
import sys
import time
import warnings

from workers.faulty_envs import FaultyEnv, NapEnv


class Spy(FaultyEnv):
    """Tells of its process."""

    def tell(self):
        return {
            "is_fresh": sys.flags.safe_path,
            "folder": os.getcwd(),
            "path": sys.path[0],
            "variable": os.environ.get("VECENV_TEST"),
            "cores": os.sched_getaffinity(0),
            "filters": list(warnings.filters),
        }


VARIABLE = os.environ.get("VECENV_TEST")  # when this was imported
_numbers = itertools.count()  # of the envs of a process


class Task(FaultyEnv):
    """Takes some time to load, and tells how it was made."""

    imported_with = VARIABLE

    def __init__(self, name, length=1000, load_s=0.0, assets=None, only_one=None, **spaces):
        super().__init__(name, length)
        time.sleep(load_s)
        self.number = os.getpid(), next(_numbers)
        self.only_one = only_one
        if assets is not None and not assets.exists():
            raise FileNotFoundError(f"no assets at {assets}")
        if only_one is not None:
            only_one.touch(exist_ok=False)
        for key, space in spaces.items():
            setattr(self, key, space)

    def variable(self, key):
        return os.environ.get(key)

    def close(self):
        if self.only_one is not None:
            self.only_one.unlink()
            self.only_one = None


class Loading(FaultyEnv):
    """Is made for as long as fewer than `most` have begun, and a moment; sees how many are then."""

    def __init__(self, name, folder, most):
        super().__init__(name)
        own, self.seen, end = folder / f"loading-{name}", 0, time.monotonic() + 20
        own.touch()
        (folder / f"begun-{name}").touch()
        for _ in range(20):
            self.seen = max(self.seen, len(list(folder.glob("loading-*"))))
            time.sleep(0.01)
            while len(list(folder.glob("begun-*"))) < most and time.monotonic() < end:
                time.sleep(0.01)
        own.unlink()


def fail_to_load(told):
    raise OSError(told)


class Threads(FaultyEnv):
    def __init__(self, wanted=None):
        import numba
        import torch

        super().__init__()
        if wanted is not None:
            torch.set_num_threads(wanted)
        names = "OMP_NUM_THREADS"
        self.threads = (
            os.environ.get(names),
            torch.get_num_threads(),
            numba.config.NUMBA_NUM_THREADS,
        )


class Calling(NapEnv):
    """Calls something in every step."""

    def __init__(self, call):
        self.wait = call


def hang():
    time.sleep(60)


class ServedEnv(FaultyEnv):
    """Starts processes that outlive it if they are let: by Popen, by a shell, by a fork."""

    def __init__(self, name, folder, ignores):
        super().__init__(name)
        self.folder = folder
        command = f"import signal, time; {ignores}; print(1, flush=True); time.sleep(300)"
        self.server = subprocess.Popen(
            [sys.executable, "-S", "-c", command], stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout.readline() == "1\n"
        shell = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=-1, text=True)
        self.pids = [self.server.pid, int(shell.stdout.readline())]
        if name == 0:
            self.pids.append(os.fork())
            if self.pids[-1] == 0:
                time.sleep(300)
                os._exit(0)

    def servers(self):
        return self.pids
