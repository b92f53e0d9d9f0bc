"""GTPO (arXiv:2508.03772) in TRL's GRPOTrainer; see docs/other-trainers.md.

python examples/trl_gtpo.py --model_name_or_path MODEL --output_dir outputs/trl
"""

import re
import warnings

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from gtpo_verl import GTPOConfig, compute_gtpo_token_advantages
from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics


class GTPOTrainer(GRPOTrainer):
    """GRPOTrainer with an advantage per token, (B, T): δ_i (A_i − γ⟨H⟩_i) λ_it in place of TRL's A_i."""

    def __init__(self, *args, gtpo: GTPOConfig | None = None, **kwargs):
        self.gtpo = gtpo or GTPOConfig(completion_filter="always")
        self.gtpo.filter_is_active(self.gtpo.initial_entropy)  # raises if that is not known
        super().__init__(*args, **kwargs)
        papers = {"loss_type": "grpo", "importance_sampling_level": "token"}  # Eq. 11; a ratio per sequence averages λ
        papers |= {"beta": 0.0, "num_iterations": 1, "steps_per_generation": self.args.gradient_accumulation_steps}
        # TRL's entropy_coef raises the entropy that γ, entropy_coeff, lowers.
        papers |= {"entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}
        if other := {name: own for name in papers if (own := getattr(self.args, name)) != papers[name]}:
            paper = {name: papers[name] for name in other}
            warnings.warn(f"not the paper's GTPO: {other}; the paper has {paper}", stacklevel=2)

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # of all processes, a column per function
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
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
        every = [self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1)) for x in local]
        advantages, all_responses, response_mask, all_entropy = every
        is_scored = ~self._rewards.isnan().all(dim=1, keepdim=True)  # by one reward function at least
        response_mask = response_mask * is_scored  # A = 0 alone would leave −γ⟨H⟩
        mode = "train" if self.model.training else "eval"
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        prompt = torch.arange(len(advantages)) // group_size
        if self.multi_objective_aggregation == "sum_then_normalize":
            # At the mean of a group TRL's rounding can leave a sign, by which λ would go.
            rewards = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
            advantages[compute_group_advantages(rewards, Completions(is_scored.long(), prompt)) == 0] = 0
        result = compute_gtpo_token_advantages(advantages, prompt, all_responses, response_mask, all_entropy, self.gtpo)
        own = torch.arange(len(responses)) + self.accelerator.process_index * len(responses)
        batch["advantages"] = result.advantages[own, : responses.shape[1]]
        truncated = response_mask.sum(-1) >= self.max_completion_length
        for name, value in compute_gtpo_metrics(result, self.gtpo, self.gtpo.initial_entropy, truncated).items():
            self._metrics[mode][name].append(value)
        return batch


def right_sum(completions, answer, **kwargs):
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    parser = TrlParser((GRPOConfig, ModelConfig, GTPOConfig))
    parser.set_defaults(loss_type="grpo", completion_filter="always")  # Eq. 11: a mean over tokens, then completions
    args, model, gtpo = parser.parse_args_and_config()
    loaded = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    args.model_init_kwargs = loaded | (args.model_init_kwargs or {})
    layers = {"quantization_config": get_quantization_config(model), "peft_config": get_peft_config(model)}
    sums = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)])
    trainer = GTPOTrainer(model.model_name_or_path, right_sum, args, sums, gtpo=gtpo, **layers)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
