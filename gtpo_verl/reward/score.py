"""Reward of GTPO (arXiv:2508.03772), App. 8.2 "Reward Settings", as a verl custom reward function::

    score = format + 10 * acc        format in {10, 1, 0}, acc in {1, 0}

``acc`` is 1 if the right answer is enclosed in the answer tags, whatever the rest looks like. In a verl config::

    reward.custom_reward_function.path=pkg://gtpo_verl.reward
    reward.custom_reward_function.name=compute_score

Where the paper is silent: the answer is the content of the last complete ``<answer>...</answer>`` pair, and equality is
that of math-verify (fractions, LaTeX, sets, units, six decimals), not of strings. A number in a sentence is an answer
only where math-verify finds it there.

math-verify runs in a process of its own (``math_verify_process``). Integers, and answers that are the ground truth but
for their spelling, do without it.
"""

import importlib.util
import logging
import re
from fractions import Fraction

from gtpo_verl.reward.math_verify_process import MathVerifyProcess

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("gtpo_verl.reward.score needs math-verify: pip install math-verify")

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
MAX_ANSWER_CHARS = 300
"""A longer answer is no answer. The longest of MATH's 12,500 answers has 159 characters."""
MAX_NESTING = 6
"""An answer with brackets nested deeper is wrong unseen, as math-verify would parse it for seconds. MATH's reach 3."""

logger = logging.getLogger(__name__)
_math_verify = MathVerifyProcess()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs
) -> dict[str, float | str]:
    """Score one completion (arXiv:2508.03772, App. 8.2). Any completion gets a score; none raises.

    Args:
        data_source: Name of the dataset; every dataset is scored alike.
        solution_str: The completion as text, without special tokens.
        ground_truth: The right answer, plain or LaTeX, 1 to ``MAX_ANSWER_CHARS`` characters.
        extra_info, **kwargs: What verl adds; not used.

    Returns:
        Always the same keys: ``score`` (the reward, format + 10 acc), ``format`` (10, 1 or 0), ``acc`` (1 or 0),
        ``pred`` (the answer in canonical form, to vote with; "" if there is none), ``strict`` (1 if the completion is
        ``<reasoning>...</reasoning>`` then ``<answer>...</answer>`` and nothing else, else 0), ``timeout`` (1 if
        math-verify gave no verdict, in which case ``acc`` is 0 but means "unknown", else 0).

    Raises:
        ValueError: if ``ground_truth`` is no text, empty or too long.
        RuntimeError: if the math-verify process cannot start.
    """
    if not isinstance(ground_truth, str) or not 0 < len(ground_truth.strip()) <= MAX_ANSWER_CHARS:
        raise ValueError(
            f"reward_model.ground_truth must be text of 1 to {MAX_ANSWER_CHARS} characters, got {ground_truth!r} "
            f"(data_source={data_source!r}): correct or drop the row in the dataset"
        )
    answer = extract_answer(solution_str)
    timeout = False
    try:
        acc = float(is_equal(ground_truth, answer))
    except TimeoutError as error:
        logger.warning("%s", error)
        acc = 0.0
        timeout = True
    format_reward = compute_format_reward(solution_str)
    return {
        "score": format_reward + 10.0 * acc,
        "format": format_reward,
        "acc": acc,
        "pred": canonicalize(answer),
        "strict": float(is_strict(solution_str)),
        "timeout": float(timeout),
    }


def compute_format_reward(solution_str: str) -> float:
    """Return 10 if all four ``TAGS`` occur in the completion, 1 if only some do, 0 if none does (App. 8.2)."""
    present = [tag for tag in TAGS if tag in solution_str]
    if len(present) == len(TAGS):
        return 10.0
    return 1.0 if present else 0.0


def is_strict(solution_str: str) -> bool:
    """Return whether the completion is ``<reasoning>...</reasoning>`` then ``<answer>...</answer>``, each tag once.

    Whitespace around the two blocks is allowed, other text is not. The paper does not reward this; it shows the loss of
    a completion's end, which ``compute_format_reward`` does not see.
    """
    has_each_tag_once = all(solution_str.count(tag) == 1 for tag in TAGS)
    return has_each_tag_once and _STRICT.fullmatch(solution_str) is not None


def extract_answer(solution_str: str) -> str:
    """Return what the last complete ``<answer>...</answer>`` pair holds, stripped; "" without one, or if it is long."""
    before_last_closing, _, _ = solution_str.rpartition("</answer>")
    _, opening, rest = before_last_closing.rpartition("<answer>")
    if not opening:
        return ""
    answer, _, _ = rest.partition("</answer>")
    answer = answer.strip()
    return answer if len(answer) <= MAX_ANSWER_CHARS else ""


def canonicalize(answer: str) -> str:
    """Return a form to vote with, in which equal answers mostly are equal strings: numbers by value, all else spelt.

    ``0.50``, ``\\frac12`` and ``1/2`` give ``1/2``; ``$1,200``, ``1200.`` and ``1200 dollars`` give ``1200``. Algebra
    is left alone: ``x+1`` and ``1+x`` stay two answers. The result depends on ``answer`` only and is printable.
    """
    return _spelling(_clean(answer))


def is_equal(ground_truth: str, answer: str) -> bool:
    """Return whether two answers are equal by math-verify, asking it only where spelling and integers do not decide.

    Raises:
        TimeoutError: if math-verify gave no verdict: it ran out of time, or its process was killed.
        RuntimeError: if the math-verify process cannot start.
    """
    gold = _clean(ground_truth)
    pred = _clean(answer)
    if not pred:
        return False
    if _spelling(gold) == _spelling(pred):
        return True
    numbers = (_parse_number(gold), _parse_number(pred))
    if all(number is not None and number.denominator == 1 for number in numbers):
        return False
    return _is_well_nested(pred) and _math_verify.is_equal(gold, pred)


def closing_brace(text: str, start: int) -> int:
    """Return the index of the ``}`` that closes the ``{`` at ``text[start]``, or -1.

    ``\\{`` and ``\\}`` are not braces.
    """
    depth = 0
    for match in _BRACE.finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
        if depth == 0:
            return match.start()
    return -1


_STRICT = re.compile(r"\s*<reasoning>.*</reasoning>\s*<answer>.*</answer>\s*", re.DOTALL)
# A brace, or an escaped character, which is no brace whatever it is.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]")
# A command of LaTeX: letters, as in \frac, or one other character, as in \% and "\ ".
_CONTROL_SEQUENCE = re.compile(r"\\(?:[A-Za-z]+|.)")
_PLAIN_SPELLING = {
    **dict.fromkeys((r"\!", r"\left", r"\right", r"\$"), ""),
    **dict.fromkeys((r"\,", r"\;", r"\:", r"\ ", r"\quad", r"\qquad"), " "),
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys((r"\mathrm", r"\textbf", r"\textrm", r"\textnormal", r"\mbox"), r"\text"),
    r"\%": "%",
}
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
# A box around the whole answer, \boxed{5} or \fbox{5}, up to its brace.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# A dash in the place of a minus sign: "–5", "–$5", "–\frac12".
_DASH_AS_MINUS = re.compile(r"^\u2013(?=[0-9.\\$])")
# A separator of thousands as LaTeX writes it, before three digits: "1,\!000", "1\,000", "1{,}000".
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,?\\[,!]\s*|\{,\})(?=[0-9]{3}(?![0-9]))")
# "pi" as a word, neither a command already (\pi) nor the end of one ("api").
_PI = re.compile(r"(?<![\\A-Za-z])pi\b")
# A root without LaTeX, of what stands in braces or parentheses, or of one number or letter: "√2", "sqrt(x+1)", " √{3}".
_ROOT = re.compile(r" ?(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\{([^{}]+)\}|\(([^()]+)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
# One dollar sign, of a currency: before a number, behind its sign ("-$5"), or behind all ("5$").
_CURRENCY = re.compile(r"^([-+]?)\s*\$\s*(?=[0-9.])|\$$")
# "1,234.5", "1234.", ".5", with a sign or without.
_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_DECIMAL = re.compile(_NUMBER)
# Text within mathematics around the whole answer, \text{yes}, up to its brace.
_TEXT = re.compile(r"\\text\s*(?=\{)")
# A symbol with the spaces around it; letters, digits and commands of LaTeX keep theirs.
_SPACE_AROUND_SYMBOL = re.compile(r"\s*([^\w\s\\])\s*")
# \frac{1}{2}, \frac12 and 1/2.
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+))"
)
# "1 1/2", which is 3/2.
_MIXED_NUMBER = re.compile(r"([-+]?)([0-9]+) ([0-9]+) ?/ ?([0-9]+)")
# "18 dollars", "5\text{ cm}", "90^\circ", "50%". A word that changes the number ("3 pi") is left to math-verify.
_WORDS = r"[A-Za-z]{2,}(?:[ /.-]+[A-Za-z]+)*"
_QUANTITY = re.compile(
    rf"({_NUMBER}(?:/[0-9]+)?)\s*(?:%|\^\s*(?:\\circ|\{{\\circ\}})|-?\s*({_WORDS})|\\text\s*\{{\s*({_WORDS})[ .]*\}})"
)
_LENGTHS = r"(?:[kcdm]m|in|inch(?:es)?|ft|f(?:oo|ee)t|yd|yards?|mi|miles?|(?:kilo|centi|milli)?met(?:er|re)s?|units?)"
# The exponent of a unit at the end, behind the unit: "5 cm^2", "5\text{ cm}^{3}".
_POWER_OF_UNIT = re.compile(rf"([0-9] ?{_LENGTHS}|\\text\s*\{{[^{{}}]*\}})\^\{{?[23]\}}?$")
# What stands between the words of a quantity: "miles per hour", "km/h", "sq. ft".
_BETWEEN_WORDS = re.compile(r"[ /.-]+")
_NOT_UNITS = frozenset(
    "and base billion billionth choose crore cubed dozen factorial half halves hundred lakh million millionth minus "
    "mod not or over plus quarter squared third fourth fifth sixth seventh eighth ninth ten tenth eleventh "
    "twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth "
    "hundredth thousand thousandth times to trillion trillionth arccos arcsin arctan cos exp ln log sin sqrt tan "
    "alpha beta delta gamma lambda mu omega phi pi psi rho sigma tau theta".split()
)


def _clean(answer: str) -> str:
    """Return ``answer`` in plain spelling, with its value alone.

    Delimiters, ``\\boxed``, spacing commands, currency, percent signs, units and unprintable characters are left out,
    and LaTeX's synonyms get one spelling.
    """
    text = "".join(char for char in " ".join(answer.split()) if char.isprintable())
    text = text.replace("\u2212", "-")  # the minus sign of typesetting
    text = _without_delimiters(text)
    text = _DASH_AS_MINUS.sub("-", text)
    text = _THOUSANDS.sub(",", text)
    text = _CONTROL_SEQUENCE.sub(lambda match: _PLAIN_SPELLING.get(match.group(), match.group()), text)

    # Symbols without LaTeX become its commands.
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _PI.sub(r"\\pi", text)
    text = text.replace("∞", r"\infty ").replace("∪", r"\cup ")

    text = " ".join(text.split())
    if text.count("$") == 1:
        text = _CURRENCY.sub(r"\1", text)

    mixed = _MIXED_NUMBER.fullmatch(text)
    if mixed:
        sign, whole, numerator, denominator = mixed.groups()
        return rf"{sign}\frac{{{int(whole) * int(denominator) + int(numerator)}}}{{{denominator}}}"
    return _without_unit(text)


def _without_delimiters(text: str) -> str:
    """Return what stands within the delimiters and boxes around the whole text, and before its full stop."""
    previous = None
    while text != previous:
        previous = text
        text = text.strip().rstrip(".").rstrip()
        text = _unwrap(text, _BOX)
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text == opening + inner + closing and opening not in inner and closing not in inner:
                text = inner
    return text


def _without_unit(text: str) -> str:
    """Return the number of a quantity, or the text if it is none, or if one of its words may change the number."""
    quantity = _QUANTITY.fullmatch(_POWER_OF_UNIT.sub(r"\1", text))
    if quantity is None:
        return text
    number, plain_unit, unit_in_latex = quantity.groups()
    words = _BETWEEN_WORDS.split((plain_unit or unit_in_latex or "").lower())
    singular = [word.removesuffix("s") for word in words]
    return number if _NOT_UNITS.isdisjoint([*words, *singular]) else text


def _spelling(text: str) -> str:
    """Return the canonical form of a cleaned answer."""
    number = _parse_number(text)
    if number is not None:
        return str(number)
    return _SPACE_AROUND_SYMBOL.sub(r"\1", _unwrap(text, _TEXT))


def _unwrap(text: str, command: re.Pattern[str]) -> str:
    """Return the argument of a command of LaTeX if ``text`` is nothing else, otherwise ``text``."""
    match = command.match(text)
    if match and closing_brace(text, match.end()) == len(text) - 1:
        return text[match.end() + 1 : -1].strip()
    return text


def _parse_number(text: str) -> Fraction | None:
    """Return the exact value of an integer, a decimal, ``a/b`` or ``\\frac{a}{b}``; None for anything else."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    numerator, denominator = [int(group) for group in match.groups()[1:] if group is not None]
    if denominator == 0:
        return None
    sign = -1 if match["sign"] == "-" else 1
    return Fraction(sign * numerator, denominator)


def _is_well_nested(text: str) -> bool:
    """Return whether braces are closed and no bracket is nested deeper than ``MAX_NESTING``."""
    depth = 0  # of brackets of any kind
    braces = 0
    for bracket in _BRACKET.findall(text):
        opens = bracket in ("(", "[", "{", r"\{")
        depth = depth + 1 if opens else max(depth - 1, 0)
        if bracket in "{}":
            braces += 1 if opens else -1
        if depth > MAX_NESTING or braces < 0:
            return False
    return braces == 0
