"""`python -m kvoffload`: the command line."""

import sys

from kvoffload.cli import main

if __name__ == "__main__":
    sys.exit(main())
