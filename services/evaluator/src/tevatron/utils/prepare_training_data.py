"""`python -m tevatron.utils.prepare_training_data`: training data of a BEIR folder; see tevatron.evaluator.prepare_command."""

import sys

from tevatron.evaluator.prepare_command import main

if __name__ == "__main__":
    sys.exit(main())
