"""C code is compiled once, kept where only its user may write, and compiled anew if it is not what was kept."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopa_dist.c_library import INT, LONG, P, Unavailable, c_compiler, compiled, intact, load, memory

FUNCTIONS = {"five": (INT, ())}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in C, of a user who never compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "five.c"
    file.write_text("int five(void) { return 5; }\n")
    try:
        compiled(file)
    except Unavailable as why:
        pytest.skip(f"no C here: {why}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    return file


def test_it_is_compiled_once(source: Path, tmp_path: Path) -> None:
    first = compiled(source)
    made = first.stat().st_mtime_ns
    assert compiled(source) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "another" / "lopa_dist").iterdir()] == [first.name]
    assert load(source, FUNCTIONS).five() == 5


def test_ranks_that_need_it_at_the_same_time_compile_it_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, compiler = c_compiler(), tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo >> {tmp_path}/runs; sleep 0.3; }}\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(4) as ranks:
        assert len(set(ranks.map(compiled, [source] * 4))) == 1
    assert (tmp_path / "runs").read_text() == "\n"


def test_without_a_home_it_is_kept_in_a_temporary_folder_of_one_s_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there, by root neither
    monkeypatch.setattr("lopa_dist.c_library.gettempdir", lambda: str(tmp_path))
    made = compiled(source)
    assert made.parent == tmp_path / f"lopa_dist-{os.getuid()}"
    assert compiled(source) == made
    made.parent.chmod(0o777)
    with pytest.raises(Unavailable, match="is not this user's alone"):
        load(source, FUNCTIONS)


def test_without_any_home_it_is_kept_there_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom the system does not know, in a container."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr("lopa_dist.c_library.gettempdir", lambda: str(tmp_path))
    assert compiled(source).parent == tmp_path / f"lopa_dist-{os.getuid()}"


def test_code_of_other_users_does_not_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a folder that is theirs, nor a file of theirs; a folder that they may write to is closed."""
    folder = compiled(source).parent
    folder.chmod(0o777)
    assert compiled(source).parent == folder
    assert folder.stat().st_mode & 0o022 == 0
    own = os.getuid()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("lopa_dist.c_library.gettempdir", lambda: str(tmp_path / "temporary"))
    planted = compiled(source)
    os.utime(planted, (0, 0))
    real = Path.stat

    def of_another(path: Path, **how: Any) -> os.stat_result:
        found = real(path, **how)
        theirs = path == owned and found.st_uid == own
        return os.stat_result((*found[:4], own + 1, *found[5:])) if theirs else found

    monkeypatch.setattr(Path, "stat", of_another)
    owned = planted
    assert real(compiled(source)).st_mtime > 0, "compiled anew"
    owned = folder
    with monkeypatch.context() as context:
        context.setattr("lopa_dist.c_library.os.getuid", lambda: own)
        assert compiled(source).parent == tmp_path / "temporary" / f"lopa_dist-{own}"


def test_a_library_that_was_cut_short_is_compiled_anew(source: Path, tmp_path: Path) -> None:
    """Loading it could end the process without a word."""
    made = compiled(source)
    whole = made.read_bytes()
    for left in (0, 1000, len(whole) - 1):
        made.write_bytes(whole[:left])
        assert not intact(made)
    assert load(source, FUNCTIONS).five() == 5
    assert intact(made)
    assert not intact(tmp_path / "nowhere.so")


def test_c_code_gets_the_memory_of_an_array_or_an_error(source: Path) -> None:
    source.write_text(
        "long long doubled(long long *x, long long n) { for (int i = 0; i < n; i++) x[i] *= 2; return n; }\n"
    )
    doubled = load(source, {"doubled": (LONG, (P, LONG))}).doubled
    array = np.arange(6).reshape(2, 3)
    assert doubled(memory(array), array.size) == 6
    assert array.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert doubled(memory(np.zeros(0, np.int64)), 0) == 0
    with pytest.raises(TypeError, match="contiguous"):
        memory(array.T)
