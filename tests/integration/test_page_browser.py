"""The page of a run in a real browser, without a window: Debian's package `chromium` (`make chromium`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from flows.page.live_page import serving
from flows.page.page import page_html
from tests.pages import HOSTILE, make_page, step_line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="there is no chromium on this machine: `make chromium` installs it"
)
Browse = Callable[..., "Seen"]


class Seen:
    """The document as it is after its script has run, and all that the browser complained of."""

    def __init__(self, document: str, log: str) -> None:
        self.document = document
        self.complaints = [line for line in log.splitlines() if ":CONSOLE" in line]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    def run(url: str, *options: str) -> Seen:
        argv = [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--log-level=0",
            *options,
            url,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return Seen(done.stdout, done.stderr)

    return run


@pytest.fixture
def page(tmp_path: Path) -> Path:
    data = make_page(tmp_path)
    assert data.facts is not None
    data.facts.samples = [replace(data.facts.samples[0], completion=HOSTILE, prompt=HOSTILE)]
    file = tmp_path / "report.html"
    file.write_text(page_html(data))
    return file


def test_a_browser_shows_all_charts_without_complaint(page: Path, browse: Browse) -> None:
    seen = browse(f"file://{page}", "--dump-dom")
    assert seen.document.count('<svg class="chart') >= 12 and seen.document.count('<svg class="bars"') == 4
    assert not seen.complaints


def test_a_complaint_of_the_browser_would_be_seen(tmp_path: Path, browse: Browse) -> None:
    file = tmp_path / "broken.html"
    file.write_text("<script>nothing.at.all()</script>")
    assert any("nothing is not defined" in line for line in browse(f"file://{file}", "--dump-dom").complaints)


def test_a_hostile_completion_is_only_read(page: Path, browse: Browse) -> None:
    seen = browse(f"file://{page}", "--dump-dom", "--virtual-time-budget=2000")
    assert "<title>test-1 · StreamRL</title>" in seen.document and "<img" not in seen.document
    assert "&lt;script&gt;document.title='taken'" in seen.document


def test_the_policy_of_the_page_stops_a_script_that_came_in(page: Path, browse: Browse) -> None:
    """Even if a text were not escaped, it could not run."""
    page.write_text(page.read_text().replace("<main>", "<main><script>document.title='taken'</script>"))
    seen = browse(f"file://{page}", "--dump-dom")
    assert "<title>test-1" in seen.document
    assert any("Content Security Policy" in line for line in seen.complaints)


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 420])
def test_it_is_drawn_in_light_and_dark_narrow_and_wide(
    page: Path, browse: Browse, tmp_path: Path, mode: str, width: int
) -> None:
    picture = tmp_path / "page.png"
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if mode == "dark" else []
    browse(f"file://{page}", f"--screenshot={picture}", f"--window-size={width},1600", *dark)
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(1 << 24) or []
        assert image.size == (width, 1600)
    most = max(colours)[1]
    assert (sum(most) > 600) == (mode == "light"), f"most of it is {most}"
    strong = [
        count for count, (red, green, blue) in colours if max(red, green, blue) - min(red, green, blue) > 90
    ]
    assert len(colours) > 500 and sum(strong) > 2000, "curves and bars have colours"


def test_the_numbers_under_the_mouse_are_shown(page: Path, browse: Browse) -> None:
    """The page's own script answers a mouse that moves; the policy is taken off for the test's own part."""
    move = """<script>
      const box = document.querySelector("svg.chart").getBoundingClientRect();
      document.querySelector("svg.chart").dispatchEvent(new MouseEvent("mousemove",
        {bubbles: true, clientX: box.left + box.width * 0.52, clientY: box.top + 50}));
    </script></body>"""
    text = re.sub("<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", move)
    page.write_text(text)
    seen = browse(f"file://{page}", "--dump-dom", "--window-size=1440,1600")
    tip = seen.document.partition('<div id="tip"')[2].partition("<script>")[0]
    assert "optimizer step" in tip and "training" in tip and "held-out" in tip and "± 0.012" in tip
    assert not seen.complaints


def test_a_live_page_refreshes_itself(tmp_path: Path, browse: Browse) -> None:
    data, asked = make_page(tmp_path, steps=30), [0]

    class Growing:
        def page(self) -> bytes:
            asked[0] += 1
            data.files.take_step(step_line(29 + asked[0]))
            fresh = type(data)(data.record, data.files, data.facts)
            return page_html(fresh, refresh_s=0.5).encode()

    with serving(Growing(), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/"
            seen = browse(url, "--dump-dom", "--virtual-time-budget=4000")
        finally:
            server.shutdown()
            thread.join()
    steps = re.findall(r"(\d+) optimizer steps", seen.document)
    assert asked[0] > 2 and int(steps[0]) > 31, "the document is that of a later answer"
    assert not seen.complaints
