"""A real Chromium, driven by selenium: what a person sees of a page, what it requests, what it complains of."""

import json
import shutil
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1200,1000"
)


def missing() -> str:
    """Why no browser can be driven here; empty where one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"there is no {' and no '.join(names)}: make browser" if names else ""


class Browser:
    """One Chromium for all tests; `open` begins anew each time."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        self.downloads = folder / "downloads"
        self.downloads.mkdir()
        for flag in (*FLAGS.split(), f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def cdp(self, method: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(method, arguments)

    def open(self, page: Path | str, *, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.complaints(), self.requests()  # of the page before
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)
        if self.js("return document.getElementById('data') !== null"):
            self.wait("return document.documentElement.dataset.ready")

    def resize(self, width: int, height: int) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        return wait(lambda: self.js(script, *arguments))

    def keys(self, *keys: str) -> None:
        """Types on the keyboard, to whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def complaints(self) -> list[str]:
        """What the console says: errors, violations of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def names(self) -> list[str]:
        """All names that the table shows, from the first row to the last: it is scrolled through."""
        return self.js(  # type: ignore[no-any-return]
            "const all = []; const grid = document.getElementById('grid'); grid.scrollTop = 0; draw();"
            "for (;;) { for (const b of document.querySelectorAll('#rows th button')) {"
            " const i = +b.closest('tr').getAttribute('aria-rowindex') - 2; all[i] = b.textContent; }"
            " if (grid.scrollTop + grid.clientHeight >= grid.scrollHeight - 1) return all;"
            " grid.scrollTop += 400; draw(); }"
        )

    def search(self, query: str) -> list[str]:
        self.js(
            "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            query,
        )
        return self.names()

    def downloaded(self, name: str) -> str:
        path = self.downloads / name
        wait(path.is_file)
        text = path.read_text("utf-8")
        path.unlink()
        return text

    def pdf(self) -> bytes:
        return b64decode(self.cdp("Page.printToPDF", preferCSSPageSize=True)["data"])

    def picture(self, path: Path, most: int = 6000) -> None:
        """The whole page."""
        width, height = self.js("return [innerWidth, Math.max(innerHeight, document.documentElement.scrollHeight)]")
        self.resize(width, min(height, most))
        time.sleep(0.2)
        path.write_bytes(b64decode(self.cdp("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.driver.quit()


def wait(found: Callable[[], Any], seconds: float = 10) -> Any:
    until = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)
    return result
