"""The stepper where people use it: headless Chromium shows the HTML file and a JupyterLab page."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers import ask, make_engine

from minibatch import player

CHROMIUM = "/usr/bin/chromium"
NASTY = "<b>&\"'</script><!--"

pytestmark = pytest.mark.slow


def trace_of(configuration="paged", name="r", **options):
    """Four requests of which two fit at a time, so that somebody waits and somebody is preempted."""
    engine = make_engine(configuration, num_blocks=6, num_slots=2, meta={"workload": "toy", "seed": 0}, **options)
    engine.run([ask(f"{name}{i}", 6, 8, at=float(i)) for i in range(4)])
    return engine.trace


@pytest.fixture(scope="module")
def chromium():
    if not os.path.exists(CHROMIUM):
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_file(chromium, tmp_path):
    """Writes the stepper and opens it, without network; at the end there must have been no error and no request."""
    wrong, pages = [], []

    def opened(traces, width=1000, scheme="light"):
        path = tmp_path / f"{len(pages)}.html"
        player.export_html(traces, path)
        page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request)
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert wrong == []


def said(page):
    return page.inner_text("#says")


def at(page):
    """The iteration that is shown, by the heading of the (first) run."""
    return int(re.search(r"iteration (\d+)", page.inner_text(".run [data-panel=head]"))[1])


def test_keys_and_buttons_step_jump_and_play(open_file):
    """Fault: a key or a button that does nothing, or another's work; play that does not stop at the end."""
    trace = trace_of()
    page, film = open_file(trace), player.frames(trace)
    last, jumps = len(film) - 1, player.events(film)
    assert at(page) == 0 and "iteration 0" in said(page)
    for key, expected in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last)):
        page.keyboard.press(key)
        assert at(page) == expected, key
    page.keyboard.press("p")
    assert at(page) == max(i for i in jumps if i < last)
    page.keyboard.press("Home")
    page.keyboard.press("n")
    assert at(page) == min(i for i in jumps if i > 0)
    page.keyboard.press("Home")
    for name, expected in (("step on", 1), ("step back", 0), ("next event", jumps[1]), ("previous event", jumps[0])):
        page.get_by_role("button", name=name).click()
        assert at(page) == expected, name
    page.select_option("#speed", "1")
    page.keyboard.press(" ")  # to play, and not to press the button that was clicked last
    assert page.inner_text("#play") == "Pause"
    page.wait_for_function(f"document.getElementById('slider').value > {jumps[0]}")
    page.get_by_role("button", name="Pause", exact=True).click()
    stopped = at(page)
    assert page.inner_text("#play") == "Play" and 0 < stopped < last
    page.focus("#play")
    page.keyboard.press(" ")  # pressed once, not twice
    assert page.inner_text("#play") == "Pause"
    page.select_option("#speed", "25")
    page.wait_for_function(f"document.getElementById('slider').value == {last}")
    page.wait_for_function("document.getElementById('play').textContent == 'Play'")
    page.keyboard.press("Home")
    page.focus("#on")
    page.keyboard.press(" ")
    assert at(page) == 1 and page.inner_text("#play") == "Play", "space presses the button that has the focus"
    page.focus("#slider")
    page.keyboard.press("ArrowRight")
    assert at(page) == 2, "one press of a key on the slider is one step"


def test_keys_work_after_a_speed_and_with_caps_lock_and_held(open_file):
    """Fault: the list of speeds keeps the keys; a held space plays and pauses in turn; N is not n."""
    trace = trace_of()
    page, jumps = open_file(trace), player.events(player.frames(trace))
    page.focus("#speed")
    page.dispatch_event("#speed", "pointerdown")
    page.select_option("#speed", "1")
    page.keyboard.press("ArrowRight")
    assert at(page) == 1
    page.keyboard.press("N")
    assert at(page) == min(i for i in jumps if i > 1)
    page.keyboard.press("P")
    assert at(page) == max(i for i in jumps if i <= 1)
    page.keyboard.down(" ")
    page.keyboard.down(" ")  # the keyboard repeats it
    assert page.inner_text("#play") == "Pause"
    page.keyboard.up(" ")
    page.keyboard.press(" ")
    page.focus("#speed")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    assert page.input_value("#speed") == "4", "with the arrow keys one goes on through the speeds"


def test_a_bar_has_edges_and_a_long_id_is_low(open_file):
    """Fault: parts that run into their ground; an id of 300 letters that fills the screen; one that turns its text."""
    page = open_file(trace_of(name="\u202e" + "x" * 300))
    page.keyboard.press("ArrowRight")
    edge, ink = page.locator(".batch .bar i").first.evaluate(
        "element => [getComputedStyle(element).borderRight, getComputedStyle(document.body).color]"
    )
    assert edge == f"1px solid {ink}"
    name = page.locator(".batch b").first
    assert name.bounding_box()["height"] < 60 and len(name.get_attribute("title")) > 300
    assert name.evaluate("element => getComputedStyle(element).unicodeBidi") == "isolate"
    assert page.locator("#says").bounding_box()["height"] < 300


def test_the_page_shows_what_the_frames_say(open_file):
    """Every panel of some iterations, read back. Fault: a panel that is not updated."""
    trace = trace_of()
    page, film = open_file(trace), player.frames(trace)
    gone = next(i for i, frame in enumerate(film) if any(event.kind == "preempted" for event in frame.events))
    for frame, steps in (film[gone], gone), (film[-1], len(film) - 1 - gone):
        for _ in range(steps):
            page.keyboard.press("ArrowRight")
        rows = page.locator(".batch tbody tr:not(.none)")
        assert [rows.nth(i).locator("b").inner_text() for i in range(rows.count())] == [
            r.request_id for r in frame.rows
        ]
        owners = [text.strip().lstrip("+") for text in page.locator(".units li s").all_inner_texts()]
        assert owners == [unit.owners[0] if unit.owners else "" for unit in frame.units]
        assert f"{frame.tokens.total} token" in page.inner_text(".tokens [data-panel]")
        queue = page.inner_text(".queue [data-panel]")
        assert all(q.request_id in queue and q.reason in queue for q in frame.queue)
        assert all(event.text in page.inner_text(".events [data-panel]") for event in frame.events)
        assert f"{frame.so_far.completed} of 4" in page.inner_text(".metrics [data-panel]")
        left = page.locator(".cursor").evaluate("element => parseFloat(element.style.left)")
        assert left == pytest.approx(100 * frame.index / len(film), abs=0.01)


def test_a_click_into_the_picture_of_the_run_goes_there(open_file):
    trace = trace_of()
    page = open_file(trace)
    box = page.locator(".track").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 5.5 / len(trace.steps), box["y"] + 5)
    assert at(page) == 5


def test_two_runs_are_on_one_clock(open_file):
    """Fault: the second run follows the iterations of the first; the one that has ended is not marked."""
    traces = {"static": trace_of("static"), "paged": trace_of()}
    page = open_file(traces)
    moments = player.common_clock([player.frames(trace) for trace in traces.values()])
    shown = page.evaluate(f"""() => Array.from({{length: {len(moments)}}}, (_, number) => {{
        if (number) document.body.dispatchEvent(new KeyboardEvent("keydown", {{key: "ArrowRight", bubbles: true}}));
        const visible = (element) => getComputedStyle(element).display !== "none";
        return [...document.querySelectorAll(".run")].map((run) =>
            [run.querySelector("[data-panel=head]").innerText, visible(run.querySelector(".ended"))]);
    }})""")
    for moment, runs in zip(moments, shown, strict=True):
        for (head, ended), place, done in zip(runs, moment.current, moment.done, strict=True):
            expected = "has not begun" if place is None else f"iteration {place} "
            assert expected in head and ended == done, moment
    assert any(any(moment.done) for moment in moments)


def test_an_id_that_is_html_appears_as_it_is(open_file):
    """Fault: an id that is run, or that ends the script."""
    page = open_file({NASTY: trace_of(name=NASTY)})
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert at(page) == 8
    assert f"{NASTY}1" in page.inner_text(".batch") + page.inner_text(".queue")
    assert page.inner_text("h2") == NASTY and page.title() == f"minibatch: {NASTY}"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_telephone_nothing_scrolls_sideways(open_file, count, scheme):
    """390 pixels, in every iteration, with long ids as well. Fault: a panel that is wider than the screen."""
    names = [f"{'a_very_long_id_without_spaces_' * 2}{i}" for i in range(count)]
    page = open_file({name: trace_of(name=name) for name in names}, width=390, scheme=scheme)
    widths = page.evaluate("""() => Array.from({length: 40}, () => {
        document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
        return document.documentElement.scrollWidth;
    })""")
    assert max(widths) <= page.evaluate("innerWidth") == 390
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 26)"}[scheme]


def test_it_can_be_used_without_a_mouse_or_eyes(open_file):
    """Fault: a control without a name, a focus that cannot be seen, a state that is not read out."""
    page = open_file(trace_of())
    assert page.get_attribute("#says", "aria-live") == "polite"
    for name in ("previous event", "step back", "Play", "step on", "next event"):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        assert (focused.get_attribute("aria-label") or focused.inner_text()) == name
        assert focused.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "moment of the run"
    keys = page.inner_text(".keys")
    assert all(word in keys for word in ("←", "→", "space", "n p", "home", "end"))


# ---------------------------------------------------------------- JupyterLab

NOTEBOOK = """
from minibatch import ChunkedPrefill, Engine, PagedKVCache, Request, SamplingParams, ToyModel, player
engine = Engine(ToyModel(), ChunkedPrefill(8, 2), PagedKVCache(6, 4))
engine.run([Request(range(6), SamplingParams(max_tokens=8), f"r{i}", float(i)) for i in range(4)])
player.show(engine.trace);
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab of its own, with one notebook."""
    cell = {"cell_type": "code", "id": "a", "source": NOTEBOOK, "metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "stepper.ipynb").write_text(json.dumps(book))
    port, token = free_port(), secrets.token_hex(16)
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "s"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "w")}
    own |= {"IPYTHONDIR": str(tmp_path / "ipython")}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        f"--port={port}",
        f"--IdentityProvider.token={token}",
    ]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", "--allow-root"]
    command += ["--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path / "work", env=os.environ | own, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.25)
        yield f"{address}/lab/tree/stepper.ipynb?token={token}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(tmp_path / "work")


@pytest.mark.slow
def test_the_stepper_runs_in_jupyterlab(chromium, lab):
    """Run the notebook, step, play, read the state. Fault: a widget that the front end cannot make, or a callback that
    only works without one."""
    page = chromium.new_page(viewport={"width": 1300, "height": 1000})
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(90_000)
    page.goto(lab)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    page.keyboard.press("Shift+Enter")
    head = page.locator(".jp-OutputArea .run [data-panel=head]")
    head.wait_for()
    assert "iteration 0" in head.inner_text()
    assert page.locator(".jp-OutputArea img").count() == 1, "the picture"
    page.get_by_role("button", name=">", exact=True).click()
    page.wait_for_function("document.querySelector('.run [data-panel=head]').innerText.includes('iteration 1 ')")
    assert "r0" in page.locator(".batch").inner_text()
    page.locator(".jupyter-widgets.widget-play button").first.click()
    page.wait_for_function("/iteration ([4-9]|1.) /.test(document.querySelector('.run [data-panel=head]').innerText)")
    page.close()
    assert [text for text in wrong if "Failed to load resource" not in text] == []  # settings that nobody has saved
