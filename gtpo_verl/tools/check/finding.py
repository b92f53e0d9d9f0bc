"""What `gtpo-verl check` finds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: a problem if there is a remedy, a warning if there is advice."""

    subject: str
    says: str
    remedy: str = ""
    advice: str = ""
