"""The part of Ray that is used here; no other module imports it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from vecenv.ray.worker import RayRolloutWorker
from vecenv.shm.deadline import Deadline
from vecenv.shm.faults import shorten

__all__ = ["ActorGoneError", "Cluster"]

_PROBE_S = 5.0
_SLICE_S = 1.0
# A gRPC server, such as Ray's head, greets with a SETTINGS frame; other servers don't.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


class ActorGoneError(Exception):
    """An actor is gone, or can't be reached; the message is Ray's."""


class Cluster:
    """A connection to Ray, local or by address; there is one per process.

    Args:
        address: "host:port" of a cluster's head, "ray://host:port" or "auto"; None for the cluster
            of the environment variable `RAY_ADDRESS`, else one on this machine that ends with this
            process. If Ray is initialized already, that cluster is used.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address.
        ValueError: Not an address, or Ray is connected to another one.
    """

    def __init__(self, address: str | None) -> None:
        self._ray = _import_ray()
        if self._ray.is_initialized():
            self._require_same(address)
        else:
            self._connect(address or os.environ.get("RAY_ADDRESS"))

    def _require_same(self, address: str | None) -> None:
        if not address or address in ("auto", "local") or address.startswith("ray://"):
            return
        current = self._ray.get_runtime_context().gcs_address
        if address.rpartition(":")[2] != current.rpartition(":")[2]:
            raise ValueError(
                f"address is {address!r}, but this process is connected to the Ray cluster at "
                f"{current!r} already; leave the address out, or call ray.shutdown() first"
            )

    def _connect(self, address: str | None) -> None:
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if address in (None, "", "local"):
            self._ray.init(address="local", include_dashboard=False, **options)
            return
        assert address is not None
        if address != "auto":
            _probe(address)
        try:
            self._ray.init(address=address, **options)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(
                f"there is no Ray cluster at {address!r}: {shorten(str(error))}. Start one with "
                "`ray start --head`, or leave the address out for one on this machine"
            ) from error

    @property
    def is_connected(self) -> bool:
        """Whether Ray has not been shut down."""
        return self._ray.is_initialized()

    def free_places(self, cpus: float) -> int:
        """Return how many actors of so many CPUs can be started now."""
        return int(self._ray.available_resources().get("CPU", 0.0) / cpus + 1e-9)

    def require_places(self, count: int, cpus: float, deadline: Deadline) -> None:
        """Wait until `count` actors of so many CPUs can be started.

        Raises:
            ValueError: The cluster is too small.
            RuntimeError: Others use it, until after the deadline.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        sizes = [node.get("CPU", 0.0) for node in nodes]
        places = sum(int(size / cpus + 1e-9) for size in sizes)
        advice = "take fewer (num_workers), give each less (cpus_per_worker), or add nodes"
        if places < count:
            raise ValueError(
                f"{count} actors of {cpus:g} CPUs each don't fit on this Ray cluster: its nodes "
                f"have {', '.join(f'{size:g}' for size in sizes) or 'no'} CPUs, which is room for "
                f"{places}; {advice}"
            )
        while (free := self.free_places(cpus)) < count:
            if deadline.is_over:
                raise RuntimeError(
                    f"{count} actors of {cpus:g} CPUs each don't fit on this Ray cluster now: "
                    f"others use it, there is room for {free}; {advice}"
                )
            time.sleep(0.1)

    def start(self, cpus: float, runtime_env: dict[str, Any] | None) -> Any:
        """Start an actor and return its handle; it may take a while to be there."""
        options = {"num_cpus": cpus, "runtime_env": runtime_env, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(RayRolloutWorker).options(max_restarts=0, **options).remote()

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        """Start calling a method of an actor and return a reference to what will come of it."""
        return getattr(actor, method).remote(*args)

    def wait(self, references: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Return those that are ready, after a short wait for the first."""
        timeout = min(_SLICE_S, deadline.left())
        ready, _ = self._ray.wait(list(references), num_returns=1, timeout=timeout)
        if len(ready) < len(references):  # one was asked for; take all there are
            ready, _ = self._ray.wait(
                list(references), num_returns=len(references), timeout=0, fetch_local=False
            )
        return ready

    def fetch_all(self, references: Sequence[Any], deadline: Deadline) -> list[Any] | None:
        """Return all values after a short wait, or None if one isn't there or has failed."""
        try:
            return self._ray.get(list(references), timeout=min(_SLICE_S, deadline.left()))
        except self._ray.exceptions.RayError:
            return None

    def fetch(self, reference: Any) -> Any:
        """Return the value of a reference that is ready.

        Raises:
            ActorGoneError: There won't be one.
        """
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError:
            raise  # not of the envs, whose faults are values
        except exceptions.RayError as error:
            raise ActorGoneError(_essence(str(error))) from None

    def put(self, value: Any) -> Any:
        """Put a value into the object store, once for all actors."""
        return self._ray.put(value)

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        with contextlib.suppress(Exception):  # it or all of Ray may be gone
            if self.is_connected:
                self._ray.kill(actor, no_restart=True)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("RayVectorEnv needs Ray: pip install 'vecenv[ray]'") from error
    return ray


def _essence(text: str) -> str:
    """Return what Ray's long message says about the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace"))]
    return shorten(" ".join(said), 400)


def _probe(address: str) -> None:
    """Make sure that a Ray head listens at this address; Ray itself would try for minutes.

    Raises:
        ConnectionError: Nobody, or somebody else does.
        ValueError: Not an address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"address is {address!r}, expected 'host:port', 'ray://host:port' or 'auto'"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_HTTP2_HELLO)
            greeting = connection.recv(9)
    except OSError as error:
        raise ConnectionError(
            f"there is no Ray cluster at {address!r}: {error}. Start one with `ray start --head`, "
            "or leave the address out for one on this machine"
        ) from error
    if len(greeting) < 4 or greeting[3] != _SETTINGS:
        raise ConnectionError(
            f"what listens at {address!r} is not a Ray head (it answers {greeting!r}); "
            "`ray status` on the head's machine names the address"
        )
