"""Which tokens end a completion: a completion that ends with none of them was cut off, by whichever limit."""

from contextlib import suppress

import torch
from omegaconf import DictConfig


def eos_token_ids(model: DictConfig) -> torch.Tensor:
    """The tokenizer's EOS token, and the others at which rollout engines stop: those of the model's generation config.

    Args:
        model (DictConfig): verl's `actor_rollout_ref.model`.

    Returns:
        (number of tokens,) int64.
    """
    from transformers import GenerationConfig
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    tokenizer_path = copy_to_local(model.get("tokenizer_path") or model.path)
    ids = {hf_tokenizer(tokenizer_path, trust_remote_code=model.get("trust_remote_code", False)).eos_token_id}
    with suppress(OSError):  # a model need not have a generation config
        more = GenerationConfig.from_pretrained(copy_to_local(model.path)).eos_token_id
        ids.update(more if isinstance(more, list) else [more])
    return torch.tensor(sorted(ids - {None}))
