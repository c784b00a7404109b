"""The connection to Ray; no other module imports Ray."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vecenv.core.deadline import Deadline
from vecenv.core.faults import shorten

__all__ = ["ActorGoneError", "Cluster", "Demand", "about_here"]

_PROBE_S = 4.0  # in total; the documentation promises an answer within 5 seconds
_SLICE_S = 1.0
_POLL_S = 0.03
_FILES = ("working_dir", "py_modules", "excludes")  # which Ray takes with a connection
_UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "bytes of memory"}

_uploaded: tuple[dict[str, Any], dict[str, Any]] | None = None  # local paths, Ray's names of them


class ActorGoneError(Exception):
    """An actor is gone or can't be reached; the `__cause__` has Ray's whole message."""


class Demand(NamedTuple):
    """The resources that Ray reserves for an actor, its placement and its runtime environment.

    Attributes:
        resources: Amounts, more than 0, by Ray's names: "CPU", "GPU", "memory" (bytes), others.
        strategy: "SPREAD", "DEFAULT", or an object of `ray.util.scheduling_strategies`.
        runtime_env: See Ray; None for that of the connection.
    """

    resources: Mapping[str, float]
    strategy: Any = "SPREAD"
    runtime_env: dict[str, Any] | None = None

    @property
    def is_counted(self) -> bool:
        """Whether the cluster's free resources tell if there is a place; False for a group's."""
        return isinstance(self.strategy, str)

    def places(self, amounts: Mapping[str, float]) -> int:
        """Return the number of actors that these amounts suffice for."""
        shares = (amounts.get(name, 0.0) / amount for name, amount in self.resources.items())
        return int(min(shares) + 1e-9)

    def options(self) -> dict[str, Any]:
        """Return the demand as options of a Ray actor."""
        amounts = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "scheduling_strategy": self.strategy,
            "runtime_env": self.runtime_env,
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

    Attributes:
        runtime_env: The remaining entries, which are set per actor.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address, or it demands another token.
        ValueError: The address is invalid; Ray is connected to another one, or was connected to
            without the folders and modules of `runtime_env`; or these don't exist.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
        if address is not None and not isinstance(address, str):
            raise TypeError(
                f"address is {address!r}, expected 'host:port', 'ray://host:port', 'auto' or None"
            )
        try:
            self._ray = _part_of_ray("")
        except ImportError as error:
            raise ImportError("RayVectorEnv needs Ray: pip install 'vecenv[ray]'") from error
        uploads, self.runtime_env = _split(runtime_env)
        if self._ray.is_initialized():
            self._require_same(address)
            self._require_uploaded(uploads)
        else:
            self._connect(address or os.environ.get("RAY_ADDRESS"), uploads)

    def _require_same(self, address: str | None) -> None:
        if not address or address in ("auto", "local") or address.startswith("ray://"):
            return
        current = self._ray.get_runtime_context().gcs_address
        if address.rpartition(":")[2] != current.rpartition(":")[2]:
            raise ValueError(
                f"address is {address!r}, but this process is connected to the Ray cluster at "
                f"{current!r} already; leave the address out, or call ray.shutdown() first"
            )

    def _require_uploaded(self, uploads: dict[str, Any]) -> None:
        if not uploads or _uploaded == (uploads, self._job_env()):
            return
        raise ValueError(
            f"runtime_env names files of this machine, {uploads!r}, which Ray takes only when it "
            "is connected to, and this process is connected already; connect with "
            f"ray.init(..., runtime_env={uploads!r}) and leave them out here, or let RayVectorEnv "
            "connect (ray.shutdown() first)"
        )

    def _job_env(self) -> dict[str, Any]:
        """Return the `runtime_env` that this process is connected with, as Ray has it."""
        return dict(self._ray.get_runtime_context().runtime_env)

    def _connect(self, address: str | None, uploads: dict[str, Any]) -> None:
        global _uploaded  # noqa: PLW0603, as there is one connection per process
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if uploads:
            options["runtime_env"] = dict(uploads)  # Ray changes it
        is_local = address in (None, "", "local")
        if is_local:
            options["include_dashboard"] = False
        else:
            assert address is not None
            self._look_at(address)
        try:
            self._ray.init(address="local" if is_local else address, **options)
        except (ConnectionError, RuntimeError, self._ray.exceptions.RayError) as error:
            if is_local:
                raise
            raise _no_cluster(address, shorten(str(error))) from error
        except BaseException:  # perhaps connected, but the upload has failed
            self._ray.shutdown()
            raise
        if uploads:
            _uploaded = uploads, self._job_env()

    def _look_at(self, address: str) -> None:
        """Ensure that a Ray head at the address accepts this process.

        `ray.init` would try for minutes, and not say that a token is missing.

        Raises:
            ConnectionError: There is no head, or it refuses this process.
            ValueError: The address is invalid.
        """
        if address == "auto":  # which Ray looks for on this machine
            return
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"address is {address!r}, expected 'host:port', 'ray://host:port' or 'auto'"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        except OSError as error:
            raise _no_cluster(address, str(error)) from error
        if not address.startswith("ray://"):
            self._ask_to_be_let_in(address)

    def _ask_to_be_let_in(self, address: str) -> None:
        """Ask a head with private parts of Ray (2.60), without which `ray.init` will tell."""
        answers: list[Exception | None] = []

        def ask() -> None:
            try:
                setup = _part_of_ray("_private.authentication.authentication_token_setup")
                # Ray's clients end the process if a token is required and missing.
                setup.ensure_token_if_auth_enabled(create_token_if_missing=False)
                _part_of_ray("_raylet").GcsClient(address=address)
                answers.append(None)
            except (ImportError, AttributeError):  # another release of Ray
                answers.append(None)
            except Exception as error:
                answers.append(error)

        asking = threading.Thread(target=ask, daemon=True)  # Ray's own wait is 40 seconds
        asking.start()
        asking.join(_PROBE_S)
        if not answers:
            raise _no_cluster(address, f"no Ray head has answered within {_PROBE_S:g} seconds")
        if (error := answers[0]) is None:
            return
        if type(error).__name__ != "AuthenticationError":
            raise _no_cluster(address, f"what listens there is no Ray head ({error})") from error
        raise ConnectionError(
            f"the Ray cluster at {address!r} refuses this process: {error} Clusters started where "
            "there is a token file demand that token: set RAY_AUTH_MODE=token in the environment "
            "of this process and of all nodes, or start all of them with RAY_AUTH_MODE=disabled"
        ) from error

    @property
    def is_connected(self) -> bool:
        """Whether Ray has not been shut down."""
        return self._ray.is_initialized()

    def free_places(self, demand: Demand) -> int:
        """Return the number of such actors that can be started now."""
        return demand.places(self._ray.available_resources())

    def all_places(self, demand: Demand) -> int:
        """Return the number of such actors that fit if nothing else uses the cluster."""
        return sum(demand.places(node["Resources"]) for node in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def require_places(self, count: int, demand: Demand, deadline: Deadline) -> None:
        """Wait until `count` such actors can be started.

        Raises:
            ValueError: The cluster is too small.
            RuntimeError: Other programs use it until after the deadline.
        """
        if not demand.is_counted:
            return
        places, why = self.all_places(demand), f"{count} actors of {demand} each don't fit on this"
        advice = (
            "take fewer (num_workers), give each less (cpus_per_worker and the like), or add nodes"
        )
        if places < count:
            have = "; ".join(demand.of(node["Resources"]) for node in self._nodes()) or "nothing"
            raise ValueError(
                f"{why} Ray cluster: its nodes have {have}, which is room for {places}; {advice}"
            )
        self.await_places(count, demand, deadline)
        if (free := self.free_places(demand)) < count:
            raise RuntimeError(
                f"{why} Ray cluster now: others use it, there is room for {free}; {advice}"
            )

    def await_places(self, count: int, demand: Demand, deadline: Deadline) -> None:
        """Wait until `count` such actors can be started, or as many as there is room for."""
        while self.is_connected and not deadline.is_over:
            if self.free_places(demand) >= min(count, self.all_places(demand)):
                return
            time.sleep(_POLL_S)

    def own_store(self) -> tuple[str, int]:
        """Return the id of the node of this process, and the bytes of its object store."""
        own = self._ray.get_runtime_context().get_node_id()
        node = next((node for node in self._nodes() if node["NodeID"] == own), {"Resources": {}})
        return own, int(node["Resources"].get("object_store_memory", 0))

    def start(self, demand: Demand) -> tuple[Any, Any]:
        """Start an actor; return its handle and a reference to what `about_here` is there."""
        actor_class = self._ray.remote(_actor_class())
        actor = actor_class.options(max_restarts=0, **demand.options()).remote()
        return actor, actor.about.remote()

    def beside(self, demand: Demand, node: str | None) -> Demand:
        """Return a demand without CPUs, on this node if given."""
        # It demands memory: Ray places actors that need nothing by any node, perhaps a frozen one.
        others = {"memory": 1, **demand.resources}
        del others["CPU"]
        if node is None or not demand.is_counted:
            return demand._replace(resources=others)
        strategies = _part_of_ray("util.scheduling_strategies")
        place = strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        return demand._replace(resources=others, strategy=place)

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        """Start calling a method of an actor and return a reference to the future result."""
        return actor.call.remote(method, *args)

    def arrived(
        self, references: Sequence[Any], deadline: Deadline, *, all_at_once: bool = False
    ) -> dict[Any, Any]:
        """Return what actors have answered, after a short wait for the first of them.

        Args:
            references: To the answers.
            deadline: Until which there may be a wait.
            all_at_once: Wait for all rather than the first, which is quicker.

        Returns:
            By reference the value, wherever it was, or an ActorGoneError if it is lost with its
            actor. Values on a node that does not send them are left out.
        """
        ray, left_s = self._ray, min(_SLICE_S, deadline.left())
        errors = ray.exceptions
        if all_at_once:
            with contextlib.suppress(errors.RayError):  # one is late, or lost
                values = ray.get(list(references), timeout=left_s)
                return dict(zip(references, values, strict=True))
            left_s = min(_SLICE_S, deadline.left())
        ready, others = ray.wait(list(references), num_returns=1, timeout=left_s)
        if others:  # one was asked for; take all there are
            count = len(references)
            ready, _ = ray.wait(list(references), num_returns=count, timeout=0, fetch_local=False)
        found = {}
        for reference in ready:
            left_s = deadline.left()
            try:
                found[reference] = ray.get(
                    reference, timeout=None if left_s == float("inf") else left_s
                )
            except errors.RayTaskError:
                raise  # not from the envs: their faults are returned as values
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


def _part_of_ray(name: str) -> Any:
    """Import a part of Ray; a private one may be missing in another release, or have changed."""
    return importlib.import_module(f"ray.{name}".rstrip("."))


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
            import platform
            import socket

            # As far as they must be equal for two processes to exchange pickles.
            versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
            for name in ("vecenv", "numpy", "gymnasium"):
                try:
                    version = str(importlib.import_module(name).__version__)
                    versions[name] = version if name == "vecenv" else version.partition(".")[0]
                except Exception as error:
                    versions[name] = f"can't be imported ({type(error).__name__}: {error})"
            node, ray = "", importlib.import_module("ray")
            if ray.is_initialized():
                node = ray.get_runtime_context().get_node_id()
            where = {"node": node, "host": socket.gethostname(), "pid": os.getpid()}
            return {**where, "versions": versions}

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
        "node" (its id), "host", "pid", and the "versions" of Python, vecenv, NumPy and Gymnasium
        that others must have, or why they can't be imported.
    """
    return _actor_class()().about()


def _no_cluster(address: Any, why: str) -> ConnectionError:
    return ConnectionError(
        f"there is no Ray cluster at {address!r}: {why}. Start one with `ray start --head`, or "
        "leave the address out for one on this machine; `ray status` on the head's machine names "
        "the address"
    )


def _cause(text: str) -> str:
    """Return the cause from Ray's long message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("class_name", "actor_id", "namespace"))]
    return shorten(" ".join(said), 400)


def _split(runtime_env: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split a `runtime_env` into files of this machine, for the connection, and the rest."""
    left = dict(runtime_env or {})
    modules = left.get("py_modules", [])
    modules = modules if isinstance(modules, list) else [modules]
    sources = [left.get("working_dir", "://"), *modules]
    if all(isinstance(source, str) and "://" in source for source in sources):
        return {}, left or None
    for source in sources:
        is_path = isinstance(source, str | os.PathLike) and "://" not in os.fspath(source)
        if is_path and not os.path.exists(source):
            raise ValueError(f"runtime_env has {os.fspath(source)!r}, which does not exist")
    return {name: left.pop(name) for name in _FILES if name in left}, left or None
