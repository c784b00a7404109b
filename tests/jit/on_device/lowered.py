"""What numba-cuda has lowered, run on the processor: the code for a device without a device.

The texts that libNVVM gets are LLVM's language for another machine. Here the pointers' types, which
LLVM has given up, are taken out of them, registers with the number of a thread become a loop, and
LLVM compiles the whole for the processor. So types, widths of integers, control flow and every
address are those of a device; what is left out are libNVVM, ptxas and the device itself.
"""

import ctypes
import re

import llvmlite.binding as llvm
from jit.on_device.host_device import HostDevice

from vecenv.jit.cuda import compiler
from vecenv.jit.cuda.compiler import ARGUMENTS

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\*|[^"*]+')
_CLOSING = {")": "(", "}": "{", "]": "[", ">": "<"}
_SPACE = re.compile(r"addrspace\((\d+)\)\s*$")
_LOOP = """
declare void @{entry}({types})
@vecenv_thread = external global i32
define void @vecenv_all(i64 %rows, {named}) {{
begin:
  br label %next
next:
  %row = phi i64 [0, %begin], [%after, %body]
  %is_left = icmp slt i64 %row, %rows
  br i1 %is_left, label %body, label %end
body:
  %thread = trunc i64 %row to i32
  store i32 %thread, ptr @vecenv_thread
  call void @{entry}({named})
  %after = add i64 %row, 1
  br label %next
end:
  ret void
}}
"""
_REGISTERS = """
@vecenv_thread = global i32 0
define i32 @vecenv_tid() {
  %1 = load i32, ptr @vecenv_thread
  ret i32 %1
}
define i32 @vecenv_zero() {
  ret i32 0
}
define i32 @vecenv_one() {
  ret i32 1
}
"""
_NAMES = {
    "llvm.nvvm.read.ptx.sreg.tid.x": "vecenv_tid",
    "llvm.nvvm.read.ptx.sreg.ntid.x": "vecenv_one",
    "llvm.nvvm.read.ptx.sreg.ctaid.x": "vecenv_zero",
}
_MATH = re.compile(r'@"?__nv_(\w+)"?')


def untyped(text):
    """Return text in LLVM's language whose pointers have no types."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("target ", "!nvvm")):
            continue
        lines.append(_untyped_line(line) if "*" in line else line)
    return "\n".join(lines)


def _untyped_line(line):
    done = ""
    for token in _TOKENS.findall(line):
        if token != "*":
            done += token
            continue
        start, space = _type_before(done)
        done = done[:start] + "ptr" + space
    return done


def _type_before(text):
    """Return where the type begins that ends here, and its address space."""
    end, space = len(text.rstrip()), ""
    if (found := _SPACE.search(text)) is not None:
        end = len(text[: found.start()].rstrip())
        space = f" addrspace({found[1]})"
    if text[end - 1] == ")":  # of a function: the type it returns comes before
        start = len(text[: _opening(text, end)].rstrip())
        return _type_before(text[:start])[0], space
    if text[end - 1] in _CLOSING:
        return _opening(text, end), space
    return end - len(re.search(r'(?:%"[^"]*"|[\w.%]+)$', text[:end])[0]), space


def _opening(text, end):
    depth = 0
    for place in range(end - 1, -1, -1):
        depth += (text[place] in _CLOSING) - (text[place] in _CLOSING.values())
        if depth == 0:
            return place
    raise AssertionError(text)


class LoweredDevice(HostDevice):
    """A device whose code is run by the processor, thread after thread."""

    def load(self, kernels, params):
        run = compiled(compiler.lower(kernels, params))[0]

        def launch(num_rows, arguments):
            run(num_rows, *arguments.tolist())

        return launch


_compiled = {}  # engines must be kept


def compiled(program):
    """Compile a program for the processor; return a function of the rows and ARGUMENTS."""
    if program not in _compiled:
        _compiled[program] = compiled_texts(program, ["i64"] * len(ARGUMENTS))
    return _compiled[program]


_C_TYPES = {"ptr": ctypes.c_int64, "i64": ctypes.c_int64}
_C_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double}


def compiled_texts(program, kinds):
    """The same of whatever has `modules` and `entry`, with arguments of LLVM's types.

    Returns:
        The function, and what must be kept as long as it.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    main = None
    named = ", ".join(f"{kind} %a{k}" for k, kind in enumerate(kinds))
    types = ", ".join(kinds)
    texts = [untyped(text) for text in program.modules]
    texts += [_REGISTERS, _LOOP.format(entry=program.entry, types=types, named=named)]
    for text in texts:
        for name, ours in _NAMES.items():
            text = text.replace(f'@"{name}"', f"@{ours}")
        module = llvm.parse_assembly(_MATH.sub(r"@\1", text))  # the C library's
        module.verify()
        if main is None:
            main = module
        else:
            main.link_in(module)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    for one in list(main.functions):
        if not one.is_declaration and one.name != "vecenv_all":
            one.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(main, passes)
    engine = llvm.create_mcjit_compiler(main, machine)
    engine.finalize_object()
    address = engine.get_function_address("vecenv_all")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, *[_C_TYPES[kind] for kind in kinds])
    return kind(address), (engine, machine)
