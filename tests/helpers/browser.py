"""Headless Chromium, driven through its debugging pipe: JSON messages that end in a zero byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27, "Enter": 13}


class Browser:
    """One page at a time. ``logged`` holds every console line, exception and refusal since it was opened."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program, f"none of {', '.join(NAMES)} is installed"
        self.folder, self._sent, self._rest = folder, 0, b""
        self._session: str | None = None
        self.logged: list[dict[str, Any]] = []
        hears, self._say = os.pipe()
        self._hear, says = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{hears} 4>&{says}'
        options = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *options], pass_fds=(hears, says), stderr=subprocess.DEVNULL
        )
        os.close(hears)
        os.close(says)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._say)
        os.close(self._hear)

    def open(self, source: str, address: str = "") -> None:
        """Show a page, and wait until its script says that it is ready."""
        page = self.folder / "page.html"
        page.write_text(source, encoding="utf-8")
        self._call("Page.navigate", url="about:blank")
        self.logged.clear()
        self._call("Page.navigate", url=f"{page.as_uri()}{address}")
        for _ in range(200):
            if self.run("document.body?.dataset.ready ?? ''") == "yes":
                return
            self.run("new Promise((done) => setTimeout(done, 50))")
        raise AssertionError(f"the page's script did not run to its end: {self.logged}")

    def run(self, code: str) -> Any:
        """The value of an expression in the page; it must not throw."""
        answer = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                code = KEYS[key]
                text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
                self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def point(self, element: str, click: bool = False) -> None:
        """Move the mouse to the middle of an element (an expression), and perhaps click."""
        box = f"(({element}).scrollIntoView({{block: 'center'}}), ({element}).getBoundingClientRect())"
        x, y = self.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        kinds = ["mouseMoved", *(["mousePressed", "mouseReleased"] if click else [])]
        for kind in kinds:
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if click else "none", clickCount=1
            )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._say, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.logged.append(answer["params"])
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._hear, 1 << 16)
            assert data, "the browser has closed"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message
