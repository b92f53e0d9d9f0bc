"""Sampling in batches, on a trainer whose `_validate` makes completions up and dumps them as verl's does."""

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls

from recipes.paper.batched_validation import BatchedValidation
from recipes.paper.evaluation import read_dump

SOURCES = ["GSM8K", "org/AIME", "GSM8K", "GSM8K", "org/AIME"]
SAMPLES = 3


class Killed(BaseException):
    pass


class FakeTrainer:
    _write_generations = staticmethod(PPOTrainer._write_generations)

    def __init__(self, config):
        self.config = config
        self.val_dataset = self.Dataset()
        self.asked = []
        self.lost = self.killed_at = None

    class Dataset(list):
        dataframe = {"data_source": SOURCES}

        def __init__(self):
            super().__init__({"raw_prompt": f"question {i}"} for i in range(len(SOURCES)))

    def _validate(self):
        (batch,) = self.val_dataloader
        prompts = list(batch["raw_prompt"])
        if self.killed_at in prompts:
            raise Killed
        self.asked += prompts
        keys = [f"{prompt}_{session}_0" for prompt in prompts for session in range(SAMPLES)]
        keys = [key for key in keys if key != self.lost]
        infos = {"acc": [1.0] * len(keys), "pred": ["1"] * len(keys), "uid": keys}
        inputs = [key.split("_")[0] for key in keys]
        self._dump_generations(inputs, inputs, ["1"] * len(keys), [1.0] * len(keys), infos, "not used")
        return self._val_metrics_update(["the rewards"], bootstrap="them")


class Sampler(BatchedValidation, FakeTrainer):
    pass


@pytest.fixture
def config(tmp_path):
    (tmp_path / "test.parquet").write_text("rows")
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs): return 1.0")
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": "org/model", "lora_adapter_path": None},
                "rollout": {"seed": 1, "val_kwargs": {"n": SAMPLES, "temperature": 1.0}},
            },
            "data": {"val_files": [str(tmp_path / "test.parquet")], "val_batch_size": 2},
            "reward": {"custom_reward_function": {"path": str(tmp_path / "reward.py")}},
            "trainer": {"validation_data_dir": str(tmp_path / "out"), "v1": {"trainer_mode": "batched_validation"}},
        }
    )


def test_each_data_source_becomes_a_dump_with_all_its_completions(config, tmp_path):
    assert Sampler(config)._validate() == {"val/questions": 5}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "GSM8K.jsonl",
        "org_AIME.jsonl",
        "settings.json",
    ]
    (found,) = read_dump(tmp_path / "out/GSM8K.jsonl").items()
    assert found[0] == "GSM8K" and [question.name for question in found[1]] == [
        "question 0",
        "question 2",
        "question 3",
    ]
    assert {len(question.correct) for question in found[1]} == {SAMPLES}
    assert set(read_dump(tmp_path / "out/org_AIME.jsonl")) == {"org/AIME"}


def test_data_sources_do_not_share_a_dump(config):
    sampler = Sampler(config)
    sampler.val_dataset.dataframe = {"data_source": ["org/AIME", "org_AIME"]}
    with pytest.raises(ValueError, match="org/AIME, org_AIME "):
        sampler._validate()


def test_a_killed_evaluation_goes_on_with_the_batches_that_it_lacks(config, tmp_path):
    first = Sampler(config)
    first.killed_at = "question 3"
    with pytest.raises(Killed):
        first._validate()
    assert not list((tmp_path / "out").glob("*.jsonl"))
    (tmp_path / "out/GSM8K.parts/000000.partial").mkdir()  # what a kill behind a written batch leaves
    second = Sampler(config)
    second._validate()
    assert (first.asked, second.asked) == (["question 0", "question 2"], ["question 3", "question 1", "question 4"])
    assert len((tmp_path / "out/GSM8K.jsonl").read_text().splitlines()) == 3 * SAMPLES
    third = Sampler(config)
    third._validate()
    assert third.asked == []


def test_a_lost_completion_is_an_error_and_its_batch_is_not_written(config, tmp_path):
    sampler = Sampler(config)
    sampler.lost = "question 2_1_0"
    with pytest.raises(RuntimeError, match="GSM8K: 1 of 6 completions .*lost"):
        sampler._validate()
    assert not list((tmp_path / "out").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("actor_rollout_ref.model.path", "org/other"),
        ("actor_rollout_ref.rollout.val_kwargs", {"temperature": 0.6}),
        ("actor_rollout_ref.rollout.seed", 2),
        ("actor_rollout_ref.rollout.dtype", "float32"),
        ("data.apply_chat_template_kwargs", {"enable_thinking": False}),
        ("data.val_batch_size", 3),
        ("test.parquet", "others"),
        ("reward.py", "others"),
    ],
)
def test_completions_of_other_settings_or_files_are_not_gone_on_with(config, tmp_path, changed, value):
    Sampler(config)._validate()
    before = (tmp_path / "out/settings.json").read_text()
    if (tmp_path / changed).exists():
        (tmp_path / changed).write_text(value)
    else:
        OmegaConf.update(config, changed, value)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'out'} .*other settings \(.*{changed}"):
        Sampler(config)._validate()
    assert (tmp_path / "out/settings.json").read_text() == before


def test_a_single_file_of_questions_needs_no_list(config, tmp_path):
    (config.data.val_files,) = config.data.val_files
    Sampler(config)._validate()
    assert f'"{tmp_path / "test.parquet"}": ' in (tmp_path / "out/settings.json").read_text()


def test_verl_knows_the_trainer_once_the_module_is_loaded():
    trainer = get_trainer_cls("batched_validation")
    assert issubclass(trainer, BatchedValidation) and issubclass(trainer, get_trainer_cls("sync"))
    assert trainer._validate is BatchedValidation._validate
