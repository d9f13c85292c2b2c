"""Options of environments: a frozen dataclass that callers pass as separate arguments, and their checks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, get_type_hints

# Former spellings of options and of their values, accepted with a warning until the next version.
FORMER = {"neighbours": "neighbors"}


def one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Returns ``value``; raises ValueError unless it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    return value


def flat_options(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates an ``__init__`` so that callers pass the fields of its argument ``options``, a dataclass, in its place.

    Thus an environment and its vector form share the list of options, and ``gymnasium.make`` takes each by name.
    """
    options_class = get_type_hints(init)["options"]
    fields = inspect.signature(options_class).parameters
    own = inspect.signature(init)
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        parameters += fields.values() if parameter.name == "options" else [parameter]
    signature = own.replace(parameters=parameters)

    @wraps(init)
    def flat_init(*args: Any, **kwargs: Any) -> None:
        for former in FORMER.keys() & kwargs.keys():
            if FORMER[former] not in kwargs:
                kwargs[_current(former)] = kwargs.pop(former)
        arguments = signature.bind(*args, **kwargs).arguments
        options = {name: _current(arguments.pop(name)) for name in fields if name in arguments}
        init(**arguments, options=options_class(**options))

    vars(flat_init)["__signature__"] = signature
    return flat_init


def _current(word: Any) -> Any:
    """Returns the current spelling of an option or a value, with a warning if it has changed."""
    if isinstance(word, str) and word in FORMER:
        warnings.warn(f"{word!r} is now spelled {FORMER[word]!r}", DeprecationWarning, stacklevel=3)
        return FORMER[word]
    return word
