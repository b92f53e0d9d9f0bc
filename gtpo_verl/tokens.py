"""Text of tokens, by the library `tokenizers` alone: torch and transformers stay out, and no code of a model is run."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_CHARACTER_BYTES = 4  # in UTF-8; each byte of a character may be a token


@cache
def load_tokenizer(name: str) -> "Tokenizer":
    """Return the `tokenizer.json` of a folder, or of a model on the Hub; a ValueError if there is none."""
    from tokenizers import Tokenizer

    folder = Path(name).expanduser()
    is_path = folder.is_dir() or folder.is_absolute() or name.startswith(".")
    if not is_path:
        print(f"{name} is no folder here: asking the Hugging Face Hub", file=sys.stderr)
    try:
        if is_path:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(name)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises no narrower class
        remedy = "give --tokenizer a Hub name, or a folder with a tokenizer.json, as save_pretrained writes it"
        raise ValueError(f"no tokenizer {name} ({error}): {remedy}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def eos_ids(*sources: Any) -> list[int]:
    """Return the tokens that end a completion, sorted: the `eos_token_id` of a tokenizer and of configs, each of which
    may have one, several or none."""
    ids: set[int] = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        if isinstance(eos, int):
            ids.add(eos)
        elif eos is not None:
            ids.update(eos)
    return sorted(ids)


def decoded_fields(completion: Mapping[str, Any], tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return the fields of a completion of a dump that need its tokenizer: `ended`, `prompt` and `token_strings`.

    It has ended if the last of the model's own tokens is a special one.
    """
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    models_own = list(compress(completion["token_ids"], completion["response_mask"]))
    return {
        "ended": bool(models_own) and models_own[-1] in special,
        "prompt": tokenizer.decode(completion["prompt_ids"], skip_special_tokens=False),
        "token_strings": spell(tokenizer, completion["token_ids"]),
    }


def spell(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    A character whose bytes are spread over several tokens is at the last of them, with "" at the others; bytes that are
    no character become U+FFFD, and a token that the tokenizer lacks `<id>`.
    """
    words: list[str] = []
    # ids[last_start:start] is the last piece of text that was whole, ids[start:] what is being put together.
    last_start = 0
    start = 0
    for t, token in enumerate(ids):
        # Some vocabularies put a space before a word, which is only written if there is text before it.
        context = ids[last_start:start]
        before = tokenizer.decode(context, skip_special_tokens=False)
        text = tokenizer.decode([*context, *ids[start : t + 1]], skip_special_tokens=False)[len(before) :]

        # The token may hold the first bytes of a character, and the next tokens the others.
        may_go_on = t - start < _MAX_CHARACTER_BYTES - 1 and t < len(ids) - 1
        if text.endswith("\N{REPLACEMENT CHARACTER}") and may_go_on:
            words.append("")
            continue

        is_known = tokenizer.id_to_token(token) is not None
        words.append(text if is_known else f"<{token}>")
        last_start = start
        start = t + 1
    return words
