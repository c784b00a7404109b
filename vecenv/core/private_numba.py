"""The private parts of Numba that compiling kernels for the CPU uses; tested with Numba 0.68.

*Linking.* Numba optimises each function together with all that it calls, and makes machine code of
the result, again for every level of calls. Only the outermost function is ever called. All others
exist only as LLVM code, which is linked into the module of the outermost function and optimised
once, there. CAGE 4 then compiles in three quarters of the time. Linked functions are private, so
LLVM inlines a function with one caller whatever its size, after simplifying it: envs step up to
18 % faster for that. (Functions with `forceinline` are inlined before anything is simplified.)
Linked functions must not call one another in turn (one that calls itself is fine), as Numba looks
for their addresses in machine code. If parts of this are missing, `CAN_LINK` is False, and
functions are compiled as Numba does it.

*Symbols.* The names of machine code consist of the qualified name, a number and the argument types,
and Numba counts from one in every process. Functions that are neither inlined nor private are weak
symbols of the code kept on disk, and the linker takes the first definition of a name. So code
loaded from disk could call a function of the same name and number that was just compiled for
another constant or another record (whose types are numbered, too). To prevent that, no two
compilations in any process may have the same number: numbers start at a random one. Only names
change; Numba finds files without them. Where that can't be done, nothing is kept on disk.
"""

from __future__ import annotations

import itertools
import os
import re
import types
from typing import Any

from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler
from numba.core.typing.templates import builtin_registry

__all__ = [
    "CAN_LINK",
    "CAN_NUMBER",
    "Compiler",
    "Files",
    "LinkedCompiler",
    "OutermostCompiler",
    "calls_in_circles",
    "registered",
    "symbols_of_before",
]

CAN_NUMBER = hasattr(FunctionIdentity, "_unique_ids")
_FIRST_SYMBOL = 10**18
_SYMBOL_NUMBER = re.compile(r"B\d+v(\d+)")  # in a mangled name
_UNRESOLVED = ".numba.unresolved$"  # prefix of names of addresses that Numba fills in later
_ENVIRONMENT = "_ZN08NumbaEnv"  # prefix of names of environments in machine code


def _number_symbols_anew() -> None:
    FunctionIdentity._unique_ids = itertools.count(_FIRST_SYMBOL + int.from_bytes(os.urandom(8)))


if CAN_NUMBER:
    _number_symbols_anew()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_number_symbols_anew)


def symbols_of_before(library: Any) -> list[str]:
    """Return functions in compiled code whose numbers are from before this module was imported.

    Numba may compile parts of itself that early; other processes may give them the same names.
    """
    return [
        function.name
        for function in library.get_defined_functions()
        if any(int(number) < _FIRST_SYMBOL for number in _SYMBOL_NUMBER.findall(function.name))
    ]


def calls_in_circles(library: Any) -> list[str]:
    """Return functions in compiled code that call one another in turn.

    Numba gives their addresses to the code that it compiles, but not to code that it loads, which
    would then call missing functions.
    """
    names = [variable.name for variable in library._final_module.global_variables]
    return [name.removeprefix(_UNRESOLVED) for name in names if name.startswith(_UNRESOLVED)]


def registered(function: types.FunctionType) -> list[Any]:
    """Types that Numba knows for a plain function, which it replaces by a registered one."""
    return [kind for value, kind in builtin_registry.globals if value is function]


class Files(FunctionCache):
    """Numba's cache of one function whose name contains its fingerprint."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple()  # Numba's own key also contains the pickled closure


LinkedCompiler: type[Compiler] = Compiler  # of functions that only compiled functions call
OutermostCompiler: type[Compiler] = Compiler  # of functions that call such functions
CAN_LINK = False

try:
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler_machinery import AnalysisPass, register_pass
    from numba.core.environment import lookup_environment
    from numba.core.typed_passes import IRLegalization, NoPythonBackend
except ImportError:  # a version of Numba that has moved them
    pass
else:

    class _LinkedLibrary(JITCodeLibrary):
        """Code of one function, to be linked into that of others."""

        def _optimize_final_module(self) -> None:
            """Do nothing: the library of the outermost function does it."""

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
            """Return itself: Numba asks it for `set_env` only, unless it needs machine code."""
            return self

        def set_env(self, env_name: str, env: Any) -> None:
            """Do nothing: `_SetEnvironments` does it."""

    class _OutermostLibrary(JITCodeLibrary):
        """Code of one function, with all that it calls."""

        def _optimize_final_module(self) -> None:
            """Before that, make all callees private.

            Not Numba's reference counters: if this code were linked into another function, LLVM
            would rename those of one module, and Numba would no longer find them.
            """
            for function in self._final_module.functions:
                is_linked_in = not function.is_declaration
                is_linked_in = is_linked_in and function.linkage.name == "linkonce_odr"
                if is_linked_in and not function.name.startswith("NRT_"):
                    function.linkage = "internal"
            super()._optimize_final_module()

    class _Pass(AnalysisPass):
        def __init__(self) -> None:
            super().__init__()

    class _ChooseLibrary(_Pass):
        """Give a function a library of another kind before it is lowered."""

        library: type[JITCodeLibrary]

        def run_pass(self, state: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            codegen = state.targetctx.codegen()
            state.library = self.library(codegen, state.func_id.func_qualname)
            state.library.enable_object_caching()  # as Numba's own pass does
            return False

    @register_pass(mutates_CFG=False, analysis_only=True)
    class _Link(_ChooseLibrary):
        _name, library = "vecenv_link", _LinkedLibrary

    @register_pass(mutates_CFG=False, analysis_only=True)
    class _MakePrivate(_ChooseLibrary):
        _name, library = "vecenv_make_private", _OutermostLibrary

    @register_pass(mutates_CFG=False, analysis_only=True)
    class _SetEnvironments(_Pass):
        """Tell machine code the addresses of the environments of the functions linked into it."""

        _name = "vecenv_set_environments"

        def run_pass(self, state: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            codegen = state.targetctx.codegen()
            for variable in state.library._final_module.global_variables:
                if variable.name.startswith(_ENVIRONMENT):
                    environment = lookup_environment(variable.name)
                    if environment is not None:
                        codegen.set_env(variable.name, environment)
            return False

    def _compiler(*passes: tuple[Any, Any]) -> type[Compiler]:
        """Return Numba's compiler with additional passes, each after a given one."""

        class WithPasses(Compiler):
            def define_pipelines(self) -> list[Any]:
                managers = super().define_pipelines()
                for manager in managers:
                    for added, before in passes:
                        manager.add_pass_after(added, before)
                    manager.finalize()
                return managers

        return WithPasses

    CAN_LINK = hasattr(JITCodeLibrary, "_finalize_dynamic_globals") and hasattr(
        JITCodeLibrary, "_optimize_final_module"
    )
    LinkedCompiler = _compiler((_Link, IRLegalization))
    OutermostCompiler = _compiler(
        (_MakePrivate, IRLegalization), (_SetEnvironments, NoPythonBackend)
    )
