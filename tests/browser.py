"""A headless Chromium, driven over a pipe by its own protocol: no further package is needed."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One page of the browser.

    Attributes:
        events: what the browser has told of it, each with a ``method`` and ``params``.
    """

    def __init__(self, write, read):
        self._write, self._read, self._number, self._session = write, read, 0, None
        self.events, self._left = [], b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """Send a command, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write.fileno(), json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        parts = [self._left]
        while b"\0" not in parts[-1]:
            parts.append(self._read.read1(1 << 16))
            assert parts[-1], "the browser has gone"
        last, _, self._left = parts.pop().partition(b"\0")
        return json.loads(b"".join((*parts, last)))

    def open(self, path, width, *, dark=False, height=900):
        """Load a file in a window of this width, in the light or the dark theme."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
             mobile=False)  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[theme])
        self("Page.navigate", url=f"file://{path}")
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def requested(self):
        """The addresses of what was loaded, without the page's own."""
        sent = [e["params"]["request"] for e in self.events if e.get("method") == _SENT]
        return [each["url"] for each in sent[1:] if not each["url"].startswith("data:")]

    def complaints(self):
        """What the console has to say."""
        methods = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event for event in self.events if event.get("method") in methods]

    def screenshot(self, path):
        """The whole page as a picture."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))


_SENT = "Network.requestWillBeSent"


@contextlib.contextmanager
def browser():
    """Within the context a page of a browser of its own."""
    down, up = os.pipe(), os.pipe()

    def place():  # the browser reads commands from 3 and answers to 4
        read, write = os.dup(down[0]), os.dup(up[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [BROWSER, *_OPTIONS, f"--user-data-dir={folder}"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down[0])
        os.close(up[1])
        try:
            with os.fdopen(down[1], "wb") as write, os.fdopen(up[0], "rb") as read:
                yield Page(write, read)
        finally:
            process.terminate()
            process.wait()
