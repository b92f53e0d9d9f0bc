"""The untrained model's mean token entropy, ⟨H⟩_ini, measured as in the paper, with Hugging Face transformers.

GTPO (arXiv:2508.03772, Sec. 5.2 and 6) samples one completion of each of the first 100 training prompts, at temperature
1.0, without top-k, top-p or a penalty for repetition. `gtpo-verl initial-entropy` is the command line.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.tokens import eos_ids

if TYPE_CHECKING:
    import torch

    from gtpo_verl.run.initial_entropy import InitialEntropy

_TEMPLATE = "data.apply_chat_template_kwargs"


def read_prompts(data: Path, samples: int) -> list[list[dict[str, str]]]:
    """Return the chat messages of the first `samples` rows of a parquet file for verl's RLHFDataset.

    Raises:
        ValueError: the file has fewer rows, or its prompts are not chat messages.
    """
    import pyarrow.parquet as pq

    try:
        column = pq.read_table(data, columns=["prompt"]).column("prompt")
        prompts = column.slice(0, samples).to_pylist()
    except (KeyError, ValueError) as error:
        raise ValueError(f"--data {data}: not a parquet file with a column prompt ({error})") from error
    if len(prompts) < samples:
        raise ValueError(
            f"--samples {samples}: {data} has {len(prompts)} rows; give at most that many, and start the recipe with "
            "algorithm.gtpo.initial_entropy=VALUE"
        )
    if not all(_is_chat(prompt) for prompt in prompts):
        raise ValueError(f"--data {data}: the column prompt does not hold chat messages; verl's RLHFDataset wants them")
    return prompts


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(message, dict) and "role" in message for message in prompt)


def template_kwargs(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides of verl's `data.apply_chat_template_kwargs` into keyword arguments for the chat template.

    Raises:
        ValueError: an override sets another key, or Hydra cannot parse it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    config = OmegaConf.create({"data": {"apply_chat_template_kwargs": {}}})
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key = override.key_or_group
            if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
                raise ValueError(f"{override.input_line}: only {_TEMPLATE} changes what is measured: leave it out")
            OmegaConf.update(config, key, override.value())
    except HydraException as error:
        raise ValueError(f"{_TEMPLATE}: {error}") from error
    return OmegaConf.to_container(config.data.apply_chat_template_kwargs)  # type: ignore[return-value]


def sample_entropies(
    model: Any, tokenizer: Any, prompts: list[list[dict[str, str]]], max_response_length: int, **template: Any
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Sample a completion of each prompt.

    Returns:
        Each completion's mean token entropy ⟨H⟩_i, in nats, and its length in tokens, both (len(prompts),).
    """
    import torch

    from gtpo_verl.algorithm.advantage import compute_trajectory_entropy

    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True, **template
    ).to(model.device)
    entropies: list[torch.Tensor] = []

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the entropy of the distribution that each token is drawn from, and leave the logits as they are."""
        entropies.append(torch.special.entr(scores.float().softmax(-1)).sum(-1))
        return scores

    with torch.inference_mode():
        sequences = model.generate(**inputs, max_new_tokens=max_response_length, logits_processor=[record])

    # A token counts if no EOS comes before it, so the first EOS itself counts.
    responses = sequences[:, inputs["input_ids"].shape[1] :]
    eos = torch.tensor(model.generation_config.eos_token_id, device=sequences.device)
    is_eos = torch.isin(responses, eos).int()
    eos_before = is_eos.cumsum(-1) - is_eos
    response_mask = (eos_before == 0).int()
    trajectory_entropy = compute_trajectory_entropy(torch.stack(entropies, 1), response_mask)
    return trajectory_entropy.cpu(), response_mask.sum(-1).cpu()


def measure_initial_entropy(
    model_path: str, data: Path, samples: int, max_response_length: int, batch_size: int, seed: int, template: dict
) -> "InitialEntropy":
    """Measure ⟨H⟩_ini of a model in Hugging Face format, on the GPU if there is one; see `add_arguments`.

    Raises:
        ValueError: the data has fewer than `samples` rows, there is no such model, or the GPUs are in a Ray cluster.
    """
    prompts = read_prompts(data, samples)
    if os.environ.get("VERL_USE_MODELSCOPE", "").lower() == "true":
        import verl  # noqa: F401, since its import makes transformers ask ModelScope
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from gtpo_verl.run.initial_entropy import InitialEntropy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # With GPUs in a Ray cluster alone, this machine's CPU would take hours.
    cluster = os.environ.get("RAY_ADDRESS")
    if cluster and device == "cpu" and os.environ.get("VERL_PLATFORM") != "cpu":
        remedy = "run this command by ray job submit --entrypoint-num-gpus=1, and give the run its value"
        raise ValueError(f"RAY_ADDRESS={cluster}, and no GPU on this machine: {remedy}")
    work = f"{samples} completions of up to {max_response_length} tokens"
    print(f"loading {model_path}, then {work} on {device}", file=sys.stderr)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left", trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", trust_remote_code=False).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model_path} cannot be loaded: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to(device)
    # The model's own settings would sample from a narrower distribution: Qwen2.5's have temperature 0.7 and top-k 20.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,  # off
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=eos_ids(tokenizer, model.generation_config),  # the tokens at which the rollout stops
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    entropies = []
    lengths = []
    for start in range(0, samples, batch_size):
        batch = prompts[start : start + batch_size]
        entropy, length = sample_entropies(model, tokenizer, batch, max_response_length, **template)
        entropies.append(entropy)
        lengths.append(length)
    return InitialEntropy.measure(torch.cat(entropies), torch.cat(lengths), range(samples))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gtpo-verl initial-entropy`."""
    parser.description = "Measure the untrained model's mean entropy, for a run's algorithm.gtpo.initial_entropy."
    parser.epilog = "example: gtpo-verl initial-entropy --model Qwen/Qwen2.5-3B-Instruct --data data/math/train.parquet"
    parser.add_argument("--model", required=True, help="folder in Hugging Face format, or Hub name")
    parser.add_argument("--data", required=True, type=Path, help="the run's training questions, a parquet file")
    parser.add_argument("--samples", type=int, default=100, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-response-length", type=int, default=1500, help="as in training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=20, help="completions at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3407, help="random seed of the sampling (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help=f"after --: the run's overrides of {_TEMPLATE}")


def run(args: argparse.Namespace) -> int:
    """Print the value, its spread and the decision it leads to."""
    for name in ("samples", "max_response_length", "batch_size"):
        number = getattr(args, name)
        if number < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    if not args.data.is_file():
        raise ValueError(f"--data {args.data}: no such file: give the parquet file of the run's training questions")
    template = template_kwargs(args.overrides) if args.overrides else {}  # which needs Hydra
    measured = measure_initial_entropy(
        model_path=args.model,
        data=args.data,
        samples=args.samples,
        max_response_length=args.max_response_length,
        batch_size=args.batch_size,
        seed=args.seed,
        template=template,
    )
    print(f"initial_entropy={measured.value:.6f}")
    print(f"standard deviation over the completions: {measured.std:.6f} nats per token")
    print(measured.decision(GTPOConfig()))
    return 0
