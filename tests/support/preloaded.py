"""What the fork server of tests/support/programs.py imports once for all programs."""

import functools
import os

import cluster  # noqa: F401
from fabrics.data import documents

# Reading the documentation of Python takes seconds.
documents.standard_library_docstrings = functools.cache(documents.standard_library_docstrings)
documents.standard_library_docstrings()
# No test asks whether files outlive a loss of power.
os.fsync = lambda descriptor: None
