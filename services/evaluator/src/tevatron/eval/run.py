"""`python -m tevatron.eval.run`; see tevatron.evaluator.run_command."""

import sys

from tevatron.evaluator.run_command import main

if __name__ == "__main__":
    sys.exit(main())
