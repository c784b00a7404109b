"""Errors about mistakes in kernels; their messages begin with the user's line."""

from __future__ import annotations

import linecache
import types
from typing import Any, NamedTuple

__all__ = ["KernelCompileError", "KernelIndexError", "KernelResultError", "Place"]


class Place(NamedTuple):
    """A line of a function; its text is "FILE:LINE, in FUNCTION" and the line itself."""

    filename: str
    lineno: int
    function: str

    @classmethod
    def of(cls, function: types.FunctionType, line: int | None = None) -> Place:
        """Return a line of a function; its first line if none is given."""
        code = function.__code__
        return cls(code.co_filename, line or code.co_firstlineno, code.co_name)

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.lineno).strip()
        inside = f", in {self.function}" if self.function else ""
        return f"{self.filename}:{self.lineno}{inside}" + (f"\n    {source}" if source else "")


class _OfALine(Exception):
    """Base of errors about a line of a kernel, or of a function that it calls.

    Attributes:
        filename: File of the line at fault.
        lineno: That line; the first one of the kernel if none is known.
    """

    def __init__(self, message: str, filename: str = "", lineno: int = 0, **more: Any) -> None:
        super().__init__(message)
        self.filename, self.lineno = filename, lineno
        vars(self).update(more)

    @classmethod
    def at(cls, place: Place, text: str, **more: Any) -> Any:
        """Return the error for a line."""
        return cls(f"{place}\n{text}", place.filename, place.lineno, **more)


class KernelCompileError(_OfALine, RuntimeError):
    """A kernel can't be compiled, or is not allowed; begins with file, line and reason.

    Attributes:
        numba_message: Numba's whole message, without colours.
    """

    numba_message = ""


class KernelResultError(_OfALine, RuntimeError):
    """A kernel returns a wrong result, or leaves memory unwritten that it must write."""


class KernelIndexError(_OfALine, IndexError):
    """A kernel uses an index that is out of range."""
