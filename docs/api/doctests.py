"""How the API pages show doctests: as code, wherever they stand in a docstring."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestsAsCode(griffe.Extension):
    """Put doctests under "Examples:", the only heading under which griffe takes them for code."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Change the docstring of an object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = as_section(obj.docstring.value)


def as_section(docstring: str) -> str:
    """Return a docstring whose doctests, the last of it, are in a section of their own."""
    text = re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)
    begin = re.search(r"^>>> ", text, flags=re.MULTILINE)
    if begin is None:
        return text
    doctests = "\n".join(f"    {line}".rstrip() for line in text[begin.start() :].splitlines())
    return f"{text[: begin.start()]}Examples:\n{doctests}"
