import ast
import importlib
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import shape_checks
from jaxtyping import TypeCheckError

ROOT = Path(__file__).parents[1]
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["vecenv"]

ROWS_MODULE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import numpy as np
if TYPE_CHECKING:
    from jaxtyping import Bool, Float32

def keep_rows(
    rows: Float32[np.ndarray, "envs obs"], keep: Bool[np.ndarray, " envs"]
) -> Float32[np.ndarray, "kept obs"]:
    return rows[keep]
"""


def test_shape_and_dtype_errors_are_found(tmp_path, monkeypatch):
    (tmp_path / "module_with_rows.py").write_text(ROWS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    shape_checks.install(["module_with_rows"])
    keep_rows = importlib.import_module("module_with_rows").keep_rows
    rows, keep = np.zeros((3, 2), np.float32), np.array([True, False, True])

    assert keep_rows(rows, keep).shape == (2, 2)
    for wrong in [(rows, keep[:2]), (rows.astype(np.float64), keep), (rows, keep.tolist())]:
        with pytest.raises(TypeCheckError):
            keep_rows(*wrong)


@pytest.mark.parametrize("name", LISTED["shape-checked-modules"] or [None])
def test_listed_modules_postpone_annotations_and_are_not_compiled(name):
    if name is None:
        return  # nothing listed yet
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    source = path.read_text()
    assert "from __future__ import annotations" in source
    imported = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {"njit", "numba"} & imported, "Numba cannot compile the checker's wrapper"
