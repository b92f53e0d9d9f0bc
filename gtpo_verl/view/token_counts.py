"""How often GTPO (arXiv:2508.03772) protected and doubled each token of a run, for `gtpo-verl plot --tokens`."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from gtpo_verl.view.sources import find_source
from gtpo_verl.view.tokens import token_pieces


class TokenCounts(NamedTuple):
    """How often the tokens of a run were trained on, protected and doubled.

    Args:
        steps (int): how many were counted.
        applied (bool): whether GTPO did so; else it would have.
        trained: occurrences of each token id in the loss.
        protected: those with λ < 1.
        doubled: those with λ > 1.
        pieces: what each token spells, a string or, where they are no whole characters, bytes.
    """

    steps: int
    applied: bool
    trained: Counter[int]
    protected: Counter[int]
    doubled: Counter[int]
    pieces: dict[int, str | list[int]]


def count_tokens(path: Path, tokenizer: str | None = None) -> TokenCounts:
    """Count over all steps of a source; tokens of filtered completions are neither protected nor doubled.

    Args:
        path: a token dump or verl's rollouts, as for `gtpo-verl view`.
        tokenizer: folder or Hub name of the run's tokenizer; None: the one that the dump names.

    Raises:
        ValueError: there is no such source, or no token of it was protected or doubled.
    """
    source = find_source(path, tokenizer)
    counts = trained, protected, doubled = Counter[int](), Counter[int](), Counter[int]()
    for file in source.paths:
        for completion in source.read(file):
            tokens = zip(completion["token_ids"], completion["lambda"], completion["loss_mask"], strict=True)
            weights = [(id, weight) for id, weight, is_trained in tokens if is_trained]
            trained.update(id for id, _ in weights)
            if completion["keep"]:
                protected.update(id for id, weight in weights if weight < 1)
                doubled.update(id for id, weight in weights if weight > 1)
    if not protected and not doubled:
        raise ValueError(f"{path}: no token is protected or doubled in its {len(source.paths)} steps")
    pieces = token_pieces(source.tokenizer, trained)
    return TokenCounts(len(source.paths), source.header["gtpo_applied"], *counts, pieces)
