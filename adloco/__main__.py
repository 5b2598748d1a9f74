"""`python -m adloco` is `python run.py`."""

import sys

from run import start

if __name__ == "__main__":
    sys.exit(start())
