"""The token dump that `gtpo-verl view` reads: token ids, entropy, advantage and λ of each token of a step.

Under another estimator than `gtpo` the λ, the entropies and the filter are what GTPO (arXiv:2508.03772) would have
done; the advantages are the estimator's own.

Format. `gtpo_dump.json` has `schema_version` (2), `adv_estimator`, `gtpo_applied`, `tokenizer`, `initial_entropy`
(under another estimator that of the first dumped step, unless the config says it), `filter_active`, `checkpoints`, by
which a run recognises its own dump, and `gtpo`, the settings. Each dumped step has a `step_NNNNNN.jsonl` with a line
for each completion, group after group; of an agent's session with several outputs it has the last. Lists have an item
for each token of the response, tool output included. Numbers have four decimals; null means not finite. The fields of a
line, whose names follow prime-rl's token export where they fit:

    schema_version, step      2; verl's global step
    uid                       the group, whose completions answer one prompt
    reward                    sum of the completion's token-level rewards
    group_advantage           A_i, before the entropy term
    trajectory_entropy        mean entropy of the completion, nats per token
    keep                      δ_i; false if the completion is filtered
    prefix_len, suffix_len    tokens on the forward and on the backward conflict mask; not there with `token_weights`
    prompt_ids, token_ids     token ids of prompt and response
    prompt, token_strings     text of the prompt, and what each token adds to the text, if the run has a fast tokenizer,
                              so that the view needs none
    ended                     whether the model's last own token is a special one; with `token_strings`
    response_mask             1 on the model's own tokens
    loss_mask                 the same, with 0 on tokens that verl's rollout correction rejected
    lambda                    λ of each token
    advantages                what the loss gets; under another estimator without λ, δ and γ
    entropy                   the policy's entropy at each token, nats
    trainer_logprobs          log-probability in verl's old-log-prob pass; under `bypass_mode` the rollout's
    inference_logprobs        the same of the rollout engine, if verl has it
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.run.dumps import HEADER_NAME, SCHEMA_VERSION, STEP_FILES
from gtpo_verl.run.records import atomic_write
from gtpo_verl.tokens import decoded_fields
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.run_config import RunConfig, VerlGTPOConfig

# A step's groups are written whole until there are this many tokens; the first one always is.
_STEP_TOKENS = 1 << 19
_FOLDER_BYTES = 4 << 30
_LOG_PROBS = {"trainer_logprobs": "old_log_probs", "inference_logprobs": "rollout_log_probs"}
BATCH_FIELDS = {"token_level_rewards", "advantages", "response_mask", *_LOG_PROBS.values()}
"""What the dump reads of verl's batch, where it is."""

logger = logging.getLogger("gtpo_verl")


class TokenDump:
    """Writes the groups of every `dump_freq`-th step, and of the first, into `dump_dir`.

    Args:
        folder: where the files go.
        config: the run's settings.
        header: what the dump's header says of the run besides.
        tokenizer (tokenizers.Tokenizer | None): the run's; None: no words are written, and the view needs it.
    """

    def __init__(self, folder: str | Path, config: VerlGTPOConfig, header: Mapping[str, Any], tokenizer: Any = None):
        self.config = config
        self.folder = Path(folder)
        self._tokenizer = tokenizer
        self._step = -1  # the last one that was written
        self._header = {"schema_version": SCHEMA_VERSION, **header}
        self._bytes = sum(path.stat().st_size for path in self.folder.glob(STEP_FILES))

    @classmethod
    def of(cls, trainer: Any, run: RunConfig) -> "TokenDump | None":
        """Return the dump that a trainer of verl asks for; None if it asks for none.

        Deletes the files of an earlier start's steps that the trainer, which resumes before them, will make again.
        """
        if run.gtpo.dump_dir is None:
            return None
        config = trainer.config
        model = config.actor_rollout_ref.model
        header = {
            "adv_estimator": config.algorithm.adv_estimator,
            "gtpo_applied": run.applies_gtpo,
            "tokenizer": str(model.get("tokenizer_path") or model.path),
            "checkpoints": config.trainer.default_local_dir,  # by which a later start knows its own dump
        }
        # A tokenizer written in Python has no backend.
        tokenizer = getattr(getattr(trainer, "tokenizer", None), "backend_tokenizer", None)
        for path in Path(run.gtpo.dump_dir).glob(STEP_FILES):
            step = path.stem.removeprefix("step_")
            if step.isdecimal() and int(step) >= trainer.global_steps:
                path.unlink()
        return cls(run.gtpo.dump_dir, run.gtpo, header, tokenizer)

    def is_due(self, step: int) -> bool:
        """Whether the groups of this step are written."""
        return (step == 1 or step % self.config.dump_freq == 0) and self._bytes < _FOLDER_BYTES

    def write(
        self, step: int, batch: Any, fields: BatchFields, result: GTPOAdvantage, initial_entropy: float | None
    ) -> Path:
        """Write the groups of one step, and return its file.

        Where a step has several updates (separate_async), each call adds to the file of that step.

        Args:
            batch: verl's tensors of shape (bs, response_length): `token_level_rewards`, `advantages`, `old_log_probs`
                and `rollout_log_probs` where there are, and `response_mask` as the loss sees it, without the tokens
                that verl's rollout correction rejected.
            fields, result: of the same rows, one output per session, with their entropy.
            initial_entropy (float | None): ⟨H⟩_ini of the run in nats per token.
        """
        header = self._header | {
            "initial_entropy": initial_entropy,
            "filter_active": self.config.filter_is_active(initial_entropy),
            "gtpo": asdict(self.config),
        }
        atomic_write(self.folder / HEADER_NAME, json.dumps(header, indent=2) + "\n")

        rows = bounded_rows(result)
        lines = self._lines(step, rows, batch, fields, result)
        path = self.folder / f"step_{step:06d}.jsonl"
        before = path.read_text() if step == self._step else ""
        atomic_write(path, before + lines)
        self._step = step
        self._bytes += len(lines)  # JSON is ASCII

        if len(rows) < int((result.completions.lengths > 0).sum()):
            logger.info("GTPO's dump of step %d has the first %d completions only, to limit its size", step, len(rows))
        if self._bytes >= _FOLDER_BYTES:
            logger.warning("GTPO's dump %s has reached %d bytes and ends with step %d", self.folder, self._bytes, step)
        return path

    def _lines(self, step: int, rows: list[int], batch: Any, fields: BatchFields, result: GTPOAdvantage) -> str:
        """Return the lines of these rows."""
        rewards = batch["token_level_rewards"].sum(-1)
        columns = self._columns(rows, batch, fields, result)
        lines = ""
        for place, row in enumerate(rows):
            completion = {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "uid": str(result.completions.uids[row]),
                "reward": rewards[row].item(),
                "group_advantage": result.group_advantages[row].item(),
                "trajectory_entropy": result.trajectory_entropy[row].item(),
                "keep": bool(result.keep[row]),
            }
            if result.conflicts is not None:
                completion |= result.conflicts.lengths_of(row)
            completion["prompt_ids"] = fields.prompts[row].tolist()
            length = int(fields.response_len[row])
            for name, column in columns.items():
                completion[name] = column[place][:length]
            if self._tokenizer is not None:
                completion |= decoded_fields(completion, self._tokenizer)
            lines += json.dumps(completion, separators=(",", ":"), allow_nan=False) + "\n"
        return lines

    @staticmethod
    def _columns(rows: list[int], batch: Any, fields: BatchFields, result: GTPOAdvantage) -> dict[str, list[list]]:
        """Return the lists of a dump's lines by their names, each with a list of response_length for every row."""
        assert fields.entropy is not None  # the caller has waited for it
        columns = {
            "token_ids": fields.responses[rows].tolist(),
            "response_mask": fields.response_mask[rows].int().tolist(),
            "loss_mask": batch["response_mask"][rows].int().tolist(),
            "lambda": _rounded(result.token_weights[rows]),
            "advantages": _rounded(batch["advantages"][rows]),
            "entropy": _rounded(fields.entropy[rows]),
        }
        for name, field in _LOG_PROBS.items():
            if field in batch.keys():
                columns[name] = _rounded(batch[field][rows])
        return columns


def bounded_rows(result: GTPOAdvantage, tokens: int = _STEP_TOKENS) -> list[int]:
    """Return the rows of the first groups, as many whole ones as fit into a number of tokens; the first always."""
    rows: list[int] = []
    lengths = result.completions.lengths
    groups = result.completions.groups
    for group in groups[lengths > 0].unique():  # numbered in the order of their first rows
        members = groups == group
        tokens -= int(lengths[members].sum())
        if rows and tokens < 0:
            break
        rows += members.nonzero().flatten().tolist()
    return rows


def _rounded(values: torch.Tensor) -> list[list[float | None]]:
    """Return values with four decimals; None in place of one that is not finite, which JSON cannot express."""
    rounded = np.round(values.double().numpy(), 4)
    return np.where(np.isfinite(rounded), rounded, np.array(None)).tolist()
