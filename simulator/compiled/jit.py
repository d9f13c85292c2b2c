"""``jit``: numba.njit with a cache that knows what was compiled in.

Numba compiles the values of global names into a function, and takes the function from its cache as long as the
function's own file is unchanged: a constant or a function of another file goes stale there without a word. ``jit``
adds a stamp of all that is compiled in to ``__qualname__``, which is part of the name of the file in the cache: after
a change the function is looked for under another name, not found, and compiled.

Of several processes that need a function only one compiles it; the others wait, and find it in the cache.
"""

from __future__ import annotations

import builtins
import dis
import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import njit, typeof, types
from numba.core import cgutils
from numba.core.compiler import Flags
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, is_jitted

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)
_LIBRARIES = ("numpy", "numba", "math")
PATIENCE = 120.0  # seconds: then a process compiles, whatever another that was at it first does

_types: Any = types  # its functions are not typed
_cgutils: Any = cgutils

# Numba's flags are keys of its tables, and are compared property by property: a fifth of the time that it compiles.
_flags: Any = Flags
_flags.__eq__ = lambda self, other: isinstance(other, Flags) and self._values == other._values
_flags.__hash__ = lambda self: hash(tuple(sorted(self._values)))


def jit(function: Any = None, **options: Any) -> Any:
    """Decorator: ``numba.njit(cache=True, **options)``, compiled anew when anything that it compiles in has changed.

    Raises:
        TypeError: a global name in it has no stamp: a module or object of ours, a function of plain ``njit``, or what
            is defined only below.
    """
    if function is None:
        return lambda function: jit(function, **options)
    _stamped(function, repr(sorted(options.items())))
    function.__qualname__ += "_" + function.stamp
    options = {"cache": True} | options
    try:
        out: Any = njit(**options)(function)
    except RuntimeError as error:  # neither the installation nor the home can be written
        if not options["cache"] or "no locator" not in str(error):
            raise
        _uncached()
        out = njit(**options | {"cache": False})(function)
    out.compile = _considerately(out)
    for owner, name, otherwise in (
        (getattr(out._cache, "_cache_file", None), "_load_index", dict),  # of a type that is no more, or damaged
        (out._cache, "load_overload", lambda: None),  # damaged: not cached
        (out._cache, "save_overload", lambda: None),  # a full disk: not saved
    ):
        if hasattr(owner, name):
            setattr(owner, name, _forgivingly(getattr(owner, name), otherwise))
    return out


@cache
def _uncached() -> None:
    """Says once that every process will compile for itself."""
    print("compiled code is not kept: set NUMBA_CACHE_DIR to a folder that can be written", file=sys.stderr)


def stage(function: Any = None, entry: bool = False, inline: bool = False) -> Any:
    """``jit`` for what allocates nothing and never divides by 0: without reference counts, without the GIL.

    Args:
        entry: it is called from Python, too. What is not is compiled with what calls it, and not cached by itself.
        inline: LLVM has to inline it.
    """
    if function is None:
        return lambda function: stage(function, entry, inline)
    out = jit(
        function, _nrt=False, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=not entry,
        cache=entry, forceinline=inline, no_rewrites=not entry,
    )  # fmt: skip
    by_types = out.get_call_template
    # Numba would compile it once for every constant that it is called with, and once where it is not one.
    out.get_call_template = lambda args, kws: by_types([_types.unliteral(a) for a in args], kws)
    return out


def _considerately(dispatcher: Any) -> Callable[[Any], Any]:
    """Its ``compile``, by one process at a time and without garbage collections: the compiler makes very many objects,
    and most of them stay until it is done."""
    call = dispatcher.compile

    def run(signature: Any) -> Any:
        # Numba's own lock first: a thread that waits for another process must not keep what the others wait for.
        with global_compiler_lock, _alone(dispatcher._cache, signature):
            collects = gc.isenabled()
            gc.disable()
            try:
                return call(signature)  # which looks into the cache first
            finally:
                if collects:
                    gc.enable()

    return run


def _forgivingly(call: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
    """``call`` of a cache, which is only there to save time: where it fails, it is as if there were none."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception:  # unpickling what is damaged, or of another version, may raise any
            return otherwise()

    return run


def _alone(cache: Any, signature: Any) -> AbstractContextManager[Any]:
    """Waits until no other process compiles the function for this signature; for one that died it does not wait."""
    if fcntl is None or cache.cache_path is None:  # nothing is shared
        return nullcontext()
    name = f"{cache._impl.filename_base}-{hashlib.sha256(str(signature).encode()).hexdigest()[:16]}.lock"
    try:
        lock = open(os.path.join(cache.cache_path, name), "ab")
    except OSError:  # the folder cannot be written
        return nullcontext()
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # the file system has no locks
            break
    return lock  # closed, it is free again


def _stamped(function: Any, options: str = "") -> Any:
    """The function, with a ``stamp`` of all that is compiled in with it."""
    text = "\n".join([*_compiled_in(function), options])
    function.stamp = hashlib.sha256(text.encode()).hexdigest()[:16]
    return function


def _compiled_in(function: FunctionType) -> Iterator[str]:
    """All that the compiled function depends on: its code, defaults and constants, and what its global names mean."""
    where = f"{function.__module__}.{function.__qualname__}"
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    yield _text(function.__defaults__, f"{where}: a default")
    yield from (f"{name} = {_text(cell.cell_contents, f'{where}: {name}')}" for name, cell in cells.items())
    codes = [function.__code__]
    for code in codes:  # grows by the functions inside
        yield code.co_code.hex()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        yield from (_text(c, f"{where}: a constant") for c in code.co_consts if not isinstance(c, CodeType))
        for name in sorted(_globals(code) - {function.__name__}):
            if name in function.__globals__:
                yield f"{name} = {_text(function.__globals__[name], f'{where}: {name}')}"
            elif not hasattr(builtins, name):
                raise TypeError(f"{where}: {name} has to be defined above it")


def _globals(code: CodeType) -> set[str]:
    """The global names that a code refers to; dis.get_instructions finds the same in 40 times as long."""
    names, extended = set(), 0
    for op, arg in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        arg |= extended
        extended = arg << 8 if op == dis.EXTENDED_ARG else 0
        if op == dis.opmap["LOAD_GLOBAL"]:
            names.add(code.co_names[arg >> 1])
    return names


def _text(value: Any, where: str) -> str:
    """What a value is stamped by."""
    if isinstance(value, _VALUES):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(_text(v, where) for v in value)})"
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
        return f"{value.__module__}.{value.__qualname__}({', '.join(value._fields)})"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype!r} {value.shape} {value.tobytes().hex()}"
    function: Any = value.py_func if is_jitted(value) else value
    if isinstance(getattr(function, "stamp", None), str):
        return str(function.stamp)
    if function is value:
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        if home.partition(".")[0] in _LIBRARIES:
            return f"{home}.{getattr(value, '__name__', '')}"
    raise TypeError(f"{where} is {value!r}, which cannot be stamped: import the constant or the jit function itself")


def address(function: Any, *args: Any) -> int:
    """Where the code of a ``stage`` for arguments like these is; it is compiled where it is not there yet."""
    kinds = tuple(map(typeof, args))
    function.compile(kinds)
    found = function.overloads[kinds]
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))


@intrinsic
@_stamped
def call(typing, where, like, args):  # type: ignore[no-untyped-def]
    """In compiled code: what the function at an ``address`` returns. By its name it would be optimised once more, as a
    part of what calls it.

    Args:
        like: of the type of what it returns.
        args: a tuple, of the very types that ``address`` was asked for.
    """
    kinds = [_types.unliteral(kind) for kind in args]
    returned = _types.Tuple([_types.unliteral(kind) for kind in like])

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        function = context.call_conv.get_function_type(returned, kinds)
        pointer = builder.inttoptr(values[0], function.as_pointer())
        given = _cgutils.unpack_tuple(builder, values[2])
        status, out = context.call_conv.call_function(builder, pointer, returned, kinds, given)
        with _cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return out

    return returned(where, returned, _types.Tuple(kinds)), code
