"""`python -m kvoffload`: the command line."""

import sys

from kvoffload.commands import main

if __name__ == "__main__":
    sys.exit(main())
