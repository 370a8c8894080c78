"""``python -m minibatch``."""

import sys

from minibatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
