"""``jit``: numba.njit with a cache that depends on everything that is compiled in.

Numba compiles the values of global names into a function, but invalidates its cache only if the function's own file
changes: constants and functions of other files go stale silently. ``jit`` appends a hash of all compiled-in values to
``__qualname__``, which is part of the cache's file name, so that a changed function is recompiled.

If several processes need a function, one compiles it; the others wait and load it from the cache.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import njit, typeof, types
from numba.core import cgutils
from numba.core.compiler import Flags
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, is_jitted

from simulator.files import no_collections

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)
_LIBRARIES = ("numpy", "numba", "math")
LOCK_TIMEOUT_S = 120.0  # seconds that a process waits for another one to compile before it compiles itself

_types: Any = types  # its functions are not typed
_cgutils: Any = cgutils

# Numba compares its flags, which are dictionary keys, property by property: a fifth of the compile time.
_flags: Any = Flags
_flags.__eq__ = lambda self, other: isinstance(other, Flags) and self._values == other._values
_flags.__hash__ = lambda self: hash(tuple(sorted(self._values)))


def jit(function: Any = None, **options: Any) -> Any:
    """Decorates with ``numba.njit(cache=True, **options)``; recompiles if anything that is compiled in has changed.

    Raises:
        TypeError: A global name has no stamp: one of our modules or objects, a function of plain ``njit``, or a name
            that is defined only below.
    """
    if function is None:
        return lambda function: jit(function, **options)
    stamped(function, repr(sorted(options.items())))
    function.__qualname__ += "_" + function.stamp
    options = {"cache": True} | options
    try:
        out: Any = njit(**options)(function)
    except RuntimeError as error:  # neither the installation nor the home folder is writable
        if not options["cache"] or "no locator" not in str(error):
            raise
        _uncached()
        out = njit(**options | {"cache": False})(function)
    out.compile = _exclusively(out)
    for owner, name, fallback in (
        (getattr(out._cache, "_cache_file", None), "_load_index", dict),  # damaged, or of a removed type
        (out._cache, "load_overload", lambda: None),  # damaged
        (out._cache, "save_overload", lambda: None),  # disk full
    ):
        if hasattr(owner, name):
            setattr(owner, name, _with_fallback(getattr(owner, name), fallback))
    return out


@cache
def _uncached() -> None:
    """Warns once that every process will compile for itself."""
    print("compiled code is not cached: set NUMBA_CACHE_DIR to a writable folder", file=sys.stderr)


def stage(function: Any = None, entry: bool = False, inline: bool = False) -> Any:
    """Applies ``jit`` to a function without allocation or division by 0: no reference counts, no GIL.

    Args:
        entry: Whether Python calls the function, too. Others are compiled into their callers and not cached themselves.
        inline: Whether LLVM must inline it.

    Returns:
        The compiled function, or a decorator if ``function`` is None.
    """
    if function is None:
        return lambda function: stage(function, entry, inline)
    out = jit(
        function,
        _nrt=False,
        nogil=True,
        error_model="numpy",
        no_cfunc_wrapper=True,
        no_cpython_wrapper=not entry,
        cache=entry,
        forceinline=inline,
        no_rewrites=not entry,
    )
    by_types = out.get_call_template
    # Numba would specialize it for every constant argument.
    out.get_call_template = lambda args, kws: by_types([_types.unliteral(a) for a in args], kws)
    return out


def _exclusively(dispatcher: Any) -> Callable[[Any], Any]:
    """Returns a dispatcher's ``compile``, restricted to one process at a time and without garbage collection.

    The compiler allocates very many objects, most of which live until it is done.
    """
    call = dispatcher.compile

    def run(signature: Any) -> Any:
        # Numba's own lock first, so that a thread that waits for another process does not block other threads.
        with global_compiler_lock, _compile_lock(dispatcher._cache, signature):
            with no_collections():
                return call(signature)  # checks the cache first

    return run


def _with_fallback(call: Callable[..., Any], fallback: Callable[[], Any]) -> Callable[..., Any]:
    """Returns a cache function ``call`` that falls back to ``fallback`` on any exception."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception:  # unpickling damaged or outdated files may raise anything
            return fallback()

    return run


def _compile_lock(cache: Any, signature: Any) -> AbstractContextManager[Any]:
    """Waits until no other live process compiles the function for this signature."""
    if fcntl is None or cache.cache_path is None:  # nothing is shared
        return nullcontext()
    name = f"{cache._impl.filename_base}-{hashlib.sha256(str(signature).encode()).hexdigest()[:16]}.lock"
    try:
        lock = open(os.path.join(cache.cache_path, name), "ab")
    except OSError:  # the folder cannot be written
        return nullcontext()
    until = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # the file system has no locks
            break
    return lock  # released when closed


def stamped(function: Any, options: str = "") -> Any:
    """Returns the function with a ``stamp`` of everything that is compiled in."""
    text = "\n".join([*_dependencies(function), options])
    function.stamp = hashlib.sha256(text.encode()).hexdigest()[:16]
    return function


def _dependencies(function: FunctionType) -> Iterator[str]:
    """Yields all that the compiled function depends on: code, defaults, constants, and values of its global names."""
    where = f"{function.__module__}.{function.__qualname__}"
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    yield _text(function.__defaults__, f"{where}: a default")
    yield from (f"{name} = {_text(cell.cell_contents, f'{where}: {name}')}" for name, cell in cells.items())
    codes = [function.__code__]
    for code in codes:  # nested functions are appended
        yield code.co_code.hex()
        yield repr(code.co_names)  # attributes; the code has only their positions
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        yield from (_text(c, f"{where}: a constant") for c in code.co_consts if not isinstance(c, CodeType))
        for name in sorted(_globals(code) - {function.__name__}):
            if name in function.__globals__:
                yield f"{name} = {_text(function.__globals__[name], f'{where}: {name}')}"
            elif not hasattr(builtins, name):
                raise TypeError(f"{where}: {name} must be defined above it")


def _globals(code: CodeType) -> set[str]:
    """Returns the global names that a code object refers to; like dis.get_instructions, but 40 times faster."""
    names = set()
    extended = 0
    for op, arg in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        arg |= extended
        extended = arg << 8 if op == dis.EXTENDED_ARG else 0
        if op == dis.opmap["LOAD_GLOBAL"]:
            names.add(code.co_names[arg >> 1])
    return names


def _text(value: Any, where: str) -> str:
    """Returns the text by which a value is stamped."""
    if isinstance(value, _VALUES):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(_text(v, where) for v in value)})"
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
        return f"{value.__module__}.{value.__qualname__}({', '.join(value._fields)})"
    if isinstance(value, type) and issubclass(value, Enum):
        return f"{value.__module__}.{value.__qualname__}({[(member.name, member.value) for member in value]})"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype!r} {value.shape} {value.tobytes().hex()}"
    function: Any = value.py_func if is_jitted(value) else value
    if isinstance(getattr(function, "stamp", None), str):
        return str(function.stamp)
    if function is value:
        module_name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        if module_name.partition(".")[0] in _LIBRARIES:
            return f"{module_name}.{getattr(value, '__name__', '')}"
    raise TypeError(f"{where} is {value!r}, which cannot be stamped: import the constant or the jit function itself")


def address(function: Any, *args: Any) -> int:
    """Returns the address of a ``stage`` function compiled for arguments like these; compiles it if necessary."""
    kinds = tuple(map(typeof, args))
    function.compile(kinds)
    found = function.overloads[kinds]
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))


@intrinsic
@stamped
def call(typing, where, like, args):
    """Calls the function at an ``address`` from compiled code.

    A call by name would make LLVM optimize the function again as a part of its caller.

    Args:
        like: A value of the return type.
        args: A tuple of exactly the argument types that were passed to ``address``.
        typing: Numba's typing context.
        where: Address of the function.

    Returns:
        The function's result.
    """
    kinds = [_types.unliteral(kind) for kind in args]
    returned = _types.Tuple([_types.unliteral(kind) for kind in like])

    def code(context, builder, signature, values):
        function = context.call_conv.get_function_type(returned, kinds)
        pointer = builder.inttoptr(values[0], function.as_pointer())
        arguments = _cgutils.unpack_tuple(builder, values[2])
        status, out = context.call_conv.call_function(builder, pointer, returned, kinds, arguments)
        with _cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return out

    return returned(where, returned, _types.Tuple(kinds)), code
