"""A headless Chromium for pages that a test wrote itself."""

import shutil
from pathlib import Path

from selenium import webdriver

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync"),
)


def open_chromium(profile: str | Path) -> webdriver.Chrome:
    """A browser with a new profile in an empty folder, and its log; to be ended with `quit`."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(BINARY)
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
