import asyncio
import threading

import pytest
import ray
import torch
from transformers import GenerationConfig
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from verl.trainer.ppo.v1.agent_loop_tq import apply_greedy_sampling_params
from verl.workers.config import HFModelConfig, RolloutConfig

from recipes.tasks import tiny
from recipes.verl_cpu import rollout
from recipes.verl_cpu.rollout import HFReplica, HFServer, HFServerAdapter, generate, load_weights, sampling

TOKENIZER = tiny.build_tokenizer()
EOS, SECOND_EOS = TOKENIZER.eos_token_id, 6
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6], [20, 21, 22]]
SEEDS = [[0], [1], [2], [3], [4]]


def tiny_model(seed=0, tied=False):
    torch.manual_seed(seed)
    model = tiny.build_model(TOKENIZER).eval()
    model.lm_head.weight.data *= 8  # peaked enough that rows differ, and no two logits tie
    if tied:
        model.model.embed_tokens.weight = model.lm_head.weight
    model.generation_config = GenerationConfig()  # else transformers' generate would stop at the model's own eos
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def greedy_by_transformers(model, prompt_ids, max_tokens, stop_token_ids=()):
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(stop_token_ids) or None, pad_token_id=0
        ),
    )
    return output[0, len(prompt_ids) :].tolist()


def test_a_completion_ends_with_its_first_stop_token_and_the_others_go_on(model):
    free = [greedy_by_transformers(model, prompt, 20) for prompt in PROMPTS]
    stops = frozenset({free[0][3], free[2][0]})
    completions = generate(model, PROMPTS, sampling(20, stops, temperature=0.0), SEEDS)
    expected = [greedy_by_transformers(model, prompt, 20, stops) for prompt in PROMPTS]
    assert [token_ids for token_ids, _ in completions] == expected
    assert [len(log_probs) for _, log_probs in completions] == [len(token_ids) for token_ids in expected]
    assert len(expected[2]) == 1 and len({len(token_ids) for token_ids in expected}) > 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 0, 1.0), (2.0, 3, 1.0), (2.0, -1, 0.6), (2.0, 5, 0.8)],
)
def test_log_probs_are_those_of_the_distribution_that_a_plain_forward_gives(model, temperature, top_k, top_p):
    config = sampling(12, {EOS, 7}, temperature, top_p, top_k)
    for prompt, (token_ids, log_probs) in zip(PROMPTS, generate(model, PROMPTS, config, SEEDS), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
        logits /= temperature or 1.0
        if top_k > 0:
            logits = TopKLogitsWarper(top_k)(None, logits)
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)
        assert expected.isfinite().all()  # a token outside the nucleus would be -inf
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=1e-4, atol=1e-4)


def test_tokens_are_drawn_as_often_as_they_are_likely(model):
    rows = 4000
    with torch.no_grad():
        likely = model(torch.tensor([[5, 6, 7]])).logits[0, -1].float().softmax(-1)
    drawn = generate(model, [[5, 6, 7]] * rows, sampling(1), [[seed] for seed in range(rows)])
    counts = torch.zeros_like(likely)
    for (token,), _ in drawn:
        counts[token] += 1
    deviation = (likely * (1 - likely) / rows).sqrt()
    assert ((counts / rows - likely).abs() <= 5 * deviation + 1 / rows).all()


def test_a_row_is_drawn_alike_whatever_stands_beside_it(model):
    config = sampling(12, {EOS}, temperature=2.0)
    together = generate(model, PROMPTS, config, SEEDS)
    backwards = generate(model, PROMPTS[::-1], config, SEEDS[::-1])[::-1]
    alone = [generate(model, [prompt], config, [seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    for others in (backwards, alone):
        assert [token_ids for token_ids, _ in others] == [token_ids for token_ids, _ in together]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(temperature):
    model = tiny_model()
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ArithmeticError, match="logits .*not numbers"):
        generate(model, PROMPTS, sampling(2, temperature=temperature), SEEDS)


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_a_tied_pair_is_enough(absent):
    source, target = tiny_model(seed=0, tied=True), tiny_model(seed=1, tied=True)
    load_weights(target, {name: weight for name, weight in source.state_dict().items() if name != absent})
    torch.testing.assert_close(target.lm_head.weight, source.lm_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(target.model.embed_tokens.weight, source.lm_head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_and_unknown_weights_are_an_error_that_names_them(model, absent):
    with pytest.raises(ValueError, match=f"1 weights missing .*{absent}.* 1 unknown .*lora_A"):
        weights = model.state_dict() | {"model.lora_A.weight": torch.zeros(2)}
        load_weights(tiny_model(), {name: weight for name, weight in weights.items() if name != absent})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(path)
    model.save_pretrained(path)
    GenerationConfig(eos_token_id=[EOS, SECOND_EOS]).save_pretrained(path)
    return str(path)


def rollout_config(**overrides):
    own = {"name": "hf", "prompt_length": 8, "response_length": 12, "dtype": "float32"}
    return RolloutConfig(**own | {"tensor_model_parallel_size": 1, "n_gpus_per_node": 1} | overrides)


@pytest.fixture
def server(model_path, model):
    return make_server(model_path, model)


def make_server(model_path, model, rank=0, **overrides):
    model_config = HFModelConfig(path=model_path, override_config={"attn_implementation": "sdpa"})
    server = HFServer(rollout_config(**overrides), model_config, replica_rank=rank)
    if model is not None:
        asyncio.run(server.update_weights(model.state_dict(), global_steps=3))
    return server


def complete(server, prompts, **params):
    """All prompts at once, with the sampling parameters that verl's agent loop sends."""
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True} | params

    async def gather():
        return await asyncio.gather(*(server.generate(prompt, dict(sent), request_id="r") for prompt in prompts))

    return asyncio.run(gather())


def test_verls_greedy_parameters_give_transformers_greedy_completions(server, model):
    params = {}
    apply_greedy_sampling_params(params)
    outputs = complete(server, PROMPTS, **params)
    expected = [greedy_by_transformers(model, prompt, 12, [EOS, SECOND_EOS]) for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stop_reason == "completed" for output in outputs)
    assert all(output.extra_fields == {"global_steps": 3} for output in outputs)


def test_every_eos_of_the_tokenizer_and_the_generation_config_stops(server):
    assert server.eos_token_ids == {EOS, SECOND_EOS}
    config, _ = server._parse(1, {"stop_token_ids": [9]})
    assert config.eos_token_id == [EOS, SECOND_EOS, 9]
    config, _ = server._parse(1, {"stop_token_ids": [9], "ignore_eos": True})
    assert config.eos_token_id == [9]


@pytest.mark.parametrize("seeds", [(3, 3), (3, 4)])
def test_the_rollouts_seed_decides_the_completions(model_path, model, seeds):
    first, second = (
        [output.token_ids for output in complete(make_server(model_path, model, seed=seed), PROMPTS, temperature=2.0)]
        for seed in seeds
    )
    assert (first == second) == (seeds[0] == seeds[1])


def token_ids_of_each(prompts, outputs):
    completions = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        completions.setdefault(tuple(prompt), []).append(output.token_ids)
    return {prompt: sorted(each) for prompt, each in completions.items()}


def test_requests_in_another_order_get_the_same_completions(model_path, model):
    prompts = PROMPTS * 3
    first = complete(make_server(model_path, model, seed=3), prompts, temperature=2.0)
    backwards = complete(make_server(model_path, model, seed=3), prompts[::-1], temperature=2.0)
    few = complete(make_server(model_path, model, seed=3, max_num_seqs=4), prompts, temperature=2.0)
    assert token_ids_of_each(prompts, first) == token_ids_of_each(prompts[::-1], backwards)
    assert token_ids_of_each(prompts, first) == token_ids_of_each(prompts, few)
    # The completions of one prompt are not one completion.
    assert all(len({*map(tuple, each)}) > 1 for each in token_ids_of_each(prompts, first).values())


def test_what_was_sampled_otherwise_before_changes_no_completion(model_path, model):
    validated, other = (make_server(model_path, model, seed=3) for _ in range(2))
    complete(validated, PROMPTS, temperature=0.5)
    expected, got = (complete(server, PROMPTS, temperature=2.0) for server in (other, validated))
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


@pytest.mark.parametrize("steps", [3, 4, None])
def test_a_prompt_is_drawn_anew_at_each_request_and_at_each_step(model_path, model, steps):
    server = make_server(model_path, model, seed=3)
    before = complete(server, PROMPTS, temperature=2.0)
    asyncio.run(server.update_weights(model.state_dict(), global_steps=steps))
    after = complete(server, PROMPTS, temperature=2.0)
    assert [output.token_ids for output in before] != [output.token_ids for output in after]


def test_a_run_that_goes_on_from_a_step_draws_what_it_would_have_drawn(model_path, model):
    whole, resumed = (make_server(model_path, model, seed=3) for _ in range(2))
    complete(whole, PROMPTS, temperature=2.0)
    outputs = []
    for server in (whole, resumed):
        asyncio.run(server.update_weights(model.state_dict(), global_steps=7))
        outputs.append([output.token_ids for output in complete(server, PROMPTS, temperature=2.0)])
    assert outputs[0] == outputs[1]


def test_two_servers_of_a_run_draw_differently(model_path, model):
    first, second = (make_server(model_path, model, rank=rank, seed=3) for rank in (0, 1))
    outputs = [[output.token_ids for output in complete(x, PROMPTS, temperature=2.0)] for x in (first, second)]
    assert outputs[0] != outputs[1]


def test_log_probs_come_only_when_asked_for(server):
    with_log_probs, without = complete(server, [[5]])[0], complete(server, [[5]], logprobs=False)[0]
    assert len(with_log_probs.log_probs) == len(with_log_probs.token_ids)
    assert without.log_probs is None


@pytest.mark.parametrize(
    "length, params, max_tokens",
    [
        (3, {}, 12),  # the response length
        (12, {}, 8),  # what prompt and response may take together
        (3, {"max_tokens": 5}, 5),
        (3, {"max_new_tokens": 6}, 6),
        (1020, {"max_tokens": 50}, 4),  # the model's 1024 positions
    ],
)
def test_max_tokens_is_asked_for_or_the_configured_length_within_the_models(server, length, params, max_tokens):
    config, _ = server._parse(length, params)
    assert config.max_new_tokens == max_tokens


@pytest.mark.parametrize(
    ("prompt", "params", "inputs", "reason"),
    [
        ([5] * 1024, {}, {}, "max_prompt_length"),
        ([5], {"min_p": 0.1}, {}, "min_p"),
        ([5], {"repetition_penalty": 1.2}, {}, "repetition_penalty"),
        ([5], {}, {"image_data": [object()], "video_data": None}, r"\['image_data'\]"),
    ],
)
def test_what_cannot_be_generated_is_an_error_that_names_it(server, prompt, params, inputs, reason):
    with pytest.raises(ValueError, match=reason):
        asyncio.run(server.generate(prompt, params, request_id="r", **inputs))


def test_generating_before_the_first_weight_sync_is_an_error(model_path):
    with pytest.raises(RuntimeError, match="before the trainer .*weights"):
        complete(make_server(model_path, model=None), [[5]])


@pytest.mark.parametrize("max_num_seqs, batches", [(256, [10]), (4, [4, 4, 2])])
def test_requests_that_arrive_together_are_one_batch_up_to_max_num_seqs(
    model_path, model, monkeypatch, max_num_seqs, batches
):
    sizes = []
    monkeypatch.setattr(rollout, "generate", lambda *args: sizes.append(len(args[1])) or generate(*args))
    complete(make_server(model_path, model, max_num_seqs=max_num_seqs), PROMPTS * 2)
    assert sizes == batches


def test_an_error_while_generating_reaches_every_caller_and_the_server_goes_on(server, monkeypatch):
    def fail(*args):
        raise ArithmeticError("no such number")

    async def gather():
        calls = [server.generate(prompt, {}, request_id="r") for prompt in PROMPTS]
        return await asyncio.gather(*calls, return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(rollout, "generate", fail)
        errors = asyncio.run(gather())
    assert [type(error) for error in errors] == [ArithmeticError] * len(PROMPTS)
    assert complete(server, [[5]])[0].token_ids


def test_new_weights_wait_for_the_running_batch(server, monkeypatch):
    started, finish = threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        assert finish.wait(600)
        return generate(*args)

    async def sync_during_a_batch():
        old = asyncio.create_task(server.generate([5], {"temperature": 0.0}, request_id="r"))
        await asyncio.to_thread(started.wait, 600)
        sync = asyncio.create_task(server.update_weights(tiny_model(seed=1).state_dict(), global_steps=4))
        await asyncio.sleep(0.1)
        assert not sync.done()
        finish.set()
        await sync
        return await old, await server.generate([5], {"temperature": 0.0}, request_id="r")

    monkeypatch.setattr(rollout, "generate", slow)
    old, new = asyncio.run(sync_during_a_batch())
    assert (old.extra_fields["global_steps"], new.extra_fields["global_steps"]) == (3, 4)
    assert old.token_ids != new.token_ids


@pytest.fixture
def adapter(model_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    model_config = HFModelConfig(path=model_path, override_config={"attn_implementation": "sdpa"})
    return HFServerAdapter(rollout_config(), model_config, device_mesh=None)


def test_the_adapter_sends_a_copy_of_every_weight_to_its_own_replica(adapter, monkeypatch):
    sent = {}

    class Server:
        class update_weights:
            @staticmethod
            async def remote(weights, global_steps):
                sent.update(weights=weights, global_steps=global_steps)

    def merged_weights():
        live = torch.ones(2)
        yield "a", live
        live.zero_()  # as verl unmerges LoRA when its iterator ends
        yield "b", live

    monkeypatch.setattr(ray, "get_actor", lambda name: {"hf_server_1": Server}[name])
    asyncio.run(adapter.update_weights(merged_weights(), global_steps=7, base_sync_done=True))
    assert sent["global_steps"] == 7
    assert {name: weight.tolist() for name, weight in sent["weights"].items()} == {"a": [1.0, 1.0], "b": [0.0, 0.0]}


def test_unmerged_lora_is_an_error_that_names_the_key(adapter):
    with pytest.raises(ValueError, match="actor_rollout_ref.model.lora.merge=True"):
        asyncio.run(adapter.update_weights(iter(()), peft_config={"r": 4}))


@pytest.mark.parametrize("key, value", [("tensor_model_parallel_size", 2), ("logprobs_mode", "raw_logprobs")])
def test_what_the_rollout_cannot_do_is_refused_before_a_server_starts(key, value):
    replica = HFReplica(0, rollout_config(**{key: value}), model_config=None, gpus_per_node=1)
    with pytest.raises(ValueError, match=f"rollout.{key} must be"):
        asyncio.run(replica.launch_servers())
