"""Set-up shared by all tests: hypothesis without clocks, markers, a time budget."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

# Else each process compiles the library and rewrites all tests anew. Numba keeps code here, too.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("MPLBACKEND", "Agg")  # no window opens
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
if "PYTEST_XDIST_WORKER" in os.environ:  # others use the cores, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a script runs in the background ignores Ctrl-C, and so would the programs that tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTED = time.monotonic()
gc.disable()  # until all is collected: imports make objects that stay

hypothesis.settings.register_profile(
    "vecenv", deadline=None, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.load_profile("vecenv")


def pytest_addoption(parser):
    parser.addoption(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="skip, saying so, the tests not begun after this many seconds",
    )
    parser.addoption(
        "--changed-first",
        type=int,
        metavar="COMMITS",
        help="begin with the tests of folders that the last commits have changed",
    )


def pytest_configure(config):
    """Let each of several processes begin to collect elsewhere.

    In a fresh clone each compiles and rewrites one part of the test files, and reads the others.
    """
    if hasattr(config, "workerinput") and config.args_source is config.ArgsSource.TESTPATHS:
        number, count = (config.workerinput[key] for key in ("workerid", "workercount"))
        tests = Path(__file__).parent
        paths = [path for path in sorted(tests.iterdir()) if path.is_dir() or is_test(path)]
        first = int(number.removeprefix("gw")) * len(paths) // count
        config.args = [str(path) for path in paths[first:] + paths[:first]]


def is_test(path):
    return path.name.startswith("test_") and path.suffix == ".py"


# What takes longest: begun first, so that the processes end at about the same time.
LONGEST = (
    "tests/cage/challenge2",
    "tests/buffers/core",
    "tests/cage/challenge4",
    "tests/workers/test_starting.py",
    "tests/compare",
    "tests/agents",
    "tests/workers",
    "tests/jit",
    "tests/examples",
    "tests/buffers",
)


def group_of(nodeid):
    """Tests that stay in one process: of a folder in a folder, or of a file."""
    return "/".join(nodeid.partition("::")[0].split("/")[:3])


def changed_groups(num_commits):
    """Return the beginnings of groups whose tests, or whose code, the last commits have changed."""
    command = ["git", "log", f"-{num_commits}", "--name-only", "--format="]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    groups = set()
    for file in done.stdout.split():  # none where there is no history
        package, _, rest = file.partition("/")
        folder = {"vecenv": "tests", "buffers": "tests/buffers", "tests": "tests"}.get(package)
        if folder is not None and "/" in rest:
            groups.add(group_of(f"{folder}/{rest.rpartition('/')[0]}"))
    return tuple(groups)


def pytest_collection_modifyitems(config, items):
    commits = config.getoption("--changed-first")
    first = changed_groups(commits) if commits else ()

    def place(item):
        group = group_of(item.nodeid)
        number = next((k for k, name in enumerate(LONGEST) if group.startswith(name)), len(LONGEST))
        return not group.startswith(first), number

    # By file as well, so that all processes have one order wherever they began to collect.
    items.sort(key=lambda item: (place(item), item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several processes (-n) give each whole groups, so that few kernels are compiled twice.

    The marks of `--dist loadgroup` do not reach xdist 3.8 with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

        def _reschedule(self, node):
            """Hand on until a process has more than the test that it keeps back for its end.

            xdist 3.8 hands on one group, and waits forever where that is of a single test.
            """
            if node not in self.registered_collections:  # a process that is yet to collect
                return
            left = None
            while left != len(self.workqueue) and self._pending_of(self.assigned_work[node]) <= 2:
                left = len(self.workqueue)
                super()._reschedule(node)

        def _assign_work_unit(self, node):
            # An error says that it has just ended: `remove_node` will hand on what it was to do.
            with contextlib.suppress(OSError):
                super()._assign_work_unit(node)

        def remove_node(self, node):
            """Hand on what a process that has ended leaves, but the test that ended it.

            xdist 3.8 hands that on, too, and groups that are done, for whose end it waits forever.
            """
            groups = self.assigned_work.pop(node)
            left = [
                (group, test)
                for group, tests in groups.items()
                for test, is_done in tests.items()
                if not is_done
            ]
            if not left:
                return None
            group, ended_by = left[0]
            groups[group][ended_by] = True
            self.workqueue.update(
                {name: tests for name, tests in groups.items() if not all(tests.values())}
            )
            for other in self.assigned_work:
                self._reschedule(other)
            return ended_by

    config.option.loadscopereorder = False  # the order of `LONGEST`, not by number of tests
    return ByGroup(config, log)


def leave_alone():
    """Let collections of garbage pass by all that there is now: what modules have, and compilers.

    They take up to a quarter of a second otherwise, of tests that ask for one and of compilations,
    which make many objects. Forks are quicker, too.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    leave_alone()
    gc.set_threshold(200_000)
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            # pytest adds its handlers, three times a test, to every logger that does not propagate.
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Between files, leave alone what tests have imported and compiled."""
    ends_file = nextitem is not None and nextitem.path != item.path
    if ends_file and len(gc.get_objects()) > 50_000:  # without those left alone already
        leave_alone()


def pytest_runtest_setup(item):
    budget = item.config.getoption("--time-budget")
    if budget is not None and time.monotonic() - STARTED > budget:
        pytest.skip(f"the time budget of {budget:.0f} s is used up")
    if item.get_closest_marker("linux"):
        from vecenv.machine import is_portable

        if is_portable():
            pytest.skip("is of what only Linux has")
    if item.get_closest_marker("cuda"):
        from vecenv.core import cuda

        try:
            cuda.require()
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture(autouse=True)
def a_program_without_threads(monkeypatch):
    """Fork where a plain script would: pytest-timeout's timer is a thread, which speaks against it.

    What starts from a clean process is tested in tests/workers/test_starting.py, which undoes this.
    """
    import vecenv.workers.starting

    monkeypatch.setattr(vecenv.workers.starting, "why_not_fork", lambda: None)


@pytest.fixture(autouse=True)
def curves_that_nobody_looks_at(monkeypatch):
    """Leave an empty file where a run would draw its learning curve, which takes an eighth second.

    What tests of pictures undo.
    """
    if "vecenv.learn.run" in sys.modules:
        monkeypatch.setattr(
            "vecenv.learn.Run.draw_curve",
            lambda run, *_: run.curve_steps and (run.folder / "curve.png").touch(),
        )


@pytest.fixture(autouse=True)
def subnormal_numbers():
    """Code that torch compiles with GCC lets a thread take them for 0 from its loading on."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture
def one_torch_thread():
    """More only wait for each other on networks so small, for ever on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def path_for_actors():
    """Processes of Ray inherit the environment, not what pytest adds to the path."""
    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield


@pytest.fixture(scope="module")
def local_ray(path_for_actors):
    """A Ray of its own for each module: small, without dashboard, and gone afterwards."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="WARNING",
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def no_actors_stay():
    """A test that fails keeps its vector env alive, and the next ones would wait for its place."""
    yield
    from vecenv import RayVectorEnv

    for envs in [found for found in gc.get_objects() if type(found) is RayVectorEnv]:
        envs.close(terminate=True)
