"""The page of the token view in a real browser."""

import json
import re
import shutil
from collections import Counter
from itertools import pairwise

import pytest
from rollout_files import LETTER_COUNTING
from token_dump import END, GOOD, HOSTILE, STEPS, batch_of, make_dump, write, write_dump, write_rollouts

from gtpo_verl import cli
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig

pytest.importorskip("selenium", reason="selenium is not installed: bash scripts/setup_browser.sh")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync"),
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A headless browser with a new profile, and its log."""
    binary, service = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not binary or not service:
        pytest.skip("there is no Chromium with its driver: bash scripts/setup_browser.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(service)) as driver:
        yield driver


@pytest.fixture
def show(driver, tmp_path):
    """Open the page of a dump, at a width and in a colour scheme."""

    def shown(*arguments, width=1280, scheme="light"):  # 900 pixels high
        page = tmp_path / "view.html"
        assert cli.main(["view", *map(str, arguments), "-o", str(page)]) == 0
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get(page.as_uri())
        let_draw(driver)
        return driver

    yield shown
    assert driver.get_log("browser") == []


def let_draw(driver):
    """Wait until the page has seen what is near the screen, which it draws a frame later."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")


def find(driver, selector):
    return driver.find_elements(By.CSS_SELECTOR, selector)


def text(driver, selector):
    return find(driver, selector)[0].text


def tokens(driver, row):
    """Text and classes of the drawn tokens of a completion."""
    let_draw(driver)
    script = "return [...document.querySelectorAll('article')[arguments[0]].querySelectorAll('.token')]"
    return driver.execute_script(f"{script}.map(x => [x.textContent, x.className])", row)


def filter_above(driver, threshold):
    script = (
        "const x = document.getElementById('threshold'); x.value = arguments[0]; x.dispatchEvent(new Event('input'))"
    )
    driver.execute_script(script, threshold)


def test_tokens_are_coloured_by_what_the_dump_says(show, dump):
    driver = show(dump)
    lines = [json.loads(line) for line in (dump / "step_000001.jsonl").read_text().splitlines()]
    for row, line in enumerate(lines):
        drawn = [classes.split()[1] for _, classes in tokens(driver, row)]
        assert drawn == [{0: "protected", 1: "plain", 2: "doubled"}[x] for x in line["lambda"]]
    assert "doubled" in str(tokens(driver, 0)) and "protected" in str(tokens(driver, 1))
    head = text(driver, "article h2")
    assert "reward 20" in head and "A +1.15" in head and "entropy 0.25" in head and "kept" in head
    assert "7 + 5 = ?" in text(driver, "#prompt")
    zeroed = [id for line in lines for id, x in zip(line["token_ids"], line["lambda"], strict=True) if x == 0]
    table = [row.text.split()[-2] for row in find(driver, "#frequent tbody tr")]
    assert table[:3] == [str(n) for _, n in Counter(zeroed).most_common(3)]


def test_each_good_completion_stands_above_the_bad_one_that_begins_most_alike(show, tmp_path, tokenizer):
    texts = ["abcdX", "abZ", "abcdY", "neither", "abQ", "other"]
    show(write_dump(tmp_path / "dump", tokenizer, {1: (texts, [0.0, 0.0, 20.0, 7.5, 10.0, 7.5], 0.2)}))
    driver = show(tmp_path / "dump")
    assert [x.text for x in find(driver, "article b")] == ["#3", "#1", "#5", "#2", "#4", "#6"]
    assert "protected" in text(driver, "article:nth-child(2) .key-word.protected")
    assert "doubled" in text(driver, "article:nth-child(1) .key-word.doubled")


def test_the_best_completion_of_the_demo_is_seen_without_scrolling_beside_the_wrong_one(show):
    driver = show("--demo", width=1440)
    first, second = find(driver, "article")[:2]
    assert first.rect["y"] + first.rect["height"] < second.rect["y"] + second.rect["height"] < 900
    assert "16 lions" in text(driver, "#prompt")
    shown = driver.execute_script("const x = document.querySelector('#prompt .text'); return x.scrollTop")
    assert shown > 0


def test_hover_shows_numbers_and_the_completions_that_share_the_token(show, dump):
    driver = show(dump)
    ActionChains(driver).move_to_element(find(driver, "article:nth-child(2) .token")[2]).perform()
    details = text(driver, "#token")
    assert "Protected" in details and "#1 (A +1.15), from the start" in details and "#3" not in details
    assert "0.250 nats" in details and "77.9 %" in details and "3 from the start, 35 from the end" in details
    partner = find(driver, "#rows .partner")
    assert len(partner) == 1 and partner[0].find_element(By.XPATH, "ancestor::article/h2/b").text == "#1"
    find(driver, "#token .context")[0].click()
    assert text(driver, "#token h3") == "e of #1"


def test_it_can_be_used_by_keyboard(show, dump):
    driver = show(dump)
    driver.execute_script("document.querySelector('#prompt summary').focus()")
    keys = lambda *sent: ActionChains(driver).send_keys(*sent).perform()  # noqa: E731
    keys(Keys.TAB, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text(driver, "#token h3") == "e of #1"
    keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    assert text(driver, "#token h3") == "r of #2"
    keys(Keys.ENTER)
    ActionChains(driver).move_to_element(find(driver, "article .token")[5]).perform()
    assert text(driver, "#token h3") == "r of #2"
    keys(Keys.ESCAPE)
    assert not find(driver, "#token")[0].is_displayed()
    driver.execute_script("document.getElementById('step').focus()")
    keys(Keys.ARROW_RIGHT)
    assert text(driver, "#step-name") == "10" and len(find(driver, "article")) == 3
    driver.refresh()
    assert text(driver, "#step-name") == "10"


def test_it_opens_where_the_run_breaks_and_marks_what_did_not_end(show):
    driver = show(LETTER_COUNTING, "--tokenizer", LETTER_COUNTING)
    (sign,) = [x.text for x in find(driver, "#signs li")]
    assert sign.startswith("Since step 300: ")
    assert text(driver, "#step-name") == "300" and "completions with EOS 0 ·" in text(driver, "#summary")
    assert [x.text for x in find(driver, "article .unended")] == ["did not end"] * 8
    ActionChains(driver).send_keys("p").perform()
    assert text(driver, "#step-name") == "290" and text(driver, "#summary").count("completions with EOS") == 1
    ActionChains(driver).send_keys("n", "n", "n", "n", "n").perform()
    assert text(driver, "#step-name") == "400"
    find(driver, "#signs button")[0].click()
    assert text(driver, "#step-name") == "300"
    driver.execute_script("goToStep(3)")
    assert text(driver, "#step-name") == "40" and not find(driver, "article .unended")


def test_the_threshold_slider_filters_completions(show, dump):
    driver = show(dump)
    assert "The filter takes 0 of the 3 completions." in text(driver, "#summary")
    assert text(driver, "#threshold-name") == "filter above 0.693 nats"
    filter_above(driver, 0.1)
    assert "The filter takes 3 of the 3 completions." in text(driver, "#summary")
    assert {classes.split()[1] for _, classes in tokens(driver, 0)} == {"filtered"}
    find(driver, "#strip g")[2].click()  # of completions with an entropy of 0.9
    filter_above(driver, 0.85)
    assert "filtered" in text(driver, "article h2")
    filter_above(driver, 0.95)
    assert "kept" in text(driver, "article h2") and "doubled" in str(tokens(driver, 0))
    filter_above(driver, 9)
    assert text(driver, "#threshold-name") == "no filter" == find(driver, "article .badge")[0].text


def test_entropy_and_mismatch_are_heat(show):
    driver = show(LETTER_COUNTING, "--tokenizer", LETTER_COUNTING)
    driver.execute_script(
        "const c = rows[0]; c.entropy.splice(0, 2, 0, 1.5);"
        "c.inference_logprobs[0] = c.trainer_logprobs[0] + Math.LN2; c.inference_logprobs[1] = c.trainer_logprobs[1];"
    )
    colours = {}
    for kind in ("entropy", "mismatch"):
        Select(find(driver, "#colour")[0]).select_by_value(kind)
        colours[kind] = [x.value_of_css_property("background-color") for x in find(driver, "article .token")[:2]]
    (cold, warm), (off, same) = colours.values()
    assert cold == same and len({cold, warm, off}) == 3
    find(driver, "article .token")[0].click()
    assert "ratio of both\n0.500" in text(driver, "#token") and "a factor of 2" in text(driver, "#scale")


def test_any_unicode_is_shown(show, tmp_path, tokenizer):
    write_dump(tmp_path / "dump", tokenizer, {1: (HOSTILE, [1.0, 0.0, 0.5], 0.2)})
    driver = show(tmp_path / "dump")
    drawn = [word for word, _ in tokens(driver, 2)]
    assert "".join(drawn).replace("⋯", "") == "☃␣🙂␣日本␣ß�a��<|im_end|>"
    assert drawn[:4] == ["⋯", "⋯", "☃", "␣"]


@pytest.mark.parametrize("of", ["dump", "rollouts"])
def test_hostile_text_is_inert(show, tmp_path, tokenizer, of):
    prompt = "</script>\u202e<b>"
    if of == "dump":
        driver = show(write_dump(tmp_path / "dump", tokenizer, {1: (HOSTILE, [1.0, 0.0, 0.5], 0.2)}, prompt=prompt))
    else:
        rollouts = write_rollouts(tmp_path / "rollouts", {7: (HOSTILE, [1.0, 0.0, 0.5])}, prompt=prompt)
        driver = show(rollouts, "--tokenizer", tokenizer)
    # Rows are drawn as they come into sight, which a busy machine delays.
    WebDriverWait(driver, 60).until(lambda driver: "⟨U+202E⟩" in text(driver, "#rows"))
    state = driver.execute_script("return [window.hacked, document.images.length, document.scripts.length]")
    assert state == [None, 0, 3]
    page = driver.execute_script("return document.body.textContent")
    assert not re.search("[\u0000\u001b\u200b\u202a-\u202e\u2066-\u2069\u2028\ufeff]", page)
    assert "⟨U+202E⟩" in page and "␛" in page and "</script>⟨U+202E⟩<b>" in text(driver, "#prompt")
    boxes = [x.rect["x"] for x in find(driver, "article:nth-child(2) .token")[:9]]
    assert all(left <= right for left, right in pairwise(boxes))


def test_under_grpo_it_says_that_nothing_was_applied(show, tmp_path, tokenizer):
    driver = show(write_dump(tmp_path / "dump", tokenizer, STEPS, adv_estimator="grpo"))
    assert "with grpo, not with GTPO" in text(driver, "#notice")
    find(driver, "article:nth-child(2) .token")[2].click()
    assert "weight 0." in text(driver, "#token")
    assert "advantage\n−7.00" in text(driver, "#token") and "λ\n0" in text(driver, "#token")
    filter_above(driver, 0.1)
    assert "would take 3" in text(driver, "#summary")


def test_tool_output_is_not_trained_and_shifts_no_place(show, tmp_path, tokenizer):
    batch, row_len = batch_of([[*b"abTOOLcd", END], [*b"abcx", END]], [1.0, 0.0])
    for mask in ("response_mask", "loss_mask"):
        batch[mask] = batch[mask].clone()
        batch[mask][0, 2:6] = 0
    batch["loss_mask"][1, 3] = 0  # a token that the trainer rejected
    dump = make_dump(tmp_path / "dump", VerlGTPOConfig(), tokenizer=tokenizer)
    write(dump, 1, batch, "uu", batch["responses"][:, :0], row_len)
    driver = show(tmp_path / "dump")
    fates = [[classes.split()[1][0] for _, classes in tokens(driver, row)] for row in (0, 1)]
    assert "".join(fates[0]) == "ddoooodpd" and "".join(fates[1]) == "pppop"
    find(driver, "article .token")[6].click()
    assert "c of #1" in text(driver, "#token h3") and "3 from the start, 3 from the end" in text(driver, "#token")
    assert [x.text for x in find(driver, "#rows .partner")] == ["c"]
    find(driver, "article .token")[3].click()
    assert "Not trained" in text(driver, "#token") and not find(driver, "#rows .partner")


def test_a_long_completion_shows_its_two_ends_until_it_is_unfolded(show, tmp_path, tokenizer):
    words = (GOOD + "\n") * 256
    texts = [*(words[i : i + 8191] for i in range(3)), "a" * 8191]
    driver = show(write_dump(tmp_path / "dump", tokenizer, {1: (texts, [float(i % 2) for i in range(4)], 0.2)}))
    drawn = lambda: driver.execute_script("return rows.map((row) => row.element.querySelectorAll('.token').length)")  # noqa: E731
    assert drawn() == [240] * 4 and "7,952 more tokens" in text(driver, "article .fold")
    find(driver, "article .fold")[0].click()
    driver.execute_script("goTo(rows[3], 4000)")
    assert text(driver, "article:nth-child(4) b") in text(driver, "#token h3")
    assert drawn() == [8192, 240, 240, 8192]
    words = driver.execute_script("return [...rows[3].element.querySelectorAll('.token')].map((span) => span.t)")
    assert words == list(range(8192))


def test_rollouts_on_a_phone_in_the_dark_have_no_entropy_and_unknown_ends(show, tmp_path, tokenizer):
    rollouts = write_rollouts(tmp_path / "rollouts", {7: (HOSTILE, [1.0, 0.0, 0.5])})
    driver = show(rollouts, "--tokenizer", tokenizer, width=390, scheme="dark")
    assert "Ends are unknown" in text(driver, "#notice")
    assert [x.text for x in find(driver, "article .badge")] == ["end unknown"] * 3
    assert not find(driver, "#threshold")[0].is_displayed() and "entropy" not in text(driver, "#rows")
    find(driver, "article .token")[2].click()
    assert "advantage\n+1.00" in text(driver, "#token") and "nats" not in text(driver, "#token")
    assert all(x.get_property("hidden") for x in find(driver, ".needs-inference"))
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    background = driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert background == "rgb(20, 23, 26)"
