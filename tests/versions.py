"""Tests that need more than the oldest releases which pyproject.toml allows."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package, lowest, reason):
    """Skip a test where the installed `package` is older than `lowest`, saying for what reason."""
    is_older = Version(version(package)) < Version(lowest)
    return pytest.mark.skipif(is_older, reason=f"{package} before {lowest} {reason}")
