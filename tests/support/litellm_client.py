"""litellm's own rerank, as a process: it sets up loggers and workers when it is imported, and some of it warns.

Reads a list of arguments of `litellm.rerank` from its input, and prints the list of results.
"""

import json
import sys

import litellm

answers = [litellm.rerank(**arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([answer.results for answer in answers]))  # noqa: T201
