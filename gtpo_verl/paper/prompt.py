"""The prompt of GTPO (arXiv:2508.03772), App. 8.2, word for word."""

SYSTEM_PROMPT = """\
You are a helpful assistant for solving math problems.
Given a question, first think step by step between <reasoning> and </reasoning>.
Then, give the final answer between <answer> and </answer>."""


def build_messages(question: str) -> list[dict[str, str]]:
    """The chat messages of one question, as in verl's ``prompt`` column: the system prompt, then the question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
