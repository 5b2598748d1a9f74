"""README and docs: short enough, every link and anchor leads somewhere, the page of keys is what the keys say."""

import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from docs import write_library_reference
from docs.write_configuration import PAGE, page
from tests.support.blocks import PAGES, ROOT
from tests.support.helpers import NAMES_ONLY
from utils.config.reading import parse_config
from utils.config.schema import FIELDS

SOURCES = [
    *ROOT.glob("*.py"),
    *(path for folder in {path.parent for path in ROOT.glob("*/*.py")} for path in folder.rglob("*.py")),
]
SOURCE_WORDS = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text("utf-8"))}


def without_code(text: str) -> str:
    """Markdown without fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(path: Path) -> set[str]:
    """The names that the headings of a page have on GitHub."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,6} +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def spans(path: Path) -> set[str]:
    """Return the texts in backquotes within sentences and tables."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "docs/results").glob("*.md"))], ids=lambda path: path.name)
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


def test_the_reference_of_the_library_is_up_to_date():
    written = write_library_reference.PAGE.read_text(encoding="utf-8")
    assert written == write_library_reference.page(), "run: python docs/write_library_reference.py"


def test_the_page_of_keys_is_up_to_date():
    text = page()
    assert all(f"| `{name}` |" in text for name in FIELDS)
    assert PAGE.read_text(encoding="utf-8") == text, "run: python docs/write_configuration.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_in_sentences_are_possible(path):
    """`key: value` and `key=value` are what a configuration may say."""
    for span in spans(path) - {
        "pretrained=True",
        "merging_policy: all_together",
    }:  # one key and one policy that are not ours
        if setting := re.fullmatch(r"(\w+)(?:: |=)([^=\s]\S*)", span):
            parse_config({"max_tokens": 1}, ["=".join(setting.groups())], checks=NAMES_ONLY)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_and_names_in_sentences_are_there(path):
    """Every file that a page names exists, and every name with an underscore is in some source."""
    named = spans(path)
    files = {span for span in named if re.fullmatch(r"(\w+/)+\w+\.(py|yaml|md)|\w+\.py", span)}
    assert {file for file in files if not (ROOT / file).exists()} == set()
    names = {span for span in named if re.fullmatch(r"\w+_\w+", span)}
    theirs = {"save_to_disk", "TORCHINDUCTOR_CACHE_DIR"}  # of datasets and PyTorch
    assert names - SOURCE_WORDS - theirs == set()


def test_recorded_results_name_commits_of_the_history():
    git = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode or (ROOT / ".git/shallow").exists():
        pytest.skip("needs a clone with its history")
    history = {commit[:10] for commit in done.stdout.split()}
    missing = {}
    for path in (ROOT / "docs/results").glob("*.json"):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if path.stem != "gpu":
            unknown = {outcome["commit"] for outcome in recorded["outcomes"]} - history
            missing |= {path.stem: unknown} if unknown else {}
    assert missing == {}


def test_registries_are_where_the_table_says():
    rows = re.findall(
        r"^\|.*\| `(\w+)`, `([\w/]+)\.py` \|$", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), re.M
    )
    assert len(rows) > 5
    for registry, module in rows:
        assert hasattr(importlib.import_module(module.replace("/", ".")), registry), registry
