"""`python -m tevatron.eval.serve.server`: the reference's command, served by `tevatron.scorer`."""

import sys

from tevatron.scorer.server.main import main

if __name__ == "__main__":
    sys.exit(main())
