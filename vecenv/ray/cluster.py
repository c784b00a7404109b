"""The connection to Ray; no other module imports Ray."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vecenv.core.arguments import Deadline

__all__ = ["ActorGoneError", "Cluster", "Demand", "about_here"]

_logger = logging.getLogger("vecenv")
_PROBE_S = 10.0  # seconds to wait for the head's answer
_SLICE_S, _FETCH_S = 1.0, 60.0  # seconds to wait for actors, and for the data that one has sent
_POLL_S, _RELEASE_S = 0.03, 3.0
_UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "bytes of memory"}

_given: dict[str, Any] = {}  # the runtime environment with which this process has connected


class ActorGoneError(Exception):
    """An actor is gone or can't be reached; the `__cause__` has Ray's whole message."""


class Demand(NamedTuple):
    """The resources that Ray reserves for an actor, and its placement.

    Attributes:
        resources: Amounts, more than 0, by Ray's names: "CPU", "GPU", "memory" (bytes), others.
        strategy: "SPREAD", "DEFAULT", or an object of `ray.util.scheduling_strategies`.
    """

    resources: Mapping[str, float]
    strategy: Any = "SPREAD"

    @property
    def is_counted(self) -> bool:
        """Whether the cluster's free resources tell if there is room; False for a group's."""
        return isinstance(self.strategy, str)

    def places(self, amounts: Mapping[str, float]) -> int:
        """Return the number of actors for which these amounts suffice."""
        shares = (amounts.get(name, 0.0) / amount for name, amount in self.resources.items())
        return int(min(shares) + 1e-9)

    def options(self) -> dict[str, Any]:
        """Return the demand as options of a Ray actor."""
        amounts = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "scheduling_strategy": self.strategy,
        }
        if "memory" in amounts:
            options["memory"] = int(amounts.pop("memory"))
        return {**options, "resources": amounts}

    def of(self, amounts: Mapping[str, float]) -> str:
        """Describe the available amounts of the demanded resources, for messages."""
        parts = [f"{amounts.get(n, 0.0):,.12g} {_UNITS.get(n, n)}" for n in self.resources]
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.of(self.resources)


class Cluster:
    """A connection to Ray, local or by address; there is one per process.

    Args:
        address: "host:port" of a cluster's head, "ray://host:port" or "auto"; None for the cluster
            of the environment variable `RAY_ADDRESS`, else one on this machine that ends with this
            process. If Ray is initialized already, that cluster is used.
        runtime_env: Runtime environment of the actors. Its folders and modules of this machine are
            uploaded when the cluster is connected to, the only time at which Ray accepts them.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address, or it demands another token.
        ValueError: Ray is connected to another address, or was connected to without `runtime_env`;
            or folders and modules in it don't exist.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ImportError("RayVectorEnv needs Ray: pip install 'vecenv[ray]'") from error
        if not isinstance(address, str | None):
            raise TypeError(f"address is {address!r}, expected text such as 'host:port', or None")
        given = dict(runtime_env or {})
        if not self._ray.is_initialized():
            self._connect(address or os.environ.get("RAY_ADDRESS") or "local", given)
            return
        self._require_same(address)
        if given and given != _given:
            raise ValueError(
                f"runtime_env is {given!r}, which Ray takes only when it is connected to, and this "
                "process is connected already; pass it to ray.init(..., runtime_env=...) and leave "
                "it out here, or let RayVectorEnv connect"
            )

    def _require_same(self, address: str | None) -> None:
        if not address or address in ("auto", "local") or address.startswith("ray://"):
            return
        current = self._ray.get_runtime_context().gcs_address
        if address.rpartition(":")[2] != current.rpartition(":")[2]:
            raise ValueError(
                f"address is {address!r}, but this process is connected to the Ray cluster at "
                f"{current!r} already; leave the address out, or call ray.shutdown() first"
            )

    def _connect(self, address: str, runtime_env: dict[str, Any]) -> None:
        global _given  # noqa: PLW0603, as there is one connection per process
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        if address not in ("auto", "local"):
            _require_head(address)
        try:
            given = dict(runtime_env)  # a copy, as Ray changes it
            self._ray.init(address, logging_level=logging.WARNING, runtime_env=given, **options)
        except BaseException as error:
            self._ray.shutdown()  # perhaps connected, but the upload has failed
            told = ConnectionError, RuntimeError, self._ray.exceptions.RayError, SystemExit
            if address != "local" and isinstance(error, told):
                raise _no_cluster(address, f"{type(error).__name__}: {error}") from error
            raise
        _given = runtime_env

    @property
    def is_connected(self) -> bool:
        """Whether Ray has not been shut down."""
        return self._ray.is_initialized()

    def free_places(self, demand: Demand) -> int:
        """Return the number of such actors that can be started now."""
        return demand.places(self._ray.available_resources())

    def all_places(self, demand: Demand) -> int:
        """Return the number of such actors that fit if nothing else uses the cluster."""
        return sum(map(demand.places, self._nodes()))

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def choose_number(self, num_envs: int, demand: Demand) -> int:
        """Return how many such actors, at most one for each env, can be started now; log it."""
        most, deadline = min(num_envs, self.all_places(demand)), Deadline(_RELEASE_S)
        while (free := self.free_places(demand)) < most and not deadline.is_over:
            time.sleep(_POLL_S)  # Ray releases the CPUs of actors that have just ended
        count = min(num_envs, max(1, free))
        _logger.log(
            logging.WARNING if count < most else logging.INFO,
            "%d envs in %d actors of %s each, where there would be room for %d if others did not "
            "use it; num_workers says how many",
            *(num_envs, count, demand, most),
        )
        return count

    def require_places(self, count: int, demand: Demand) -> None:
        """Ensure that the cluster is large enough for `count` such actors.

        Raises:
            ValueError: It is not, even if nothing else uses it.
        """
        if demand.is_counted and (places := self.all_places(demand)) < count:
            have = "; ".join(map(demand.of, self._nodes())) or "nothing"
            raise ValueError(
                f"{count} actors of {demand} each don't fit on this Ray cluster: its nodes have "
                f"{have}, which is room for {places}; take fewer (num_workers), give each less "
                "(cpus_per_worker and the like), or add nodes"
            )

    def start(self, demand: Demand) -> tuple[Any, Any]:
        """Start an actor; return its handle and a reference to the result of `about_here` there."""
        actor_class = self._ray.remote(_actor_class())
        actor = actor_class.options(max_restarts=0, **demand.options()).remote()
        return actor, actor.about.remote()

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        """Start calling a method of an actor and return a reference to the future result."""
        return actor.call.remote(method, *args)

    def arrived(
        self, references: Sequence[Any], deadline: Deadline, *, all_at_once: bool = False
    ) -> dict[Any, Any]:
        """Return the answers of actors, after a short wait for the first of them.

        Args:
            references: References to the answers.
            deadline: Latest end of the wait.
            all_at_once: Wait for all rather than the first, which is quicker.

        Returns:
            The value by reference, on whatever node it was, or an ActorGoneError if it is lost with
            its actor. Values on a node that does not send them are left out.
        """
        ray, errors, count = self._ray, self._ray.exceptions, len(references)
        wanted = count if all_at_once else 1
        left_s = min(_SLICE_S, deadline.left())
        ready, others = ray.wait(list(references), num_returns=wanted, timeout=left_s)
        if others and wanted == 1:  # the wanted one is there; take all that are
            ready, _ = ray.wait(list(references), num_returns=count, timeout=0, fetch_local=False)
        found = {}
        for reference in ready:
            try:
                found[reference] = ray.get(reference, timeout=min(_FETCH_S, deadline.left()))
            except errors.RayTaskError:
                raise  # not raised by envs: their faults are returned as values
            except errors.GetTimeoutError:
                continue
            except errors.RayError as error:
                gone = found[reference] = ActorGoneError(_cause(str(error)))
                gone.__cause__ = error
        return found

    def put(self, value: Any) -> Any:
        """Put a value into the object store, once for all actors."""
        return self._ray.put(value)

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        with contextlib.suppress(Exception):  # the actor or all of Ray may be gone
            if self.is_connected:
                self._ray.kill(actor, no_restart=True)


@functools.cache
def _actor_class() -> type:
    """Return the class of the actors; defined in a function, so that it is pickled by value.

    So a node on which this package is missing, or has another version, can report that. The class
    may use no name of this module.
    """

    class RayEnvActor:
        """Owns a `vecenv.ray.actor.EnvActor`."""

        worker: Any = None

        def about(self) -> dict[str, Any]:
            """Return where this is and what is installed, see `about_here`."""
            import importlib
            import os
            import socket

            # As far as they must be equal for two processes to exchange pickles.
            versions = []
            for name in ("vecenv", "numpy", "gymnasium"):
                try:
                    version = str(importlib.import_module(name).__version__)
                    version = version if name == "vecenv" else version.partition(".")[0]
                except Exception as error:
                    version = f"can't be imported ({type(error).__name__}: {error})"
                versions.append(f"{name} {version}")
            node = importlib.import_module("ray").get_runtime_context().get_node_id()
            where = {"node": node, "host": socket.gethostname(), "pid": os.getpid()}
            return {**where, "versions": ", ".join(versions)}

        def call(self, method: str, *args: Any) -> Any:
            """Call a method of the worker; the first call makes it."""
            if self.worker is None:
                from vecenv.ray.actor import EnvActor

                self.worker = EnvActor()
            return self.worker.answer(method, *args)

    return RayEnvActor


def about_here() -> dict[str, Any]:
    """Return for this process what `about` returns for an actor's.

    Returns:
        "node" (its id), "host", "pid", and the "versions" of vecenv, NumPy and Gymnasium that
        others must have, or why they can't be imported, as text.
    """
    return _actor_class()().about()


def _require_head(address: str) -> None:
    """Let Ray's command ask for a head: without one `ray.init` would end the process.

    Raises:
        ConnectionError: There is no head, or it refuses this process.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from error
    if address.startswith("ray://"):
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired as error:
        told = f"no Ray head has answered within {_PROBE_S:g} seconds"
        raise _no_cluster(address, told) from error
    except subprocess.CalledProcessError as error:
        if lines := [line for line in error.stderr.splitlines() if "Error:" in line]:
            raise _no_cluster(address, lines[-1]) from error  # else `ray.init` reports it


def _no_cluster(address: Any, why: str) -> ConnectionError:
    return ConnectionError(
        f"there is no Ray cluster at {address!r} for this process: {why:.400}. Start one "
        "with `ray start --head`, or leave the address out for one on this machine; `ray status` "
        "on the head's machine names the address, 'host:port' (or 'ray://host:port', 'auto')"
    )


def _cause(text: str) -> str:
    """Return the cause from Ray's long message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace"))]
    return " ".join(said)[:400]
