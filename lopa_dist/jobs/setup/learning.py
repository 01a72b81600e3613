"""What the options of learning mean for a job: which are refused, and how its adapter is made."""

from __future__ import annotations

from dataclasses import fields

from transformers import PreTrainedTokenizerFast

from lopa_dist.config import Config
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.learn.config import LearnConfig
from lopa_dist.learn.learning import Learning
from lopa_dist.learn.memory import FEWEST_MASKS
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.tokenizer import unused_token
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.group import Group

MOST_MASKS = 16  # of a group


def check_learning(config: Config, masks: int) -> None:
    """Raise a ValueError for options of learning that would have no effect.

    Args:
        config: may still have options that are ``auto``.
        masks: how many masks score a text, if the task has texts scored; else 0.
    """
    learn = config.job.learn
    if learn is None:
        for entry in fields(LearnConfig):
            if (value := getattr(config.learn, entry.name)) != entry.default:
                raise ValueError(f"learn.{entry.name}={value}: has no effect without job.learn (auto, or a number)")
        return
    if masks:
        raise ValueError(f"job.learn={learn}: texts are scored, and nothing is drafted; leave it out")
    if config.decode.drafts == 0:
        raise ValueError(f"job.learn={learn}: decode.drafts=0 drafts nothing; leave one of them out")
    if not config.decode.drafts_masks:
        raise ValueError(
            f"job.learn={learn}: masks learn, but decode.draft_from={config.decode.draft_from} drafts without them; "
            "leave one of the two out"
        )


def mask_token(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token under which PEFT finds a mask's embedding: the model's mask, or one that no text has."""
    own = config.mask_id < config.vocab_size
    return config.mask_id if own else unused_token(tokenizer, config.vocab_size)


def masks_of(decode: DecodeConfig) -> int:
    """Return how many masks of a group are trained: as many as chains have drafts, within reason."""
    return min(max(decode.max_drafts, FEWEST_MASKS), MOST_MASKS)


def learning_of(model: Transformer, tokenizer: PreTrainedTokenizerFast, config: Config, group: Group) -> Learning:
    """Return the adapter in training of a job's ranks, which all call this; it raises what `Learning` raises."""
    return Learning(
        model, mask_token(model.config, tokenizer), config.learn.rank, group.everyone, group.failures.watched,
        masks_of(config.decode), group.tensor, lambda name: group.store.barrier(keys.LESSON.format(name)),
    )  # fmt: skip
