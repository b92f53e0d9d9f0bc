"""What a run of OpenRLHF computed, for the test to compare: `$OPENRLHF_CPU_RECORD/NAME-TIME-PID.pt`.

Loaded by the stand-ins in every process. `$OPENRLHF_CPU_BREAK` breaks the run, for the test to notice: `sync` makes
vLLM forget the weights that it is sent, `tokens` shifts the tokens that GTPO sees by one.
"""

import functools
import os
import time

import torch
import wrapt

FOLDER = os.environ.get("OPENRLHF_CPU_RECORD", "")


def write(name, **content):
    torch.save(content, f"{FOLDER}/{name}-{time.monotonic_ns()}-{os.getpid()}.pt")


def record_rollouts(module):
    """What the vLLM engine returned, before OpenRLHF makes an Experience of it."""

    def process(wrapped, instance, args, kwargs):
        keys = ("prompt", "observation_tokens", "action_ranges", "reward", "rollout_log_probs", "truncated")
        write("rollout", **{key: args[0][key] for key in keys})
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "SamplesGenerator._process_response_into_experience", process)


def record_training(module):
    """The weights before an update and after it, and the micro-batch of each loss."""

    def train(wrapped, trainer, args, kwargs):
        for name in ("before", "after"):
            if name == "after":
                result = wrapped(*args, **kwargs)
            write(name, weights={key: x.detach().clone() for key, x in trainer.actor.model.module.state_dict().items()})
        return result

    def step(wrapped, trainer, args, kwargs):
        experience = args[0]
        write("batch", sequences=experience.sequences, attention_mask=experience.attention_mask)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "ActorPPOTrainer.ppo_train", train)
    wrapt.wrap_function_wrapper(module, "ActorPPOTrainer.training_step", step)


def record_loss(module):
    """The arguments of OpenRLHF's own PolicyLoss."""

    def forward(wrapped, loss, args, kwargs):
        _, old_log_probs, advantages = args
        write("loss", old_log_probs=old_log_probs, advantages=advantages.clone(), action_mask=kwargs["action_mask"])
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "PolicyLoss.forward", forward)


def record_entropy(module):
    """The entropy of the pass before the update, from the logits that its log-probs were computed from."""

    def forward(wrapped, actor, args, kwargs):
        result = wrapped(*args, **kwargs)
        if not torch.is_grad_enabled() and kwargs.get("return_output"):
            log_probs = result[1]["logits"].log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)[:, :-1]
            write("entropy", sequences=args[0], attention_mask=args[2], entropy=entropy)
        return result

    wrapt.wrap_function_wrapper(module, "Actor.forward", forward)


def forget_weights(module):
    def update_weight(wrapped, worker, args, kwargs):
        model, worker.model_runner.model = worker.model_runner.model, Forgetful()
        try:
            return wrapped(*args, **kwargs)
        finally:
            worker.model_runner.model = model

    wrapt.wrap_function_wrapper(module, "WorkerWrap.update_weight", update_weight)


class Forgetful:
    def load_weights(self, weights):
        pass


def shift_tokens(module):
    compute = module.compute_gtpo

    @functools.wraps(compute)
    def shifted(*, responses, **kwargs):
        return compute(responses=responses.roll(1, -1), **kwargs)

    module.compute_gtpo = shifted


def install():
    os.makedirs(FOLDER, exist_ok=True)
    wrapt.register_post_import_hook(record_rollouts, "openrlhf.trainer.ppo_utils.samples_generator")
    wrapt.register_post_import_hook(record_training, "openrlhf.trainer.ray.ppo_actor")
    wrapt.register_post_import_hook(record_loss, "openrlhf.models.loss")
    wrapt.register_post_import_hook(record_entropy, "openrlhf.models.actor")
    broken = os.environ.get("OPENRLHF_CPU_BREAK", "").split(",")
    if "sync" in broken:
        wrapt.register_post_import_hook(forget_weights, "openrlhf.trainer.ray.vllm_worker_wrap")
    if "tokens" in broken:
        wrapt.register_post_import_hook(shift_tokens, "gtpo_verl.openrlhf.stage")
