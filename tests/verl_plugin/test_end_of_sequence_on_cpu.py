from omegaconf import OmegaConf
from transformers import GenerationConfig

from gtpo_verl.cpu.tiny import build_tokenizer
from gtpo_verl.verl_plugin.end_of_sequence import eos_token_ids


def test_a_completion_ends_with_the_tokenizers_token_or_one_of_the_generation_config(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = OmegaConf.create({"path": str(tmp_path)})
    assert eos_token_ids(model).tolist() == [tokenizer.eos_token_id]
    others = [tokenizer.eos_token_id + 5, tokenizer.eos_token_id + 9]
    GenerationConfig(eos_token_id=others).save_pretrained(tmp_path)
    assert eos_token_ids(model).tolist() == [tokenizer.eos_token_id, *others]
    GenerationConfig(eos_token_id=others[0]).save_pretrained(tmp_path)
    assert eos_token_ids(model).tolist() == [tokenizer.eos_token_id, others[0]]
