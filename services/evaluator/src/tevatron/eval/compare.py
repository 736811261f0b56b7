"""`python -m tevatron.eval.compare`: systems side by side; see tevatron.evaluator.compare_command."""

import sys

from tevatron.evaluator.compare_command import main

if __name__ == "__main__":
    sys.exit(main())
