"""Imports of the fork server of tests/support/programs.py, once for all programs."""

import os

from fabrics.data import python_docs
from run import fast_imports

with fast_imports():
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    import cluster  # noqa: F401
    import training_logs.recording.recorder  # noqa: F401

# Without its bar: all programs would share the bar's lock, and one that is killed would never release it.
python_docs.progress_bar = lambda files, **_: files
python_docs.standard_library_docstrings()
# No test asks whether files outlive a loss of power.
os.fsync = lambda descriptor: None
