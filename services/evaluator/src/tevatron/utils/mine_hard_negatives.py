"""`python -m tevatron.utils.mine_hard_negatives`: training data out of a run; see tevatron.evaluator.mining_command."""

import sys

from tevatron.evaluator.mining_command import main

if __name__ == "__main__":
    sys.exit(main())
