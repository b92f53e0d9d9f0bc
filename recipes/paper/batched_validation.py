"""The completions of whole test sets, by verl's validation, in batches that survive a kill.

verl's validation holds the completions of all questions at once, writes them after the last, and then bootstraps every
number that the reward returned. With 64 completions of 5,000 questions that exceeds TransferQueue's default capacity,
leaves nothing to resume from, and keeps the GPUs waiting for an hour. This module calls verl's validation for one batch
of questions after the other and writes each batch at once. A second start skips the batches that exist. In a verl
config, with the V1 trainer:

    VERL_USE_EXTERNAL_MODULES=recipes.paper.batched_validation          in the environment
    trainer.v1.trainer_mode=batched_validation  trainer.val_only=True
    data.val_files=[…]  data.val_batch_size=256                questions of a batch
    trainer.validation_data_dir=DIR

DIR gets one dump per data source, `DIR/<data_source>.jsonl`, once all its batches are complete, for
`python3 -m recipes evaluate`. A lost completion is an error.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import wrapt
from omegaconf import OmegaConf
from tqdm import tqdm

from recipes.claim import claim

# Settings that determine a completion. A folder with other values is an error.
_SETTINGS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.model.custom_chat_template",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.rollout.val_kwargs",
    "data.apply_chat_template_kwargs",
    "data.seed",
    "data.shuffle",
    "data.val_files",
    "data.val_max_samples",
    "data.val_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "reward.custom_reward_function",
)


class BatchedValidation:
    """`_validate` in batches, to be mixed into one of verl's trainers."""

    def __init__(self, config: Any) -> None:
        keep_settings(config, Path(config.trainer.validation_data_dir))  # before any worker is up
        config.trainer.v1.trainer_mode = "sync"  # which it is in all other ways
        super().__init__(config)  # type: ignore[call-arg]

    def _validate(self: Any) -> dict[str, float]:
        folder = Path(self.config.trainer.validation_data_dir)
        sources: dict[str, list[int]] = {}
        for index, source in enumerate(self.val_dataset.dataframe["data_source"]):
            sources.setdefault(source, []).append(index)
        dumps = {source: folder / f"{source.replace('/', '_')}.jsonl" for source in sources}
        if len(set(dumps.values())) < len(dumps):
            raise ValueError(f"the data sources {', '.join(sources)} would share a file: rename one in data.val_files")
        with tqdm(total=len(self.val_dataset), unit="question", mininterval=0) as progress:
            for source, indices in sources.items():
                progress.set_description(source)
                self._sample(source, indices, dumps[source], progress)
        return {"val/questions": len(self.val_dataset)}

    def _sample(self: Any, source: str, indices: list[int], dump: Path, progress: tqdm) -> None:
        """Sample the questions of a data source, but for the batches that exist, and join all batches to its dump."""
        from verl.utils.dataset.rl_dataset import collate_fn

        parts = dump.with_suffix(".parts")
        size = self.config.data.val_batch_size
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            # What `_dump_generations` writes, which verl's validation calls at its end.
            self._source = source
            self._part = parts / f"{start:06}.jsonl"
            if not (dump.exists() or self._part.exists()):
                self.val_dataloader = [collate_fn([self.val_dataset[index] for index in batch])]
                super()._validate()  # type: ignore[misc]
            progress.update(len(batch))
        if not dump.exists():
            partial = dump.with_suffix(".partial")
            with partial.open("wb") as file:
                for path in sorted(parts.glob("*.jsonl")):
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, file)
            partial.replace(dump)
            shutil.rmtree(parts)

    def _dump_generations(
        self: Any, inputs: list, outputs: list, gts: list, scores: list, reward_extra_infos_dict: dict, dump_path: str
    ) -> None:
        """Write one batch to its file, if all its completions are there.

        Raises:
            RuntimeError: completions are missing.
        """
        # A session of the agent loop draws one completion: its outputs are {group}_{session}_{output}.
        drawn = len({uid.rpartition("_")[0] for uid in reward_extra_infos_dict["uid"]})
        wanted = len(self.val_dataloader[0]["raw_prompt"]) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        if drawn != wanted:
            raise RuntimeError(
                f"{self._source}: {wanted - drawn} of {wanted} completions of a batch are lost; verl's log above has "
                "the reason. Start again: the batches before it are kept"
            )
        infos = reward_extra_infos_dict | {"data_source": [self._source] * len(inputs)}
        folder = self._part.with_suffix(".partial")
        self._write_generations(inputs, outputs, gts, scores, infos, str(folder), 0)
        (folder / "0.jsonl").replace(self._part)
        folder.rmdir()

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}  # instead of the bootstrap


def keep_settings(config: Any, folder: Path) -> None:
    """Record what determines the completions in the folder, or compare it with the record of an earlier start.

    Raises:
        ValueError: the folder holds completions of another model, data or sampling.
    """
    model = config.actor_rollout_ref.model
    val_files = config.data.val_files
    if isinstance(val_files, str):
        val_files = [val_files]
    paths = [model.path, model.get("lora_adapter_path"), *val_files, config.reward.custom_reward_function.path]
    settings: dict[str, Any] = {}
    for path in paths:
        if path:
            settings[str(path)] = _fingerprint(path)
    selected = OmegaConf.create({key: OmegaConf.select(config, key) for key in _SETTINGS})
    settings.update(OmegaConf.to_container(selected))  # type: ignore[arg-type]
    claim(folder / "settings.json", settings, "give another OUT, or remove it")


def _fingerprint(path: str) -> str:
    """Return a hash of name, size and time of the files of a model or a data set; all names on the Hub have one."""
    known = []
    for file in [Path(path), *sorted(Path(path).rglob("*"))]:
        if file.is_file():
            status = file.stat()
            known.append([file.name, status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256(repr(known).encode())
    return digest.hexdigest()[:12]


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_sync")
def _register(trainer_sync: Any) -> None:
    trainer = type("BatchedValidationSync", (BatchedValidation, trainer_sync.PPOTrainerSync), {})
    trainer_sync.register_trainer("batched_validation")(trainer)
