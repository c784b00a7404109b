"""Puts the examples into the wheel, as data: `vecenv train` and `vecenv demo` run them from there.

All else stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies examples/*.py to vecenv/examples, which editable installations do without."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "vecenv", "examples")
            self.mkpath(str(folder))
            for file in sorted(Path("examples").glob("*.py")):
                self.copy_file(str(file), str(folder / file.name))


setup(cmdclass={"build_py": BuildWithExamples})
