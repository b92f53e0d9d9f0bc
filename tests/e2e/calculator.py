"""A tool-calling agent loop, as a user of verl writes one: after each `=` of the model a calculator writes the sum."""

import re
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

SUM = re.compile(r"\d+(?:\+\d+)+$")
DRAFTS = (0, 1, 2, 1)
"""How often a session solves the sum before its answer, by its number modulo 4; these outputs have another prompt."""
FAILS = 7
"""The session of each question in which the calculator is out of order."""


@register("calculator")
class CalculatorLoop(AgentLoopBase):
    async def run(self, sampling_params, session_id, **kwargs):
        if session_id == FAILS:
            raise RuntimeError("the calculator is out of order")
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        draft_prompt = prompt_ids + self.tokenizer.encode("?")
        prompts = [draft_prompt] * DRAFTS[session_id % len(DRAFTS)] + [prompt_ids]
        return [await self._solve(prompt, sampling_params) for prompt in prompts]

    async def _solve(self, prompt_ids, sampling_params):
        (equals,) = self.tokenizer.encode("=")
        ids, mask, log_probs, turns = [], [], [], 0
        while len(ids) < self.rollout_config.response_length:
            room = self.rollout_config.response_length - len(ids)
            turn = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids + ids,
                sampling_params={**sampling_params, "max_tokens": room, "stop_token_ids": [equals]},
            )
            turns += 1
            ids, mask = ids + turn.token_ids, mask + [1] * len(turn.token_ids)
            log_probs += turn.log_probs
            asked = SUM.search(self.tokenizer.decode(ids[:-1]))
            if turn.token_ids[-1] != equals or not asked:
                break
            answer = self.tokenizer.encode(str(sum(map(int, asked[0].split("+")))))[: room - len(turn.token_ids)]
            ids, mask, log_probs = ids + answer, mask + [0] * len(answer), log_probs + [0.0] * len(answer)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=turns,
            metrics=AgentLoopMetrics(),
            extra_fields=turn.extra_fields,
        )
