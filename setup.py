"""Puts the examples into the wheel, as data: `vecenv train` and `vecenv demo` run them from there.

All else stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies the examples and their zoo to vecenv/examples; editable installations do without."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            zoo = [
                f for f in Path("examples/zoo").rglob("*") if f.suffix in (".toml", ".json", ".pt")
            ]
            for file in sorted([*Path("examples").glob("*.py"), *zoo]):
                target = Path(self.build_lib, "vecenv", file)
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithExamples})
