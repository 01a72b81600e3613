"""What tasks whose answers are programs share: whether the programs may be run, and how."""

from __future__ import annotations

import logging
import math
import re
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
        ValueError: `allow_code_execution` is None, or programs cannot be run here in this way.
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
        if self.allow:
            check(self.confined)
        if not self.confined:
            log.warning("WARNING: the model's programs run unconfined: they can do whatever you can, within limits")
        super().__init__(*benchmark, **named)

    def run(self, solution: str, tests: str, extracted: str) -> Score | None:
        """Return whether the tests pass, which takes up to the time limit; None if running is not allowed."""
        if not self.allow:
            return None
        outcome = run_tests(solution, tests, self.limits, self.confined, self.cancelled)
        return Score(outcome.passed, extracted, reason=outcome.reason)

    def cancel(self) -> None:
        """End the running programs, and start no more."""
        self.cancelled.set()


BLOCK = re.compile(
    r"^[ \t]*(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w+#.-]*)([ \t]+\w+=[^`\n]*)?[ \t]*\n"
    r"(?P<code>.*?)(?P<end>(?P=fence)[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
DEFINED = re.compile(r"^[ \t]*(def|class|import|from)\b", re.MULTILINE)


def first_block(text: str) -> str:
    """Return the first fenced code block if there is one, else the text as it is.

    Fences are Markdown's, at the beginnings of lines. A block that does not end is the rest of the text, and code with
    no fence but one after it is what comes before that. A block within a line counts if there is no other.
    """
    block = BLOCK.search(text)
    if block is None:
        parts = text.split("```")
        return text if len(parts) < 2 else parts[1]
    before, code = text[: block.start()], block["code"]
    if not block["language"] and not block["end"] and DEFINED.search(before):
        return before
    return dedent(code)


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
