"""Write docs/library_reference.md from the docstrings of the package adloco: python docs/write_library_reference.py."""

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import adloco

PAGE = Path(__file__).resolve().parent / "library_reference.md"


def entry(name: str, described: object, level: int) -> str:
    """Return the heading, signature and docstring of a class or function."""
    signature = "" if isinstance(described, property) else str(inspect.signature(described))
    signature = signature.replace("(self, ", "(").replace("(self)", "()")
    text = inspect.getdoc(described)
    return f"{'#' * level} {name}\n\n```\n{name}{signature}\n\n{text}\n```\n"


def page() -> str:
    parts = ["# Reference of the library\n\nWritten by `docs/write_library_reference.py` from the docstrings.\n"]
    for name in adloco.__all__:
        described = getattr(adloco, name)
        parts.append(entry(name, described, 2))
        for member, value in vars(described).items() if isinstance(described, type) else ():
            public = not member.startswith("_") and inspect.getdoc(value)
            if public and (inspect.isfunction(value) or isinstance(value, property)):
                parts.append(entry(f"{name}.{member}", value, 3))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
