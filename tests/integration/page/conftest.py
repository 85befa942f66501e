"""Chromium, and the page of a fake gateway and of the demo model's ring."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playground import FakeGateway, Page, no_faults
from rig import Server, serve
from selenium import webdriver

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = ["headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync", "disable-dev-shm-usage"]


@pytest.fixture
def fake() -> Iterator[FakeGateway]:
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="package")
def demo() -> Iterator[Server]:
    with serve("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        reason = "the page is NOT tested: Debian's packages chromium and chromium-driver are not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}", "window-size=1440,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER))) as driver:
        ask_for_motion(driver, "reduce")  # drawing it without a GPU took a fifth of the tests' time
        yield driver


@pytest.fixture
def motion(browser: webdriver.Chrome) -> Iterator[None]:
    """The page moves as for a user who has asked for nothing."""
    ask_for_motion(browser, "no-preference")
    yield
    ask_for_motion(browser, "reduce")


def ask_for_motion(browser: webdriver.Chrome, how: str) -> None:
    features = [{"name": "prefers-reduced-motion", "value": how}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def page(browser: webdriver.Chrome, fake: FakeGateway) -> Iterator[Page]:
    yield Page(browser, f"{fake.url}/")
    no_faults(browser)


@pytest.fixture(params=["fake", "demo"])
def any_page(browser: webdriver.Chrome, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = Page(browser, f"{request.getfixturevalue(request.param).url}/")
    page.set("temperature", "0")
    yield page
    no_faults(browser)
