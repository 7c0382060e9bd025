"""A user's own classes and functions, by import path or from a file in a recipe folder."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from relax.types import RelaxError


class PluginError(RelaxError, ValueError):
    """A class or function that cannot be used: says where it is and what is missing."""


def load_object(spec: str, base: Path | None) -> object:
    """The object named by `package.module:name` or `path/to/file.py:name`.

    A relative file path counts from `base`, or the current folder without one. A file is loaded
    once per process. Raises `PluginError` for a malformed spec, a module or file that is missing or
    fails to load, and an unknown name (with the nearest one).
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise PluginError(f"'{spec}' must look like package.module:name or path/to/file.py:name")
    module = _load_file(place, spec, base) if place.endswith(".py") else _import(place, spec)
    try:
        found: object = getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f": did you mean '{near[0]}'?" if near else ""
        raise PluginError(f"{origin(module)} has no '{name}' (asked for by '{spec}'){hint}") from None
    return found


def load_class(spec: str, base: Path | None) -> type:
    """Like `load_object`, for a class."""
    found = load_object(spec, base)
    if not isinstance(found, type):
        raise PluginError(f"'{spec}' is a {type(found).__name__}, a class is needed")
    return found


def load_function(spec: str, base: Path | None) -> Callable[..., Any]:
    """Like `load_object`, for a function or another callable that is not a class."""
    found = load_object(spec, base)
    if isinstance(found, type) or not callable(found):
        what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise PluginError(f"'{spec}' is {what}, a function is needed")
    return found


def origin(thing: object) -> str:
    """The file of a module, class or function, for messages."""
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(getattr(thing, "__module__", ""))
    return str(getattr(module, "__file__", None) or getattr(module, "__name__", module))


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # User code runs here and may raise anything; the cause stays chained.
        raise PluginError(f"cannot import '{name}' (asked for by '{spec}'): {_words(error)}") from error


def _load_file(place: str, spec: str, base: Path | None) -> ModuleType:
    path = ((base or Path()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise PluginError(f"file {path} does not exist (asked for by '{spec}')")
    # One name per file, so that two recipes with a worker.py each do not share a module.
    name = f"relax_plugin_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise PluginError(f"file {path} cannot be loaded as Python (asked for by '{spec}')")
    module = importlib.util.module_from_spec(found)
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"file {path} fails to load (asked for by '{spec}'): {_words(error)}") from error
    return module


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
