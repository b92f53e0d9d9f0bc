"""Time the token view on 64 completions of 8,192 tokens: writing the dump, making the page, using it in Chromium.

    python scripts/bench_view.py

Needs what scripts/setup_browser.sh installs. The first two are CPU time, which other work on the machine disturbs less.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from chromium import open_chromium
from token_dump import END, batch_of, save_tokenizer, write

from gtpo_verl import GTPOConfig, cli
from gtpo_verl.verl_plugin.token_dump import TokenDump

ACTIONS = {
    "hover": "show(rows[3], 50)",
    "threshold": "state.threshold = 0.3; repaint()",
    "colour": "state.colour = 'entropy'; repaint()",
    "order": "state.order = 'reward'; drawGroup()",
    "unfold all": "$('unfold').click()",
    "end of the last completion": "choose(rows[63], 8191)",
}


def completion() -> list[int]:
    """Random lines between a beginning and an end that all completions share."""
    body = random.choices(list("abcdefghijklmnopqrstuvwxyz  ☃é\n"), k=8192)
    text = b"<reasoning>\n" + "".join(body).encode()
    end = b"</reasoning>"
    return [*text[: 8191 - len(end)], *end, END]


def main() -> None:
    """Print one line per measurement."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        batch, row_len = batch_of([completion() for _ in range(64)], [float(i % 2) for i in range(64)])
        dump = TokenDump(GTPOConfig(dump_dir=f"{folder}/dump"), "gtpo", save_tokenizer(f"{folder}/tokenizer"))
        start = time.process_time()
        path = write(dump, 1, batch, ["prompt"] * 64, batch["responses"][:1, :20].expand(64, -1), row_len)
        print(f"writing the dump: {time.process_time() - start:.2f} s, {path.stat().st_size / 1e6:.0f} MB")
        start = time.process_time()
        cli.main(["view", f"{folder}/dump", "-o", f"{folder}/view.html"])
        print(f"making the page: {time.process_time() - start:.2f} s")
        driver = open_chromium(f"{folder}/profile")
        driver.get(f"file://{folder}/view.html")
        loaded = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
        print(f"opening the page: {driver.execute_script(loaded) / 1e3:.2f} s")
        for name, action in ACTIONS.items():
            print(f"{name}: {driver.execute_async_script(_timed(action)):.0f} ms")
        driver.execute_script(
            "window.long = []; new PerformanceObserver((list) => window.long.push(...list.getEntries()))"
            ".observe({ type: 'longtask' }); scrollTo(0, 0)"
        )
        for _ in range(40):
            driver.execute_script("scrollBy(0, 3000)")
            time.sleep(0.05)
        longest = driver.execute_script("return Math.max(0, ...window.long.map((task) => task.duration))")
        print(f"longest task above 50 ms while scrolling: {longest:.0f} ms")
        print("tokens in the page:", driver.execute_script("return document.querySelectorAll('#rows .token').length"))
        driver.quit()


def _timed(action: str) -> str:
    """Script for the time in ms until what an action changes is drawn."""
    return (
        f"const done = arguments[0], start = performance.now(); {action};"
        "requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)))"
    )


if __name__ == "__main__":
    main()
