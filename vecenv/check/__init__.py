"""check_vector_env: does a vector env follow Gymnasium's interface?"""

from __future__ import annotations

from vecenv.check.vector_env import CheckReport, VectorEnvCheckError, check_vector_env

__all__ = ["CheckReport", "VectorEnvCheckError", "check_vector_env"]
