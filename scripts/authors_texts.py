"""Generate texts with the authors' own program: ``python scripts/authors_texts.py NAME FOLDER [FOLDER]``.

The texts are written to tests/models/authors_texts/NAME.json. FOLDER is a checkout of the program's repository, at the
commit that `tests/models/authors.py` gives for NAME. The second FOLDER has the code of the model: `d3llm` and `llada`
need czg1225/dParallel, and `sdar_moe` needs PKU-SEC-Lab/TEAM-MoE-dLLM. Run this from the root, in an environment with
numpy, pytest, einops, accelerate, tqdm, and the version of transformers that the program needs: 4.52.4 for `lopa`,
`sdar`, `sdar_moe` and `trado`, 4.57.1 for the others.

A prompt is left out if its answer changes when all logits are moved by up to `NEAR`, so that no text depends on
rounding.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models import authors
from tests.models.authors import EOS, MASK, PAD, Comparison
from tests.models.small_checkpoints import reference

NEAR = 1e-4
DRAWS = 4  # how often each prompt is answered with moved logits

Generate = Callable[..., Tensor]
"""Takes a prompt, the length of its answer and the setting's arguments, and returns the answer."""


def main(name: str, *folders: Path) -> None:
    """Write the texts of all settings of the comparison `name`."""
    comparison = authors.COMPARISONS[name]
    torch.set_num_threads(1)
    model, generate = PROGRAMS[name](comparison, *folders)
    model.load_state_dict(comparison.weights(), strict=True)
    model.eval()
    calls = Calls(model.forward)
    model.forward = calls
    found = [texts_of(comparison, setting, generate, calls) for setting in comparison.settings]
    authors.FOLDER.mkdir(exist_ok=True)
    file = authors.FOLDER / f"{name}.json"
    file.write_text(json.dumps(found, separators=(",", ":")).replace("},", "},\n") + "\n")
    print(name, [len(texts) for texts in found], "forwards", [sum(t["forwards"] for t in texts) for texts in found])


class Calls:
    """Runs and counts forwards, keeps random weights from predicting the mask, and moves logits by up to `near`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.number, self.near = forward, 0, 0.0
        self.noise = torch.Generator().manual_seed(0)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the output of a forward, with the logits changed."""
        self.number += 1
        output = self.forward(*inputs, **options)
        if self.near:
            output.logits.add_((2 * torch.rand(output.logits.shape, generator=self.noise) - 1) * self.near)
        output.logits[..., MASK] = -1e9  # trained weights never predict it; an infinity would make entropies NaN
        return output


@torch.no_grad()
def texts_of(
    comparison: Comparison, setting: authors.Setting, generate: Generate, calls: Calls
) -> list[dict[str, Any]]:
    """Return the first prompts without near ties, with the answers of the program and its numbers of forwards."""
    found: list[dict[str, Any]] = []
    for prompt, most in comparison.requests(setting):
        answers = []
        for near in (0.0, *itertools.repeat(NEAR, DRAWS)):
            calls.near, before = near, calls.number
            tokens = generate(torch.tensor([prompt]), most, **setting.authors).flatten().tolist()[:most]
            answers.append(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)
            if near == 0:
                forwards = calls.number - before
        if all(answer == answers[0] for answer in answers):
            found.append({"prompt": prompt, "most": most, "forwards": forwards, "answer": answers[0]})
        if len(found) == setting.prompts:
            break
    return found


def rnd1(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return RND1's model and sampler, with as many steps as tokens."""
    sys.path.insert(0, str(folder))
    rnd = importlib.import_module("rnd")
    config = rnd.RND1Config(attn_implementation="sdpa")
    for key, value in comparison.kind.config.items():  # the constructor of the config has set the published sizes
        if key not in ("model_type", "rope_scaling"):
            setattr(config, key, value)
    config.rope_scaling, config.pad_token_id = None, PAD
    model = rnd.RND1LM(config)

    def generate(prompt: Tensor, most: int) -> Tensor:
        length = prompt.shape[1] + most
        options = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": PAD}
        return rnd.diffusion_sample(model, length + 1, most, prefix_ids=prompt[0], **options)[
            0, prompt.shape[1] : length
        ]

    return model, generate


def in_blocks(decode: Any, model: torch.nn.Module) -> Generate:
    """Return the block-by-block generation of SDAR's program; `decode` is its module."""

    def generate(prompt: Tensor, most: int, block: int, threshold: float) -> Tensor:
        options = {"block_length": block, "denoising_steps": block, "confidence_threshold": threshold}
        options |= {"gen_length": most, "mask_id": MASK, "stopping_criteria_idx": [EOS]}
        return decode.block_diffusion_generate(model, {"input_ids": prompt}, **options)[0, prompt.shape[1] :]

    return generate


def sdar(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return the model of SDAR or TraDo, and the block-by-block generation that both have, made greedy."""
    stand_in("flash_attn", flash_attn_func=attention)
    stand_in("flash_attn.ops.triton.layer_norm", rms_norm_fn=rms_norm)
    sys.path.insert(0, str(folder))
    model_folder = next(folder.glob("**/modeling_sdar.py")).parent
    sys.path.insert(0, str(model_folder.parent))
    stand_in(f"{model_folder.name}.fused_linear_diffusion_cross_entropy", FusedLinearDiffusionCrossEntropyLoss=None)
    package(model_folder.name, model_folder)
    code = importlib.import_module(f"{model_folder.name}.modeling_sdar")
    torch.multinomial = lambda probs, num_samples: probs.argmax(-1, keepdim=True)  # type: ignore[assignment]
    decode = importlib.import_module("generate")
    model = code.SDARForCausalLM(
        code.SDARConfig(**plain(comparison), fuse_cross_entropy=False, attn_implementation="sdpa")
    )

    return model, in_blocks(decode, model)


def sdar_moe(comparison: Comparison, folder: Path, copy: Path) -> tuple[torch.nn.Module, Generate]:
    """Return SDAR's mixture of experts and generation; the model's code is TEAM's copy, without TEAM's additions."""
    stand_in("flash_attn.ops.triton.layer_norm", rms_norm_fn=rms_norm)
    transformers = importlib.import_module("transformers")
    package("team", copy)
    stand_in("team.configuration_sdar_moe", SDARMoeConfig=transformers.Qwen3MoeConfig)
    code = importlib.import_module("team.modeling_sdar_moe")
    torch.multinomial = lambda probs, num_samples: probs.argmax(-1, keepdim=True)  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    decode = importlib.import_module("generate")
    model = code.SDARMoeForCausalLM(transformers.Qwen3MoeConfig(**plain(comparison), attn_implementation="sdpa"))
    both = model.forward
    model.forward = lambda *inputs, **options: both(*inputs, **options)[0]  # the second output is for TEAM's additions

    return model, in_blocks(decode, model)


def fast_dllm_v2(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return Fast-dLLM v2's model and `generate`, from a copy of the model's code."""
    at = next(folder.glob("**/Fast_dLLM_v2_7B"))
    sys.path.insert(0, str(at.parent))
    code = importlib.import_module(f"{at.name}.modeling")
    model = code.Fast_dLLM_QwenForCausalLM(code.Fast_dLLM_QwenConfig(**plain(comparison), attn_implementation="sdpa"))

    def generate(prompt: Tensor, most: int, threshold: float, small: int) -> Tensor:
        length, block = prompt.shape[1], comparison.kind.config["bd_size"]
        blocks = -(-(length % block + most) // block)
        options = {"small_block_size": small, "block_size": block, "mask_id": MASK, "stop_token": EOS}
        return model.generate(prompt, blocks * block, threshold=threshold, **options)[0][0, length:]

    return model, generate


def a2d(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return dLLM's model and sampler for models whose rows see everything, with one token per step."""
    sys.path.insert(0, str(folder))
    for name in ("dllm", "dllm.core", "dllm.pipelines", "dllm.pipelines.a2d"):  # without running what they import
        package(name, folder / name.replace(".", "/"))
    sampler = importlib.import_module("dllm.core.samplers.mdlm")
    layout = comparison.kind.config["model_type"].removeprefix("a2d-")
    code = importlib.import_module(f"dllm.pipelines.a2d.models.{layout}.modeling_{layout}")
    name = f"A2D{layout.capitalize()}"
    config = getattr(code, f"{name}Config")(**plain(comparison), attn_implementation="sdpa")
    model = getattr(code, f"{name}LMHeadModel")(config)
    tokenizer = types.SimpleNamespace(mask_token_id=MASK, eos_token_id=EOS, bos_token_id=None)

    def generate(prompt: Tensor, most: int, block: int) -> Tensor:
        found = sampler.MDLMSampler(model, tokenizer).sample(
            [prompt[0]], max_new_tokens=most, steps=most, block_size=block, return_dict=False
        )
        return found[0, prompt.shape[1] :]

    return model, generate


def a2d_blocks(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return dLLM's model and sampler for models that read block by block, with one token per step."""
    model, _ = a2d(comparison, folder)
    sampler = importlib.import_module("dllm.core.samplers.bd3lm")
    tokenizer = types.SimpleNamespace(mask_token_id=MASK, eos_token_id=EOS, bos_token_id=None, pad_token_id=-1)

    def generate(prompt: Tensor, most: int, block: int) -> Tensor:
        found = sampler.BD3LMSampler(model, tokenizer).sample(
            [prompt[0]], max_new_tokens=most, steps_per_block=block, block_size=block, return_dict=False
        )
        return found[0, prompt.shape[1] :]

    return model, generate


def llada_model(comparison: Comparison, folder: Path) -> torch.nn.Module:
    """Return LLaDA's model, from dParallel's copy of its code."""
    at = folder / "LLaDA"
    sys.path.insert(0, str(at))
    code = importlib.import_module("model.modeling_llada")
    return code.LLaDAModelLM(code.LLaDAConfig(**plain(comparison)))


def dparallel(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return LLaDA's model and dParallel's `generate`, which fills by entropy."""
    model = llada_model(comparison, folder)
    decode = importlib.import_module("generate")

    def generate(prompt: Tensor, most: int, block: int, threshold: float) -> Tensor:
        options = {"steps": most, "gen_length": most, "block_length": block, "mask_id": MASK}
        return decode.generate(model, prompt, **options, threshold=threshold)[0][0, prompt.shape[1] :]

    return model, generate


def dparallel_dream(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return Dream's model and the generation of dParallel-Dream, which fills by entropy."""
    sys.path.insert(0, str(folder / "Dream"))
    code = importlib.import_module("model.modeling_dream")
    decode = importlib.import_module("model.generation_utils_semiar")
    model = code.DreamModel(code.DreamConfig(**plain(comparison), attn_implementation="sdpa"))

    def generate(prompt: Tensor, most: int, block: int, threshold: float) -> Tensor:
        options = {"temperature": 0.0, "alg": "entropy_threshold", "mask_token_id": MASK, "steps": most}
        config = decode.DreamGenerationConfig(**options, max_length=prompt.shape[1] + most)
        sample = decode.DreamGenerationMixin._sample
        return sample(model, prompt, None, config, threshold, block)[0][0, prompt.shape[1] :]

    return model, generate


def dream(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return Dream's model and its own sampler, from the copy in Fast-dLLM.

    With the default `eps` of 0.001, the sampler's schedule rounds down, so the first step fills no token and the last
    step two. With an `eps` below 0, each step fills one token.
    """
    sys.path.insert(0, str(folder / "dream"))
    code = importlib.import_module("model.modeling_dream")
    decode = importlib.import_module("model.generation_utils")
    model = code.DreamModel(code.DreamConfig(**plain(comparison), attn_implementation="sdpa"))

    def generate(prompt: Tensor, most: int, order: str) -> Tensor:
        options = {"temperature": 0.0, "alg": order, "mask_token_id": MASK, "steps": most, "eps": -1e-4}
        config = decode.DreamGenerationConfig(**options, max_length=prompt.shape[1] + most)
        sample = decode.DreamGenerationMixin._sample
        found = sample(model, prompt, None, config, lambda step, x, logits: x, lambda step, x, logits: logits)
        return (found if isinstance(found, Tensor) else found.sequences)[0, prompt.shape[1] :]

    return model, generate


def d3llm(comparison: Comparison, folder: Path, copy: Path) -> tuple[torch.nn.Module, Generate]:
    """Return LLaDA's model and d3LLM's `generate_multi_block`."""
    model = llada_model(comparison, copy)
    stand_in("utils.utils_LLaDA.model.modeling_llada", LLaDAModelLM=None)
    sys.path.insert(0, str(folder / "d3llm" / "d3llm_LLaDA"))
    decode = importlib.import_module("d3llm_llada_generate_util")

    def generate(prompt: Tensor, most: int, block: int, threshold: float) -> Tensor:
        options = {"max_new_tokens": most, "block_size": block, "mask_id": MASK, "threshold": threshold}
        found = decode.generate_multi_block(
            model, prompt, **options, block_add_threshold=1.0, decoded_token_threshold=1.0
        )
        return found[0][0, prompt.shape[1] :]

    return model, generate


def llada(comparison: Comparison, folder: Path, copy: Path | None = None) -> tuple[torch.nn.Module, Generate]:
    """Return LLaDA's model and `generate`, with one token per step.

    Without `copy`, the model is the one of iLLaDA: Llama whose rows see everything.
    """
    model = SeesAll(comparison) if copy is None else llada_model(comparison, copy)
    sys.path.insert(0, str(folder))
    decode = importlib.import_module("generate")

    def generate(prompt: Tensor, most: int, block: int | None = None) -> Tensor:
        options = {"steps": most, "gen_length": most, "block_length": block or most, "mask_id": MASK}
        return decode.generate(model, prompt, **options)[0, prompt.shape[1] :]

    return model, generate


class SeesAll(torch.nn.Module):
    """A model of transformers in which all rows see one another."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.model = reference(comparison.kind)
        self.device = self.model.device

    def load_state_dict(self, weights: Any, strict: bool = True) -> Any:  # type: ignore[override]
        """Load the checkpoint's weights."""
        return self.model.load_state_dict(weights, strict)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None) -> Any:
        """Run all rows; the program must give no attention mask."""
        assert attention_mask is None
        return self.model(tokens, attention_mask=torch.zeros(1, 1, *2 * tokens.shape[1:]), use_cache=False)


def lopa(comparison: Comparison, folder: Path) -> tuple[torch.nn.Module, Generate]:
    """Return Dream's model and LoPA's program for D2F-Dream on one device, with the settings of LoPA's scripts."""
    sys.path.insert(0, str(folder / "scale_dream_d2f"))
    stand_in("datasets", Dataset=None)
    stand_in("peft", PeftConfig=None, PeftModel=None)
    stand_in("lm_eval.utils")
    stand_in("lm_eval.api.instance", Instance=None)
    stand_in("lm_eval.api.model", TemplateLM=object)
    stand_in("lm_eval.api.registry", register_model=lambda name: lambda made: made)
    stand_in("lm_eval.models.utils", get_dtype=None)
    stand_in("lm_eval.__main__", cli_evaluate=None)
    vars(sys.modules["lm_eval"])["utils"] = None
    module = importlib.import_module("scale_dream_d2f")
    module.gc = types.SimpleNamespace(collect=lambda: None)  # otherwise the program collects garbage in every round
    code = importlib.import_module("model_cache.dream.model_dream")
    model = code.DreamModel(code.DreamConfig(**plain(comparison), attn_implementation="sdpa"))

    def generate(prompt: Tensor, most: int, branches: int, block: int, add: float, threshold: float) -> Tensor:
        options = {
            "model": model, "device": "cpu", "target_dtype": torch.float32, "max_length": 512, "max_new_tokens": most,
            "block_size": block, "mask_token_id": MASK, "eot_token_id": EOS, "temperature": 0.0, "top_p": None,
            "top_k": None, "sampling_strategy": "neg_entropy", "block_add_threshold": add,
            "decoded_token_threshold": 0.95, "skip_threshold": threshold, "branch_topp": 1.0,
            "selection_conf_alpha": 0.0, "branching_factor": max(branches, 1), "use_full_attention": True,
            "use_uncertainty_logic": True, "branch_verification_mode": True, "base_branch_competition": True,
            "verification_force_base_winner": False,
        }  # fmt: skip
        of_options = type("OfOptions", (module.DreamLoRA,), options)
        return torch.tensor(object.__new__(of_options)._generate_enhanced_speculative(prompt)[0])

    return model, generate


def plain(comparison: Comparison) -> dict[str, Any]:
    """Return the entries of `config.json`, except those that name the kind of model."""
    return {key: value for key, value in comparison.kind.config.items() if key not in ("model_type", "auto_map")}


def package(name: str, folder: Path) -> None:
    """Register `folder` as the package `name`, without running its `__init__.py`."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def stand_in(name: str, **members: Any) -> None:
    """Register a module `name` that has only `members`, in place of one that needs a GPU or that is not used here."""
    parts = name.split(".")
    for size in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:size]), types.ModuleType(parts[size - 1]))
    sys.modules[name] = types.ModuleType(parts[-1])
    vars(sys.modules[name]).update(members)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    """Return what flash attention returns, ``[B, rows, heads, D]``; nothing is masked."""
    assert not causal
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"scale": softmax_scale, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """Return what the norm of flash attention returns."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


PROGRAMS: dict[str, Callable[..., tuple[Any, Generate]]] = {
    "a2d_qwen2": a2d,
    "a2d_qwen2_bd3lm": a2d_blocks,
    "a2d_qwen3": a2d,
    "d3llm": d3llm,
    "dparallel": dparallel,
    "dparallel_dream": dparallel_dream,
    "dream": dream,
    "fast_dllm_v2": fast_dllm_v2,
    "illada": llada,
    "llada": llada,
    "lopa": lopa,
    "rnd1": rnd1,
    "sdar": sdar,
    "sdar_moe": sdar_moe,
    "trado": sdar,
}


if __name__ == "__main__":
    main(sys.argv[1], *(Path(name).resolve() for name in sys.argv[2:]))
