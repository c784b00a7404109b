"""Compile functions that only compiled code calls as parts of it, without their own machine code.

Numba optimises each function together with all that it calls, and makes machine code of that, once
for every level of calls. Only the outermost one is ever called: all others need to be there as LLVM
code, which is optimised once, in the module of the outermost function that they are linked into.
CAGE 4 then compiles in three quarters of the time. There they are private, so LLVM inlines what is
called from one place whatever its size, and after it has simplified it: envs step up to 18 % faster
for that. Functions with `forceinline` are inlined before anything is simplified; with those, CAGE 2
took 5 % longer a step.

Functions here must not call one another in turn (one that calls itself is fine): Numba looks for
their addresses in machine code.

What is replaced here is no stable interface of Numba's. Where parts of it are missing, functions
are compiled as Numba does.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import IRLegalization, NoPythonBackend

__all__ = ["CAN_LINK", "LinkedCompiler", "OutermostCompiler"]

CAN_LINK = all(
    hasattr(JITCodeLibrary, name)
    for name in (
        "_finalize_dynamic_globals",
        "_finalize_final_module",
        "_optimize_final_module",
        "get_pointer_to_function",
    )
)
_ENVIRONMENT = "_ZN08NumbaEnv"  # with which names of environments begin in machine code


class _LinkedLibrary(JITCodeLibrary):
    """Code of one function, to be linked into that of others."""

    def _optimize_final_module(self) -> None:
        """Leave that to the library of the outermost function."""

    def _finalize_final_module(self) -> None:
        """Make no machine code."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """Itself: Numba asks it for `set_env` only, for machine code."""
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Leave that to `_SetEnvironments`."""


class _OutermostLibrary(JITCodeLibrary):
    """Code of one function, with all that it calls."""

    def _optimize_final_module(self) -> None:
        """Make what it calls private before that.

        Not Numba's counters of references: were this linked into another function, LLVM would give
        those of one module other names, by which Numba no longer finds them.
        """
        for function in self._final_module.functions:
            is_linked_in = not function.is_declaration and function.linkage.name == "linkonce_odr"
            if is_linked_in and not function.name.startswith("NRT_"):
                function.linkage = "internal"
        super()._optimize_final_module()


class _ChooseLibrary(AnalysisPass):
    """Give a function a library of another kind before it is lowered."""

    library: type[JITCodeLibrary]

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        codegen = state.targetctx.codegen()
        state.library = self.library(codegen, state.func_id.func_qualname)
        state.library.enable_object_caching()  # as Numba's own pass does
        return False


@register_pass(mutates_CFG=False, analysis_only=True)
class _Link(_ChooseLibrary):
    _name = "vecenv_link"
    library = _LinkedLibrary


@register_pass(mutates_CFG=False, analysis_only=True)
class _MakePrivate(_ChooseLibrary):
    _name = "vecenv_make_private"
    library = _OutermostLibrary


@register_pass(mutates_CFG=False, analysis_only=True)
class _SetEnvironments(AnalysisPass):
    """Tell machine code where the environments are of the functions that are linked into it."""

    _name = "vecenv_set_environments"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        codegen = state.targetctx.codegen()
        for variable in state.library._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT):
                environment = lookup_environment(variable.name)
                if environment is not None:
                    codegen.set_env(variable.name, environment)
        return False


class LinkedCompiler(Compiler):
    """Compiles functions that only compiled functions call."""

    def define_pipelines(self) -> list[Any]:
        """Return Numba's, with a pass more."""
        return _with_pass(super().define_pipelines(), _Link, after=IRLegalization)


class OutermostCompiler(Compiler):
    """Compiles functions that call those of `LinkedCompiler`."""

    def define_pipelines(self) -> list[Any]:
        """Return Numba's, with two passes more."""
        managers = _with_pass(super().define_pipelines(), _MakePrivate, after=IRLegalization)
        return _with_pass(managers, _SetEnvironments, after=NoPythonBackend)


def _with_pass(managers: list[Any], added: Any, *, after: Any) -> list[Any]:
    for manager in managers:
        manager.add_pass_after(added, after)
        manager.finalize()
    return managers
