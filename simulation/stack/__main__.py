"""See cli.py."""

import sys

from simulation.stack.cli import main

if __name__ == "__main__":
    sys.exit(main())
