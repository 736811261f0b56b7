"""`python -m tevatron.eval.metrics`: metrics of one ranked list; see tevatron.evaluator.metrics_command."""

import sys

from tevatron.evaluator.metrics_command import main

if __name__ == "__main__":
    sys.exit(main())
