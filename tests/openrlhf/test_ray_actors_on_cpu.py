"""The hooks on OpenRLHF's classes, on classes of the same form; OpenRLHF itself is not needed."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from gtpo_verl.openrlhf import ray_actors


class Actor(torch.nn.Module):
    """Returns as OpenRLHF's `Actor` does; the entropy is that of the first token id."""

    def forward(self, sequences, action_mask, return_output=False, return_entropy=False):
        log_probs = -sequences[:, 1:].float()
        if not return_output:
            return log_probs
        assert return_entropy
        return log_probs, SimpleNamespace(entropy=sequences[:, :-1].float())


class Worker:
    def __init__(self):
        self.actor = Actor()

    def forward(self, sequences):
        with torch.no_grad():
            return self.actor(sequences, None)


@pytest.fixture
def worker():
    ray_actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=type("Worker", (Worker,), {})))
    ray_actors._hook_actor(SimpleNamespace(PolicyModelActor=ray_actor))
    return ray_actor.__ray_metadata__.modified_class()


def test_forward_returns_what_it_did_and_the_entropies_are_handed_over_in_order(worker):
    batches = [torch.arange(8).view(2, 4) + number for number in range(3)]
    for batch in batches:
        assert worker.forward(batch).equal(Worker().forward(batch))
    for number, batch in enumerate(batches):
        assert worker.take_gtpo_entropy(number).equal(batch[:, :-1].float())


def test_update_is_not_asked_for_an_entropy(worker):
    batch = torch.arange(8).view(2, 4)
    worker.forward(batch)
    assert worker.actor(batch, None).equal(-batch[:, 1:].float())


def test_trainers_step_logs_gtpos_metrics_beside_its_own(monkeypatch):
    made = []

    class Stage:
        metrics = {"gtpo/entropy/mean": 0.5}

        def __init__(self, trainer, resumed):
            made.append(resumed)

    class Trainer:
        def train_step(self, rollout_samples, global_step):
            return {"reward": rollout_samples}, global_step + 1

    monkeypatch.setitem(sys.modules, "gtpo_verl.openrlhf.stage", SimpleNamespace(GTPOStage=Stage))
    ray_actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Trainer))
    ray_actors._hook_trainer("PPOTrainer", SimpleNamespace(PPOTrainer=ray_actor))
    trainer = Trainer()
    assert trainer.train_step(1.0, 4) == ({"reward": 1.0, "gtpo/entropy/mean": 0.5}, 5)
    trainer.train_step(1.0, 5)
    Trainer().train_step(1.0, 0)
    assert made == [True, False]


def test_what_travels_to_workers_by_name_can_be_found_there():
    assert pickle.loads(pickle.dumps(ray_actors.take_gtpo_entropy)) is ray_actors.take_gtpo_entropy
