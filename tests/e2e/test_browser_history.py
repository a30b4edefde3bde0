"""The history in a browser: the list, search, undo, import and export.

The engine is scripted, so that each answer is known and comes at a steady pace.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, RUNNING, begin
from tests.e2e.scripted_server import REPEAT
from tests.e2e.server_process import ROOT

Contexts = Callable[..., tuple[BrowserContext, Any]]

LINK = ".chat-list__link"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = '<img src=x onerror="document.title=1"> **needle**'


def chats_file(path: Path, count: int) -> Path:
    """A file of our own format with this many chats, the newest named last."""
    chats = []
    for number in range(count):
        time = f"2026-01-{1 + number // 1440:02}T{number // 60 % 24:02}:{number % 60:02}:00Z"
        texts = [f"question {number} 東京の天気", f"{HOSTILE} in answer {number}"]
        messages = [
            {
                "id": f"{number}-{at}",
                "parent": f"{number}-0" if at else None,
                "role": "assistant" if at else "user",
                "text": text,
                "status": "complete",
                "created_at": time,
            }
            for at, text in enumerate(texts)
        ]
        chats.append(
            {
                "id": f"chat-{number}",
                "title": f"Imported {number}",
                "created_at": time,
                "updated_at": time,
                "active_leaf": f"{number}-1",
                "messages": messages,
            }
        )
    document = {"format": "rejoinder-chats", "version": 1, "chats": chats}
    path.write_text(json.dumps(document, ensure_ascii=False))
    return path


def import_chats(page: Page, file: Path) -> None:
    page.goto("/history")
    page.set_input_files("input[type=file]", file)
    page.click(".history__form button")
    page.wait_for_url(re.compile("/history/imports/"))
    expect(page.locator(".import-job .figures")).to_be_visible()


def figure(page: Page, name: str) -> str:
    return page.locator(f".figures__item:has(dt:text-is('{name}')) dd").inner_text()


def open_menu(page: Page, number: int = 0) -> None:
    page.locator(".chat-menu__toggle").nth(number).click()


def test_chats_come_in_and_go_out(page: Page, tmp_path: Path) -> None:
    import_chats(page, chats_file(tmp_path / "chats.json", 3))
    assert [figure(page, name) for name in ("Imported", "Here already")] == ["3", "0"]
    expect(page.locator(LINK)).to_have_text(["Imported 2", "Imported 1", "Imported 0"])
    import_chats(page, tmp_path / "chats.json")
    assert [figure(page, name) for name in ("Imported", "Here already")] == ["0", "3"]
    expect(page.locator(LINK)).to_have_count(3)

    page.goto("/history")
    with page.expect_download() as download:
        page.click(".history__download >> text=JSON")
    chats = json.loads(Path(download.value.path()).read_text())["chats"]
    assert [chat["title"] for chat in chats] == ["Imported 0", "Imported 1", "Imported 2"]
    with page.expect_download() as download:
        page.click(".history__download >> text=Markdown")
    assert re.fullmatch(r"rejoinder-chats-[\d-]+\.zip", download.value.suggested_filename)
    assert len(zipfile.ZipFile(download.value.path()).namelist()) == 3
    open_menu(page)
    with page.expect_download() as download:
        page.click(".chat-menu[open] .chat-menu__export >> text=Markdown")
    assert download.value.suggested_filename == "Imported 2.md"
    assert HOSTILE in Path(download.value.path()).read_text()


def test_a_file_that_is_none_is_told_with_the_form_still_there(
    new_context: Contexts, tmp_path: Path
) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("400"))
    page = context.new_page()
    page.goto("/history")
    page.set_input_files(
        "input[type=file]", {"name": "x.json", "mimeType": "application/json", "buffer": b"no"}
    )
    page.click(".history__form button")
    expect(page.locator("#notice")).to_contain_text("neither a JSON file nor a zip file")
    expect(page.locator(".history__form")).to_be_visible()
    # One that is too large is not even sent.
    page.locator("input[type=file]").evaluate("(field) => { field.dataset.maxBytes = '1'; }")
    page.set_input_files("input[type=file]", chats_file(tmp_path / "large.json", 1))
    assert "MiB" in page.locator("input[type=file]").evaluate("(field) => field.validationMessage")


def test_the_list_grows_as_it_is_scrolled(page: Page, tmp_path: Path) -> None:
    import_chats(page, chats_file(tmp_path / "chats.json", 120))
    page.goto("/")
    expect(page.locator(LINK)).to_have_count(50)
    for count in (100, 120):
        page.locator(".chat-list__more").scroll_into_view_if_needed()
        expect(page.locator(LINK)).to_have_count(count)
    titles = page.locator(LINK).all_inner_texts()
    assert titles == [f"Imported {number}" for number in range(119, -1, -1)]
    expect(page.locator(".chat-list__more")).to_have_count(0)
    open_menu(page, 110)
    page.click(".chat-menu[open] .chat-menu__pin")
    expect(page.locator(LINK).first).to_have_text("Imported 9")
    expect(page.locator(LINK)).to_have_count(120)


def test_search_as_one_types_and_as_a_page(page: Page, tmp_path: Path) -> None:
    import_chats(page, chats_file(tmp_path / "chats.json", 3))
    page.goto("/")
    page.fill("#search-box", "question 1")
    found = page.locator("#search-found")
    expect(found.locator(".found__title")).to_have_text("Imported 1")
    expect(found.locator(".found__snippet mark")).to_have_text(["question", "1"])
    expect(page.locator("#chat-list")).to_be_hidden()
    assert found.locator("img").count() == 0
    page.fill("#search-box", "京の")
    expect(found.locator(".found__snippet mark")).to_have_text(["京の"] * 3)
    page.fill("#search-box", "nowhere at all")
    expect(found).to_contain_text("Nothing found")
    page.press("#search-box", "Escape")
    expect(page.locator("#chat-list")).to_be_visible()
    expect(page.locator("#search-box")).to_have_value("")

    page.fill("#search-box", "needle")
    page.press("#search-box", "Enter")
    page.wait_for_url(re.compile(r"/search\?q=needle"))
    expect(page.locator(".history mark").first).to_have_text("needle")
    page.locator(".history .found__snippet").first.click()
    page.wait_for_url(re.compile(r"/chats/[0-9a-f]+#message-"))
    expect(page.locator(".message--assistant strong")).to_have_text("needle")
    assert page.title() != "1"


def test_a_hit_on_another_branch_opens_that_branch(page: Page) -> None:
    begin(page, f"{REPEAT}first words")
    expect(page.locator(DONE)).to_have_count(1)
    answer = page.locator(".message--assistant").get_attribute("id") or ""
    token = page.locator("[name=_csrf_token]").first.get_attribute("value") or ""
    page.request.post(
        f"/messages/{answer.removeprefix('message-')}/again", form={"_csrf_token": token}
    )
    page.reload()
    expect(page.locator(DONE)).to_have_count(1)
    assert page.locator(".message--assistant").get_attribute("id") != answer
    page.goto("/search?q=first+words")
    page.click("button.found__snippet:has-text('Assistant, on another branch')")
    page.wait_for_url(re.compile(r"/chats/[0-9a-f]+"))
    expect(page.locator(f"#{answer}")).to_be_visible()


def test_rename_in_place_pin_and_the_way_back(new_context: Contexts, tmp_path: Path) -> None:
    context, trouble = new_context(viewport={"width": 1280, "height": 800})
    trouble.expected.append(re.compile("400"))
    page = context.new_page()
    import_chats(page, chats_file(tmp_path / "chats.json", 3))
    page.goto("/")
    open_menu(page, 1)
    title = page.locator(".chat-menu[open] .chat-menu__title")
    title.fill("not kept")
    title.press("Escape")
    expect(page.locator(".chat-menu[open]")).to_have_count(0)
    expect(page.locator(".chat-menu__toggle").nth(1)).to_be_focused()
    page.locator(LINK).nth(1).focus()
    page.keyboard.press("F2")
    expect(title).to_be_focused()
    expect(title).to_have_value("Imported 1")
    title.fill("")
    title.press("Enter")
    assert title.evaluate("(field) => field.validity.valueMissing")
    title.fill("  ")
    title.press("Enter")
    expect(page.locator("#notice")).to_contain_text("The title is empty")
    title.fill("Café <b>")
    title.press("Enter")
    expect(page.locator(LINK)).to_have_text(["Imported 2", "Café <b>", "Imported 0"])
    expect(page.locator(".chat-menu__toggle").nth(1)).to_be_focused()

    open_menu(page, 2)
    page.click(".chat-menu[open] .chat-menu__pin")
    expect(page.locator(LINK)).to_have_text(["Imported 0", "Imported 2", "Café <b>"])
    expect(page.locator(".chat-list__pin")).to_have_count(1)
    open_menu(page, 1)
    expect(page.locator(".chat-menu[open]")).to_have_count(1)
    page.click("main")
    expect(page.locator(".chat-menu[open]")).to_have_count(0)

    open_menu(page, 0)
    page.click(".chat-menu[open] .button--danger")
    expect(page.locator(LINK)).to_have_text(["Imported 2", "Café <b>"])
    expect(page.locator(".undo__item")).to_contain_text("Deleted “Imported 0”")
    expect(page.locator(".undo__item button")).to_be_focused()
    page.reload()
    expect(page.locator(".undo__item")).to_have_count(1)
    page.click(".undo__item button")
    expect(page.locator(LINK)).to_have_text(["Imported 0", "Imported 2", "Café <b>"])
    expect(page.locator(".undo__item")).to_have_count(0)


def test_the_offer_to_undo_ends_when_the_server_does(page: Page) -> None:
    begin(page, f"{REPEAT}gone")
    expect(page.locator(DONE)).to_have_count(1)
    page.goto("/")
    open_menu(page)
    page.click(".chat-menu[open] .button--danger")
    item = page.locator(".undo__item")
    assert 25_000 < int(item.get_attribute("data-left-ms") or 0) <= 30_000
    item.evaluate(
        """(item) => {
          const shown = item.cloneNode(true);
          shown.dataset.leftMs = "300";
          item.replaceWith(shown);
        }"""
    )
    expect(item).to_have_count(0)


def test_escape_in_the_list_stops_no_answer(page: Page) -> None:
    begin(page, "Tell me everything")
    page.wait_for_selector(RUNNING)
    open_menu(page)
    page.keyboard.press("Escape")
    page.focus("#search-box")
    page.keyboard.press("Escape")
    expect(page.locator(DONE)).to_have_count(1)
    expect(page.locator(".message__note")).to_have_count(0)


def test_deleting_the_open_chat_stops_it_and_leads_to_the_start(page: Page) -> None:
    begin(page, "Tell me everything")
    page.wait_for_selector(RUNNING)
    chat = page.url
    open_menu(page)
    page.click(".chat-menu[open] .button--danger")
    page.wait_for_url(re.compile(r"/$"))
    assert page.request.get(chat).status == 404
    page.click(".undo__item button")
    page.click(LINK)
    expect(page.locator(".message__note")).to_contain_text("You stopped this answer")


def test_it_all_works_without_script(new_context: Contexts, tmp_path: Path) -> None:
    context, _ = new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto("/history")
    page.set_input_files("input[type=file]", chats_file(tmp_path / "chats.json", 60))
    page.click(".history__form button")
    for _ in range(50):
        page.goto(page.url)
        if page.locator(".figures").count():
            break
    assert figure(page, "Imported") == "60"
    page.goto("/")
    expect(page.locator(LINK)).to_have_count(50)
    page.click(".chat-list__more a")
    expect(page.locator(LINK)).to_have_count(10)
    page.click(".chat-list__more a")
    page.fill("#search-box", "answer 59")
    page.press("#search-box", "Enter")
    expect(page.locator(".history .found__title").first).to_have_text("Imported 59")
    page.goto("/")
    open_menu(page)
    page.fill(".chat-menu[open] .chat-menu__title", "Renamed")
    page.press(".chat-menu[open] .chat-menu__title", "Enter")
    expect(page.locator(LINK).first).to_have_text("Renamed")
    open_menu(page)
    page.click(".chat-menu[open] .chat-menu__pin")
    open_menu(page)
    page.click(".chat-menu[open] .button--danger")
    expect(page.locator(LINK).first).to_have_text("Imported 58")
    page.click(".undo__item button")
    expect(page.locator(LINK).first).to_have_text("Renamed")


@pytest.mark.parametrize(("scheme", "width"), [("light", 380), ("dark", 1280)])
def test_pages_are_accessible_and_narrow(
    new_context: Contexts, tmp_path: Path, scheme: str, width: int
) -> None:
    context, trouble = new_context(color_scheme=scheme, viewport={"width": width, "height": 740})
    trouble.expected.append(re.compile("style-src|inline style"))  # axe measures with styles
    page = context.new_page()
    import_chats(page, chats_file(tmp_path / "chats.json", 55))
    result = page.url
    faults = []
    for path in (result, "/history", "/search", "/search?q=needle", "/search?q=nowhere", "/"):
        page.goto(path)
        if path == "/":
            if width == 380:
                page.click(".topbar__toggle")
            open_menu(page, 1)
            page.click(".chat-menu[open] .button--danger")
            expect(page.locator(".undo__item")).to_be_visible()
            open_menu(page, 1)
            page.fill("#search-box", "Imported")
            expect(page.locator("#search-found .found__title").first).to_be_visible()
            assert page.evaluate("document.getElementById('sidebar').scrollWidth") <= 380
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate("document.getElementById('main').scrollWidth") <= width, path
        page.evaluate(AXE.read_text())
        for violation in page.evaluate("axe.run(document, {preload: false})")["violations"]:
            for node in violation["nodes"]:
                faults.append((path, violation["id"], node["html"][:120]))
    assert faults == []
