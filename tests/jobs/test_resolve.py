"""What auto comes to by the ranks; test_config.py has what it comes to by the model, test_profiles.py by a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa_dist.config import Config, composed
from lopa_dist.jobs.resolve import by_model, by_ranks, resolve, resolve_decode, sequences_of_replica
from lopa_dist.models.checkpoint import read_config
from lopa_dist.models.families import PATTERNS
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop

CPU = torch.device("cpu")


def config(*overrides: str) -> Config:
    return composed([*overrides, "parallel.threads=1"])


@pytest.mark.parametrize(("branches", "wanted"), [("auto", [(3, "there are 4"), (0, "this is one rank")]), (1, [])])
def test_each_branch_rank_has_a_branch_of_verified_lookahead(
    branches: int | str, wanted: list[tuple[int, str]]
) -> None:
    asked = config("decode=embedded", f"decode.branches={branches}")
    found = [by_ranks(asked, mesh) for mesh in (Mesh(1, 4), Mesh(2, 1))]
    reason = "the ranks: a branch for each branch rank, and "
    expected = [{"decode.branches": (k, reason + ranks)} for k, ranks in wanted]
    assert found == (expected or [{}, {}])
    assert resolve_decode(asked.decode, PATTERNS["d2f"]).branches == (0 if branches == "auto" else 1)


def test_no_auto_is_left_and_the_rest_stays() -> None:
    asked = config("decode=verified", "decode.tau_conf=0.7", "engine.max_sequences=3")
    shape, group = read_config(EMBEDDED), Group(World("python"), Mesh(1, 1), "auto", 5, CPU, Stop(5))
    resolved = resolve(asked, shape, CPU, group, 4)
    for section in (resolved.decode, resolved.engine):
        assert "auto" not in {key: value for key, value in vars(section).items() if key != "graphs"}.values()
    assert (resolved.decode.tau_conf, resolved.engine.max_sequences) == (0.7, 3)
    for key, (value, reason) in by_model(asked, shape, CPU).items():
        section, name = key.split(".")
        assert reason
        if section != "model":  # what the model is loaded with is resolved where it is loaded
            assert getattr(getattr(resolved, section), name) == value


def test_causal_models_are_not_decoded_as_masked_ones() -> None:
    """And one without masks is not asked for drafts."""
    shape = replace(read_config(EMBEDDED), family="qwen3")
    shape = replace(shape, mask_id=shape.vocab_size)
    with pytest.raises(ValueError, match="this is a causal model"):
        by_model(config("model=local", "model.path=x", "decode=vanilla"), shape, CPU)
    with pytest.raises(ValueError, match=r"decode\.drafts=10 needs a mask token"):
        by_model(config("decode=verified"), shape, CPU)
    with pytest.raises(ValueError, match=r"model\.pattern=d2f: qwen3 models are causal"):
        by_model(config("decode=vanilla"), shape, CPU)
    unshifted = replace(read_config(EMBEDDED), family="llada", shift=False)
    with pytest.raises(ValueError, match=r"model\.pattern=causal: in llada models a row predicts its own position"):
        by_model(config("decode=vanilla", "model.pattern=causal"), unshifted, CPU)


def test_a_replica_decodes_its_share_of_few_requests() -> None:
    engine = config("engine.max_sequences=8").engine
    assert [sequences_of_replica(engine, requests, 4) for requests in (0, 5, 32, 99)] == [1, 2, 8, 8]
