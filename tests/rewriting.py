"""The modules of tests, their assertions rewritten by pytest, are made once for all test processes and kept.

Rewriting takes nearly all of a test process's time to collect, and each would do it by itself: in every run where
PYTHONDONTWRITEBYTECODE is set, else in the first. So what pytest makes lies in pytest's own cache, and the process that
hands out the tests, which has nothing else to do while libraries are imported for the others, makes what is missing.
A file is taken for what its source's hash says that it is, as everywhere in pytest.
"""

import contextlib
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).resolve().parent


def keep_in_cache(config: pytest.Config) -> None:
    """From now on pytest looks in its cache, if it has one, for what it has rewritten."""
    cache = getattr(config, "cache", None)
    with contextlib.suppress(OSError):  # nobody may write here
        if cache is not None and rewrite.assertstate_key in config.stash:
            folder = cache.mkdir("rewritten")
            rewrite.get_cache_dir = lambda path: folder


def rewrite_all(config: pytest.Config) -> None:
    """Rewrite every module of tests that is not kept, if pytest rewrites any."""
    state = config.stash.get(rewrite.assertstate_key, None)
    for path in sorted(TESTS.glob("test_*.py")) if state is not None else ():
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(kept.parent):
            with contextlib.suppress(SyntaxError, ValueError):  # whoever collects it says so
                source_hash, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, source_hash, kept)
