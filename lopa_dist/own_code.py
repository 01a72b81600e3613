"""The user's own code, named on the command line: ``rules.py:function``, or ``module:function``."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from threading import RLock, get_ident
from types import CodeType, ModuleType
from typing import Any

SOURCE_OF = "the source of "  # followed by a setting: the name of a hash of the user's own code
LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed libraries, wherever they are
MODULES: dict[str, ModuleType] = {}  # by the source that was named
LOADED: dict[str, tuple[Path, bytes]] = {}  # by module: the files that were executed here, and their text at that time
LOADING = RLock()
ARGUMENTS = {"decode.fill": ("probability", "confidence", "masked"), "task.score": ("text", "fields")}
"""By setting: the positional arguments with which the function that it names is called."""


def is_own(text: object) -> bool:
    """Return whether `text`, a setting's value, names the user's own code."""
    return isinstance(text, str) and ":" in text


def load(text: str, key: str) -> Any:
    """Return what the setting `key` names by its value `text`: a function if `ARGUMENTS` has the setting.

    Raises:
        ValueError: there is no such file, module or function, or it cannot be imported, or takes other arguments.
    """
    source, _, name = text.rpartition(":")
    function = getattr(module_of(text, key), name, None)
    if function is None or (key in ARGUMENTS and not callable(function)):
        raise ValueError(f"{key}={text}: there is no {'function ' * (key in ARGUMENTS)}{name!r} in {source}")
    if key in ARGUMENTS:
        check_arguments(function, text, key)
    return function


@cache
def check_arguments(function: Callable[..., Any], text: str, key: str) -> None:
    """Raise a ValueError if `function` cannot be called with the arguments of the setting `key`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have no signature
        return
    try:
        signature.bind(*ARGUMENTS[key])
    except TypeError as error:
        raise ValueError(
            f"{key}={text}: it takes {signature}, but is called with {len(ARGUMENTS[key])} arguments: "
            f"{', '.join(ARGUMENTS[key])}"
        ) from error


class Uncached(SourceFileLoader):
    """Loads a file from its source: Python's cached bytecode misses edits within a second that keep the length."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the source as it is now, compiled."""
        source = self.get_data(self.path)
        LOADED[fullname] = Path(self.path).resolve(), source
        return self.source_to_code(source, self.path)


class OwnFiles(MetaPathFinder):
    """Makes imports of files that are not installed use `Uncached`, in the thread that creates this finder."""

    def __init__(self) -> None:
        self.thread = get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is, as other finders say; None if none knows it, or in other threads."""
        if get_ident() != self.thread:
            return None
        others = [
            finder for finder in sys.meta_path if not isinstance(finder, OwnFiles) and hasattr(finder, "find_spec")
        ]
        spec = next((found for one in others if (found := one.find_spec(name, path, target)) is not None), None)
        if spec and type(spec.loader) is SourceFileLoader and not is_installed(Path(spec.loader.path).resolve()):
            spec.loader = Uncached(name, spec.loader.path)
        return spec


def module_of(text: str, key: str) -> ModuleType:
    """Return the module that has what `text` names.

    It imports from the working directory, too, as under ``python -m``: the console script has another `sys.path`.
    """
    source, _, function = text.rpartition(":")
    if not source or not function.isidentifier():
        raise ValueError(f"{key}={text}: write FILE.py:FUNCTION, or MODULE:FUNCTION")
    with LOADING:
        if source in MODULES:
            return MODULES[source]
        with suppress(FileNotFoundError):  # a directory that was removed
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.append(here)
        finder = OwnFiles()
        sys.meta_path.insert(0, finder)
        try:
            if not source.endswith(".py"):
                module = importlib.import_module(source)
            else:
                path = Path(source).expanduser()
                if not path.is_file():
                    raise ValueError(f"{key}={text}: no such file: {path.resolve()}")
                module = executed(path)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:  # of the user's code
            raise ValueError(f"{key}={text}: {source} cannot be imported: {type(error).__name__}: {error}") from error
        finally:
            sys.meta_path.remove(finder)
        MODULES[source] = module
        return module


def forget_changed() -> None:
    """Forget all code of the user's own that was executed here, if a file of it has changed since.

    The code is executed again when a setting next names it. Each job of a sweep, and each call of an `LLM`, first calls
    this. Files that the code imports are included if it imports them when it is loaded. Modules that the program itself
    has imported are not forgotten: only the program may reload them.
    """
    with LOADING:
        if all(text_now(file) == text for file, text in LOADED.values()):
            return
        for name in LOADED:
            module = sys.modules.pop(name, None)
            package, _, child = name.rpartition(".")
            if module is not None and getattr(sys.modules.get(package), child, None) is module:
                delattr(sys.modules[package], child)  # where `from package import child` would find it
        LOADED.clear()
        MODULES.clear()
        importlib.invalidate_caches()


def text_now(file: Path) -> bytes:
    """Return a file's content; empty if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def text_of(file: Path) -> bytes:
    """Return a file's content as it was executed here, or as it is now."""
    return next((text for loaded, text in list(LOADED.values()) if loaded == file), None) or text_now(file)


def executed(path: Path) -> ModuleType:
    """Execute a file, and return it as a module with a unique name in `sys.modules`, as dataclasses and pickle need."""
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=Uncached(name, str(path)))
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def digest(text: str, key: str) -> str:
    """Return a hash of the file that has what `text` names, so that results of different versions are not mixed.

    Other files of the user's own that it imports count, too, and what these import.
    """
    module, found = module_of(text, key), hashlib.sha256()
    try:
        file = inspect.getsourcefile(module)
    except TypeError:  # it is built in
        file = None
    for source in own_files(Path(file)) if file else ():
        found.update(text_of(source))
    return found.hexdigest()[:16]


def own_files(file: Path) -> list[Path]:
    """Return `file`, which was imported, and all files that it imports, except installed ones."""
    found: dict[Path, None] = {}
    left = [file.resolve()]
    while left:
        source = left.pop(0)
        if source in found:
            continue
        found[source] = None
        for name in imported(source, package_of(source)):
            path = Path(str(getattr(sys.modules.get(name), "__file__", None) or "")).resolve()
            if path.suffix == ".py" and not is_installed(path):
                left.append(path)
    return list(found)


def is_installed(file: Path) -> bool:
    """Return whether a file is this package's, a library's or Python's, and so not the user's own."""
    return any(folder in file.parents for folder in installed()) or not LIBRARIES.isdisjoint(file.parts)


@cache
def installed() -> list[Path]:
    """Return the folders of this package, of libraries and of Python."""
    return [Path(folder).resolve() for folder in (*sysconfig.get_paths().values(), str(Path(__file__).parent))]


def own_line(error: BaseException) -> str:
    """Return the file and line of the user's own code where an error arose, as ``FILE, line N: ``; else nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".py")]
    own = [frame for frame in frames if not is_installed(Path(frame.filename).resolve())]
    return f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""


def package_of(source: Path) -> str:
    """Return the package of a file that was imported; empty if it is in none."""
    files = (module for module in list(sys.modules.values()) if getattr(module, "__package__", None))
    found = (module for module in files if Path(str(getattr(module, "__file__", None) or "")).name == source.name)
    return next((str(module.__package__) for module in found if Path(str(module.__file__)).resolve() == source), "")


def imported(source: Path, package: str = "") -> list[str]:
    """Return the names of modules that a file of a package may import, by its text, in that order."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text_of(source))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            try:
                whole = importlib.util.resolve_name(origin, package)
            except ImportError:  # relative, and in no package
                continue
            names += [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
    return names
