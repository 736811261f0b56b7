"""What all services of Tevatron agree on: prompts, contracts, formats, errors, settings.

Knows no service and never imports torch (only `tevatron.core.nn` does, for those who score).
"""

import tevatron

if getattr(tevatron, "__file__", None):
    raise ImportError(
        f"another distribution named 'tevatron' is installed at {tevatron.__file__}; it hides the "
        "namespace package that this project's services share. Run `pip uninstall tevatron`, then try again."
    )
