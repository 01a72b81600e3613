"""The first line of a job: what generates, how, on which ranks and threads."""

from __future__ import annotations

from lopa_dist.config import Config
from lopa_dist.engine.sizes import usual_rows
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import threads
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.rules import rule_for


def announcement(
    config: Config, builder: EngineBuilder, model: Transformer, world: World, mesh: Mesh, masks: int
) -> str:
    """Return the line, without the task and the run folder.

    Args:
        config: without any ``auto``.
        builder: of `model`.
        model: this rank's part of it.
        world: all ranks.
        mesh: what each rank does.
        masks: how many masks estimate a text's likelihood; 0 if answers are generated.
    """
    quantized = "" if config.model.quantization == "none" else f" and {config.model.quantization}"
    size = f"{parameters(model) / 1e6:.1f}M parameters{' a rank' * (mesh.tensor > 1)}"
    return (
        f"model {config.model.path} ({model.config.family}, {size}, {builder.dtype}{quantized} on {builder.device}), "
        f"{how(config, masks)}, data {mesh.data} x branch {mesh.branch} x tensor {mesh.tensor} "
        f"ranks{threads_of(config, builder, world)}"
    )


def how(config: Config, masks: int) -> str:
    """Return how texts are generated, or scored by `masks` masks."""
    decode = config.decode
    if masks:
        by = f" by up to {masks} masks of each text or block" if masks > 1 else ""
        return f"scores texts{by}, context {decode.context}"
    prompt = "" if decode.scope.caches_kv else "its prompt and "
    usual = usual_rows(decode)
    rows = f"{prompt}{usual} row{'s' * (usual != 1)} per sequence in a step"
    return f"{rule_for(decode).words(decode)} (cached: {decode.scope.summary}; {rows})"


def threads_of(config: Config, builder: EngineBuilder, world: World) -> str:
    """Return how many CPU threads compute on each rank, and why; empty on a GPU."""
    if builder.device.type != "cpu":
        return ""
    number, why, _ = threads(config, world)
    return f" of {number} thread{'' if number == 1 else 's'} ({why})"


def parameters(model: Transformer) -> int:
    """Return how many parameters a model has here; those that the head shares with the embeddings count once."""
    shared = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    return sum(shared.values())
