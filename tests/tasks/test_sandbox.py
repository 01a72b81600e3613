"""What model code may not do, confined and unconfined; and what counts as passing."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lopa_dist.tasks import bubblewrap
from lopa_dist.tasks.sandbox import Limits, NotRun, Outcome, check, judge, run_tests
from lopa_dist.tasks.task import Cancelled

if not sys.platform.startswith("linux"):
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("sandbox_to_itself")

QUICK = Limits(wall_s=1.0)
FORGE = (
    "import contextlib, os\nfor fd in range(3, 64):\n    with contextlib.suppress(OSError): "  # what is written follows
)
BOTH = pytest.mark.parametrize("confined", [True, False])


@BOTH
def test_right_and_wrong(confined: bool) -> None:
    program = """
import dataclasses, math

@dataclasses.dataclass
class A:
    x: int

def f(x):
    return math.floor(x) + A(1).x
"""
    assert run_tests(program, "assert f(1.5) == 2", Limits(), confined) == Outcome(True, "")
    wrong = run_tests(program, "assert f(1.5) == 3, 'not three'", Limits(), confined)
    assert (wrong.passed, wrong.reason) == (False, "AssertionError: not three")
    assert run_tests("def f(:", "", Limits(), confined).reason.startswith("SyntaxError")


def test_python_may_have_been_started_by_a_path_that_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = os.path.split(sys.executable)
    here = os.path.dirname(__file__)  # which the sandbox does not show
    monkeypatch.setattr(sys, "executable", os.path.join(here, os.path.relpath(folder, here), name))
    assert run_tests("x = 1", "assert x == 1", Limits()).passed


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit, os; atexit.register(os._exit, 0); exit()",
        "import threading, os; threading.Thread(target=lambda: os._exit(0)).start(); import time; time.sleep(9)",
        "def check(f): return None\nimport builtins\nbuiltins.check = check\nbuiltins.exec = builtins.compile = print",
        "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.__build_class__ = builtins.isinstance = None",
        "import __main__, sys\n__main__.work = __main__.judge = None\nsys.exc_info = lambda: (None,) * 3",
        "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None",
        FORGE + 'os.write(fd, b\'{"token": "0", "reason": ""}\\n\')\nos._exit(0)',
        "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E",
        "class E(BaseException):\n    def __str__(self):\n        while True: pass\nraise E",
    ],
)
def test_ending_early_or_patching_the_checker_does_not_pass(program: str) -> None:
    outcome = run_tests(program, "def check(f): assert f(1) == 2\ncheck(lambda x: x)", Limits(wall_s=4))
    assert not outcome.passed
    assert outcome.reason


def test_patched_builtins_are_put_back_before_the_tests() -> None:
    program = "import builtins\nbuiltins.all = lambda x: True\nbuiltins.abs = lambda x: 0\ndef f(): return 1"
    assert not run_tests(program, "assert all(x == 2 for x in [f()])", QUICK).passed
    assert not run_tests(program, "assert abs(f() - 2) < 0.1", QUICK).passed


@BOTH
def test_endless_loop(confined: bool) -> None:
    began = time.monotonic()
    outcome = run_tests("while True: pass", "", QUICK, confined)
    assert outcome.reason == "TimeoutError: no result within 1 s"
    assert time.monotonic() - began < 30


@BOTH
def test_fork_bomb_is_limited(confined: bool) -> None:
    program = """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    pass
"""
    outcome = run_tests(program, "assert n < 20, n", Limits(wall_s=5), confined)
    assert outcome.passed, outcome.reason


@BOTH
def test_processes_that_fork_all_the_time_are_ended(confined: bool) -> None:
    """Also if each has a session of its own."""
    program = """
import os, time
end = time.monotonic() + 20
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
os._exit(0)
"""
    before, began = set(os.listdir("/proc")), time.monotonic()
    outcome = run_tests(program, "", Limits(wall_s=2), confined)
    assert outcome.reason == "TimeoutError: no result within 2 s"
    assert time.monotonic() - began < 30
    assert not left_since(before)


@BOTH
def test_memory_is_limited(confined: bool) -> None:
    limits = Limits(wall_s=5, memory_bytes=1 << 29)
    assert run_tests("x = bytearray(1 << 30)", "", limits, confined).reason == "MemoryError: "


def test_writing_outside(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "there").write_text("old")
    (tmp_path / "there").chmod(0o666)
    for statement in (
        "open(p + '/new', 'w')",
        "open(p + '/there', 'w')",
        "os.remove(p + '/there')",
        "os.mkdir(p + '/d')",
    ):
        outcome = run_tests(f"import os\np = {str(tmp_path)!r}\n{statement}", "", Limits())
        assert outcome.reason.startswith(("OSError", "FileNotFoundError")), outcome.reason
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("there", "old")]
    own = "import tempfile, os\nopen('x', 'w').write('1')\nos.mkdir('d')\ntempfile.TemporaryFile().write(b'1')"
    assert run_tests(own, "assert open('x').read() == '1'", Limits()).passed


def test_the_temporary_folder_goes_and_files_stay_small() -> None:
    where = run_tests("import os\nraise Exception(os.getcwd())", "", Limits(), False).reason.removeprefix("Exception: ")
    assert "lopa-run-" in where
    assert not Path(where).exists()
    assert "too large" in run_tests("open('x', 'wb').write(bytes(20 << 20))", "", Limits()).reason


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_no_network(kind: str) -> None:
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as server:
        server.bind(("127.0.0.1", 0))
        if kind == "SOCK_STREAM":
            server.listen()
        program = (
            f"import socket\ns = socket.socket(socket.AF_INET, socket.{kind})\ns.settimeout(2)\n"
            f"s.connect(('127.0.0.1', {server.getsockname()[1]}))\ns.send(b'x')"
        )
        server.settimeout(0.3)
        get = server.accept if kind == "SOCK_STREAM" else lambda: server.recv(1)
        exec(program, {})  # it is the sandbox that prevents it
        get()
        run_tests(program, "", Limits())
        with pytest.raises(TimeoutError):
            get()


@BOTH
def test_nothing_is_left_running(confined: bool) -> None:
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    program = (
        "import ctypes, os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        time.sleep(100 + 0 * {mark})\n    os._exit(0)\ntime.sleep(0.3)"
    )
    before = set(os.listdir("/proc"))
    assert run_tests(program, "", Limits(), confined).passed
    assert not left_since(before)


@BOTH
def test_a_cancelled_run_ends_soon_and_leaves_nothing(
    confined: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nwhile True: pass"
    before, cancelled = set(os.listdir("/proc")), threading.Event()
    threading.Timer(1.0, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        run_tests(program, "", Limits(wall_s=60), confined, cancelled)
    assert time.monotonic() - began < 30
    assert not left_since(before)
    assert not list(tmp_path.iterdir())


def left_since(before: set[str]) -> list[str]:
    """The sandbox's processes that were not there before."""
    time.sleep(0.2)
    return [p for p in set(os.listdir("/proc")) - before if p.isdigit() and mine(p)]


def mine(pid: str) -> bool:
    """Whether a process came from the sandbox; its command line is the child's whole source."""
    try:
        return b"sigtimedwait" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_output_is_thrown_away() -> None:
    began = time.monotonic()
    outcome = run_tests(
        "import os\nfor i in range(100): print('x' * 10_000_000)\nos.write(2, b'y' * 9999)", "", Limits()
    )
    assert outcome.passed  # 1 GB
    assert time.monotonic() - began < 60


def test_flooding_the_answer_pipe_fails() -> None:
    program = FORGE + "\n        while True: os.write(fd, b'{}\\n' * 9999)"
    assert not run_tests(program, "", QUICK).passed


def test_the_runner_is_out_of_easy_reach() -> None:
    assert run_tests("import __main__", "assert not hasattr(__main__, 'libc')", Limits()).passed


def test_environment_holds_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run_tests("import os", "assert 'WANDB_API_KEY' not in os.environ", Limits()).passed


@pytest.mark.parametrize(
    "answers",
    [b"", b"\n", b"{}", b"null\n[]\n1", b'begun\n{"token": "guess"}\n', b"\xff\xfe", b"[" * 60000],
)
def test_forged_answers_do_not_pass(answers: bytes) -> None:
    assert not judge(b"begun\n" + answers, "0123").passed


def test_what_did_not_begin_is_no_wrong_answer() -> None:
    for answers, said, reason in (
        (b"", "", "its process ended before it began"),
        (b'{"token": "0123"}\n', "", '{"token": "0123"}'),
        (b"", "bwrap: no\nbwrap: at all\n", "bwrap: at all"),
    ):
        with pytest.raises(NotRun) as error:
            judge(answers, "0123", said)
        assert str(error.value) == reason


def test_without_bubblewrap_programs_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check.cache_clear()
    with pytest.raises(ValueError, match=r"=true: .* no bwrap: install bubblewrap .*unconfined runs them with limits"):
        check(True)
    check(False)
    check.cache_clear()


def test_usual_programs_run() -> None:
    program = (
        "import asyncio, multiprocessing, subprocess, sys, tempfile, threading\n"
        "async def one(): return 1\n"
        "def f():\n"
        "    with multiprocessing.Pool(2) as pool: two = pool.map(abs, [-1, 1])\n"
        "    with tempfile.NamedTemporaryFile() as file: file.write(b'1')\n"
        "    thread = threading.Thread(target=two.append, args=(1,))\n    thread.start()\n    thread.join()\n"
        "    out = subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout\n"
        "    return [asyncio.run(one()), *two, int(out)]\n"
    )
    outcome = run_tests(program, "assert f() == [1] * 5", Limits())
    assert outcome.passed, outcome.reason


def test_only_libraries_are_visible() -> None:
    folders = bubblewrap.visible()
    assert not {"/", "/home", "/root", "/tmp", os.getcwd(), str(Path.home())} & {*folders}
    program = f"import os\nassert not os.path.exists({str(Path(__file__))!r})\nassert not os.listdir('.')"
    assert run_tests(program, "", Limits()).passed


def test_a_python_in_the_home_does_not_show_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On clusters, Python is often built with --prefix=$HOME."""
    for part in ("bin", "lib", ".ssh", "python/bin"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bubblewrap.of_python(tmp_path) == [str(tmp_path / "bin"), str(tmp_path / "lib")]
    assert bubblewrap.of_python(tmp_path.parent) == []
    assert bubblewrap.of_python(tmp_path / "python") == [str(tmp_path / "python")]


def test_the_working_folder_is_empty_where_a_library_is_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as library:
        Path(library).chmod(0o755)
        Path(library, "there").touch()
        folders = [*bubblewrap.visible(), library]
        monkeypatch.setattr(bubblewrap, "visible", lambda: folders)
        program = f"import os\nassert not os.listdir('.')\nassert os.listdir({library!r}) == ['there']\nopen('x', 'w')"
        assert run_tests(program, "", Limits()) == Outcome(True, "")
