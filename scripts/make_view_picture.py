"""Draw docs/view.png: of the view's demo the right completion above the wrong one that begins like it.

    bash scripts/setup_browser.sh
    python scripts/make_view_picture.py docs/view.png

The page is that of `gtpo-verl view --demo`; a line of ours below each of the two says what the colour means.
"""

import base64
import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

from gtpo_verl import cli

_WIDTH = 720
_CAPTIONS = {
    "#4": "Right: GTPO doubles the tokens that it shares with worse completions.",
    "#8": "Wrong: GTPO leaves the shared tokens alone, which GRPO makes less likely.",
}
_KEEP_TWO = """
const captions = arguments[0];
for (const article of [...document.querySelectorAll("article")]) {
  const caption = captions[article.querySelector("b").textContent];
  if (!caption) { article.remove(); continue; }
  const line = document.createElement("p");
  line.textContent = caption;
  article.append(line);
  article.querySelector(".badge").remove();
  article.style.contentVisibility = "visible"; // or its height is not known before it is drawn
}
document.body.replaceChildren(document.getElementById("rows"));
const { x, y, width, height } = document.body.getBoundingClientRect();
return { x, y, width, height, scale: 1 };
"""


def main() -> None:
    """Open the page, keep the two completions, and write what is seen."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "view.html"
        cli.main(["view", "--demo", "-o", str(page)])
        for flag in ("headless", "no-sandbox", "disable-gpu", f"user-data-dir={folder}/profile"):
            options.add_argument(f"--{flag}")
        with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
            screen = {"width": _WIDTH, "height": 900, "deviceScaleFactor": 2, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            driver.get(page.as_uri())
            clip = driver.execute_script(_KEEP_TWO, _CAPTIONS)
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    Path(sys.argv[1]).write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
