"""verl's rollout files."""

import json
from pathlib import Path

LETTER_COUNTING = Path(__file__).resolve().parent / "letter_counting_dump"
"""A token dump of version 1, of a GRPO run that counts letters, with its tokenizer."""


def write_rollouts(folder, groups, first=1):
    """A step per entry, each a list of (text, score, acc)."""
    folder.mkdir()
    for number, completions in enumerate(groups, start=first):
        rows = [
            {"uid": f"a_{i}_0", "input": "1+1", "output": text, "score": score, "acc": acc}
            for i, (text, score, acc) in enumerate(completions)
        ]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
