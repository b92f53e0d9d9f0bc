"""Which verls this plugin serves, and why it cannot run in this process."""

import verl
from packaging.version import InvalidVersion, Version

SUPPORTED_VERL = ("0.9.0", "0.9.1")

load_errors: dict[str, None] = {}
"""Why GTPO cannot run in this process: verl swallows exceptions while it loads plugins. The reasons are the keys of a
dict, so that each is there once, in their order."""


def verl_version() -> Version | None:
    """Return the version of the imported verl, which may not be an installed package; None if it cannot be parsed."""
    try:
        return Version(verl.__version__)
    except InvalidVersion:
        return None


def is_too_old() -> bool:
    """Whether this verl comes before the first of `SUPPORTED_VERL`.

    A version 0.9.0.dev counts as 0.9.0. verl's branch `neo` has it: the functions that GTPO hooks are there, and no
    later version exists to which one could upgrade. Where a function is missing, the hooks say so.
    """
    installed = verl_version()
    return installed is not None and Version(installed.base_version) < Version(SUPPORTED_VERL[0])


def is_tested() -> bool:
    """Whether this verl is a release from the first to the last of `SUPPORTED_VERL`, not a checkout or a fork."""
    installed = verl_version()
    if installed is None or installed.is_prerelease or installed.local:
        return False
    return Version(SUPPORTED_VERL[0]) <= installed <= Version(SUPPORTED_VERL[-1])


def check_loaded() -> None:
    """Raise a RuntimeError that names each cause and its remedy, if GTPO cannot run in this process."""
    if load_errors:
        raise RuntimeError("GTPO cannot run: " + "; ".join(load_errors))
