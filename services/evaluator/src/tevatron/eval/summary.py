"""`python -m tevatron.eval.summary`; see tevatron.evaluator.summary_command."""

import sys

from tevatron.evaluator.summary_command import main

if __name__ == "__main__":
    sys.exit(main())
