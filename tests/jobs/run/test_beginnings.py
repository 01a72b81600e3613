"""Where prompts are cut, so that what many begin with is computed once."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.jobs.run import beginnings
from lopa_dist.jobs.run.beginnings import LEAST, TOKEN, Beginnings, common


def words(seed: int, number: int, most: int = 30_000) -> list[int]:
    """Return random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(most) for _ in range(number)]


def test_instructions_are_cut_off_from_the_second_prompt_on() -> None:
    """The prompts' own tokens, of which the first ones are sometimes alike, make hardly any further cuts."""
    cuts, instructions = Beginnings(), words(0, 100)
    found = [cuts.cut(instructions + words(seed, 40, most=3)) for seed in range(1, 50)]
    assert found[0] == 0
    assert all(100 <= cut < 100 + LEAST for cut in found[1:])
    assert len(cuts.cuts) <= 3


def test_each_document_is_cut_off_with_the_instructions_before_it() -> None:
    """A document is computed for its first question alone, and once more for all others."""
    cuts, instructions = Beginnings(), words(0, 20)
    documents = [instructions + words(seed, 200) for seed in (1, 2, 3)]
    found = [[cuts.cut(document + words(9 * i + j, 12)) for j in range(4)] for i, document in enumerate(documents, 10)]
    assert found == [[0, 220, 220, 220], [20, 220, 220, 220], [20, 220, 220, 220]]


def test_a_little_more_in_common_does_not_cost_what_is_shared_already() -> None:
    """A longer cut is computed from its first token on; one prompt does not justify that, several do."""
    cuts, instructions = Beginnings(), words(0, 100)
    for seed in range(1, 4):
        cuts.cut(instructions + words(seed, 40))
    header = instructions + words(7, 30)
    found = [cuts.cut(header + words(seed, 40)) for seed in range(20, 30)]
    assert found[:4] == [100] * 4
    assert found[-3:] == [130] * 3


@pytest.mark.parametrize(("own", "copies", "cut"), [(40, 1, 100), (40, 3, 100), (40, 4, 0), (100, 2, 0)])
def test_copies_share_the_whole_prompt_unless_their_own_part_is_short(own: int, copies: int, cut: int) -> None:
    """Copies of a prompt that is cut each compute what is behind the cut."""
    cuts, instructions = Beginnings(), words(0, 100)
    cuts.cut(instructions + words(1, 40))
    cuts.cut(instructions + words(2, 40))
    assert cuts.cut(instructions + words(3, own), copies=copies) == cut


def test_a_known_beginning_is_cut_off_at_once() -> None:
    """A system prompt is one before a second prompt shows it; a longer one is found behind it."""
    cuts, system, task = Beginnings(), words(0, 20), words(1, 60)
    assert [cuts.cut(system + task + words(seed, 30), known=20) for seed in range(2, 5)] == [20, 80, 80]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=30),
    st.integers(0, 3),
    st.integers(0, 200),
)
def test_cuts_are_beginnings_of_other_prompts(prompts: list[list[int]], known: int, remembered: int) -> None:
    """A cut leaves at least a token behind it, and what is before it was known or is of an earlier prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "REMEMBERED", remembered)
        patch.setattr(beginnings, "LEAST", 2)
        patch.setattr(beginnings, "MOST_CUTS", 3)
        cuts = Beginnings()
        for number, prompt in enumerate(prompts):
            own = array("i", prompt).tobytes()
            most_alike = min(max((common(own, other) for other in cuts.seen), default=0), len(own) - TOKEN)
            having = sum(other.startswith(own[:most_alike]) for other in cuts.seen)
            assert cuts.longest(own) == ((most_alike, having) if most_alike >= 2 * TOKEN else (0, 0))
            most = min(known, len(prompt) - 1)
            cut = cuts.cut(prompt, most)
            assert 0 <= cut < len(prompt)
            assert cut <= most or any(other[:cut] == prompt[:cut] for other in prompts[:number])
            assert cuts.seen == sorted(cuts.order)
            assert cuts.bytes == sum(map(len, cuts.order))
            assert len(cuts.order) == 1 or cuts.bytes <= TOKEN * remembered
            assert len(cuts.cuts) <= 3
