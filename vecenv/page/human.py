"""An env that a person plays in a browser, served on the loopback address."""

from __future__ import annotations

import base64
import errno
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from vecenv.core.deadline import Deadline
from vecenv.page.episode import fill_template
from vecenv.page.frames import check_frame, png_of
from vecenv.page.names import ActionNames, Part

__all__ = ["Game", "Orders", "env_orders", "serve"]

_HOST = "127.0.0.1"
_MAX_BODY = 1 << 16  # bytes of a request
_MAX_PARTS = 64
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_REQUEST_S = 10.0  # a browser that says nothing for so long is left


class Orders(NamedTuple):
    """What a person can choose in every step.

    Attributes:
        parts: Each with its names.
        to_actions: Returns actions for `envs.step` for an index into each part.
        possible: Returns of each part which names can have an effect, or None where all can.
        first: Index into each part at the beginning.
    """

    parts: tuple[Part, ...]
    to_actions: Callable[[list[int]], Any]
    possible: Callable[[], list[list[bool]] | None]
    first: list[int]


def env_orders(envs: Any, names: ActionNames) -> Orders:
    """Return the orders that are the actions of the only env of a vector env.

    Real numbers are chosen from their least, middle and greatest value.

    Raises:
        ValueError: A person can't be asked for such actions.
    """
    space, parts = envs.single_action_space, names.parts
    if isinstance(space, Box) and space.dtype.kind == "f" and np.prod(space.shape) <= 16:
        low = np.maximum(space.low, -1e6).reshape(-1)
        high = np.minimum(space.high, 1e6).reshape(-1)
        levels = np.stack([low, (low + high) / 2, high], axis=1)
        parts = tuple(
            Part(f"number {k}" if len(levels) > 1 else "", tuple(f"{x:.3g}" for x in row))
            for k, row in enumerate(levels.tolist())
        )
    elif isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        levels = None
    else:
        parts = ()
    if not 0 < len(parts) <= _MAX_PARTS:
        raise ValueError(
            f"a person can't be asked for actions of {space!s:.200}; expected Discrete, "
            f"MultiDiscrete or MultiBinary of at most {_MAX_PARTS} parts, or a Box of at most 16 "
            "real numbers"
        )

    def to_actions(indices: list[int]) -> np.ndarray:
        numbers: Any = [part.start + k for part, k in zip(parts, indices, strict=True)]
        if levels is not None:
            numbers = levels[np.arange(len(levels)), indices]
        return np.array(numbers, space.dtype).reshape(1, *(space.shape or ()))

    def possible() -> list[list[bool]] | None:
        if not envs.has_action_masks:
            return None
        mask, sizes = np.asarray(envs.action_masks()[0], bool), [len(part.names) for part in parts]
        return [part.tolist() for part in np.split(mask, np.cumsum(sizes)[:-1])]

    middle = 0 if levels is None else 1
    first = [part.names.index("Sleep") if "Sleep" in part.names else middle for part in parts]
    return Orders(parts, to_actions, possible, first)


class Game:
    """One env that is stepped by whoever asks, one after the other.

    Args:
        title: What it is called.
        envs: A vector env of one env, the caller's to close.
        orders: What a person chooses from.
        frame_of: Returns the picture as it is.
        seed: Of the first episode; the following ones have the next numbers.
        begin: Called after each reset.
        about: A sentence on what is played.
    """

    def __init__(
        self,
        title: str,
        envs: Any,
        orders: Orders,
        frame_of: Callable[[], Any],
        *,
        seed: int,
        begin: Callable[[Any], None] = lambda obs: None,
        after: Callable[[Any], None] = lambda obs: None,
        about: str = "",
    ) -> None:
        self.title, self.about = title, about
        self._envs, self._orders, self._frame_of = envs, orders, frame_of
        self._begin, self._after = begin, after
        self._seed, self._turn = seed, 0
        self._lock = threading.Lock()
        self._reset()

    def page(self) -> str:
        """Return the page that plays it."""
        parts = [[part.title, list(part.names)] for part in self._orders.parts]
        fps = float(self._envs.metadata.get("render_fps") or 10)
        facts = {"title": self.title, "about": self.about, "parts": parts}
        facts |= {"first": self._orders.first, "fps": min(fps, 30.0)}
        icon = '<link rel="icon" href="data:,">\n'  # else browsers ask the server for one
        return fill_template("human.html", self.title, facts, "connect-src 'self'", icon)

    def look(self) -> dict[str, Any]:
        """Return the state for the page."""
        with self._lock:
            return self._state()

    def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a page asks for, a step or a reset, if it has seen the latest state.

        Args:
            request: {"turn": which state it has seen, "reset": True} or {"turn": ..., "order": an
                index into each part}.

        Returns:
            The state after it; with "stale" and nothing done if another window was faster.

        Raises:
            ValueError: The request is something else.
        """
        with self._lock:
            if request.get("turn") != self._turn:
                return {**self._state(), "stale": True}
            if request.get("reset") is True:
                self._seed += 1
                self._reset()
                return self._state()
            order = self._checked(request.get("order"))
            if self._is_over:
                return {**self._state(), "stale": True}
            obs, rewards, terminations, truncations, _ = self._envs.step(
                self._orders.to_actions(order)
            )
            self._turn += 1
            self._step += 1
            self._reward = float(rewards[0])
            self._total += self._reward
            self._is_over = bool(terminations[0] or truncations[0])
            self._why = "terminated" if terminations[0] else "truncated, the time is up"
            if not self._is_over:
                self._after(obs)
            self._draw()
            return self._state()

    def _checked(self, order: Any) -> list[int]:
        parts = self._orders.parts
        if not isinstance(order, list) or len(order) != len(parts):
            raise ValueError(f"order is {order!r:.200}, expected {len(parts)} indices")
        for part, index in zip(parts, order, strict=True):
            if type(index) is not int or not 0 <= index < len(part.names):
                raise ValueError(f"order has {index!r:.99}, expected 0 to {len(part.names) - 1}")
        return order

    def _reset(self) -> None:
        obs, _ = self._envs.reset(seed=self._seed)
        self._turn += 1
        self._step, self._reward, self._total, self._is_over, self._why = 0, None, 0.0, False, ""
        self._begin(obs)
        self._draw()

    def _draw(self) -> None:
        self._picture = base64.b64encode(png_of(check_frame(self._frame_of()))).decode("ascii")
        self._possible = None if self._is_over else self._orders.possible()

    def _state(self) -> dict[str, Any]:
        reward = None if self._reward is None else f"{self._reward:.6g}"
        return {
            "turn": self._turn,
            "step": self._step,
            "seed": self._seed,
            "reward": reward,
            "total": f"{self._total:.6g}",
            "over": self._why if self._is_over else "",
            "possible": self._possible,
            "picture": self._picture,
        }


class _Server(ThreadingHTTPServer):
    """Serves a game to whoever knows its token."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False  # a busy port is told, not shared
    request_queue_size = 16

    def __init__(self, game: Game, port: int) -> None:
        self.game = game
        self.token = secrets.token_urlsafe(16)
        self.latest = time.monotonic()
        self.error: Exception | None = None
        super().__init__((_HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser has gone away in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # type: ignore[assignment]  # the only one that has this handler
    timeout = _REQUEST_S
    server_version = "vecenv"
    sys_version = ""

    def do_GET(self) -> None:
        name = self._name()
        if name == "":
            self._answer(200, "text/html; charset=utf-8", self.server.game.page().encode())
        elif name == "state":
            self._answer_with(self.server.game.look)
        elif name is not None:
            self._refuse(404, "there is no such page")

    def do_POST(self) -> None:
        name = self._name()
        if name != "play":
            if name is not None:
                self._refuse(404, "there is no such page")
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            request = json.loads(self.rfile.read(length)) if 0 <= length <= _MAX_BODY else None
            if not isinstance(request, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self._refuse(400, f"expected an object of JSON of at most {_MAX_BODY} bytes")
            return
        self._answer_with(lambda: self.server.game.play(request))

    def _answer_with(self, act: Callable[[], dict[str, Any]]) -> None:
        self.server.latest = time.monotonic()
        try:
            body = json.dumps(act()).encode()
        except ValueError as error:
            self._refuse(400, str(error))
        except Exception as error:  # of the env: the end of the game, told in the terminal too
            self.server.error = error
            self._refuse(500, f"the env failed: {error!s:.500}")
        else:
            self._answer(200, "application/json", body)

    def _name(self) -> str | None:
        """Return what is asked for; None of those who do not know the token, or this host."""
        token, _, name = self.path.partition("?")[0].lstrip("/").partition("/")
        host = self.headers.get("Host", "").partition(":")[0]
        if host in (_HOST, "localhost") and secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return name
        self._refuse(403, "open the address that vecenv play --human has printed")
        return None

    def _refuse(self, status: int, words: str) -> None:
        self.close_connection = True
        self._answer(status, "text/plain; charset=utf-8", words.encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def serve(
    game: Game,
    *,
    port: int = 8000,
    idle_s: float = 3600.0,
    on_start: Callable[[str], Any] = print,
    stop: threading.Event | None = None,
) -> str:
    """Serve a game until nobody has asked for anything for a while; Ctrl-C ends it, too.

    Args:
        game: See `Game`.
        port: Of the loopback address; 0 for any that is free.
        idle_s: How long to wait, in seconds.
        on_start: Called with the address, which has a token in it that nobody can guess.
        stop: Ends it, too, when it is set.

    Returns:
        Why it has ended.

    Raises:
        ValueError: There is no such port.
        OSError: The port is busy.
        Exception: What the env has raised.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}, expected 0 to 65535")
    try:
        server = _Server(game, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "busy" if error.errno == errno.EADDRINUSE else "not allowed"
        raise OSError(f"port {port} is {why}; --port 0 takes one that is free") from None
    stop = threading.Event() if stop is None else stop
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        on_start(server.url)
        while server.error is None:
            if Deadline(idle_s - (time.monotonic() - server.latest)).is_over:
                return f"nobody has played for {idle_s / 60:.3g} minutes"
            if stop.wait(0.1):
                return "it was stopped"
        raise server.error
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_REQUEST_S)
