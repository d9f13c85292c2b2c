"""Locates kernels in the user's code: the module of the model and the source line.

Both are read from Python's stack while an operator is traced: the innermost named module, and the innermost frame
outside PyTorch, Python's library and this package. The autograd engine has no such frames. In a backward pass the
sequence number of the executing autograd node identifies the forward operator, whose place is used. Checkpoints execute
forward code within a backward pass, where the frames give the place.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.autograd import graph

from simulator.program import Phase
from simulator.report import Place


class Places:
    """Determines the source location of each operator when it is dispatched.

    Args:
        modules: Module paths by module id.
        parameters: Paths of the owning modules by parameter id.
        outside: Name used for operators outside any module.
    """

    def __init__(self, modules: Mapping[int, str], parameters: Mapping[int, str], outside: str) -> None:
        self.modules, self.parameters, self.outside = modules, parameters, outside
        self._task = -1  # backward pass of the last operator; -1 if none
        self._parent: dict[int, int] = {}  # backward pass -> backward pass in which its nodes were created
        self._made: dict[int, dict[int, Place]] = {-1: {}}  # per backward pass: sequence number -> place of creation
        self._next = 0  # sequence number of the next node
        self._last = Place(outside, "")

    def of(self, phase: Phase) -> Place:
        """Returns the source location of the operator being dispatched; must be called once per operator, in order."""
        before, self._task = self._task, torch._C._current_graph_task_id()
        task = self._task
        if task != -1:
            self._parent.setdefault(task, before)
        module, line = self._stack(task != -1)
        if phase == "optimizer":
            place = Place("optimizer", line)
        elif task == -1:
            place = Place(self.outside if module is None else module, line)
        else:
            place = self._of_node(task)
            if module is not None:  # of a checkpoint
                place = Place(module, line or place.line)
        # The engine's GPU threads have their own counters, so existing entries are kept.
        made, now = self._made.setdefault(task, {}), torch.autograd._get_sequence_nr()
        for number in range(self._next if self._next <= now else now - 1, now):
            made.setdefault(number, place)
        self._next, self._last = now, place
        return place

    def _stack(self, backward: bool) -> tuple[str | None, str]:
        """Returns the innermost module's path (or None) and the user's line (or ""), within the current engine."""
        module, line = None, ""
        frame = sys._getframe(3)
        while frame is not None and (module is None or not line):
            code = frame.f_code
            owner = _owner(code.co_filename)
            if owner == "user":
                line = line or f"{_named(frame)}:{frame.f_lineno}"
            elif owner == "capture":
                break  # outer frames belong to the caller of the capture
            elif code is _CALL and module is None:
                module = self.modules.get(id(frame.f_locals["self"]))
            elif code is _ENGINE and backward:
                break
            frame = frame.f_back
        return module, line

    def _of_node(self, task: int) -> Place:
        """Returns the source location of the executing autograd node, or of the last one if none is executing."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last
        if (variable := getattr(node, "variable", None)) is not None:  # it accumulates a leaf's gradient
            return Place(self.parameters.get(id(variable), self.outside), "")
        number = node._sequence_nr()
        for made in (self._made.get(self._parent[task], {}), *self._made.values()):
            if number in made:
                return made[number]
        return self._last


def _named(frame: FrameType) -> str:
    """Returns a frame's file relative to its package's parent ("transformers/models/…"), or a script's name."""
    file = frame.f_code.co_filename.rpartition("/")[2]
    packages = str(frame.f_globals.get("__package__") or "").split(".")
    return "/".join([*filter(None, packages), file])


def users(file: str) -> bool:
    """Returns whether this file is the user's own code."""
    return _owner(file) == "user"


def _owner(file: str) -> str:
    if file not in _OWNERS:
        library = file.startswith(_LIBRARY) and not any(part in file for part in ("site-packages", "dist-packages"))
        known = library or file.startswith((_TORCH, _HERE)) or "<" in file
        _OWNERS[file] = "capture" if file == _CAPTURE else "known" if known else "user"
    return _OWNERS[file]


_OWNERS: dict[str, str] = {}
_TORCH = str(Path(torch.__file__).parent) + "/"
_HERE = str(Path(__file__).parents[1]) + "/"
_CAPTURE = str(Path(__file__).with_name("capture.py"))
_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
_CALL, _ENGINE = nn.Module._call_impl.__code__, graph._engine_run_backward.__code__
