import pytest

from gtpo_verl.openrlhf import options


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """A version of OpenRLHF."""
    monkeypatch.setattr(options, "version", lambda name: "0.11.2")
