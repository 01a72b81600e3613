"""EvalPlus's release files (``HumanEvalPlus.jsonl``, ``MbppPlus.jsonl``): inputs and a reference solution.

The hub's datasets of the same benchmarks hold ready test programs instead and need nothing of this. What counts as
equal follows EvalPlus: exact, or close for floating-point numbers, or a rule of the problem's own.
"""

from __future__ import annotations

from typing import Any

from lopa_dist.tasks.benchmark import BadRow, text_field

AS_SETS = (
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum", "intersection_array",
    "find_dissimilar", "Diff",
)  # fmt: skip
IF_FOUND = ("check_str", "text_match_three", "text_starta_endb")  # a match object stands for true

CHECK = """
def check(candidate):
    import copy, math
    from math import inf, nan
    import numpy

    def floats(value):
        if isinstance(value, (list, tuple)):
            return bool(value) and all(isinstance(v, float) for v in value)
        return isinstance(value, float)

    def digits_apart(a, b):
        a, b = str(a), str(b)
        width = max(len(a), len(b))
        return sum(abs(int(p) - int(q)) for p, q in zip(a.zfill(width), b.zfill(width)))

    def pyramid(base, height):
        return round(base ** 2 + 2 * base * math.sqrt((base / 2) ** 2 + height ** 2))

    def same(found, expected, arguments):
        if name == "find_zero":
            return abs(sum(c * math.pow(found, i) for i, c in enumerate(arguments[0]))) <= tolerance
        if name in as_sets:
            return set(found) == set(expected)
        if name in if_found:
            return expected == (found if isinstance(found, bool) else found is not None)
        if found == expected or name == "are_equivalent":
            return True
        if name == "sum_div" and found == 0:
            return True
        if name == "digit_distance_nums" and found == digits_apart(*arguments):
            return True
        if name == "surface_Area" and abs(found - pyramid(*arguments)) <= tolerance:
            return True
        near = tolerance or (1e-6 if floats(expected) else 0)
        if not near or type(found) is not type(expected):
            return False
        if isinstance(expected, (list, tuple)) and len(found) != len(expected):
            return False
        return bool(numpy.allclose(found, expected, rtol=1e-7, atol=near))

    name, tolerance, as_sets, if_found = {settings}
    reference = {{}}
    exec({reference}, reference)
    for arguments in {inputs}:
        expected = reference[name](*copy.deepcopy(arguments))
        if name in if_found and not isinstance(expected, bool):
            expected = expected is not None
        found = candidate(*copy.deepcopy(arguments))
        assert same(found, expected, arguments), "differs from the reference solution"
"""


def check_source(row: dict[str, Any]) -> str:
    """A function `check(candidate)` that compares with the reference solution on the base and the added inputs.

    Raises:
        BadRow: a field is missing, or MBPP+ needs the `evalplus` library and it is not there.
    """
    name = text_field(row, "entry_point")
    reference = text_field(row, "prompt") + text_field(row, "canonical_solution")
    inputs = [arguments for field in ("base_input", "plus_input") for arguments in list_field(row, field)]
    if str(row.get("task_id")).startswith("Mbpp/"):
        inputs = python_values(str(row["task_id"]), inputs)
    settings = (name, row.get("atol") or 0, AS_SETS, IF_FOUND)
    return CHECK.format(settings=repr(settings), reference=repr(reference), inputs=repr(inputs))


def list_field(row: dict[str, Any], name: str) -> list[Any]:
    """A field that holds argument lists."""
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(arguments, list) for arguments in value):
        raise BadRow(f"no list of argument lists in {name}")
    return value


def python_values(task_id: str, inputs: list[Any]) -> list[Any]:
    """MBPP+ inputs with the tuples, sets and complex numbers that JSON made lists and text of."""
    try:
        from evalplus.data.mbpp import mbpp_deserialize_inputs
    except ImportError as error:
        raise BadRow(
            "MBPP+ in EvalPlus's release form needs its library: pip install evalplus, or use the hub's form"
        ) from error
    return list(mbpp_deserialize_inputs(task_id, inputs))


def sentence(row: dict[str, Any]) -> str:
    """The sentence of an MBPP+ prompt, which is a docstring that also holds assertions."""
    lines = text_field(row, "prompt").strip().strip('"').strip().split("\n")
    return "\n".join(line for line in lines if not line.startswith("assert")).strip()
