"""Packages that only some jobs need: what to say where one cannot be imported."""

from __future__ import annotations

from importlib import import_module


def lacking(package: str, error: Exception, extra: str = "eval", name: str = "") -> str:
    """Return what to do about an `error` of importing a package.

    Args:
        package: its name in Python.
        error: what was raised.
        extra: the extra of lopa_dist that has it.
        name: what people call it; empty: as in Python.
    """
    name = name or package
    if isinstance(error, ModuleNotFoundError) and (error.name or package).partition(".")[0] == package:
        return f"needs {name}: pip install 'lopa_dist[{extra}]'"
    return f"needs {name}, which is installed but cannot be imported ({' '.join(str(error).split())})"


def why_lacking(package: str, extra: str = "eval", name: str = "") -> str:
    """Import `package`, and return what `lacking` says about the error; empty if the import works."""
    try:
        import_module(package)
    except Exception as error:  # a package may raise anything if another one is too old for it
        return lacking(package, error, extra, name)
    return ""
