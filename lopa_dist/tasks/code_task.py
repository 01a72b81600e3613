"""What tasks whose answers are programs share: whether the programs may be run, and how."""

from __future__ import annotations

import ast
import logging
import math
import re
import warnings
from itertools import islice
from textwrap import dedent
from threading import Event, Lock
from typing import Any, ClassVar

from lopa_dist.tasks.benchmark import BadRow
from lopa_dist.tasks.sandbox import Limits, check, run_tests
from lopa_dist.tasks.task import Score

log = logging.getLogger("lopa_dist")


class CodeTask:
    """A base class that judges programs by running them, or leaves them unjudged; it must precede `Benchmark`.

    The user decides by `allow_code_execution`: true runs programs in the sandbox, ``unconfined`` runs them with limits
    alone, and false only generates. None is refused, so that nobody finds out after hours of generation that nothing
    was judged.

    Raises:
        ValueError: `allow_code_execution` is None.
    """

    name: str
    options: ClassVar[tuple[str, ...]] = ("allow_code_execution", "code_timeout_s")

    def __init__(
        self,
        *benchmark: Any,
        allow_code_execution: bool | str | None = None,
        code_timeout_s: float = 10.0,
        **named: Any,
    ) -> None:
        self.allow = allow_code_execution
        self.limits = Limits(wall_s=code_timeout_s, cpu_s=math.ceil(code_timeout_s) + 1)
        self.cancelled = Event()
        if self.allow is None:
            raise ValueError(
                f"task={self.name} runs programs that the model writes: task.allow_code_execution=true runs them in a "
                "sandbox (see lopa_dist/tasks/sandbox.py for what it keeps them from), false generates without judging"
            )
        self.confined = self.allow != "unconfined"
        super().__init__(*benchmark, **named)

    def check_judging(self) -> None:
        """See `tasks.registry.check_judging`: try the sandbox, and warn where there is none."""
        if self.allow:
            check(self.confined)
        if not self.confined:
            log.warning("WARNING: the model's programs run unconfined: they can do whatever you can, within limits")

    def run(self, solution: str, tests: str, extracted: str) -> Score | None:
        """Return whether the tests pass, which takes up to the time limit; None if running is not allowed."""
        if not self.allow:
            return None
        outcome = run_tests(solution, tests, self.limits, self.confined, self.cancelled)
        return Score(outcome.passed, extracted, reason=outcome.reason)

    def cancel(self) -> None:
        """End the running programs, and start no more."""
        self.cancelled.set()


OPENING = re.compile(r"(?P<fence>```+|~~~+)[^\S\n]*(?P<language>[\w+#.:/-]*)([^\S\n]+\w+=[^`\n]*)?[^\S\n]*\n")
DEFINED = re.compile(r"^[ \t]*(def|class|import|from)\b", re.MULTILINE)
LANGUAGE = re.compile(r"\A(python3?|py)\b[ \t]*", re.IGNORECASE)  # at the beginning of a block within a line
MOST_ENDS, MOST_BLOCKS = 20, 20  # ends of a block, and blocks of an answer, to try: a model may repeat a fence for ever
PARSING = Lock()


def first_block(text: str) -> str:
    """Return the first fenced code block that is a program; if none is, the first block, or the text if there is none.

    Models write fences with less care than Markdown asks for: also behind other words, at the end of a line of code, or
    only after the code. If the text begins with code and has only a closing fence, the block is what is before that.
    """
    lines = text.replace("\r\n", "\n") + "\n"  # a fence may be the last thing in the text
    first, at = None, 0
    for _ in range(MOST_BLOCKS):
        if (opening := OPENING.search(lines, at)) is None:
            break
        if lines.count(opening["fence"][:3], at, opening.start()) % 2:  # it closes a block within a line
            at = opening.end()
            continue
        block, end = fenced(lines, opening)
        if first is None and not opening["language"] and (begun := DEFINED.search(lines, 0, opening.start())):
            before = lines[begun.start() : opening.start()]
            if end == len(lines):
                return before
            if is_program(before):
                return before + block if DEFINED.search(block) and is_program(block) else before
        if is_program(block):
            return block
        first, at = block if first is None else first, opening.end() if end == len(lines) else end
    if first is not None:
        return first
    parts = text.split("```")
    return text if len(parts) < 2 else LANGUAGE.sub("", parts[1])


def fenced(lines: str, opening: re.Match[str]) -> tuple[str, int]:
    """Return the block after an opening fence, and where it ends in `lines`, which is their end if it is not closed.

    Code may contain a fence itself, for instance in a comment. So the block ends at the first fence at which it is a
    program. Fences that begin a line are tried before others. If the block is a program at no fence, it ends at the
    first one that is tried.
    """
    begin, fence = opening.end(), opening["fence"]
    begins_line, anywhere = re.compile(rf"^[^\S\n]*{fence}", re.MULTILINE), re.compile(fence)
    ends = [m.span() for kind in (begins_line, anywhere) for m in islice(kind.finditer(lines, begin), MOST_ENDS)]
    if not ends:
        return dedent(lines[begin:-1]), len(lines)
    blocks = ((dedent(lines[begin:first]), last) for first, last in ends)
    return next((one for one in blocks if is_program(one[0])), (dedent(lines[begin : ends[0][0]]), ends[0][1]))


def is_program(text: str) -> bool:
    """Return whether a text is a program in Python, and not empty."""
    try:
        with PARSING, warnings.catch_warnings():  # whose filters are those of all threads
            warnings.simplefilter("ignore")
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def refuse_release_form(row: dict[str, Any]) -> None:
    """Check that a problem has a test program, as in the hub's datasets of EvalPlus.

    Raises:
        BadRow: it has inputs and a reference solution instead, as in the files that EvalPlus releases.
    """
    if "plus_input" in row:
        raise BadRow(
            "this is EvalPlus's release file, which holds no test programs: leave task.input out, or give the hub's "
            "dataset (evalplus/humanevalplus, evalplus/mbppplus) as a file"
        )
