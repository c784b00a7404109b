"""The command line: `python -m vecenv` is `vecenv`."""

import sys

from vecenv.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
