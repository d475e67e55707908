"""Run the command line: `python -m autoprec`."""

import sys

from autoprec.cli import main

if __name__ == "__main__":
    sys.exit(main())
