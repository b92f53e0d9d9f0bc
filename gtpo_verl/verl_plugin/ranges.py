"""The numbers that keys of verl take, each with the place in verl that breaks outside them, or ignores the key."""

import math
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The numbers that a key takes."""

    key: str
    place: str  # a file of verl and, behind a colon, text in it
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = True
    excludes_least: bool = False
    takes_null: bool = False

    @property
    def takes(self) -> str:
        """Return the range in words."""
        words = "a whole number" if self.is_whole else "a number"
        if self.excludes_least:
            words += f" above {self.least:g}"
        elif math.isfinite(self.least):
            words += f" of at least {self.least:g}"
        if math.isfinite(self.most):
            words += f" and at most {self.most:g}"
        return f"{words}, or null" if self.takes_null else words

    def has(self, value: Any) -> bool:
        """Whether verl can use this value."""
        if value is None:
            return self.takes_null
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.is_whole and not isinstance(value, int):
            return False
        if self.excludes_least and value == self.least:
            return False
        return self.least <= value <= self.most


def _at_least(least: int, key: str, place: str) -> Range:
    return Range(key, place, least=least)


def _null_or_at_least(least: int, key: str, place: str) -> Range:
    return Range(key, place, least=least, takes_null=True)


_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_V1 = "trainer/ppo/v1/trainer_base.py"
_ASYNC = "experimental/fully_async_policy/fully_async_trainer.py"
_OWN_POOL = "experimental/separation/utils.py"
_REPLICAS = "workers/rollout/llm_server.py"
_VLLM = "workers/rollout/vllm_rollout/vllm_async_server.py"
_MEGATRON = "workers/engine/megatron/transformer_impl.py"
_TORCHTITAN = "workers/engine/torchtitan/transformer_impl.py"
_KEEP = "utils/checkpoint/checkpoint_manager.py:max_ckpt_to_keep"
_OPTIMIZER = "workers/config/optimizer.py:build_optimizer"

RANGES = (
    # GPUs, of which only the trainer's own are always needed.
    _at_least(1, "trainer.nnodes", f"{_V1}:_init_resource_pool_mgr"),
    _at_least(1, "trainer.n_gpus_per_node", f"{_V1}:_init_resource_pool_mgr"),
    _at_least(0, f"{_ROLLOUT}.nnodes", "trainer/ppo/v1/trainer_separate_async.py:standalone_gpus"),
    _at_least(0, f"{_ROLLOUT}.n_gpus_per_node", "trainer/ppo/v1/trainer_separate_async.py:standalone_gpus"),
    _at_least(0, "rollout.nnodes", f"{_OWN_POOL}:config.rollout.nnodes"),
    _at_least(0, "rollout.n_gpus_per_node", f"{_OWN_POOL}:config.rollout.n_gpus_per_node"),
    _at_least(0, "reward.reward_model.nnodes", f"{_V1}:_init_resource_pool_mgr"),
    _at_least(0, "reward.reward_model.n_gpus_per_node", f"{_V1}:_init_resource_pool_mgr"),
    _at_least(0, "distillation.nnodes", f"{_V1}:_init_resource_pool_mgr"),
    _at_least(0, "distillation.n_gpus_per_node", f"{_V1}:_init_resource_pool_mgr"),
    # Steps and checkpoints.
    Range("trainer.total_epochs", f"{_V1}:current_epoch", least=0, excludes_least=True, is_whole=False),
    Range("trainer.total_training_steps", f"{_V1}:is_last_step", least=1, is_whole=False, takes_null=True),
    Range("trainer.save_freq", f"{_V1}:save_freq", is_whole=False),
    Range("trainer.test_freq", f"{_V1}:test_freq", is_whole=False),
    Range("trainer.max_actor_ckpt_to_keep", _KEEP, takes_null=True),
    Range("trainer.max_critic_ckpt_to_keep", _KEEP, takes_null=True),
    _at_least(1, "trainer.v1.separate_async.parameter_sync_step", f"{_V1}:self.parameter_sync_step"),
    _at_least(1, "async_training.trigger_parameter_sync_step", f"{_ASYNC}:trigger_parameter_sync_step"),
    _at_least(1, "async_training.require_batches", f"{_ASYNC}:require_batches"),
    # Batches and lengths.
    _at_least(1, "data.train_batch_size", f"{_V1}:steps_per_epoch"),
    _null_or_at_least(1, "data.gen_batch_size", f"{_V1}:gen_batch_size"),
    _at_least(1, "data.max_prompt_length", "utils/dataset/rl_dataset.py:max_prompt_length"),
    _at_least(1, "data.max_response_length", f"{_VLLM}:self.config.response_length"),
    _at_least(0, "data.dataloader_num_workers", f"{_V1}:dataloader_num_workers"),
    _at_least(1, f"{_ACTOR}.ppo_mini_batch_size", "workers/engine_workers.py:mini_batch_size"),
    _null_or_at_least(1, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "workers/engine/utils.py:micro_batch_size_per_gpu"),
    _at_least(1, f"{_ACTOR}.ppo_max_token_len_per_gpu", "utils/seqlen_balancing.py:max_token_len"),
    _at_least(1, f"{_ACTOR}.ppo_epochs", "workers/engine_workers.py:epochs"),
    _at_least(1, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", "utils/seqlen_balancing.py:max_token_len"),
    _null_or_at_least(1, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "workers/engine/utils.py:micro_batch_size"),
    # The rollout.
    _at_least(1, f"{_ROLLOUT}.n", f"{_V1}:rollout.n"),
    _at_least(1, f"{_ROLLOUT}.val_kwargs.n", f"{_V1}:val_kwargs.n"),
    _at_least(1, f"{_ROLLOUT}.prompt_length", f"{_VLLM}:self.config.prompt_length"),
    _at_least(1, f"{_ROLLOUT}.response_length", f"{_VLLM}:self.config.response_length"),
    _null_or_at_least(1, f"{_ROLLOUT}.max_model_len", f"{_VLLM}:max_model_len"),
    _null_or_at_least(1, f"{_ROLLOUT}.max_num_batched_tokens", f"{_VLLM}:max_num_batched_tokens"),
    _at_least(1, f"{_ROLLOUT}.max_num_seqs", "workers/rollout/replica.py:max_num_seqs"),
    Range(f"{_ROLLOUT}.temperature", f"{_VLLM}:SamplingParams(", least=0, is_whole=False),
    Range(f"{_ROLLOUT}.top_p", f"{_VLLM}:SamplingParams(", least=0, most=1, excludes_least=True, is_whole=False),
    Range(
        f"{_ROLLOUT}.gpu_memory_utilization",
        f"{_VLLM}:gpu_memory_utilization",
        least=0,
        most=1,
        excludes_least=True,
        is_whole=False,
    ),
    # Over how many GPUs a model is split.
    _at_least(1, f"{_ROLLOUT}.tensor_model_parallel_size", f"{_REPLICAS}:tensor_model_parallel_size"),
    _at_least(1, f"{_ROLLOUT}.data_parallel_size", f"{_REPLICAS}:data_parallel_size"),
    _at_least(1, f"{_ROLLOUT}.pipeline_model_parallel_size", f"{_REPLICAS}:pipeline_model_parallel_size"),
    _at_least(1, f"{_ACTOR}.ulysses_sequence_parallel_size", "workers/config/actor.py:ulysses_sequence_parallel_size"),
    _at_least(
        1, f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "workers/engine/fsdp/transformer_impl.py:dp_size"
    ),
    _at_least(1, f"{_ACTOR}.megatron.tensor_model_parallel_size", f"{_MEGATRON}:tensor_model_parallel_size"),
    _at_least(1, f"{_ACTOR}.megatron.pipeline_model_parallel_size", f"{_MEGATRON}:pipeline_model_parallel_size"),
    _at_least(1, f"{_ACTOR}.megatron.context_parallel_size", f"{_MEGATRON}:context_parallel_size"),
    _at_least(1, f"{_ACTOR}.torchtitan.tensor_parallel_size", f"{_TORCHTITAN}:tensor_parallel_size"),
    _at_least(1, f"{_ACTOR}.torchtitan.pipeline_parallel_size", f"{_TORCHTITAN}:pipeline_parallel_size"),
    _at_least(1, f"{_ACTOR}.torchtitan.context_parallel_size", f"{_TORCHTITAN}:context_parallel_size"),
    _at_least(
        1, f"{_ACTOR}.veomni.ulysses_parallel_size", "workers/engine/veomni/transformer_impl.py:ulysses_parallel_size"
    ),
    # Model and optimizer.
    _at_least(0, f"{_MODEL}.lora_rank", "utils/config.py:lora_rank"),
    _at_least(0, f"{_MODEL}.lora.rank", "utils/config.py:lora_rank"),
    Range(f"{_ACTOR}.optim.lr", _OPTIMIZER, least=0, is_whole=False),
    Range(f"{_ACTOR}.optim.weight_decay", _OPTIMIZER, least=0, is_whole=False),
)
