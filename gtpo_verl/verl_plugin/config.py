"""The keys of `algorithm.gtpo` that are verl's alone, beside the algorithm's own."""

from dataclasses import dataclass

from gtpo_verl.config import GTPOConfig


@dataclass(frozen=True)
class VerlGTPOConfig(GTPOConfig):
    """Settings of GTPO (arXiv:2508.03772) in verl, the section `algorithm.gtpo` of a verl config.

    Args:
        entropy_from (str): which forward pass of verl's trainer gives ⟨H⟩_i. `old_log_prob`: the one before the
            update. `update`: the update's own, so that verl can skip the other.
        dump_dir (str | None): folder for the token dump that `gtpo-verl view` shows. None: no dump.
        dump_freq (int): dump the first step and every step that this number divides. At least 1.
    """

    entropy_from: str = "old_log_prob"
    dump_dir: str | None = None
    dump_freq: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("entropy_from", "old_log_prob", "update")
        self._check_number("dump_freq", "a whole number of steps of at least 1", lambda x: x >= 1 and x == int(x))
