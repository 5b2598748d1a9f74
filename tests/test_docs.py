"""README and docs: short enough, every link and anchor leads somewhere, the page of keys is what the keys say."""

import re
from pathlib import Path

import pytest

from docs.write_configuration import PAGE, page
from tests.blocks import PAGES
from utils.config import FIELDS


def without_code(text: str) -> str:
    """Markdown without fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(path: Path) -> set[str]:
    """The names that the headings of a page have on GitHub."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,6} +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    broken = []
    for link in links(path):
        if re.match(r"\w+:", link):
            continue  # another site
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_readme_is_short_and_leads_to_every_page():
    readme = PAGES[0]
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 200
    targets = {(readme.parent / link.partition("#")[0]).resolve() for link in links(readme) if ":" not in link}
    assert set(PAGES[1:]) <= targets


def test_the_page_of_keys_is_up_to_date():
    text = page()
    assert all(f"| `{name}` |" in text for name in FIELDS)
    assert PAGE.read_text(encoding="utf-8") == text, "run: python docs/write_configuration.py"
