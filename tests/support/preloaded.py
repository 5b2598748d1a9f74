"""Imports of the fork server of tests/support/programs.py, once for all programs."""

import os

from fabrics.data import python_docs
from run import fast_imports
from tests.support.docstrings import keep_docstrings

with fast_imports():
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    import cluster  # noqa: F401
    import training_logs.recording.recorder  # noqa: F401

keep_docstrings()
python_docs.standard_library_docstrings()
# No test asks whether files outlive a loss of power.
os.fsync = lambda descriptor: None
