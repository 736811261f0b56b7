"""`python -m tevatron.utils.bm25`: a BM25 run of a BEIR folder; see tevatron.evaluator.bm25_command."""

import sys

from tevatron.evaluator.bm25_command import main

if __name__ == "__main__":
    sys.exit(main())
