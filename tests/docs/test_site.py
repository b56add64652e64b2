"""The documentation site: it builds without warnings, its links work, and it loads nothing from the network. In a
browser its pages fit a desktop and a phone, and the picture of intervals matches the library's results.
``CUPY_DMA_SITE`` names a built site (``make docs`` sets it); otherwise the tests build one. Screenshots go to
``CUPY_DMA_SCREENSHOTS``.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

import cupy_dma as dma
from tests.project.pages import ROOT
from tests.project.test_docstrings import NAMES

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SHOWN = ("index", "get-started", "concepts", "gallery", "performance", "evidence", "sharp-bits", "ladder", "api/masks",
         "api/cli")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("mkdocs") is None, reason="could not import 'mkdocs': the "
                                                   "extra docs brings it, and make docs installs it")]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    if "CUPY_DMA_SITE" in os.environ:
        return ROOT / os.environ["CUPY_DMA_SITE"]
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Page(HTMLParser):
    """The links of a page and the files that it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        of = dict(attrs)
        self.anchors.update(filter(None, (of.get("id"), of.get("name"))))
        if tag == "a" and of.get("href"):
            self.links.append(of["href"])
        elif tag in ("script", "img", "iframe", "source") and of.get("src"):
            self.loads.append(of["src"])
        elif tag == "link" and of.get("rel") != "canonical" and of.get("href"):
            (self.links if of.get("rel") in ("next", "prev") else self.loads).append(of["href"])


@pytest.fixture(scope="session")
def pages(site) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html")}
    assert len(found) > 30
    return found


def test_links_and_anchors_lead_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link}, no such anchor")
    assert not broken, "\n".join(broken)


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loads = {load for page in pages.values() for load in page.loads if urlsplit(load).scheme or load.startswith("//")}
    assert not {load for load in loads if not load.startswith("data:")}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_public_name_is_in_the_reference(site):
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    documented = set(re.findall(r'id="([\w.]+)"', text))
    names = {*NAMES, *(f"distributed.{name}" for name in dma.distributed.__all__), "policies.Step",
             *(f"backward.{name}" for name in vars(dma.backward) if re.fullmatch("[A-Z].*Gradients", name))}
    missing = {f"cupy_dma.{name.replace('policies.', 'masks.policies.')}" for name in names} - documented
    assert missing == {"cupy_dma.distributed", "cupy_dma.policies"}  # modules


def test_powers_in_docstrings_are_not_bold(site):
    for path in (site / "api").glob("*.html"):
        assert not re.search(r"\d<strong>", path.read_text()), path.name


def test_tables_and_pictures_are_made(site):
    performance = (site / "performance.html").read_text()
    assert performance.count("<table>") >= 4 and "<!-- table" not in performance
    assert performance.count("<svg xmlns:xlink") > 20 and not re.search(r'src="results/', performance)
    home = (site / "index.html").read_text()
    assert home.count("<svg xmlns:xlink") == 1 and re.search(r'class="number"><strong>\d+×', home)
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    names = re.findall(r"<!-- picture: (\S+) \|", gallery)
    assert len(names) == gallery.count("```python") - 1 >= 7
    shown = (site / "gallery.html").read_text()
    for name in names:
        assert re.search(rf'data-picture="{name}"[^>]*><svg xmlns:xlink', shown), name
    ladder = (site / "ladder.html").read_text()
    assert "heapq" in ladder and "excerpt" not in ladder
    assert "--window" in (site / "api" / "cli.html").read_text()


# ---- in a browser ----
@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    options = {"args": ["--no-sandbox", "--allow-file-access-from-files"]}
    with api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(**options)  # playwright's own browser
        except api.Error as error:
            path = next(filter(None, map(shutil.which, BROWSERS)), None)
            if path is None:
                pytest.skip("there is no Chromium: install Debian's package chromium, or run "
                            f"python -m playwright install chromium ({str(error).splitlines()[0]})")
            found = playwright.chromium.launch(executable_path=path, **options)
        yield found
        found.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("CUPY_DMA_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(params=WIDTHS)
def tab(request, browser):
    """A browser page of one width; fails at the end if anything failed or was requested from a network."""
    width, height = WIDTHS[request.param]
    context = browser.new_context(viewport={"width": width, "height": height}, has_touch=request.param == "phone")
    page = context.new_page()
    page.kind, wrong = request.param, []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith("http") else None)
    yield page
    context.close()
    assert not wrong, wrong


@pytest.mark.parametrize("name", SHOWN)
def test_pages_show_their_pictures(site, tab, screenshots, name):
    tab.goto((site / f"{name}.html").as_uri())
    tab.wait_for_load_state("load")
    for picture in tab.locator("article img").all():
        picture.scroll_into_view_if_needed()
        tab.wait_for_function("(img) => img.complete && img.naturalWidth > 100", arg=picture.element_handle())
    tab.evaluate("window.scrollTo(0, 0)")
    tab.wait_for_timeout(400)  # until the header has scrolled into place
    tab.screenshot(path=screenshots / f"{name.replace('/', '-')}-{tab.kind}.png", full_page=True)


def test_no_page_is_too_wide(site, pages, tab):
    wide = {}
    for path in pages:
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        tab.goto(path.as_uri())
        wide[path.name] = tab.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    assert not {name for name, more in wide.items() if more > 0}


def state(tab) -> dict:
    return json.loads(tab.locator("#intervals").get_attribute("data-state"))


def assert_is_the_library(shown: dict) -> None:
    scores = np.array(shown["scores"], np.float64)
    mask = dma.IntervalMask.top_w(scores[None, None], shown["window"])
    assert [run[0] for run in shown["runs"]] == list(range(len(scores)))
    assert [run[1] for run in shown["runs"]] == np.minimum(mask.stop.ravel(), len(scores)).tolist()
    assert sorted(shown["kept"]) == np.flatnonzero(mask.to_dense(len(scores))[0, 0, shown["query"]]).tolist()


def test_the_slider_shows_what_the_library_computes(site, tab, screenshots):
    tab.goto((site / "concepts.html").as_uri())
    tab.wait_for_function("document.getElementById('intervals').dataset.state")
    first = state(tab)
    assert first["window"] == 8 and len(first["scores"]) == (26 if tab.kind == "phone" else 40)
    assert_is_the_library(first)
    window = tab.locator("#intervals input[name=window]")
    for _ in range(4):
        window.press("ArrowLeft")
    assert state(tab)["window"] == 4 and "4 keys" in tab.locator("#intervals").inner_text()
    assert_is_the_library(state(tab))
    tab.locator("#intervals input[name=query]").fill("11")
    assert state(tab)["query"] == 11
    assert "Query 11 sees 4 of its 12 keys" in tab.locator("#intervals .said").inner_text()
    for pattern in ("rising", "falling", "bursts", "equal"):
        tab.locator("#intervals select").select_option(pattern)
        assert_is_the_library(state(tab))
    tab.locator("#intervals select").select_option("independent")
    before = state(tab)["scores"]
    tab.locator("#intervals button").click()
    assert state(tab)["scores"] != before
    tab.locator("#intervals").scroll_into_view_if_needed()
    tab.locator("#intervals").screenshot(path=screenshots / f"intervals-{tab.kind}.png")


def test_a_score_can_be_dragged(site, tab):
    tab.goto((site / "concepts.html").as_uri())
    tab.wait_for_function("document.getElementById('intervals').dataset.state")
    row = tab.locator("#intervals svg .score[data-key='6']")
    row.scroll_into_view_if_needed()
    box, svg = row.bounding_box(), tab.locator("#intervals svg").bounding_box()
    tab.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
    tab.mouse.down()
    tab.mouse.move(svg["x"] + 0.19 * svg["width"], box["y"] + box["height"] / 2, steps=3)
    tab.mouse.up()
    dragged = state(tab)
    assert dragged["scores"][6] == pytest.approx(0.95, abs=0.03)
    assert_is_the_library(dragged)
    assert dragged["runs"][6][1] - 6 > 8


def test_the_search_finds_a_page(site, tab):
    tab.goto((site / "index.html").as_uri())
    if tab.kind == "phone":
        tab.locator("label[for=__search].md-header__button").click()
    tab.locator("input.md-search__input").press_sequentially("sliding window")
    tab.wait_for_selector(".md-search-result__item", timeout=20000)
