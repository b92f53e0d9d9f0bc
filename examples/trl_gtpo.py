"""GTPO (arXiv:2508.03772) in TRL's GRPOTrainer; see docs/other-trainers.md.

python examples/trl_gtpo.py --model_name_or_path MODEL --output_dir outputs/trl
"""

import dataclasses
import logging
import os
import re
import warnings

import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from gtpo_verl import Completions, GTPOConfig, GTPORun, compute_group_advantages, compute_gtpo, compute_gtpo_metrics


def departures(args: GRPOConfig) -> dict[str, tuple]:
    """Return the settings of TRL with which a run is not the paper's GTPO, each with its value and the paper's."""
    papers = {
        "loss_type": "grpo",  # Eq. 11
        "importance_sampling_level": "token",  # a ratio per sequence averages λ
        "beta": 0.0,
        "num_iterations": 1,
        "steps_per_generation": args.gradient_accumulation_steps,
        # TRL's entropy_coef raises the entropy that γ, entropy_coeff, lowers.
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
    }
    if args.use_vllm:
        papers["vllm_importance_sampling_correction"] = False  # its weights multiply λ
    return {name: (getattr(args, name), paper) for name, paper in papers.items() if getattr(args, name) != paper}


def keeps_log_probs(args: GRPOConfig) -> bool:
    """Whether TRL computes the log-probabilities of the policy before an update."""
    is_used_once = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
    return not is_used_once or (args.use_vllm and args.vllm_importance_sampling_correction)


class GTPOTrainer(GRPOTrainer):
    """GRPOTrainer with an advantage per token, (B, T): δ_i (A_i − γ⟨H⟩_i) λ_it in place of TRL's A_i.

    With `completion_filter="auto"` and no `initial_entropy`, ⟨H⟩_ini is that of the first training batch. It is kept in
    each checkpoint, from which a resumed run takes it.
    """

    def __init__(self, *args, gtpo: GTPOConfig | None = None, **kwargs):
        self.gtpo = gtpo or GTPOConfig()
        self.gtpo_run: GTPORun | None = None
        super().__init__(*args, **kwargs)
        if not self.accelerator.is_main_process:
            logging.getLogger("gtpo_verl").setLevel(logging.ERROR)
        if "old_log_probs" in self.gtpo.token_weight_fields and not keeps_log_probs(self.args):
            raise ValueError(
                f"token_weights={self.gtpo.token_weights} asks for old_log_probs, which TRL computes only for several "
                f"updates per rollout: set num_iterations above 1 ({self.args.num_iterations}), or use another field"
            )
        if other := departures(self.args):
            own = {name: value for name, (value, _) in other.items()}
            paper = {name: value for name, (_, value) in other.items()}
            warnings.warn(f"not the paper's GTPO: {own}; the paper has {paper}", stacklevel=2)

    def train(self, resume_from_checkpoint=None, **kwargs):
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        self.gtpo_run = GTPORun(self.gtpo, self.args.output_dir, resumed_from=checkpoint)
        return super().train(resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save and self.gtpo_run.initial_entropy:
            checkpoint = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            self.gtpo_run.initial_entropy.save(checkpoint, self.gtpo)

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # of all processes, a column per function
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if "pixel_values" in batch:
            raise ValueError(
                "the batch has pixel_values, which GTPOTrainer's forward pass for the entropy does not see: train on "
                "prompts without pictures"
            )
        responses = batch["completion_ids"]
        with torch.no_grad():  # the policy that sampled, at the temperature that it sampled at
            _, entropy, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], responses], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                logits_to_keep=responses.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )
        local = (batch["advantages"], responses, batch["completion_mask"] * batch.get("tool_mask", 1), entropy)
        # The completions of a prompt may be spread over processes.
        if batch.get("old_per_token_logps") is not None:  # TRL has them only where a rollout is used several times
            local += (batch["old_per_token_logps"],)
        every = [self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1)) for x in local]
        advantages, all_responses, response_mask, all_entropy, *log_probs = every
        is_scored = ~self._rewards.isnan().all(dim=1, keepdim=True)  # by one reward function at least
        response_mask = response_mask * is_scored  # A = 0 alone would leave −γ⟨H⟩
        mode = "train" if self.model.training else "eval"
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        prompt = torch.arange(len(advantages)) // group_size
        rewards = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        # A_i are differences of these rewards, with which min_correct_reward can then be compared.
        are_differences = self.multi_objective_aggregation == "sum_then_normalize"
        if are_differences:
            # At the mean of a group TRL's rounding can leave a sign, by which λ would go.
            advantages[compute_group_advantages(rewards, Completions(is_scored, prompt)) == 0] = 0

        completions = Completions(response_mask, prompt)
        trajectory_entropy = completions.mean(all_entropy)
        if mode == "train":
            self.gtpo_run.measure(trajectory_entropy, completions)
        config, initial_entropy = self._settings()
        result = compute_gtpo(
            rewards=rewards if are_differences else None,
            advantages=advantages,
            responses=all_responses,
            response_mask=response_mask,
            group_ids=completions,
            entropy=all_entropy,
            trajectory_entropy=trajectory_entropy,
            old_log_probs=log_probs[0] if log_probs else None,
            config=config,
            initial_entropy=initial_entropy,
        )
        if mode == "train":
            self.gtpo_run.check(rewards, result)

        own = torch.arange(len(responses)) + self.accelerator.process_index * len(responses)
        batch["advantages"] = result.advantages[own, : responses.shape[1]]
        truncated = response_mask.sum(-1) >= self.max_completion_length
        for name, value in compute_gtpo_metrics(result, config, initial_entropy, truncated).items():
            self._metrics[mode][name].append(value)
        return batch

    def _settings(self) -> tuple[GTPOConfig, float | None]:
        """Return the settings and ⟨H⟩_ini; an evaluation before the first training batch has none, and no filter."""
        initial_entropy = self.gtpo_run.initial_entropy_value if self.gtpo_run else self.gtpo.initial_entropy
        if initial_entropy is None and self.gtpo.completion_filter == "auto":
            return dataclasses.replace(self.gtpo, completion_filter="never"), None
        return self.gtpo, initial_entropy


def right_sum(completions, answer, **kwargs):
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    parser = TrlParser((GRPOConfig, ModelConfig, GTPOConfig))
    parser.set_defaults(loss_type="grpo")  # Eq. 11: a mean over tokens, then completions
    args, model, gtpo = parser.parse_args_and_config()
    loaded = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    args.model_init_kwargs = loaded | (args.model_init_kwargs or {})
    layers = {"quantization_config": get_quantization_config(model), "peft_config": get_peft_config(model)}
    sums = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)])
    trainer = GTPOTrainer(model.model_name_or_path, right_sum, args, sums, gtpo=gtpo, **layers)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
