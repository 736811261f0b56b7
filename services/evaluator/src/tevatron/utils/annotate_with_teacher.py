"""`python -m tevatron.utils.annotate_with_teacher`: a teacher's scores for a training set; see tevatron.evaluator.annotate_command."""

import sys

from tevatron.evaluator.annotate_command import main

if __name__ == "__main__":
    sys.exit(main())
