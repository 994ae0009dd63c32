"""A browser for the site, and the site itself."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYGROUNDS = ROOT / "site" / "playgrounds"
NEEDED = ("sphinx", "myst_nb", "furo")
CHROMIUM_OPTIONS = [
    "--no-sandbox",  # which refuses to run as root otherwise, as in CI
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator:
    """The Chromium that is installed; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the group 'browser' is missing")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("a browser test: install Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


def needs_sphinx() -> None:
    """Skip the test where the site cannot be built."""
    if not all(map(importlib.util.find_spec, NEEDED)):
        pytest.skip("the group 'site' is not installed")


def run_build(*arguments: str | Path, **settings: str) -> subprocess.CompletedProcess:
    """`pdm run site` with these arguments, and these settings in its environment."""
    command = [sys.executable, ROOT / "tools" / "build_site.py", *arguments]
    environment = os.environ | settings
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
