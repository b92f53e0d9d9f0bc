"""What GTPO changes in OpenRLHF's classes: the actor keeps its entropy, the trainer asks GTPO for the advantages.

`install` is called in the driver only. Ray sends the classes of its actors from there by value, with what has been
changed in them, so that neither workers nor the user's own `ray.init` need to know of GTPO.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


def install() -> None:
    """Change the classes of OpenRLHF's actors before Ray has sent them anywhere."""
    wrapt.register_post_import_hook(_hook_actor, "openrlhf.trainer.ray.ppo_actor")
    for module, name in (("ppo_trainer", "PPOTrainer"), ("ppo_trainer_async", "TrainingActor")):
        hook = functools.partial(_hook_trainer, name)
        wrapt.register_post_import_hook(hook, f"openrlhf.trainer.{module}")


def _hook_actor(module: ModuleType) -> None:
    worker = module.PolicyModelActor.__ray_metadata__.modified_class
    worker.forward = _keeping_entropy(worker.forward)
    worker.take_gtpo_entropy = take_gtpo_entropy


def _hook_trainer(name: str, module: ModuleType) -> None:
    trainer = getattr(module, name).__ray_metadata__.modified_class
    trainer.train_step = _with_gtpo(trainer.train_step)


# What follows travels to workers: plain functions, since a proxy of wrapt has no pickle.


def _keeping_entropy(forward: Callable) -> Callable:
    """Return `PolicyModelActor.forward`, the pass before the update, so that it keeps each micro-batch's entropy."""

    @functools.wraps(forward)
    def forward_with_entropy(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.__dict__.setdefault("_gtpo_entropy", [])

        def ask(actor: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return args, kwargs | {"return_output": True, "return_entropy": True}

        def keep(actor: Any, args: tuple, result: Any) -> Any:
            log_probs, output = result
            kept.append(output.entropy.to("cpu"))
            return log_probs

        with self.actor.register_forward_pre_hook(ask, with_kwargs=True), self.actor.register_forward_hook(keep):
            return forward(self, *args, **kwargs)

    return forward_with_entropy


def take_gtpo_entropy(self: Any, number: int) -> Any:
    """Return the entropy, (micro-batch, length - 1), of the next micro-batch in the order of their forward passes.

    `number`, the micro-batch's, is not read: OpenRLHF calls an actor's method once for each element of a list.
    """
    return self._gtpo_entropy.pop(0)


def _with_gtpo(train_step: Callable) -> Callable:
    """Return the trainer's `train_step` with the advantages of a `GTPOStage`, whose metrics it logs beside its own."""

    @functools.wraps(train_step)
    def train_step_with_gtpo(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict, int]:
        from gtpo_verl.openrlhf.stage import GTPOStage

        if not hasattr(self, "_gtpo"):
            self._gtpo = GTPOStage(self, resumed=global_step > 0)
        status, global_step = train_step(self, rollout_samples, global_step)
        return status | self._gtpo.metrics, global_step

    return train_step_with_gtpo
