"""The system calls that a program in the sandbox may not make, as a filter for the kernel (seccomp).

A program that computes something needs none of them. Most would fail without capabilities anyway. They are refused all
the same, because faults in the kernel's code for such calls are found again and again. Some would get round a limit:
memory files and System V shared memory count for no process. Sockets of families other than Unix and IP can reach the
host from inside a network namespace (vsock does).
"""

from __future__ import annotations

import platform
import struct

# by machine: the number that the kernel knows it by, and the numbers of its calls
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, tuple[int, ...]] = {  # name: number on x86_64, number on aarch64
    # the kernel itself, and what all its users share
    "acct": (163, 89), "delete_module": (176, 106), "finit_module": (313, 273), "init_module": (175, 105),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "lookup_dcookie": (212, 18), "quotactl": (179, 60),
    "reboot": (169, 142), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "vhangup": (153, 58),
    # clocks and names of the machine
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "setdomainname": (171, 162),
    "sethostname": (170, 161), "settimeofday": (164, 170),
    # programs in the kernel, and queues to it
    "bpf": (321, 280), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    # mounts and namespaces
    "chroot": (161, 51), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "open_tree": (428, 428),
    "pivot_root": (155, 41), "setns": (308, 268), "umount2": (166, 39), "unshare": (272, 97),
    # files by other ways than their names
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # other processes
    "kcmp": (312, 272), "migrate_pages": (256, 238), "move_pages": (279, 239), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117),
    # keys
    "add_key": (248, 217), "keyctl": (250, 219), "request_key": (249, 218),
    # memory and queues that count for no process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mq_open": (240, 180), "msgget": (68, 186),
    "semget": (64, 190), "shmget": (29, 194),
}  # fmt: skip
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
NEW_NAMESPACES = 0x7E020000  # flags of clone
FAMILIES = (1, 2, 10)  # sockets: Unix, IPv4, IPv6
OTHER_ABI = 0x40000000  # x86_64: calls of the x32 ABI have this bit

# classic BPF over the kernel's `struct seccomp_data`
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CALL, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # the second with an error number
NOT_PERMITTED, NO_SUCH_CALL, NO_SUCH_FAMILY = REFUSE | 1, REFUSE | 38, REFUSE | 97


def filter_program() -> bytes:
    """Return the filter as the kernel and `bwrap --seccomp` read it.

    Raises:
        ValueError: the calls of this kind of machine are not known here.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"the sandbox knows the system calls of {' and '.join(MACHINES)} only, not of {machine}")
    column = list(MACHINES).index(machine)
    steps: list[tuple[int, int, int, int]] = [  # operation, steps to skip if it holds, if not, operand
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, NOT_PERMITTED),
        (LOAD, 0, 0, CALL),
        (AT_LEAST, 0, 1, OTHER_ABI),
        (RETURN, 0, 0, NOT_PERMITTED),
        (EQUAL, 0, 1, CLONE3[column]),  # the filter cannot read its flags; the C library then uses clone
        (RETURN, 0, 0, NO_SUCH_CALL),
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, NOT_PERMITTED),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 2 + 2 * len(FAMILIES), SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
    ]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, NO_SUCH_FAMILY))
    for numbers in CALLS.values():
        steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, NOT_PERMITTED)]
    steps.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
