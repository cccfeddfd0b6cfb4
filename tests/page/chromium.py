"""A real browser for tests: Debian's chromium without a window, spoken to in its own protocol (DevTools) over aiohttp."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_SECONDS = 120.0
"""Far above what anything takes on a busy machine."""


class Tab:
    """A page in the browser. errors: whatever it complained of on its console, blocked contents and failed requests among it."""

    def __init__(self, browser: "Browser", session: str, context: str):
        self._browser, self._session, self.context, self.errors = browser, session, context, []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, params, self._session)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def download_to(self, folder: Path) -> None:
        """What a click fetches lands there, under the name that the page gives it."""
        values = {"behavior": "allow", "downloadPath": str(folder), "browserContextId": self.context}
        await self._browser.call("Browser.setDownloadBehavior", values)

    async def run(self, script: str) -> Any:
        """What the expression is, awaited if it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for the expression to be true; what it is then."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while not (value := await self.run(f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()")):
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {script}; the page:\n{await self.text()}"
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str = "body") -> str:
        return await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self._tabs: dict[str, Tab] = {}

    async def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})})
        return await asyncio.wait_for(answer, WAIT_SECONDS)

    async def tab(self) -> Tab:
        """A new one, which shares nothing with the others."""
        context = (await self.call("Target.createBrowserContext", {}))["browserContextId"]
        target = (await self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context}))["targetId"]
        session = (await self.call("Target.attachToTarget", {"targetId": target, "flatten": True}))["sessionId"]
        self._tabs[session] = tab = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return tab

    async def close_tabs(self) -> None:
        for tab in self._tabs.values():
            await self.call("Target.disposeBrowserContext", {"browserContextId": tab.context})

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._waiting.pop(said["id"])
                if not future.done():
                    if "error" in said:
                        future.set_exception(AssertionError(said["error"]))
                    else:
                        future.set_result(said["result"])
            elif tab := self._tabs.get(said.get("sessionId", "")):
                tab.errors += _complaints(said["method"], said["params"])


def _complaints(method: str, params: dict[str, Any]) -> list[str]:
    if method == "Runtime.exceptionThrown":
        return [str(params["exceptionDetails"])]
    if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return [f"{params['entry']['text']} {params['entry'].get('url', '')}"]
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return [str(params["args"])]
    return []


def flags(folder: Path) -> list[str]:
    """Without a window, asking nobody for anything. folder: for its profile, with the port it listens on in DevToolsActivePort."""
    return [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0"),
        *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", f"--user-data-dir={folder}"),
    ]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """A browser, ended with the block: the URL at which it is spoken to. folder: for its profile."""
    process = subprocess.Popen(
        [PROGRAM, *flags(folder), "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + WAIT_SECONDS
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, "chromium did not start"
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # its helpers, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Browser]:
    """One who speaks to a browser that is running; the tabs that it opens are closed with the block."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
            await browser.close_tabs()
        finally:
            listening.cancel()
