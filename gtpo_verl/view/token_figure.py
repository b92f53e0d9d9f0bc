"""A figure of the tokens that GTPO (arXiv:2508.03772) protected and doubled most often in a run, for a paper or a talk."""

from collections import Counter
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from gtpo_verl.paper.plots import COLOURS, GREY, STYLE
from gtpo_verl.view.sources import Source, find_source
from gtpo_verl.view.tokens import token_pieces

_SHOWN = 15
_FONT = "DejaVu Sans Mono"


def plot_tokens(path: Path, tokenizer: str | None = None, title: str | None = None) -> Figure:
    """Bars for the tokens that were protected, and for those that were doubled, most often.

    A bar is the token's share of all protected (doubled) tokens; beside it stands how many of the token's own
    occurrences were protected (doubled). Tokens of filtered completions count as neither.

    Args:
        path: a token dump or verl's rollouts, as for `gtpo-verl view`.
        tokenizer: folder or Hub name of the run's tokenizer; None: the one that the dump names.
        title: above the figure.

    Raises:
        ValueError: there is no such source, or no token of it was protected or doubled.
    """
    source = find_source(path, tokenizer)
    uses, protected, doubled = count_tokens(source)
    if not protected and not doubled:
        raise ValueError(f"{path}: no token is protected or doubled in its {len(source.paths)} steps")
    pieces = token_pieces(
        source.tokenizer, {id for counts in (protected, doubled) for id, _ in counts.most_common(_SHOWN)}
    )
    names = {id: spell(piece) for id, piece in pieces.items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw(left, protected, uses, names, COLOURS[0], "protected")
        _draw(right, doubled, uses, names, COLOURS[1], "doubled")
        method = "GTPO" if source.header["gtpo_applied"] else "GTPO would have"
        figure.suptitle(title or f"Tokens that {method} protected and doubled most often")
        caption = (
            f"{len(source.paths)} steps, {uses.total():,} tokens. Right of a bar: share of the token's occurrences."
        )
        figure.supxlabel(caption, fontsize=7.5, color=GREY)
    return figure


def count_tokens(source: Source) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """How often each token id was trained on, protected (λ < 1) and doubled (λ > 1), over all steps."""
    uses, protected, doubled = Counter[int](), Counter[int](), Counter[int]()
    for path in source.paths:
        for completion in source.read(path):
            trained = zip(completion["token_ids"], completion["lambda"], completion["loss_mask"], strict=True)
            tokens = [(id, weight) for id, weight, is_trained in trained if is_trained]
            uses.update(id for id, _ in tokens)
            if completion["keep"]:
                protected.update(id for id, weight in tokens if weight < 1)
                doubled.update(id for id, weight in tokens if weight > 1)
    return uses, protected, doubled


def spell(piece: str | list[int]) -> str:
    """A token as a label: what cannot be seen, or has no letter in the figure's font, is spelled out."""
    if isinstance(piece, list):
        return "".join(f"⟨{byte:02X}⟩" for byte in piece)
    has_glyph = get_font(findfont(_FONT)).get_char_index
    shown = {" ": "␣", "\n": "↵", "\t": "⇥"}
    return "".join(shown.get(x) or (x if x.isprintable() and has_glyph(ord(x)) else f"⟨U+{ord(x):04X}⟩") for x in piece)


def _draw(ax: Axes, counts: Counter[int], uses: Counter[int], names: dict[int, str], colour: str, what: str) -> None:
    top = counts.most_common(_SHOWN)
    shares = [100 * n / counts.total() for _, n in top]
    bars = ax.barh(range(len(top)), shares, color=colour, height=0.7)
    ax.bar_label(bars, [f"{100 * n / uses[id]:.0f}%" for id, n in top], padding=3, fontsize=7.5, color=GREY)
    labels = [name if len(name) <= 18 else name[:17] + "…" for name in (names[id] for id, _ in top)]
    ax.set_yticks(range(len(top)), labels, family=_FONT, parse_math=False)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_xlabel(f"% of all {what} tokens")
    ax.set_title(f"{what.capitalize()}: {counts.total():,} tokens")
