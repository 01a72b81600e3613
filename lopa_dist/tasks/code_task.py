"""What tasks whose answers are programs share: whether the programs may be run, and how."""

from __future__ import annotations

import ast
import logging
import math
import re
import warnings
from textwrap import dedent
from threading import Event
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


OPENING = re.compile(r"(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w+#.-]*)([ \t]+\w+=[^`\n]*)?[ \t]*\n")
DEFINED = re.compile(r"^[ \t]*(def|class|import|from)\b", re.MULTILINE)
LANGUAGE = re.compile(r"\A(python3?|py)\b[ \t]*")  # at the beginning of a block within a line


def first_block(text: str) -> str:
    """Return the first fenced code block if there is one, else the text as it is.

    Models write fences with less care than Markdown asks for: also behind other words, at the end of a line of code, or
    only after the code. So of several places where a block may end, the first counts at which it is a program. If none
    is, the block ends at the first fence, or where the text does. If the text begins with code and has only a closing
    fence, the block is what is before that.
    """
    lines = text.replace("\r\n", "\n") + "\n"  # a fence may be the last thing in the text
    opening = OPENING.search(lines)
    if opening is None or lines[: opening.start()].count("```") % 2:  # that one closes a block within lines
        parts = text.split("```")
        return text if len(parts) < 2 else LANGUAGE.sub("", parts[1])
    before, after = lines[: opening.start()], lines[opening.end() :]
    ends = [found.start() for found in re.finditer(opening["fence"], after)]
    if not opening["language"] and DEFINED.search(before) and (not ends or is_program(before)):
        return before
    blocks = [dedent(after[:end]) for end in ends] or [dedent(after[:-1])]
    return next(filter(is_program, blocks), blocks[0])


def is_program(text: str) -> bool:
    """Return whether a text is a program in Python, and not empty."""
    try:
        with warnings.catch_warnings():
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
