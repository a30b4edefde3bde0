"""Pictures of every page, in both colour schemes and both widths, to be looked at.

`python -m tests.e2e.take_screenshots DIRECTORY` starts the scripted server of the browser tests.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from app.setup_model import set_up_embedded_model
from tests.e2e.conftest import CHROMIUM, CHROMIUM_ARGS
from tests.e2e.pages import DONE, SEND, begin, say
from tests.e2e.scripted_server import HOLD, REPEAT
from tests.e2e.server_process import ROOT, ServerProcess

WIDTHS: dict[str, ViewportSize] = {
    "wide": {"width": 1280, "height": 800},
    "narrow": {"width": 380, "height": 740},
}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
HARD = f"""{"W" * 90} and a [link that is long](https://example.org/{"path/" * 30}).

```
{"a line of code that does not end " * 6}
```

| {" | ".join(f"column {n}" for n in range(12))} |
|{"---|" * 12}
| {" | ".join(f"value {n}" for n in range(12))} |
"""


class Pictures:
    """One window, with the steps that lead to each page."""

    def __init__(self, page: Page, directory: Path, suffix: str) -> None:
        self._page, self._directory, self._suffix = page, directory, suffix
        self.narrow = page.viewport_size == WIDTHS["narrow"]

    def take(self, name: str) -> None:
        """Write a picture of what the window shows."""
        self._page.wait_for_timeout(150)
        self._page.screenshot(path=self._directory / f"{name}-{self._suffix}.png")

    def all(self) -> None:
        """Every page and state, in the order in which a person meets them."""
        page = self._page
        page.goto("/")
        self.take("home-first-visit")
        begin(page, "Tell me everything")
        page.wait_for_selector(".message--running h1")
        page.wait_for_timeout(700)
        self.take("chat-answering")
        expect(page.locator(DONE)).to_have_count(1)
        self.take("chat")
        page.locator("#conversation").evaluate("(box) => box.scrollTo(0, 0)")
        self.take("chat-top")
        chat = page.url
        say(page, REPEAT + HARD)
        self.take("chat-hard-text")
        for phase in ("restoring", "reading"):
            page.fill("#composer-text", HOLD + phase)
            page.press("#composer-text", "Enter")
            page.wait_for_selector(f".message__status:has-text('{phase}')")
            self.take(f"chat-{phase}")
            page.click(".message__stop")
            page.wait_for_selector(".message--running", state="detached")
        self.take("chat-stopped")
        page.fill("#composer-text", "Too long. " * 9000)
        page.press("#composer-text", "Enter")
        page.wait_for_selector(".problem")
        self.take("chat-refused")
        for title in ("How bread rises", "Плавильный котёл", "A log file, line by line"):
            begin(page, f"{REPEAT}{title}")
            expect(page.locator(DONE)).to_have_count(1)
        self.take("chat-short")
        self._branches()
        if self.narrow:
            page.click(".topbar__toggle")
            self.take("drawer")
            page.keyboard.press("Escape")
        page.click(".topbar__help")
        self.take("shortcuts")
        for name, path in self._plain_pages(chat).items():
            page.goto(path)
            page.wait_for_timeout(300)
            self.take(name)
        self._messages(chat)
        self._refusals()
        self._assistants()
        self._accounts()

    def _messages(self, chat: str) -> None:
        """What opens at a message, as pages of their own: so they look without scripts."""
        page = self._page
        page.goto(chat)
        for role, part in (("user", "edit"), ("assistant", "again"), ("assistant", "timeline")):
            message = page.locator(f".message--{role}").first.get_attribute("id") or ""
            page.goto(f"/messages/{message.removeprefix('message-')}/{part}")
            self.take(f"message-{part}")
            page.goto(chat)

    def _refusals(self) -> None:
        """Pages that show nothing but what went wrong."""
        page = self._page
        page.goto("/")
        token = page.locator("[name=_csrf_token]").first.input_value()
        for name, fields in (
            ("refused", {"text": "without the page's token"}),
            ("too-long", {"text": "x" * 3_000_000, "_csrf_token": token}),
        ):
            page.goto("/")
            page.evaluate(SEND, ["/chats", fields])
            page.wait_for_selector(".home__back, .problem")
            self.take(name)

    def _branches(self) -> None:
        """Answers side by side, a question that is asked otherwise, a message that waits."""
        page = self._page
        page.goto("/")
        page.select_option("[name=answers]", "2")
        page.fill("#composer-text", f"{REPEAT}Two ways to put it")
        page.press("#composer-text", "Enter")
        page.wait_for_url("**/chats/*")
        expect(page.locator(DONE)).to_have_count(2)
        self.take("candidates")
        page.click(".edit__open")
        self.take("edit")
        page.click(".edit__send")
        page.wait_for_selector(".branch__place")
        expect(page.locator(DONE)).to_have_count(1)
        self.take("branch")
        page.fill("#composer-text", HOLD + "reading")
        page.press("#composer-text", "Enter")
        page.wait_for_selector(".message--running")
        page.fill("#composer-text", "And one more thing.")
        page.press("#composer-text", "Enter")
        page.wait_for_selector("#queued")
        self.take("queued")
        page.click(".queued__withdraw")
        page.click(".message__stop")
        page.wait_for_selector(".message--running", state="detached")

    def _assistants(self) -> None:
        """An assistant that is written, looked at, changed, and a chat that can be moved."""
        page = self._page
        page.goto("/assistants/new")
        self.take("assistant-new")
        page.fill("[name=name]", "The house")
        page.fill("[name=system_prompt]", "You know the house and its rules. " * 12)
        page.click("text=Paste a text")
        paste = page.locator(".asst__document").last
        paste.locator("[name=document_name]").fill("tea")
        paste.locator("[name=document_text]").fill("Tea is at four. " * 20)
        page.click("text=Add it")
        page.wait_for_timeout(600)
        self.take("assistant-written")
        page.click("#save")
        page.wait_for_url("**/assistants/*?done=*")
        assistant = page.url.split("?")[0]
        self.take("assistant")
        page.click(".asst__new")
        page.fill("#composer-text", f"{REPEAT}Tea at four, then.")
        page.press("#composer-text", "Enter")
        page.wait_for_url("**/chats/*")
        expect(page.locator(DONE)).to_have_count(1)
        chat = page.url
        page.goto(f"{assistant}/edit")
        page.fill("[name=system_prompt]", "You know the house, and nothing else.")
        page.click("#save")
        page.wait_for_url("**/assistants/*?done=*")
        page.goto(chat)
        self.take("chat-of-an-older-version")

    def _accounts(self) -> None:
        """A guest who takes a name, a key, what operators see, and somebody who is invited."""
        page = self._page
        page.goto("/account")
        self.take("account-guest")
        page.fill("input[name=name]", f"Ada {self._suffix}")
        page.fill("input[name=password]", "correct horse battery")
        page.click("text=Make an account")
        page.fill("#key-name", "a notebook")
        page.click("text=Make a key")
        page.wait_for_selector("#new-key")
        self.take("account")
        page.goto("/operator")
        page.wait_for_timeout(300)
        self.take("operator")
        page.goto("/people")
        page.click("text=Make a link")
        page.wait_for_selector("#made-link")
        self.take("people")
        page.goto(page.locator("#made-link").text_content() or "")
        self.take("invitation")
        page.goto("/sign-in")
        self.take("sign-in")

    def _plain_pages(self, chat: str) -> dict[str, str]:
        return {
            "home": "/",
            "history": "/history",
            "search": "/search?q=bread",
            "assistants": "/assistants",
            "latency": "/latency",
            "chat-latency": f"{chat}/latency",
            "not-found": "/chats/none",
        }


def main(directory: Path) -> None:
    """Write all pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    model_dir = set_up_embedded_model(ROOT / "data", print)
    script = ROOT / "tests" / "e2e" / "scripted_server.py"
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        command = [str(script), f"{home}/data", str(model_dir)]
        server = ServerProcess(command, Path(home) / "log", wait_s=240)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        try:
            for (width, size), scheme in product(WIDTHS.items(), SCHEMES):
                context = browser.new_context(
                    base_url=server.url, viewport=size, color_scheme=scheme
                )
                Pictures(context.new_page(), directory, f"{width}-{scheme}").all()
                context.close()
        finally:
            browser.close()
            server.stop()
    print(f"{len(list(directory.glob('*.png')))} pictures are in {directory}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
