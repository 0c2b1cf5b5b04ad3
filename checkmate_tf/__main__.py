"""`python -m checkmate_tf` is `checkmate-tf`."""

import sys

from checkmate_tf.cli import main

if __name__ == "__main__":
    sys.exit(main())
