#!/usr/bin/env bash
# Install what tests/tools/view/test_browser_on_cpu.py needs to open a page: Debian's Chromium with its driver, and selenium in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v chromium google-chrome >/dev/null || ! command -v chromedriver >/dev/null; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -qq -y --no-install-recommends \
        chromium chromium-driver >/dev/null
fi
.venv/bin/python -c 'import selenium' 2>/dev/null || .venv/bin/pip install -qq selenium==4.51.0
