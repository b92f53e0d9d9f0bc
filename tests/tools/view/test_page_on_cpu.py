"""What the page is made of; in a browser: test_browser_on_cpu.py."""

import re

from token_dump import HOSTILE, write_dump

from gtpo_verl.tools.rollouts import find_source
from gtpo_verl.tools.view.page import render, step_element, summarize


def test_the_page_holds_no_markup_of_the_run_and_asks_for_nothing(tmp_path, tokenizer):
    source = find_source(write_dump(tmp_path, tokenizer, {1: (HOSTILE, [1.0, 0.0, 0.5], 0.2)}, prompt="</script><b>"))
    steps = map(step_element, map(source.read, source.paths))
    page = render(source.header | {"source": "</title><script>x</script>"}, steps)
    assert page.count("</script>") == 3 and "<img" not in page and page.count("</title>") == 1
    assert "default-src 'none'" in page
    assert not re.search(r"<[^>]+(src|href)=|https?://(?!www.w3.org/2000/svg)|@\w+@", page)


def test_summary_counts_each_trained_token_once():
    base = {"step": 3, "reward": 2.0, "keep": True, "loss_mask": [1, 1, 0, 1], "lambda": [0.0, 2.0, 2.0, 1.0]}
    summary = summarize([base, base | {"keep": False, "reward": 4.0}])
    assert summary == {"step": 3, "tokens": 6, "protected": 1, "doubled": 1, "filtered": 3, "reward": 3.0}
