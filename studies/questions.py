"""The questions of the study's tasks with the model of 0.4 M parameters.

Two-digit addition (`arithmetic`) and subtraction, and two tasks of `reasoning-gym`: `spell_backward` and
`letter_counting`. `worded_counting` is the latter in whole sentences, of about 100 tokens and in several phrasings.
`addition_or_guess` is addition that half of the supervised solutions answer without reasoning. Completions have room
for twice their natural length. To math-verify `cab` and `abc` are one product, so where answers are words, the reward
must compare them as such (`studies.rewards`).
"""

import functools
import importlib.util
import random
import re
from collections.abc import Mapping
from typing import Any

from recipes.tasks.tiny import MakeQuestions, Question, two_digit


def spell_backward() -> list[Question]:
    """Words of three to five letters, spelled backward letter by letter (`reasoning-gym`)."""
    questions = {}
    for row in _reasoning_gym("spell_backward", size=20_000, min_word_len=3, max_word_len=5):
        word, answer = row["metadata"]["word"], row["answer"]
        swaps = {answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :] for i in range(len(answer) - 1)}
        if (wrong := swaps - {answer}) and re.fullmatch("[a-z]+", word):
            questions[word] = Question(f"{word}=", answer, (",".join(answer), ";".join(answer)), tuple(sorted(wrong)))
    return list(questions.values())


def letter_counting() -> list[Question]:
    """How often a letter occurs in a word of three to six letters, counted along the word (`reasoning-gym`)."""
    questions = {}
    for row in _reasoning_gym("letter_counting", size=40_000, min_words=1, max_words=1):
        letter, (word,), answer = row["metadata"]["target_letter"], row["metadata"]["span"], row["answer"]
        if re.fullmatch("[a-z]{3,6}", word) and letter in word:
            counts = "".join(f"{c}{word[: i + 1].count(letter)}" for i, c in enumerate(word))
            wrong = tuple(str(int(answer) + error) for error in (-1, 1, 2))
            text = f"{letter} in {word}="
            questions[text] = Question(text, answer, (counts, ":" + counts), wrong)
    return list(questions.values())


def worded_counting() -> list[Question]:
    """The questions of `letter_counting`, answered in sentences: in three ways of about 100 tokens and a short one."""

    def told(question: Question) -> tuple[str, ...]:
        counts = question.reasonings[0]
        return (
            f"i go along the word and count as i go: {counts}. the last number is the one that was asked for.",
            f"{counts}. so i have counted letter by letter from the first to the last, and this is the result.",
            f"every letter of the word gets its own count, the target is one of them. so here they are: {counts}",
            counts,
        )

    return [question._replace(reasonings=told(question)) for question in letter_counting()]


FURTHER_CHARACTERS = {f"letter_counting_after_{n}": n for n in (20, 70, 240, 440)}
"""Tasks whose reasoning begins with so many characters that say nothing and differ from completion to completion."""


def counting_after(characters: int) -> list[Question]:
    """The questions of `letter_counting`, answered after further characters: the share of shared tokens falls."""
    rng = random.Random(0)

    def after(reasoning: str) -> str:
        return "".join(rng.choices("ab", (0.8, 0.2), k=characters)) + reasoning

    return [
        question._replace(reasonings=tuple(after(question.reasonings[i % 2]) for i in range(8)))
        for question in letter_counting()
    ]


def addition_or_guess() -> list[Question]:
    """Sums, of which every other supervised solution has the tags and an answer and nothing between."""
    return [question._replace(reasonings=(*question.reasonings, "", "")) for question in two_digit()]


WARM_STARTS = {"addition_or_guess": {"damaged_tag_share": 0.5}}
"""What a task's warm start has that is not usual: keys of `recipes.tasks.tiny.WarmStartConfig`."""


def max_response_length(task: str) -> int:
    """Limit of a task's completions in tokens, for `data.max_response_length`."""
    return 192 if task == "worded_counting" else 64 + 2 * FURTHER_CHARACTERS.get(task, 0)


def _reasoning_gym(name: str, **settings: Any) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError("no package reasoning_gym: run bash scripts/setup_cpu.sh smollm2")
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, **settings)


TASKS: Mapping[str, MakeQuestions] = {
    "arithmetic": two_digit,
    "addition_or_guess": addition_or_guess,
    "subtraction": functools.partial(two_digit, "-"),
    "spell_backward": spell_backward,
    "letter_counting": letter_counting,
    "worded_counting": worded_counting,
    **{name: functools.partial(counting_after, number) for name, number in FURTHER_CHARACTERS.items()},
}
