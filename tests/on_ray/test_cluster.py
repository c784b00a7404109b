"""Clusters of two nodes: one is killed, frozen, lacks modules, has others; addresses of none."""

import http.server
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from workers.faulty_envs import FINE, faulty

from vecenv import EnvCreationError, RayVectorEnv, WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NODE = {"include_dashboard": False, "object_store_memory": 80 * 2**20}


# Ray notices that a node is gone, or does not answer, within seconds instead of a minute.
ATTENTIVE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def started(num_cpus, **head_args):
    """A cluster with one node, without dashboard."""
    from ray.cluster_utils import Cluster

    head_args = {"num_cpus": num_cpus, **NODE, **head_args}
    cluster = Cluster(initialize_head=True, head_node_args=head_args)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture
def cluster():
    import ray

    cluster = started(2)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def tight():
    """Two nodes with a CPU each, and the second of them; its loss is noticed soon."""
    import ray

    cluster = started(1, _system_config=ATTENTIVE)
    second = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, resources={"second": 1})
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def run(script, *args, cwd, timeout=150, **environment):
    """Run a script in a process of its own; return what it prints if it exits with 0."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *map(str, args)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def node_of(envs, worker):
    """Id of the node on which an actor is."""
    import ray

    actor = envs._pool.seats[worker].actor
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


def nodes(envs):
    """Ids of the nodes that the actors are on."""
    return [seat.node for seat in envs._pool.seats]


def kill_node_of(envs, worker, cluster):
    """Kill the node of an actor, without a farewell; it must not be the head."""
    node_id = node_of(envs, worker)
    node = next(node for node in cluster.list_all_nodes() if node.node_id == node_id)
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_a_killed_node(cluster, on_error):
    """The head has room for all: what was on the other node is found and, if wanted, replaced."""
    second = cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    envs = RayVectorEnv(faulty(4), num_workers=2, on_error=on_error, address=cluster.address)
    found = [node_of(envs, worker) for worker in range(2)]
    assert set(found) == {cluster.head_node.node_id, second.node_id}
    envs.reset(seed=0)
    envs.step([FINE] * 4)
    lost = found.index(second.node_id)
    kill_node_of(envs, lost, cluster)
    begin = time.monotonic()
    if on_error == "raise":
        with pytest.raises(WorkerDiedError, match=rf"worker {lost} .* is gone during step"):
            while time.monotonic() < begin + 60:  # its processes may live for a second
                envs.step([FINE] * 4)
        assert envs.closed
        return
    while not envs.restarts.any():
        assert time.monotonic() < begin + 120  # 15 s: until Ray notices that the node is gone
        result = envs.step([FINE] * 4)
    expected = [env_id // 2 == lost for env_id in range(4)]
    assert result[3].tolist() == expected
    assert node_of(envs, lost) == cluster.head_node.node_id
    assert envs.step([FINE] * 4)[0][:, 1].tolist().count(0) == 2
    envs.close()


def test_another_part_of_ray_at_the_address(cluster):
    port = cluster.head_node.node_manager_port
    with pytest.raises(ConnectionError, match=f"no Ray cluster at '127.0.0.1:{port}'"):
        RayVectorEnv(faulty(1), address=f"127.0.0.1:{port}")


def test_another_address_than_the_one_connected_to_is_refused(cluster):
    RayVectorEnv(faulty(1), num_workers=1, address=cluster.address).close()
    RayVectorEnv(faulty(1), num_workers=1, address="auto").close()
    with pytest.raises(ValueError, match="connected to the Ray cluster at"):
        RayVectorEnv(faulty(1), address="127.0.0.1:1")


def test_nobody_at_the_address():
    begin = time.monotonic()
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(ConnectionError, match=f"no Ray cluster at '{address}'.*ray start"):
            RayVectorEnv(faulty(2), address=address)
    with pytest.raises(ConnectionError, match=r"somewhere.*'host:port'"):
        RayVectorEnv(faulty(2), address="somewhere")
    assert time.monotonic() - begin < 30


def test_somebody_else_at_the_address():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(ConnectionError, match="no Ray head has answered within 10 seconds"):
            RayVectorEnv(faulty(2), address=f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


HIDDEN = """
    import sys

    import ray

    address, project = sys.argv[1:]
    sys.path.insert(0, project)  # as if this were the project's main script
    import hidden_envs
    sys.path.remove(project)

    from vecenv import EnvCreationError, RayVectorEnv

    def make(**options):
        factories = [hidden_envs.HiddenEnv] * 2
        envs = RayVectorEnv(factories, num_workers=2, address=address, **options)
        assert len({seat.node for seat in envs._pool.seats}) == 2
        assert envs.reset(seed=0)[0].tolist() == [[7.0], [7.0]]
        envs.close()
        return envs

    def refusal(kind, **options):
        try:
            make(**options)
        except kind as error:
            return str(error)
        raise AssertionError(f"{options} should have been refused")

    text = refusal(EnvCreationError)
    assert "ModuleNotFoundError" in text and "hidden_envs" in text, text
    assert "runtime_env={'working_dir': '.'}" in text and "ray.init(" in text, text
    text = refusal(ValueError, runtime_env={"working_dir": project})
    assert "ray.init(..., runtime_env=" in text and "connected already" in text, text
    ray.shutdown()
    text = refusal(ValueError, runtime_env={"working_dir": project + "/none"})
    assert "existing directory" in text and not ray.is_initialized(), text
    for given in ({"working_dir": project}, {"py_modules": [hidden_envs]}):
        make(runtime_env={**given, "env_vars": {"HIDDEN": "7"}})
        make(runtime_env={**given, "env_vars": {"HIDDEN": "7"}})  # the connection has them
        ray.shutdown()
    given = {"working_dir": project, "env_vars": {"HIDDEN": "7"}}
    ray.init(address=address, logging_level=40, runtime_env=given)
    make()
    print("done")
"""


def test_modules_that_nodes_lack_travel_when_the_cluster_is_connected_to(tight, tmp_path):
    """Ray takes folders of this machine with a connection, not with an actor."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    text = """
        import os

        import gymnasium as gym
        import numpy as np

        class HiddenEnv(gym.Env):
            observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
            action_space = gym.spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                return np.full(1, os.environ.get("HIDDEN", 0), np.float32), {}

            def step(self, action):
                return np.zeros(1, np.float32), 0.0, False, False, {}
    """
    (project / "hidden_envs.py").write_text(textwrap.dedent(text))
    assert run(HIDDEN, tight[0].address, project, cwd=elsewhere).endswith("done\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "raise ModuleNotFoundError('no such package here')",
            "vecenv can't be imported .*no such pack",
        ),
        ("__version__ = '0.0.1'", "versions differ too much.*There: .*vecenv 0.0.1.*Here: vecenv "),
    ],
    ids=["missing", "other"],
)
def test_a_node_without_this_package_or_with_another_is_named(
    tmp_path, monkeypatch, text, expected
):
    import ray

    monkeypatch.chdir(tmp_path.parent)  # Ray tells the actors to look where the caller is
    cluster = started(1)
    package = tmp_path / "vecenv"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    paths = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    second = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    second = cluster.add_node(**second, env_vars={"PYTHONPATH": paths})
    try:
        with pytest.raises(EnvCreationError, match=expected) as raised:
            RayVectorEnv(faulty(2), num_workers=2, address=cluster.address)
        assert f"node {socket.gethostname()} ({second.node_id[:12]})" in str(raised.value)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_closing_gives_the_resources_back_before_it_returns(tight, caplog):
    caplog.set_level(logging.INFO, "vecenv")
    options = {"resources": {"second": 0.25}, "cpus_per_worker": 0.25, "memory_per_worker": 2**20}
    for number in range(5):
        envs = RayVectorEnv(faulty(4), address=tight[0].address)
        assert envs.num_workers == 2, number
        envs.reset(seed=0)
        envs.close(terminate=number % 2 == 1)
    assert caplog.messages.count(caplog.messages[0]) == 5
    assert caplog.messages[0].startswith("4 envs in 2 actors of 1 CPUs each")
    envs = RayVectorEnv(faulty(4), **options)
    assert (envs.num_workers, set(nodes(envs))) == (4, {tight[1].node_id})
    caplog.clear()
    others = RayVectorEnv(faulty(2))
    assert others.num_workers == 1
    assert "there would be room for 2 if others did not use it" in caplog.messages[0]
    assert caplog.records[0].levelname == "WARNING"
    others.close()
    envs.close()
    with pytest.raises(
        ValueError, match=r"1 actors of 1 CPUs, 2 second each don't fit .*1 CPUs, 1"
    ):
        RayVectorEnv(faulty(4), num_workers=1, resources={"second": 2})


def test_actors_go_where_they_are_put(tight):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    RayVectorEnv(faulty(1), num_workers=1, address=tight[0].address).close()
    group = placement_group([{"CPU": 1, "second": 1}])
    ray.get(group.ready(), timeout=60)
    strategy = PlacementGroupSchedulingStrategy(group)
    with pytest.raises(ValueError, match="needs num_workers"):
        RayVectorEnv(faulty(2), scheduling_strategy=strategy)
    envs = RayVectorEnv(faulty(2), num_workers=1, scheduling_strategy=strategy)
    assert nodes(envs) == [tight[1].node_id]
    envs.close()
    remove_placement_group(group)


def lose(way, cluster, node, envs):
    """Kill or freeze a node; return what thaws it."""
    if way == "killed":
        cluster.remove_node(node, allow_graceful=False)
        return []
    worker = nodes(envs).index(node.node_id)
    pids = [node.all_processes["raylet"][0].process.pid, envs._pool.seats[worker].pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


@pytest.mark.parametrize("way", ["killed", "frozen"])
def test_a_lost_node_without_room_elsewhere(tight, caplog, way):
    """A node is waited for, not long."""
    cluster, second = tight
    options = {"on_error": "restart", "start_timeout": 10.0}
    envs = RayVectorEnv(faulty(4), num_workers=2, address=cluster.address, **options)
    envs.reset(seed=0)
    envs.step([FINE] * 4)
    lost = nodes(envs).index(second.node_id)
    frozen = lose(way, cluster, second, envs)
    begin = time.monotonic()
    try:
        with pytest.raises(WorkerDiedError, match=r"could not be replaced.* after 10 seconds"):
            while True:
                envs.step([FINE] * 4)
        waiting = f"waiting for a node for worker {lost} "
        assert any(text.startswith(waiting) for text in caplog.messages)
        assert time.monotonic() - begin < 90
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        envs.close(terminate=True)


def listens(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


TOKEN = "0123456789abcdef" * 4
REFUSED = """
    import sys, time

    from vecenv import RayVectorEnv

    begin = time.monotonic()
    try:
        RayVectorEnv([int], num_workers=1, address=sys.argv[1])
    except ConnectionError as error:
        assert "AuthenticationError" in str(error) and sys.argv[2] in str(error), error
    else:
        raise AssertionError("should have been refused")
    assert time.monotonic() - begin < 30  # a second on an idle machine
    print("done")
"""


def test_a_token_that_is_missing_or_wrong_is_told_at_once(tmp_path):
    home = {"HOME": str(tmp_path)}
    with_token = {**home, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=1"]
    command += ["--include-dashboard=false", f"--temp-dir={tmp_path.parent / 'r'}"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen(command, env={**os.environ, **with_token}, **quiet)
    try:
        end = time.monotonic() + 60
        while not listens(port):
            assert time.monotonic() < end
            time.sleep(0.2)
        for told, *wrong in (
            ("InvalidAuthToken", "disabled", ""),
            ("InvalidAuthToken", "token", TOKEN[::-1]),
            ("no authentication token was found", "token", ""),
        ):
            mode = dict(zip(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"), wrong, strict=True))
            assert run(REFUSED, f"127.0.0.1:{port}", told, cwd=tmp_path, **home, **mode) == "done\n"
    finally:
        head.terminate()  # with --block it ends all that it has started
        head.wait(60)
