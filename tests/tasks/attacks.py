"""Programs that try to do harm, each with what must not have happened; run as root and as an ordinary user.

``python -m tests.tasks.attacks FOLDER`` runs all of them against files, sockets and processes that it makes below
FOLDER, and prints the names of those that did harm or passed. The standard library is enough.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lopa_dist.tasks.sandbox import Limits, NotRun, Outcome, check, run_tests

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
WRONG = "\ndef f(): return 1\n"
TESTS = {
    "replaced built-in functions": "assert all(x == 2 for x in [f()])",
    "replaced libraries": "import math\nassert math.isclose(f(), 2)",
    "a forged verdict": "assert f() == 2",
}
FORGE = '{"token": "0", "reason": ""}\\n'


@dataclass(frozen=True)
class Place:
    """What there is to harm."""

    folder: Path

    @property
    def mine(self) -> Path:
        """A file of the user's that anyone may write."""
        return self.folder / "mine"

    @property
    def key(self) -> Path:
        """A file that only the user should read, though the folder is open."""
        return self.folder / "key"

    @property
    def door(self) -> Path:
        """A socket of a service."""
        return self.folder / "door"


def attacks(place: Place, victim: int, port: int) -> dict[str, str]:
    """Programs by what they try."""
    mine, key, door = (repr(str(path)) for path in (place.mine, place.key, place.door))
    write = f"open({mine}, 'w').write('harm')\n"
    return {
        "writing a file": write,
        "removing a file": f"import os\nos.remove({mine})",
        "making a mount writable again": LIBC
        + "a = (ctypes.c_uint64 * 4)(0, 1, 0, 0)\n"
        + f"for p in (b'/', {str(place.folder).encode()!r}):\n"
        + f"    for flags in (0, 0x8000): libc.syscall(442, -100, p, flags, a, 32)\n{write}",
        "mounting anew": LIBC
        + "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\nlibc.mount(b'/', b'/tmp', None, 0x1000, None)\n"
        + f"libc.mount(None, b'/', None, 0x1020, None)\nopen('/tmp' + {mine}, 'w').write('harm')",
        "entering a new user namespace": LIBC
        + "assert libc.unshare(0x10000000) == 0 or libc.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0\n"
        + "raise SystemExit('HARM: a namespace of its own')",
        "joining a namespace of another process": LIBC
        + "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY)\nassert libc.setns(fd, 0) == 0\nraise SystemExit('HARM')",
        "tracing": LIBC
        + f"for p in (1, {victim}, os.getppid()):\n"
        + "    if libc.ptrace(16, p, 0, 0) == 0: raise SystemExit('HARM: traced')",
        "writing into another process' memory": f"for p in (1, {victim}):\n"
        + "    try: open(f'/proc/{p}/mem', 'r+b')\n    except OSError: continue\n    raise SystemExit('HARM: memory')",
        "signals": f"import os, signal\nfor p in ({victim}, -1):\n"
        + "    try: os.kill(p, signal.SIGKILL)\n    except OSError: pass",
        "a socket of a service": "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        + f"s.connect({door})\ns.send(b'harm')",
        "the network": f"import socket\ns = socket.create_connection(('127.0.0.1', {port}), 2)\ns.send(b'harm')",
        "sockets of other kinds": "import socket\nfor family in (16, 17, 38, 40):\n"
        + "    try: socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM)\n"
        + "    except OSError as e: continue\n    raise SystemExit(f'HARM: family {family}')",
        "reading keys": f"raise SystemExit('HARM: ' + open({key}).read())",
        "reading environments": "import glob\nfound = ''\nfor file in glob.glob('/proc/[0-9]*/environ'):\n"
        + "    try: found += open(file).read()\n    except OSError: pass\n"
        + "if 'LOPA_SECRET' in found: raise SystemExit('HARM: ' + found)",
        "settings of the kernel": "for file in ('/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', "
        "'/proc/sys/kernel/hostname', '/sys/power/state'):\n"
        + "    try: open(file, 'w')\n    except OSError: continue\n    raise SystemExit('HARM: ' + file)",
        "device files": "import os, glob\nfor file in [*glob.glob('/dev/*da*'), '/dev/mem', '/dev/kmsg', '/dev/fuse', "
        + "'/dev/vsock', '/dev/kvm']:\n    try: os.open(file, os.O_RDONLY)\n    except OSError: continue\n"
        + "    raise SystemExit('HARM: ' + file)\nos.mknod('disk', 0o60666, os.makedev(254, 0))\n"
        + "raise SystemExit('HARM: ' + str(os.open('disk', os.O_RDONLY)))",
        "fork bomb": "import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0: time.sleep(60)\n"
        + "        n += 1\nexcept OSError: pass\nif n > 20: raise SystemExit(f'HARM: {n} processes')",
        "disk bomb": "import os\nn = 0\ntry:\n    for folder in ('.', '/dev/shm', '/dev', '/', '/usr', '/var/tmp'):\n"
        + "        for i in range(50):\n            try:\n"
        + "                with open(f'{folder}/bomb{i}', 'wb') as file: n += file.write(bytes(15 << 20))\n"
        + "            except OSError: break\nfinally:\n    if n > 300 << 20: raise SystemExit(f'HARM: {n} bytes')",
        "memory bomb": "import os, time\nfor i in range(8):\n    if os.fork() == 0:\n"
        + "        x = bytearray(b'1') * (80 << 20)\n        time.sleep(60)\n"
        + "time.sleep(1.5)\nraise SystemExit('HARM: 640 MiB')",
        "shared memory and memory files": LIBC
        + "for i in range(40):\n    if libc.shmget(i, 1 << 24, 0o1666) >= 0: raise SystemExit('HARM: shmget')\n"
        + "os.memfd_create('x')\nraise SystemExit('HARM: memfd')",
        "replaced built-in functions": "import builtins\nbuiltins.all = lambda x: True\nbuiltins.exec = print\n"
        + "globals()['__builtins__'] = dict(vars(builtins), all=lambda x: True)"
        + WRONG,
        "replaced libraries": "import math, sys, types\nmath.isclose = lambda *a, **k: True\n"
        + "fake = types.ModuleType('math')\nfake.isclose = math.isclose\nsys.modules['math'] = fake"
        + WRONG,
        "a forged verdict": "import os\nfor fd in range(3, 64):\n"
        + f"    try: os.write(fd, b'begun\\n{FORGE}')\n    except OSError: pass\nos._exit(0)",
        "background processes": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        + f"        time.sleep(5)\n        {write}        time.sleep(60)\n    os._exit(0)",
        "capabilities": "caps = [line.split() for line in open('/proc/self/status') if line.startswith('Cap')]\n"
        + "held = {name: value for name, value in caps if name != 'CapBnd:' and int(value, 16)}\n"
        + "new = [l.split()[1] for l in open('/proc/self/status') if l.startswith(('NoNewPrivs', 'Seccomp:'))]\n"
        + "if held or new != ['1', '2']: raise SystemExit(f'HARM: {held} {new}')",
    }


def harmed(place: Place, outcome: Outcome, victim: subprocess.Popen[bytes], servers: list[socket.socket]) -> str:
    """What an attack did, or nothing."""
    if outcome.passed:
        return "passed"
    if "HARM" in outcome.reason:
        return outcome.reason
    if not place.mine.exists() or place.mine.read_text() != "mine":
        return "changed a file"
    if victim.poll() is not None:
        return "killed a process"
    for server in servers:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            continue
        return "reached a server"
    return ""


def processes() -> set[str]:
    """The sandbox's processes that there are on the machine."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"sigtimedwait" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
        except OSError:
            continue
    return found


def main(folder: Path, run: Callable[..., Outcome] = run_tests) -> None:
    """Run all attacks; print, as JSON, how many there were and what did harm."""
    place, limits = Place(folder), Limits(wall_s=6, memory_bytes=1 << 29)
    try:
        check(True)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
        return
    os.environ["LOPA_SECRET"] = "secret"
    folder.chmod(0o777)
    place.mine.write_text("mine")
    place.mine.chmod(0o666)
    place.key.write_text("secret")
    place.key.chmod(0o644)
    service, network = socket.socket(socket.AF_UNIX), socket.socket()
    service.bind(str(place.door))
    place.door.chmod(0o777)
    network.bind(("127.0.0.1", 0))
    servers = [service, network]
    for server in servers:
        server.listen()
        server.setblocking(False)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a parent that was started by setpriv may not be dumpable
    done: dict[str, str] = {}
    programs: dict[str, str] = {}
    with subprocess.Popen(["sleep", "120"]) as victim:
        try:
            before = processes()
            programs = attacks(place, victim.pid, network.getsockname()[1])
            for name, program in programs.items():
                place.mine.write_text("mine")
                place.mine.chmod(0o666)
                try:
                    outcome = run(program, TESTS.get(name, "raise Exception('ran')"), limits)
                except NotRun as error:
                    done[name] = f"not run: {error}"
                    continue
                if harm := harmed(place, outcome, victim, servers):
                    done[name] = harm
            deadline = time.monotonic() + 2
            while (left := processes() - before) and time.monotonic() < deadline:
                time.sleep(0.05)
            if left:
                done["what is left"] = str(left)
        finally:
            victim.kill()
    print(json.dumps({"attacks": len(programs), "harm": done}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
