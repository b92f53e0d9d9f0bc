"""Turn a checkpoint of verl into a folder that transformers and vLLM load.

    python3 -m recipes export outputs/NAME/checkpoints/global_step_500 my-model

verl.model_merger joins the shards of FSDP or Megatron, in bfloat16. Without LoRA the result is the model. With LoRA it
is the adapter, whose `adapter_config.json` names the model that was trained. (peft's `merge_and_unload` adds it to that
model; bfloat16 would round away updates that are small compared with a weight.)
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from gtpo_verl.run.records import read_record
from recipes.claim import claim

RECORD = "export.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python3 -m recipes export`."""
    parser.description = "Write a checkpoint of verl as a model, or a LoRA adapter, that transformers and vLLM load."
    parser.epilog = (
        "example: python3 -m recipes export outputs/NAME/checkpoints/global_step_500 my-model\n\n"
        "transformers  AutoModelForCausalLM.from_pretrained('my-model')\n"
        "vLLM          vllm serve my-model\n"
        "vLLM, LoRA    vllm serve BASE --enable-lora --max-lora-rank 64 --lora-modules gtpo=my-model"
    )
    parser.add_argument("checkpoint", type=Path, help="folder global_step_N of a run")
    parser.add_argument(
        "out", type=Path, nargs="?", help="folder to write (default: CHECKPOINT/exported); kept if it is up to date"
    )
    parser.add_argument("--base", help="with LoRA: the model that was trained (default: what the run was started with)")


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written."""
    out = args.out or args.checkpoint / "exported"
    print(f"{out}: {export(args.checkpoint, out, args.base)}")
    return 0


def export(checkpoint: Path, out: Path, base: str | None = None) -> str:
    """Write the model or the adapter of `checkpoint` to `out`, and return what it is, in words.

    Args:
        checkpoint: `global_step_N` of verl's PPO or SFT trainer.
        out: written as a whole or not at all; kept if it was made from this checkpoint in this way.
        base: folder or Hub name of the model under a LoRA adapter.

    Raises:
        ValueError: `checkpoint` is not one, or needs `base`; `out` holds something else.
        OSError: a shard is missing; the error names it.
    """
    from filelock import FileLock

    shards, backend = find_shards(checkpoint)
    files = shards.glob("[!.]*" if backend == "fsdp" else "model/**/*")  # an SFT checkpoint has its exports within
    times = [path.stat().st_mtime_ns for path in files if path.is_file()]
    if not times:
        raise ValueError(f"{shards} holds no file of the {backend} checkpoint that it should hold: give a whole one")
    is_inside = out.resolve().is_relative_to(checkpoint.resolve())  # and moves with the checkpoint
    made_from = {
        "checkpoint": "the folder around it" if is_inside else str(checkpoint.resolve()),
        "saved": max(times),
        "base": base,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        lock = out.with_name(f".{out.name}.lock")
        with FileLock(lock):  # of several evaluations one exports
            if not out.exists():
                _write(checkpoint, out, made_from)
            lock.unlink(missing_ok=True)
    if not (out / RECORD).is_file():
        raise ValueError(f"{out} exists and is no export: give another folder")
    other = "it was made from another checkpoint, or from this one before it was saved again"
    claim(out / RECORD, made_from, f"{other}: remove it, or give another folder")
    return what_is(out)


def _write(checkpoint: Path, out: Path, made_from: dict[str, Any]) -> None:
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shards, backend = find_shards(checkpoint)
    _merge_shards(shards, backend, partial)
    adapter = partial / "lora_adapter"
    if adapter.exists():
        base = made_from["base"] or _name_of_base(checkpoint)
        if not base:
            raise ValueError(f"{checkpoint} is of a LoRA adapter and does not name the model under it: give --base")
        config = read_record(adapter / "adapter_config.json") | {"base_model_name_or_path": base}
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
        (adapter / "adapter_model.safetensors").replace(partial / "adapter_model.safetensors")
        shutil.rmtree(adapter)
    claim(partial / RECORD, made_from, "")
    partial.replace(out)


def what_is(export: Path) -> str:
    """Return in words what an export is: a model or an adapter."""
    adapter = export / "adapter_config.json"
    if not adapter.is_file():
        return "a model in Hugging Face format"
    config = read_record(adapter, "r", "base_model_name_or_path")
    return f"a LoRA adapter of rank {config['r']} for {config['base_model_name_or_path']}"


def find_shards(checkpoint: Path) -> tuple[Path, str]:
    """Return the folder with the policy's shards, and the backend that wrote them (fsdp or megatron).

    Raises:
        ValueError: there are none, or their `fsdp_config.json` is damaged.
    """
    for folder in (checkpoint / "actor", checkpoint):
        config = folder / "fsdp_config.json"
        if config.is_file():
            read_record(config, "world_size")  # verl would not name a file that was cut off
            return folder, "fsdp"
        if (folder / "model/huggingface").is_dir():
            return folder, "megatron"
    raise ValueError(
        f"{checkpoint} is not a checkpoint of verl: give a folder global_step_N with actor/fsdp_config.json (FSDP) or "
        "actor/model/huggingface (Megatron)"
    )


def _merge_shards(shards: Path, backend: str, target: Path) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    class Merger(FSDPModelMerger):
        def save_hf_model_and_tokenizer(self, state_dict: dict[str, Any]) -> None:
            if any("lora_" in name for name in state_dict):  # verl would write the base beside the adapter
                self.save_lora_adapter(state_dict)
            else:
                super().save_hf_model_and_tokenizer(state_dict)

    in_hf_format = shards / ("huggingface" if backend == "fsdp" else "model/huggingface")
    config = ModelMergerConfig("merge", backend, target_dir=str(target), local_dir=str(shards))
    config.hf_model_config_path = str(in_hf_format)
    if backend == "fsdp":
        Merger(config).merge_and_save()
    elif any(in_hf_format.glob("*.safetensors")):  # verl saves this instead of shards where it has Megatron-Bridge
        shutil.copytree(in_hf_format, target, dirs_exist_ok=True)
    else:
        from verl.model_merger.megatron_model_merger import MegatronModelMerger

        config.tie_word_embedding = json.loads((in_hf_format / "config.json").read_text())["tie_word_embeddings"]
        MegatronModelMerger(config).merge_and_save()
    for path in in_hf_format.glob("*token*"):  # which verl leaves out beside an adapter
        shutil.copy2(path, target)


def _name_of_base(checkpoint: Path) -> str | None:
    """Return the model that the run was started with, as `python3 -m recipes run` notes it in the run's folder."""
    from recipes.runs.run_folder import unquoted

    record = checkpoint.resolve().parents[1] / "settings.json"
    settings = read_record(record) if record.is_file() else {}
    base = settings.get("actor_rollout_ref.model.path") or settings.get("model.path")  # of PPO, of SFT
    if not base:
        return None
    return unquoted(base)
