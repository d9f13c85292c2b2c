"""Places: the module of the user's model in which a kernel of a step runs, and the line of the user's code.

Both are read off Python's stack while an operator is traced: the innermost module that has a name, and the innermost
frame that is of neither PyTorch, nor Python's library, nor this package. The engine that runs a backward pass has no
such frames. There, the node that runs has the number that autograd gave it when the forward operator was traced, and
with it that operator's place. Checkpoints run forward code within a backward pass: its frames say where.
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
    """Places of operators, asked for as each is dispatched.

    Args:
        modules: id of a module -> its path.
        parameters: id of a parameter -> the path of its module.
        outside: the name for what runs in no module.
    """

    def __init__(self, modules: Mapping[int, str], parameters: Mapping[int, str], outside: str) -> None:
        self.modules, self.parameters, self.outside = modules, parameters, outside
        self._task = -1  # the backward pass that the last operator was in; -1: none
        self._parent: dict[int, int] = {}  # backward pass -> that in which its nodes were made
        self._made: dict[int, dict[int, Place]] = {-1: {}}  # by backward pass: number of a node -> where it was made
        self._next = 0  # the number of the node that is made next
        self._last = Place(outside, "")

    def of(self, phase: Phase) -> Place:
        """The place of the operator that the caller's caller dispatches; to be called once for each, in order."""
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
        # The engine's threads for GPUs count on their own: what has a place keeps it.
        made, now = self._made.setdefault(task, {}), torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        for number in range(self._next if self._next <= now else now - 1, now):
            made.setdefault(number, place)
        self._next, self._last = now, place
        return place

    def _stack(self, backward: bool) -> tuple[str | None, str]:
        """The innermost module's path (None: in none) and the user's line ("": none), within the present engine."""
        module, line = None, ""
        frame = sys._getframe(3)
        while frame is not None and (module is None or not line):
            code = frame.f_code
            owner = _owner(code.co_filename)
            if owner == "user":
                line = line or f"{_named(frame)}:{frame.f_lineno}"
            elif owner == "capture":
                break  # all outside of it called the capture
            elif code is _CALL and module is None:
                module = self.modules.get(id(frame.f_locals["self"]))
            elif code is _ENGINE and backward:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return module, line

    def _of_node(self, task: int) -> Place:
        """Of the node of autograd that runs; between two, where gradients meet, that of the last."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last
        if (variable := getattr(node, "variable", None)) is not None:  # its gradient is taken in
            return Place(self.parameters.get(id(variable), self.outside), "")
        number = node._sequence_nr()
        for made in (self._made.get(self._parent[task], {}), *self._made.values()):
            if number in made:
                return made[number]
        return self._last


def _named(frame: FrameType) -> str:
    """A frame's file below its package's folder: "transformers/models/t5/modeling_t5.py"; a script's own name."""
    file = frame.f_code.co_filename.rpartition("/")[2]
    packages = str(frame.f_globals.get("__package__") or "").split(".")
    return "/".join([*filter(None, packages), file])


def users(file: str) -> bool:
    """Whether a frame of this file is of the user's own code."""
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
_CALL, _ENGINE = nn.Module._call_impl.__code__, graph._engine_run_backward.__code__  # type: ignore[attr-defined]
