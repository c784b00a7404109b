"""A cluster of two nodes: spread over both, one of them killed; and addresses without a cluster."""

import http.server
import threading
import time

import pytest
from shm.faulty_envs import FINE, faulty

from vecenv import RayVectorEnv, WorkerDiedError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NODE = {"include_dashboard": False, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def node_of(envs, worker):
    """Id of the node on which an actor is."""
    import ray

    actor = envs._fleet._actors[worker]
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))


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
    nodes = [node_of(envs, worker) for worker in range(2)]
    assert set(nodes) == {cluster.head_node.node_id, second.node_id}
    envs.reset(seed=0)
    envs.step([FINE] * 4)
    lost = nodes.index(second.node_id)
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
    with pytest.raises(ValueError, match="expected 'host:port'"):
        RayVectorEnv(faulty(2), address="somewhere")
    assert time.monotonic() - begin < 30


def test_somebody_else_at_the_address():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(ConnectionError, match="is not a Ray head"):
            RayVectorEnv(faulty(2), address=f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
